"""The schedules' decisions: in whatever order groups end, the bound holds, nothing is lost, and no run stands still."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl.ppo.off_policy.schedules import Async, Group, OneStepOff, Schedule
from tests.random_examples import examples


def ended(place: int, version: int = 0) -> Group:
    return Group(place, version, ended=True)


def open_(place: int, version: int = 0) -> Group:
    return Group(place, version, ended=False)


def places(taken: list[Group] | None) -> list[int] | None:
    return None if taken is None else [group.place for group in taken]


def test_one_step_off_takes_the_groups_of_one_step_and_no_others() -> None:
    schedule = OneStepOff(2)
    assert (schedule.before, schedule.after, schedule.threshold) == (2, 2, 1)
    assert schedule.take([ended(0), open_(1)], 0) is None
    assert places(schedule.take([ended(0), ended(1)], 0)) == [0, 1]


def test_async_takes_the_oldest_of_those_that_have_ended() -> None:
    groups = [open_(0), ended(1), open_(2), ended(3), ended(4), ended(5)]
    assert places(Async(2, 2).take(groups, 0)) == [1, 3]
    assert Async(4, 2).take(groups[:5], 0) is None


def test_async_waits_for_a_group_that_would_be_too_old_after_the_step() -> None:
    schedule = Async(2, 2)
    others = [ended(4, 1), ended(5, 1), ended(6, 2), ended(7, 2)]
    assert places(schedule.take([open_(1, 0), *others[:-1]], 1)) == [4, 5]  # it may be trained at version 2
    assert schedule.take([open_(1, 0), *others], 2) is None
    assert places(schedule.take([ended(1, 0), *others], 2)) == [1, 4]


def test_async_waits_where_too_many_would_be_due_at_once() -> None:
    """At version 1 three groups have to be trained at 2 at the latest; a step takes two, so one of them is due now."""
    groups = [open_(0), open_(1), open_(2), ended(3, 1), ended(4, 1)]
    assert Async(2, 2).take(groups, 1) is None
    assert places(Async(2, 2).take([open_(0), ended(1), open_(2), *groups[3:]], 1)) == [1, 3]


def test_async_without_a_threshold_is_sync() -> None:
    schedule = Async(2, 0)
    assert (schedule.before, schedule.after) == (2, 0)
    assert schedule.take([ended(0), open_(1)], 0) is None
    assert places(schedule.take([ended(0), ended(1)], 0)) == [0, 1]


def test_groups_that_cannot_be_in_time_any_more_are_waited_for_by_nobody() -> None:
    """As when a run is resumed with a lower threshold: who is handed over too old is left out, and the run goes on."""
    assert places(Async(1, 1).take([ended(0), ended(1), ended(2)], 5)) == [0]


class Run:
    """A run of `schedule`, whose groups end in the order that `draw` says and whose updates may be skipped."""

    def __init__(self, schedule: Schedule, steps: int, data: st.DataObject) -> None:
        self.schedule, self.data = schedule, data
        self.version = self.asked = 0
        self.groups: list[Group] = []
        self.trained: list[int] = []
        self.ages: list[int] = []
        for step in range(steps):
            left = (steps - step) * schedule.batch
            self.ask(min(schedule.before, left))
            while (taken := schedule.take(self.groups, self.version)) is None:
                self.end_one()
            assert len(taken) == schedule.batch
            self.trained += [group.place for group in taken]
            self.ages += [self.version - group.version for group in taken]
            self.groups = [group for group in self.groups if group not in taken]
            self.ask(min(schedule.after, left - schedule.batch))
            self.version += data.draw(st.booleans()) or step % 3 > 0  # some steps update nothing

    def ask(self, most: int) -> None:
        while len(self.groups) < most:
            self.groups.append(open_(self.asked, self.version))
            self.asked += 1

    def end_one(self) -> None:
        """The next to end; there must be one, else trainer and groups wait for each other."""
        waiting = [group for group in self.groups if not group.ended]
        chosen = self.data.draw(st.sampled_from(waiting))
        self.groups = [group._replace(ended=group.ended or group is chosen) for group in self.groups]


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 8), st.data())
def test_async_keeps_its_bound_and_loses_nothing_whatever_ends_first(
    batch: int, threshold: int, steps: int, data: st.DataObject
) -> None:
    run = Run(Async(batch, threshold), steps, data)
    assert max(run.ages) <= threshold
    assert sorted(run.trained) == list(range(steps * batch))
    assert not run.groups
    for start in range(0, len(run.trained), batch):
        assert run.trained[start : start + batch] == sorted(run.trained[start : start + batch])


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 4), st.integers(1, 8), st.data())
def test_one_step_off_is_one_step_off_whatever_ends_first(batch: int, steps: int, data: st.DataObject) -> None:
    run = Run(OneStepOff(batch), steps, data)
    assert max(run.ages) <= 1
    assert run.trained == list(range(steps * batch))
