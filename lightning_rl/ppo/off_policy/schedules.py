"""When groups of rollouts are asked for, and which of them make the next batch: the schedules of off-policy training.

Pure decisions on the groups in flight: asked for, and neither trained nor left out. In every schedule the step on a
batch is the same. `sync` has none in flight beside the batch it waits for, so it needs no decisions.

Invariant: a group that is trained was asked for at most `threshold` policy versions ago, so none of its tokens is
older. No group is left behind for that: a trainer that would outrun a group waits for it.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Group(NamedTuple):
    """A group in flight.

    `place` counts the groups of a run in the order in which they are asked for, `version` is the policy version at that
    time, and `ended` says that all its rollouts have.
    """

    place: int
    version: int
    ended: bool


class Schedule(Protocol):
    """What a run asks of its schedule."""

    @property
    def batch(self) -> int:
        """Groups of a step."""
        ...

    @property
    def threshold(self) -> int:
        """Policy versions between asking for a group and training it, at most."""
        ...

    @property
    def before(self) -> int:
        """Up to how many groups are in flight while a step waits for its batch."""
        ...

    @property
    def after(self) -> int:
        """Up to how many are in flight once the batch is taken out, while the step computes."""
        ...

    def take(self, groups: Sequence[Group], version: int) -> list[Group] | None:
        """The batch of a step on the weights `version`, by place; None: wait. `groups` are those in flight, by place"""
        ...


class OneStepOff(NamedTuple):
    """The rollouts of step k + 1 are asked for when those of step k have all ended, before its update."""

    batch: int
    threshold: int = 1

    @property
    def before(self) -> int:
        """See `Schedule`."""
        return self.batch

    @property
    def after(self) -> int:
        """See `Schedule`."""
        return self.batch

    def take(self, groups: Sequence[Group], version: int) -> list[Group] | None:
        """The groups of one step, in the order in which they were asked for."""
        first = groups[: self.batch]
        return [*first] if len(first) == self.batch and all(group.ended for group in first) else None


class Async(NamedTuple):
    """A step takes the first `batch` groups that have ended, the oldest of these first.

    With `threshold` S and B groups a step, (1 + S) * B are in flight while a step waits, S * B while it computes. So no
    more than (k + 1) * B of them are due within k steps after the one that waits, and each can still be trained in time
    if every step takes its share of those. A step that finds too few of them ended waits.
    """

    batch: int
    threshold: int

    @property
    def before(self) -> int:
        """See `Schedule`."""
        return (1 + self.threshold) * self.batch

    @property
    def after(self) -> int:
        """See `Schedule`."""
        return self.threshold * self.batch

    def take(self, groups: Sequence[Group], version: int) -> list[Group] | None:
        """The oldest groups that have ended, if those that have not can still be trained in time."""
        oldest = [group for group in groups if group.ended][: self.batch]
        if len(oldest) < self.batch:
            return None
        for steps in range(self.threshold):
            early = version + steps - self.threshold  # asked for at this version: due within so many steps after this
            due = [group for group in groups if group.version <= early and group not in oldest]
            if len(due) > steps * self.batch and not all(group.ended for group in due):
                return None
        return oldest
