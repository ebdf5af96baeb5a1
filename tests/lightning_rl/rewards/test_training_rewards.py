"""A run that was cut off while it graded goes on as if it had not been."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.config.schema import CustomRewardFunction, Judge, RewardSection
from lightning_rl.rewards import FinishedRollout, training_rewards
from lightning_rl.rewards.training_rewards import Grader
from lightning_rl.store.contract import ErrorInfo, Finish, Reward, RolloutRequest


class CutOff(Exception):
    """The process was killed."""


class Cut:
    """The store of a process that is killed when it has added the rewards of one rollout."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def add_late_rewards(self, given: Mapping[tuple[str, str], Sequence[Reward]]) -> None:
        place, rewards = next(iter(given.items()))
        self.store.add_late_rewards({place: rewards})
        raise CutOff


def above_the_mean(rollouts: Sequence[FinishedRollout]) -> list[Any]:
    own = [rollout.rewards["reward"] + rollout.rewards["polite"] for rollout in rollouts]
    return [{"reward": each - sum(own) / len(own), "polite": 0.0} for each in own]


def test_a_group_that_was_graded_in_part_is_graded_by_what_its_agents_gave(served: Any) -> None:
    store = served.client()
    ids = ["r1", "r2", "r3"]
    store.enqueue([RolloutRequest(task=None, rollout_id=rollout_id, group_id="g") for rollout_id in ids])
    for number, claim in enumerate(store.claim("w", limit=3)):
        place = claim.rollout.rollout_id, claim.attempt.attempt_id
        store.add_rewards(*place, [Reward(value=1.0, name="polite")])
        store.finish(*place, Finish(status="succeeded", reward=float(number)))
    grader = Grader(above_the_mean, concurrency=1)

    def graded(at: Any) -> list[float | None]:
        return [trace.rollout.reward for trace in grader.graded([*store.traces(ids).values()], at, "policy")]

    with pytest.raises(CutOff):
        graded(Cut(store))
    assert graded(store) == graded(store) == [-1.0, 0.0, 1.0]
    assert [store.rollout(rollout_id).reward for rollout_id in ids] == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("pause", [0.0, 60.0], ids=["each at once", "at the end"])
def test_what_was_graded_before_one_that_cannot_be_is_kept_and_not_graded_again(
    served: Any, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    """A judge is paid for each of its verdicts."""
    monkeypatch.setattr(training_rewards, "_SAVE_SECONDS", pause)
    store, ids = served.client(), ["r1", "r2", "r3"]
    store.enqueue([RolloutRequest(task=None, rollout_id=each, group_id=f"g-{each}") for each in ids])
    for claim in store.claim("w", limit=3):
        store.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, Finish(status="succeeded"))
    asked: list[str] = []

    def judge(rollouts: Sequence[FinishedRollout]) -> list[float]:
        asked.append(rollouts[0].rollout_id)
        if asked == ids:
            raise ConnectionError
        return [0.5]

    grader = Grader(judge, concurrency=1)
    with pytest.raises(ConnectionError):
        grader.graded([*store.traces(ids).values()], store, "policy")
    found = grader.graded([*store.traces(ids).values()], store, "policy")
    assert asked == [*ids, "r3"]
    assert [trace.rollout.reward for trace in found] == [0.5] * 3


def test_rollouts_whose_agents_failed_are_not_graded(served: Any) -> None:
    store = served.client()
    store.enqueue([RolloutRequest(task=None, rollout_id=each, group_id="g") for each in ("ends", "fails")])
    for claim in store.claim("w", limit=2):
        failed = claim.rollout.rollout_id == "fails"
        end = Finish(status="failed", error=ErrorInfo(type="E", message="no")) if failed else Finish(status="succeeded")
        store.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, end)
    asked: list[list[str]] = []

    def half(rollouts: Sequence[FinishedRollout]) -> list[float]:
        asked.append([rollout.rollout_id for rollout in rollouts])
        return [0.5] * len(rollouts)

    found = Grader(half, concurrency=1).graded([*store.traces(["ends", "fails"]).values()], store, "policy")
    assert asked == [["ends"]]
    assert {trace.rollout.rollout_id: trace.rollout.reward for trace in found} == {"ends": 0.5, "fails": None}


def test_a_function_of_a_file_is_called_in_the_callers_thread_and_what_is_given_goes_before(tmp_path: Path) -> None:
    (file := tmp_path / "score.py").write_text("def compute_score(**told): return 1.0")
    named = RewardSection(custom_reward_function=CustomRewardFunction(path=str(file)), judge=Judge(concurrency=3))
    of_file, given = Grader.of(named, None), Grader.of(named, above_the_mean)
    assert of_file is not None
    assert given is not None
    assert (of_file._concurrency, given._concurrency) == (1, 3)
    assert given.reward is above_the_mean
    assert Grader.of(RewardSection(), None) is None
