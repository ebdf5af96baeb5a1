"""The loop of tools with real ones: those of the config answer in the conversation, and a run trains on it."""

from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.agents.agent import agent_of_run
from lightning_rl.config import ConfigError, compose
from lightning_rl.loops.configured import configured_agents
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trajectories.termination import ended_by
from lightning_rl_adapters.call import calls_of
from tests.lightning_rl.langgraph.test_graph_agent import check_masks
from tests.lightning_rl.loops.conftest import Recorded, Run, calls_tool
from tests.proxy.conftest import Served

TOOLS = '''
from lightning_rl.tools import function_tool

@function_tool
def look_up(what: str) -> tuple[str, float, dict]:
    """Look a word up.

    Args:
        what: the word
    """
    if what == "nothing":
        raise LookupError("no such word")
    return f"{what} is a word", 0.5, {"length": len(what)}
'''


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "words_tools.py").write_text(TOOLS)
    (folder / "more_words.py").write_text("def user(task, messages): return 'more' if len(messages) < 4 else None\n")
    turns = {
        "function_tool_path": str(folder / "words_tools.py"),
        "user": {"path": f"{folder / 'more_words.py'}:user"},
        "max_assistant_turns": 3,
    }
    rollout = {"n": 2, "agent": {"default_agent_loop": "tool_agent"}, "multi_turn": turns}
    return {"actor_rollout_ref": {"rollout": rollout}, **more}


def test_the_tools_of_the_config_answer_and_their_rewards_are_the_calls(
    served: Served, run: Run, recorded: Recorded, tmp_path: Path
) -> None:
    served.engine.script.extend([calls_tool("look_up", "cat", "nothing"), calls_tool("look_it", "cow"), "Done."])
    ran = run(agent_of_run(None, configured_agents(compose(settings(tmp_path)))), "how many?")
    calls, rows = recorded()
    check_masks(calls, rows)
    assert len(rows) == 1
    given = [
        (reward.value, reward.name, str(reward.call_id).removeprefix("chatcmpl-"))
        for reward in ran.emitted.call_rewards
    ]
    first, second = calls[0].call_id, calls[1].call_id
    assert given == [(0.5, "look_up", first), (0.0, "look_up", first), (0.0, "look_it", second)]
    metrics = [told["metrics"] for told in ran.objects() if told.get("tool") == "look_up"]
    assert metrics[0]["length"] == 3
    assert ran.end["tool_errors"] == {"LookupError": 1, "unknown tool": 1}


def test_tools_that_cannot_be_are_refused_before_the_run(tmp_path: Path) -> None:
    given = settings(tmp_path)
    given["actor_rollout_ref"]["rollout"]["multi_turn"]["function_tool_path"] = str(tmp_path / "nowhere.py")
    with pytest.raises(ConfigError, match="nowhere"):
        agent_of_run(None, configured_agents(compose(given)))


@pytest.mark.long
@pytest.mark.e2e
def test_a_run_without_an_agent_trains_the_loops_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return len(solution_str) % 3\n"
    )
    more = {
        "data": {"train_batch_size": 2, "max_response_length": 8, "shuffle": False},
        "reward": {"custom_reward_function": {"path": str(tmp_path / "scores.py")}},
        "trainer": {"total_training_steps": 2, "logger": ["jsonl"], "val_before_train": False},
    }
    task = {"prompt": "cars: size id", "reward_model": {"ground_truth": ""}}
    tasks = [task, task | {"agent_name": "single_turn_agent"}]
    lrl.Trainer(n_runners=4, run_dir=tmp_path / "run").fit(lrl.PPO(settings(tmp_path, **more)), tasks)
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [row["training/policy_version"] for row in rows] == [1.0, 2.0]
    for row in rows:
        assert sum(value for name, value in row.items() if name.startswith("rollouts/ended_by/")) == 4
        assert row["rollouts/agent_failed"] == 0
    store = SqlStore(f"sqlite:///{tmp_path / 'run' / 'store.db'}")
    rollouts, _ = store.page(limit=10)
    traces = store.traces([rollout.rollout_id for rollout in rollouts])
    for rollout in rollouts:
        spans = traces[rollout.rollout_id].attempts[-1].spans
        turns, why = len(calls_of(spans)), ended_by(spans)
        if rollout.task.get("agent_name"):
            assert turns == 1
            assert why in ("answer", "answer_length")
        else:
            assert 1 <= turns <= 3
            assert why in ("user_done", "answer_length", "max_assistant_turns")
