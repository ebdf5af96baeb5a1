"""TRL's reward functions get what TRL gives them, and count as TRL adds them up."""

import asyncio
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.config import ConfigError, compose
from lightning_rl.rewards import FinishedRollout
from lightning_rl.rewards.checked import RewardError
from lightning_rl.rewards.functions import RewardFunctionError
from lightning_rl.rewards.training_rewards import Grader
from lightning_rl.rewards.trl import TrlRewards

CHAT = [{"role": "user", "content": "1 + 1?"}]


def rollout(answer: str, task: Any) -> FinishedRollout:
    told = [{"role": "system", "content": [{"type": "text", "text": "Be short."}]}, *CHAT]
    messages = [*told, {"role": "assistant", "content": answer}]
    ids = list(answer.encode())
    return FinishedRollout(rollout_id=answer, group_id="g", task=task, answer=answer, messages=messages, answer_ids=ids)


def right(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    return [float(solution[place] in each[0]["content"]) for place, each in enumerate(completions)]


async def brief(completions: list[Any], **_: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [None if len(each[0]["content"]) > 3 else 1.0 for each in completions]


def test_functions_get_lists_of_prompts_completions_and_columns() -> None:
    seen: list[dict[str, Any]] = []

    def looks(**given: Any) -> list[int]:
        seen.append(given)
        return [1] * len(given["completions"])

    task = {"prompt": CHAT, "solution": "2", "completion": "no column", "completion_ids": [1], "level": 3}
    assert TrlRewards(looks)([rollout("2", task), rollout("3", task)])[1] == {"looks": 1.0, "reward": 1.0}
    TrlRewards(looks)([rollout("2", {"prompt": "1 + 1 ="})])
    TrlRewards(looks)([rollout("2", {"question": "1 + 1?"})])
    answers = [[{"role": "assistant", "content": text}] for text in "23"]
    told = [{"role": "system", "content": "Be short."}, *CHAT]
    assert seen == [
        {"prompts": [CHAT, CHAT], "completions": answers, "solution": ["2", "2"], "level": [3, 3]}
        | {"completion_ids": [[50], [51]]},
        {"prompts": ["1 + 1 ="], "completions": ["2"], "completion_ids": [[50]]},
        {"prompts": [told], "completions": answers[:1], "question": ["1 + 1?"], "completion_ids": [[50]]},
    ]


def test_rewards_are_the_weighted_sum_of_what_functions_gave() -> None:
    task = {"prompt": CHAT, "solution": "2"}
    both = TrlRewards([right, brief], weights=[2.0, 0.5])
    assert both([rollout("2", task), rollout("3", task), rollout("2, I think", task)]) == [
        {"right": 1.0, "brief": 1.0, "reward": 2.5},
        {"right": 0.0, "brief": 1.0, "reward": 0.5},
        {"right": 1.0, "reward": 2.0},
    ]
    with pytest.raises(RewardError, match="rollout too long: brief returned None, so nothing judges it"):
        TrlRewards(brief)([rollout("too long", task)])

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs)

    assert TrlRewards(wrapped)([rollout("2", task)]) == [{"wrapped": 1.0, "reward": 1.0}]

    def reward(completions: list[Any]) -> list[int]:  # no **kwargs: it gets what it names
        return [3] * len(completions)

    assert TrlRewards(reward, weights=[2])([rollout("2", task)]) == [{"reward": 6.0}]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        (None, "returned NoneType for 2 completions"),
        ([1.0, float("nan")], "rollout 3: the reward of wrong is nan; it must be finite"),
        ([1.0, "good"], "rollout 3: the reward of wrong is 'good', of type str; return a number"),
    ],
)
def test_what_is_no_list_of_numbers_names_the_function(returned: Any, message: str) -> None:
    def wrong(**_: Any) -> Any:
        return returned

    with pytest.raises(RewardError, match=message):
        TrlRewards(wrong)([rollout("2", {}), rollout("3", {})])


def test_functions_that_cannot_be_called_are_refused() -> None:
    with pytest.raises(
        RewardError, match=r"right needs 'solution', which no task has: there are completion_ids, completions, prompts"
    ):
        TrlRewards(right)([rollout("2", {"prompt": CHAT})])
    for refused, message in (
        ([], "none"),
        ([right, right], "right, right"),
        ([right, lambda completions, trainer_state: []], "needs 'trainer_state', which it is not given"),
        (["a/reward-model"], "'a/reward-model' is no reward function; a reward model is"),
    ):
        with pytest.raises(RewardFunctionError, match=message):
            TrlRewards(refused)
    with pytest.raises(RewardFunctionError, match="2 weights for 1 reward functions"):
        TrlRewards(right, weights=[1, 2])


def test_groups_are_judged_in_the_callers_thread() -> None:
    """Functions may use signals, as `math_verify` does."""
    grader = Grader.of(compose({}).reward, TrlRewards(right))
    assert grader is not None
    assert grader._concurrency == 1


def test_ppo_says_where_such_functions_go() -> None:
    with pytest.raises(
        ConfigError, match=r"TRL's reward functions do: give it as lightning_rl\.rewards\.trl\.TrlRewards"
    ):
        lrl.PPO({}, reward=right)
    with pytest.raises(ConfigError, match=r"is a list, and takes one function; .*TrlRewards\(\[\.\.\.\]\)"):
        lrl.PPO({}, reward=[right])  # type: ignore[arg-type]

    async def late(rollouts: Any) -> Any:
        return [1.0]

    with pytest.raises(ConfigError, match="is async; make it a plain function"):
        lrl.PPO({}, reward=late)  # type: ignore[arg-type]
    lrl.PPO({}, reward=TrlRewards([right, brief]))
