"""The tasks that a run takes of its datasets."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rl.config import ConfigError
from lightning_rl.ppo_algorithm import PPO

TOOL = '''
from lightning_rl.tools import function_tool

@function_tool
def look_up(what: str) -> str:
    """Look a word up, which takes a description that alone is longer than any prompt of the tasks here.

    Args:
        what: the word
    """
    return what
'''
SHORT, LONG = "hi", "words " * 40


def config(data: dict[str, Any], rollout: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"data": {"train_batch_size": 1, **data}, "actor_rollout_ref": {"rollout": rollout or {}}}


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_takes_so_many_tasks(shuffle: bool) -> None:
    limits = {"train_max_samples": 3, "val_max_samples": 2, "shuffle": shuffle, "seed": 5}
    train, val = PPO(config(limits)).prepare(list("abcdef"), list("ABC"))
    chosen = [np.random.default_rng(5).choice(of, size=many, replace=False) for of, many in ((6, 3), (3, 2))]
    assert train == (["abcdef"[at] for at in chosen[0]] if shuffle else list("abc"))  # as verl draws them
    assert val == (["ABC"[at] for at in chosen[1]] if shuffle else list("AB"))
    assert PPO(config(limits | {"train_max_samples": 9})).prepare(list("abcdef"), None)[0] == list("abcdef")


def loops(tmp_path: Path, **agent: Any) -> dict[str, Any]:
    (tmp_path / "mine_of_tasks.py").write_text(
        "from lightning_rl.loops import SingleTurnAgent as Base\nclass Mine(Base): ..."
    )
    (tmp_path / "loops.yaml").write_text(f"[{{name: mine, _target_: '{tmp_path / 'mine_of_tasks.py'}:Mine'}}]")
    (tmp_path / "tool_of_tasks.py").write_text(TOOL)
    agent = {"agent_loop_config_path": str(tmp_path / "loops.yaml"), **agent}
    return {"agent": agent, "multi_turn": {"function_tool_path": str(tmp_path / "tool_of_tasks.py")}}


def test_tasks_with_long_prompts_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = {"filter_overlong_prompts": True, "max_prompt_length": 60}
    own = {"messages": LONG, "agent_name": "mine"}
    with_tools = {"prompt": SHORT, "agent_name": "tool_agent"}
    none_selected = with_tools | {"extra_info": {"tool_selection": []}}
    broken = {"question": "?"}
    tasks = [SHORT, LONG, {"prompt": LONG}, own, with_tools, none_selected, broken]
    with caplog.at_level(logging.WARNING):
        kept, val = PPO(config(data, loops(tmp_path))).prepare(tasks, [SHORT])
    assert kept == [SHORT, own, none_selected]  # what a loop of one's own begins with is not known
    assert val == [SHORT]
    [line] = [message for message in caplog.messages if "filter_overlong" in message]
    assert "4 of 7 training tasks are left out: their prompts have more than data.max_prompt_length=60" in line
    assert "cannot be rendered (1; task 6: a loop begins with a text" in line
    assert PPO(config({"max_prompt_length": 60}, loops(tmp_path))).prepare([LONG, own], None)[0] == [LONG, own]


def test_an_agents_prompts_are_not_known_beforehand(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kept, _ = PPO(config({"filter_overlong_prompts": True, "max_prompt_length": 9})).prepare([LONG], None)
    assert kept == [LONG]
    assert "data.filter_overlong_prompts has no effect: an agent writes its prompts itself" in caplog.text


@pytest.mark.parametrize(
    ("loop", "multi_turn", "tasks", "begins"),
    [
        ("single_turn_agent", {}, [SHORT], False),
        ("tool_agent", {}, [SHORT], False),
        ("tool_agent", {"tools": True}, [SHORT], True),
        ("tool_agent", {"user": {"path": "user.py:user"}}, [SHORT], True),
        ("single_turn_agent", {"tools": True}, [SHORT], False),
        ("single_turn_agent", {}, [SHORT, {"prompt": SHORT, "agent_name": "mine"}], True),
        ("mine", {}, [SHORT], True),
        (None, {}, [SHORT], True),
    ],
)
def test_a_run_without_rewards_does_not_begin(
    tmp_path: Path, loop: str | None, multi_turn: dict[str, Any], tasks: list[Any], begins: bool
) -> None:
    """A loop that is not one's own gives none, but for its tools and its user; a function that scores always does."""
    made = loops(tmp_path, default_agent_loop=loop)
    turns = made["multi_turn"] if "tools" in multi_turn else multi_turn
    rollout = {"agent": made["agent"] if loop else {}, "multi_turn": turns}
    if begins:
        assert PPO(config({}, rollout)).prepare(tasks, None)[0] == tasks
    else:
        with pytest.raises(
            ConfigError, match=r"nothing gives the rollouts a reward: .*custom_reward_function\.path=FILE"
        ):
            PPO(config({}, rollout)).prepare(tasks, None)
        teacher = {"teacher_models": {"big": {"model_path": "x"}}, "distillation_loss": {"use_task_rewards": False}}
        alone = config({}, rollout) | {"distillation": {"enabled": True, **teacher}}
        assert PPO(alone).prepare(tasks, None)[0] == tasks
    assert PPO(config({}, rollout), reward=lambda group: [0.0 for _ in group]).prepare(tasks, None)[0] == tasks
