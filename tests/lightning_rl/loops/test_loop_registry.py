"""The loops that a config names: by the task, by the default, one's own by a file; unknown ones are refused early."""

import json
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import lightning_rl as lrl
from lightning_rl.agents.agent import AgentNotFound, agent_of_run, as_agent
from lightning_rl.agents.task_fields import LoopTaskError
from lightning_rl.config import ConfigError, compose
from lightning_rl.config.schema import Config, TrainConfig
from lightning_rl.loops.configured import configured_agents
from lightning_rl.loops.loop_registry import LoopsAgent, NotALoop, loops_of, makers
from lightning_rl.loops.user import ModelUser, user_of
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.lightning_rl.loops.conftest import Recorded, Run
from tests.proxy.conftest import Served

OWN = """
from lightning_rl.loops import AgentLoop, SingleTurnAgent

class Twice(AgentLoop):
    def __init__(self, words="again"):
        self.words = words
        self.asked = 0

    async def run(self, task, llm):
        async with self.conversation(task, llm) as talk:
            await talk.ask()
            talk.add_user(self.words)
            await talk.ask()
        self.asked += talk.assistant_turns
        return float(self.asked)

class NotOne:
    pass
"""


def config(multi_turn: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, **agent: Any) -> Config:
    found = {"agent": agent, "multi_turn": multi_turn or {}, **(rollout or {})}
    return compose({"actor_rollout_ref": {"rollout": found}})


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A file of loops of one's own."""
    (tmp_path / "own_loops.py").write_text(OWN)
    target = f"{tmp_path / 'own_loops.py'}:Twice"
    entries = [{"name": "twice", "_target_": target}, {"name": "thrice", "_target_": target, "words": "more"}]
    (tmp_path / "loops.yaml").write_text(json.dumps(entries))  # JSON is YAML
    return str(tmp_path / "loops.yaml")


def agent(config: Config) -> LoopsAgent:
    found = agent_of_run(None, configured_agents(config))
    assert isinstance(found, LoopsAgent)
    return found


def test_a_task_names_its_loop_and_others_run_the_default(
    served: Served, run: Run, own: str, recorded: Recorded, tokenizer: FastTokenizer
) -> None:
    loops = cloudpickle.loads(cloudpickle.dumps(agent(config(agent_loop_config_path=own))))
    assert run(loops, "hi").end["agent_loop"] == "single_turn_agent"
    assert run(loops, {"prompt": "hi", "agent_name": "tool_agent"}).end["agent_loop"] == "tool_agent"
    twice = run(loops, {"prompt": "hi", "agent_name": "twice"})
    assert (twice.returned, twice.end["agent_loop"]) == (2.0, "twice")
    again = run(loops, {"prompt": "hi", "agent_name": "thrice"})
    assert again.returned == 2.0  # an object runs one trajectory
    assert "more" in tokenizer.decode(served.engine.prompts[-1])
    assert len(recorded()[0]) == 6


def test_an_unknown_loop_is_refused_before_anything_is_sampled(own: str) -> None:
    known = r"there are \['single_turn_agent', 'thrice', 'tool_agent', 'twice'\]"
    algorithm = lrl.PPO(config(agent_loop_config_path=own, default_agent_loop="tool_agent"))
    tasks = [{"prompt": "hi"}, {"prompt": "hi", "agent_name": "tool_agnet"}] * 16
    with pytest.raises(LoopTaskError, match=rf"task 1 has agent_name 'tool_agnet', and there is no such loop; {known}"):
        algorithm.prepare(tasks, [])
    with pytest.raises(LoopTaskError, match="tool_agnet"):
        algorithm.prepare(tasks[:1] * 32, tasks)
    with pytest.raises(ConfigError, match="default_agent_loop is 'tool_agnet', and there are"):
        lrl.PPO(config(default_agent_loop="tool_agnet"))


def test_tools_that_no_task_is_offered_are_told_of() -> None:
    turns = {"tool_config_path": "tools.yaml"}
    once, tools = ({"prompt": "hi", "agent_name": name} for name in ("single_turn_agent", "tool_agent"))
    found = loops_of(config(turns, default_agent_loop="single_turn_agent"))
    assert found is not None
    assert "multi_turn.tool_config_path: no task has these tools" in str(found.unused_tools([{"prompt": "hi"}, once]))
    assert found.unused_tools([once, tools]) is None
    with_tools = loops_of(config(turns, default_agent_loop="tool_agent"))
    assert with_tools is not None
    assert with_tools.unused_tools([once, {"prompt": "hi"}]) is None
    assert "no task" in str(with_tools.unused_tools([once]))


def test_in_a_rollout_too_a_name_that_there_is_not_is_an_error(run: Run) -> None:
    with pytest.raises(LoopTaskError, match="the task of rollout r1 has agent_name 'other'"):
        run(agent(config(default_agent_loop="tool_agent")), {"prompt": "hi", "agent_name": "other"})


def test_loops_get_the_limits_of_the_config() -> None:
    turns = {"max_assistant_turns": 3, "max_user_turns": 2}
    found = loops_of(config(turns, {"response_length": 99}, default_agent_loop="tool_agent"))
    assert found is not None
    limits = found.limits
    assert (limits.assistant_turns, limits.user_turns, limits.response_length) == (3, 2, 99)
    assert (limits.answer_length, limits.row_length) == (512, 1536)
    assert loops_of(config(turns)) is None


def test_there_is_one_agent_given_or_named() -> None:
    loops = configured_agents(config(default_agent_loop="tool_agent"))
    both = configured_agents(config({"langgraph": {"path": "a.py:graph"}}, default_agent_loop="tool_agent"))
    with pytest.raises(AgentNotFound, match=r"the agent <lambda> and .*default_agent_loop=tool_agent name two agents"):
        agent_of_run(as_agent(lambda task: 1.0), loops)
    with pytest.raises(AgentNotFound, match="name three agents"):
        agent_of_run(as_agent(lambda task: 1.0), both)
    with pytest.raises(AgentNotFound, match=r"or a loop: actor_rollout_ref\.rollout\.agent\.default_agent_loop="):
        agent_of_run(None)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"name": "a"}, "is no list of loops"),
        ([{"name": "a"}], "is no loop: give it a name and a _target_"),
        ([{"name": "a", "_target_": "FILE:NotOne"}], "is no class of lightning_rl.loops.AgentLoop"),
        ([{"name": "a", "_target_": "FILE:Twic"}], "has no 'Twic'; did you mean 'Twice'"),
        ([{"name": "a", "_target_": "no_such_module.Loop"}], "there is no module 'no_such_module'"),
        ([{"name": "a", "_target_": "FILE:Twice", "word": "x"}], "cannot be made of {'word': 'x'}"),
        (
            [{"name": "a", "_target_": "lightning_rl.loops.single_turn.SingleTurnAgent"}] * 2,
            "two loops of the name 'a'",
        ),
    ],
)
def test_a_file_of_loops_that_cannot_be_is_refused(tmp_path: Path, own: str, entries: Any, message: str) -> None:
    text = json.dumps(entries).replace("FILE", str(tmp_path / "own_loops.py"))
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises((ConfigError, NotALoop)) as raised:
        makers(str(tmp_path / "wrong.yaml"))
    assert message in str(raised.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        makers(str(tmp_path / "nowhere.yaml"))


def test_a_function_speaks_as_the_user(run: Run, served: Served, tmp_path: Path) -> None:
    (tmp_path / "a_user.py").write_text(
        "def more(task, messages): return None if len(messages) > 3 else task['next']\n"
    )
    turns = {"user": {"path": f"{tmp_path / 'a_user.py'}:more"}}
    ran = run(agent(config(turns, default_agent_loop="tool_agent")), {"prompt": "hi", "next": "go on"})
    assert (ran.end["ended_by"], ran.end["user_turns"]) == ("user_done", 1)


def test_a_model_speaks_as_the_user() -> None:
    helper = {"gateway": {"backends": {"gpt": {"kind": "openai", "url": "http://127.0.0.1:1/v1"}}}}
    turns = {"user": {"model": "gpt", "prompt": "Be a guest.", "done": "BYE"}}
    found = loops_of(
        compose(
            helper
            | {"actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": "tool_agent"}, "multi_turn": turns}}}
        )
    )
    assert found is not None
    user: Any = user_of(found.multi_turn.user)
    assert vars(user) == vars(ModelUser("gpt", "Be a guest.", "BYE"))


def test_a_user_that_is_no_backend_or_two_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"user\.model is 'gpt', and gateway\.backends has \[\]"):
        loops_of(config({"user": {"model": "gpt"}}))
    helper = {"gateway": {"backends": {"gpt": {"kind": "openai", "url": "http://127.0.0.1:1/v1"}}}}
    both = {"actor_rollout_ref": {"rollout": {"multi_turn": {"user": {"model": "gpt", "path": "a.py:b"}}}}}
    with pytest.raises(ConfigError, match="name two users"):
        loops_of(compose(helper | both))


@pytest.mark.long
def test_the_command_line_plans_a_run_of_loops(tmp_path: Path) -> None:
    from lightning_rl.cli.train import _plan

    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "hi"}) + "\n")
    keys = ["actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "data.train_batch_size=1"]
    keys.append("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024")
    keys.append(f"data.train_files={tmp_path / 'tasks.jsonl'}")
    assert _plan(compose(command_line=keys, schema=TrainConfig), None)["agent"] == "tool_agent"
