"""Groups in flight over scripted rollouts: each is asked for once, and handed over in an order of places alone."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl.ppo.off_policy.async_rollouts import HandedOver, InFlight
from lightning_rl.ppo.off_policy.schedules import Async, OneStepOff, Schedule
from lightning_rl.store.contract import Rollout, RolloutConfig, RolloutRequest
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl_adapters import forest
from lightning_rl_adapters.credit import Rewards
from tests.random_examples import examples

N = 2


class Scripted:
    """Rollouts that end in turns: `turns` picks, of those that are open, which end next. Its clock counts the turns."""

    def __init__(self, turns: Callable[[list[str]], Sequence[str]]) -> None:
        self._turns = turns
        self.asked: list[str] = []
        self.open: list[str] = []
        self.done: dict[str, Rollout] = {}
        self.read_ids: list[str] = []
        self.now = 0.0

    def ask(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        made = []
        for request in requests:
            rollout_id = str(request.rollout_id)
            self.asked.append(rollout_id)
            if rollout_id not in self.done:
                self.open.append(rollout_id)
            made.append(rollout(rollout_id, request.task, self.now))
        return made

    def ended(self, rollout_ids: Sequence[str], wait_seconds: float) -> list[Rollout]:
        self.now += 1
        if wait_seconds:
            self.end(self._turns([*self.open]))
        return [self.done[rollout_id] for rollout_id in rollout_ids if rollout_id in self.done]

    def end(self, rollout_ids: Sequence[str]) -> None:
        for rollout_id in rollout_ids:
            self.open.remove(rollout_id)
            self.done[rollout_id] = rollout(rollout_id, None, 0.0, ended_at=self.now)

    def read(self, rollout_ids: Sequence[str]) -> list[Trajectory]:
        self.read_ids += rollout_ids
        return [trajectory(rollout_id) for rollout_id in rollout_ids]

    def cancel(self, rollout_ids: Sequence[str]) -> None:
        self.end([rollout_id for rollout_id in rollout_ids if rollout_id in self.open])

    def is_there(self, rollout_id: str) -> bool:
        return rollout_id in self.open or rollout_id in self.done


def rollout(rollout_id: str, task: Any, created_at: float, ended_at: float | None = None) -> Rollout:
    return Rollout(
        rollout_id=rollout_id, task=task, mode="train", status="queued", group_id="g", agent=None, resources_id=None,
        config=RolloutConfig(), metadata={}, attempt_count=0, created_at=created_at, ended_at=ended_at,
    )  # fmt: skip


def trajectory(rollout_id: str) -> Trajectory:
    return Trajectory(
        rollout_id=rollout_id, group_id=rollout_id.rpartition("-")[0], reward=1.0, rewards=Rewards(final=1.0),
        forest=forest.build([]), rows=[], calls=0, sampled_tokens=0, excluded={}, agent_failed=False,
    )  # fmt: skip


def requests(batch: int, task: tuple[int, Any]) -> list[RolloutRequest]:
    return [RolloutRequest(task=task[1], rollout_id=f"{batch}.{task[0]}-{k}") for k in range(N)]


def in_flight(schedule: Schedule, rollouts: Scripted, **given: Any) -> InFlight:
    batches = [[(index, f"task {index}") for index in range(schedule.batch)] for _ in range(20)]
    return InFlight(schedule, batches, requests, rollouts, **{"why_not": lambda group, version: None, **given})


def names(groups: list[list[Trajectory]]) -> list[str]:
    return [group[0].group_id for group in groups]


def test_one_step_is_asked_for_before_the_update_of_the_step_before() -> None:
    rollouts = Scripted(lambda waiting: waiting)
    groups = in_flight(OneStepOff(2), rollouts)
    assert names(groups.hand_over(0, 4, 1.0).groups) == ["1.0", "1.1"]
    assert rollouts.asked == ["1.0-0", "1.0-1", "1.1-0", "1.1-1", "2.0-0", "2.0-1", "2.1-0", "2.1-1"]
    assert names(groups.hand_over(1, 2, 1.0).groups) == ["2.0", "2.1"]
    assert len(rollouts.asked) == 8  # the run ends: no more are needed
    assert len(groups) == 0


def test_groups_that_end_first_are_handed_over_first_and_the_others_stay_in_flight() -> None:
    rollouts = Scripted(lambda waiting: [rollout_id for rollout_id in waiting if not rollout_id.startswith("1.0")][:2])
    groups = in_flight(Async(2, 1), rollouts)
    assert names(groups.hand_over(0, 8, 1.0).groups) == ["1.1", "2.0"]
    assert {rollout_id[:3] for rollout_id in groups.waiting} == {"1.0", "2.1"}
    assert "3.0-0" not in rollouts.asked  # as many as the bound bears while the step computes
    rollouts.end(["1.0-0", "1.0-1"])
    assert names(groups.hand_over(1, 6, 1.0).groups) == ["1.0", "2.1"]
    assert "3.0-0" in rollouts.asked


def test_a_group_is_whole_when_its_last_rollout_has_ended() -> None:
    rollouts = Scripted(lambda waiting: waiting[-1:])
    groups = in_flight(OneStepOff(1), rollouts)
    [group] = groups.hand_over(0, 1, 1.0).groups
    assert [trajectory.rollout_id for trajectory in group] == ["1.0-0", "1.0-1"]
    assert rollouts.read_ids == ["1.0-0", "1.0-1"]  # together, though they ended apart


def test_groups_are_left_out_with_their_reasons_and_replaced() -> None:
    def why_not(group: list[Trajectory], version: int) -> str | None:
        return "stale" if group[0].group_id == "1.1" else None

    rollouts = Scripted(lambda waiting: waiting)
    groups = in_flight(Async(2, 1), rollouts, why_not=why_not)
    found = groups.hand_over(0, 8, 1.0)
    assert names(found.groups) == ["1.0", "2.0"]
    assert [(group[0].group_id, reason) for group, reason in found.left_out] == [("1.1", "stale")]
    assert groups.next_place - len(groups) == 3
    assert "3.0-0" in rollouts.asked  # in its place


def test_a_step_takes_what_there_is_when_too_many_say_nothing() -> None:
    def why_not(group: list[Trajectory], version: int) -> str | None:
        return None if group[0].group_id == "2.1" else "zero_variance"

    found = in_flight(Async(2, 1), Scripted(lambda waiting: waiting), why_not=why_not, most=6).hand_over(0, 40, 1.0)
    assert names(found.groups) == ["2.1"]
    assert len(found.left_out) >= 5


def test_what_ended_and_was_not_taken_is_told() -> None:
    groups = in_flight(Async(2, 2), Scripted(lambda waiting: waiting))
    assert groups.hand_over(0, 40, 1.0).queued == 4


def test_sampling_is_idle_from_the_last_end_to_the_next_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = Scripted(lambda waiting: waiting)
    read = rollouts.read

    def slowly(rollout_ids: Sequence[str]) -> list[Trajectory]:
        rollouts.now += 2.0
        return read(rollout_ids)

    monkeypatch.setattr(rollouts, "read", slowly)
    groups = in_flight(OneStepOff(1), rollouts)
    groups.hand_over(0, 3, 1.0)
    assert groups.idle_seconds == 2.0
    rollouts.end(["2.0-0"])
    rollouts.now += 1.0
    groups.ask(2, 0)  # while 2.0-1 is open
    assert groups.idle_seconds == 2.0


def test_groups_of_several_versions_that_a_killed_run_had_in_flight_keep_their_order() -> None:
    rollouts = Scripted(lambda waiting: waiting)
    groups = in_flight(Async(2, 2), rollouts, state={"asked": 4, "groups": [(0, 1), (1, 0), (3, 1)]})
    assert groups.rollout_ids == ["1.0-0", "1.0-1", "1.1-0", "1.1-1", "2.1-0", "2.1-1"]
    assert names(groups.hand_over(2, 40, 1.0).groups) == ["1.0", "1.1"]


def test_what_a_killed_run_had_in_flight_is_asked_for_again_and_nothing_else() -> None:
    rollouts = Scripted(lambda waiting: [rollout_id for rollout_id in waiting if not rollout_id.startswith("1.0")][:2])
    first = in_flight(Async(2, 2), rollouts)
    taken = names(first.hand_over(0, 40, 1.0).groups)
    state = msgspec.json.decode(msgspec.json.encode(first.state_dict()))
    later = Scripted(lambda waiting: waiting)
    later.done = rollouts.done  # the store knows what has ended
    second = in_flight(Async(2, 2), later, state=state)
    assert second.state_dict() == first.state_dict()
    assert sorted(later.asked) == sorted(set(rollouts.asked) - {f"{name}-{k}" for name in taken for k in range(N)})
    assert names(second.hand_over(1, 38, 1.0).groups) == ["1.0", "2.1"]
    assert second.next_place > first.next_place


def test_groups_that_ended_and_were_not_taken_are_in_flight_where_a_run_goes_on() -> None:
    rollouts = Scripted(lambda waiting: waiting)
    first = in_flight(Async(2, 2), rollouts)
    assert first.hand_over(0, 40, 1.0).queued == 4
    later = Scripted(lambda waiting: waiting)
    later.done = rollouts.done
    second = in_flight(Async(2, 2), later, state=first.state_dict())
    assert names(second.hand_over(1, 38, 1.0).groups) == ["2.0", "2.1"]
    assert "1.0-0" not in later.asked


@pytest.mark.parametrize("threshold", [0, 3])
def test_what_is_left_at_the_end_is_cancelled_and_read(threshold: int) -> None:
    rollouts = Scripted(lambda waiting: waiting[:N])
    groups = in_flight(Async(2, threshold), rollouts)
    groups.hand_over(0, 40, 1.0)
    left = len(groups)
    assert len(groups.cancel(1.0)) == left == 2 * threshold
    assert not groups.waiting
    assert rollouts.open == []


def test_what_a_killed_run_had_asked_for_beyond_the_end_is_cancelled_and_read_too() -> None:
    rollouts = Scripted(lambda waiting: waiting[:N])
    rollouts.open = ["3.0-0", "3.0-1"]
    # One was never asked for.
    rollouts.done = {f"3.1-{k}": rollout(f"3.1-{k}", None, 0.0, ended_at=0.0) for k in range(N - 1)}
    groups = in_flight(Async(2, 0), rollouts)
    for left in (4, 2):
        groups.hand_over(0, left, 1.0)
    assert names(groups.cancel(1.0)) == ["3.0", "3.1"]
    assert groups.next_place == 6
    assert not set(rollouts.asked) & {"3.0-0", "3.1-0"}
    assert rollouts.open == []


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 5), st.data())
def test_every_group_is_asked_for_once_and_handed_over_once(
    batch: int, threshold: int, steps: int, data: st.DataObject
) -> None:
    rollouts = Scripted(lambda waiting: [data.draw(st.sampled_from(waiting))])
    groups = in_flight(Async(batch, threshold), rollouts)
    handed: list[HandedOver] = [groups.hand_over(step, (steps - step) * batch, 1.0) for step in range(steps)]
    assert len(set(rollouts.asked)) == len(rollouts.asked) == steps * batch * N
    taken = [trajectory.rollout_id for found in handed for group in found.groups for trajectory in group]
    assert sorted(taken) == sorted(rollouts.asked)
    assert all(names(found.groups) == sorted(names(found.groups)) for found in handed)
