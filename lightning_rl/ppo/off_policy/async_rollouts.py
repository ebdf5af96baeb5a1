"""The groups in flight of off-policy training: asked for as the schedule says, handed over in its order.

The queue of finished groups is the store, so what is handed over is durable. Which group has which place is settled by
the order of the tasks alone, and so is what its rollouts are called: a run that is resumed asks for the same ones.

Invariant: a group is asked for once, and then handed over, left out with a reason, or still in flight.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from lightning_rl.ppo.off_policy.schedules import Group, Schedule
from lightning_rl.store.contract import Rollout, RolloutRequest
from lightning_rl.trajectories.trajectory import Trajectory

Requests = Callable[[int, tuple[int, Any]], list[RolloutRequest]]  # of the group with this number of a batch and task
_NOTHING_ASKED: Mapping[str, Any] = {"asked": 0, "groups": ()}


class Rollouts(Protocol):
    """Where rollouts are asked for and read."""

    def ask(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Ask for rollouts."""
        ...

    def ended(self, rollout_ids: Sequence[str], wait_seconds: float) -> list[Rollout]:
        """Those that have ended, as soon as any has; [] when the time is up."""
        ...

    def read(self, rollout_ids: Sequence[str]) -> list[Trajectory]:
        """Rollouts that have ended, in that order."""
        ...

    def cancel(self, rollout_ids: Sequence[str]) -> None:
        """End them."""
        ...

    def is_there(self, rollout_id: str) -> bool:
        """Whether anybody has ever asked for it."""
        ...


@dataclass
class _PendingGroup:
    """A group in flight; `trajectories` are there once all its rollouts have ended."""

    place: int
    version: int
    rollout_ids: list[str]
    waiting: set[str]
    trajectories: list[Trajectory] = field(default_factory=list)

    def as_group(self) -> Group:
        return Group(self.place, self.version, ended=not self.waiting)


@dataclass
class HandedOver:
    """What a step is given: `groups` by place, the groups that were `left_out` meanwhile, with their reasons, and
    how many that have ended stay `queued`."""

    groups: list[list[Trajectory]]
    left_out: list[tuple[list[Trajectory], str]]
    queued: int


class InFlight:
    """The groups of one run.

    Args:
        schedule: when to ask for how many, and which make a batch.
        batches: the tasks of the run, a batch at a time, from the first batch on.
        requests: the rollouts of a group, which has the task of its number in its batch.
        why_not: why a group that has ended is not to be trained at a policy version; None: it may be.
        most: a step takes what there is when so many groups have ended and were left out or are there; None: no matter.
        state: what `state_dict` gave where a run is resumed, whose groups are asked for again.
    """

    def __init__(
        self,
        schedule: Schedule,
        batches: Iterable[Sequence[tuple[int, Any]]],
        requests: Requests,
        rollouts: Rollouts,
        *,
        why_not: Callable[[list[Trajectory], int], str | None],
        most: int | None = None,
        state: Mapping[str, Any] = _NOTHING_ASKED,
    ) -> None:
        self._schedule = schedule
        self._requests = requests
        self._rollouts = rollouts
        self._why_not = why_not
        self._most = most
        group_count: int = state["asked"]
        groups: Sequence[tuple[int, int]] = state["groups"]
        self.next_place = group_count
        self.idle_seconds = 0.0  # in which no rollout was asked for that had not ended, since it was last set to 0
        self._last_end: float | None = None
        self._groups: list[_PendingGroup] = []
        first = min((place for place, _ in groups), default=group_count)
        self._tasks = islice(_numbered(batches), first, None)
        versions = dict(groups)
        again = [(place, *next(self._tasks)) for place in range(first, group_count)]
        for version in sorted(set(versions.values())):
            self._begin([one for one in again if versions.get(one[0]) == version], version)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def rollout_ids(self) -> list[str]:
        """The rollouts of the groups in flight, those that have ended too."""
        return [rollout_id for group in self._groups for rollout_id in group.rollout_ids]

    @property
    def waiting(self) -> list[str]:
        """The rollouts in flight that have not ended, as far as is known here."""
        return sorted(rollout_id for group in self._groups for rollout_id in group.waiting)

    def state_dict(self) -> dict[str, Any]:
        """What a run that is resumed asks for again."""
        return {"asked": self.next_place, "groups": [(group.place, group.version) for group in self._groups]}

    def ask(self, most: int, version: int) -> None:
        """Ask for groups until `most` are in flight, at this policy version."""
        missing = range(self.next_place, self.next_place + max(0, most - len(self._groups)))
        self._begin([(place, *next(self._tasks)) for place in missing], version)
        self.next_place += len(missing)

    def hand_over(self, version: int, remaining: int, wait_seconds: float) -> HandedOver:
        """The batch of a step on the weights `version`, waiting for it; the run is to train `remaining` more groups.

        Asks for those whose turn it is, before it waits and when it has the batch.
        """
        handed_over = HandedOver([], [], 0)
        self._end(0)
        while True:
            self._leave_out(handed_over, version)
            self.ask(min(self._schedule.before, remaining), version)
            batch = self._schedule.take([group.as_group() for group in self._groups], version)
            if batch is None and self._enough(handed_over):
                batch = [group.as_group() for group in self._groups if not group.waiting][: self._schedule.batch]
            if batch is not None:
                break
            self._end(wait_seconds)
        places = {group.place for group in batch}
        handed_over.groups = [group.trajectories for group in self._groups if group.place in places]
        self._groups = [group for group in self._groups if group.place not in places]
        self.ask(min(self._schedule.after, remaining - self._schedule.batch), version)
        handed_over.queued = sum(not group.waiting for group in self._groups)
        return handed_over

    def cancel(self, wait_seconds: float) -> list[list[Trajectory]]:
        """End all that is in flight, and what a run that was cut off had asked for beyond it; the groups of both, which
        are in flight no more."""
        while True:
            following = next(self._tasks)
            ids = [str(request.rollout_id) for request in self._requests(*following)]
            if not self._rollouts.is_there(ids[0]):
                break
            ids = [each for each in ids if self._rollouts.is_there(each)]  # one that was lost is not asked for again
            self._groups.append(_PendingGroup(self.next_place, 0, ids, set(ids)))
            self.next_place += 1
        self._rollouts.cancel(self.waiting)
        while self.waiting:
            self._end(wait_seconds)
        ended, self._groups = [group.trajectories for group in self._groups], []
        return ended

    def _enough(self, handed_over: HandedOver) -> bool:
        """Whether so many groups have ended for this step that it looks for no more."""
        ended = sum(not group.waiting for group in self._groups)
        return self._most is not None and len(handed_over.left_out) + ended >= self._most

    def _leave_out(self, handed_over: HandedOver, version: int) -> None:
        for group in [group for group in self._groups if not group.waiting]:
            if (reason := self._why_not(group.trajectories, version)) is not None:
                handed_over.left_out.append((group.trajectories, reason))
                self._groups.remove(group)

    def _begin(self, tasks: Sequence[tuple[int, int, tuple[int, Any]]], version: int) -> None:
        """Ask for the groups of (place, batch, task)."""
        if not tasks:
            return
        requests = [self._requests(number, task) for _, number, task in tasks]
        idle = not self.waiting
        rollouts = self._rollouts.ask([request for group in requests for request in group])
        if idle and self._last_end is not None:
            self.idle_seconds += max(0.0, min(rollout.created_at for rollout in rollouts) - self._last_end)
        for (place, _, _), group in zip(tasks, requests, strict=True):
            ids = [str(request.rollout_id) for request in group]
            self._groups.append(_PendingGroup(place, version, ids, set(ids)))
        self._groups.sort(key=lambda group: group.place)

    def _end(self, wait_seconds: float) -> None:
        """Take note of rollouts that have ended, and read the groups of which it was the last."""
        if not (waiting := self.waiting):
            return
        ended = {rollout.rollout_id: rollout for rollout in self._rollouts.ended(waiting, wait_seconds)}
        ends = [rollout.ended_at for rollout in ended.values() if rollout.ended_at is not None]
        self._last_end = max(ends, default=self._last_end) if self._last_end is None else max([self._last_end, *ends])
        whole = [group for group in self._groups if group.waiting and group.waiting <= ended.keys()]
        for group in self._groups:
            group.waiting -= ended.keys()
        if not whole:
            return
        read: Mapping[str, Trajectory] = {
            trajectory.rollout_id: trajectory
            for trajectory in self._rollouts.read([rollout_id for group in whole for rollout_id in group.rollout_ids])
        }
        for group in whole:
            group.trajectories = [read[rollout_id] for rollout_id in group.rollout_ids]


def _numbered(batches: Iterable[Sequence[tuple[int, Any]]]) -> Iterator[tuple[int, tuple[int, Any]]]:
    """The tasks with the number of their batch, from 1."""
    for number, batch in enumerate(batches, start=1):
        for task in batch:
            yield number, task
