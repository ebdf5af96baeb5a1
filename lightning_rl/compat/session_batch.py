"""What sessions came to: their trajectories, what went wrong, and where their tokens are. Pure.

Invariant: every sampled token of the sessions is trainable or excluded by one reason, also in groups that are left out.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rl.trajectories.token_account import ConservationError
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl_adapters.rows import Row

FEW_SUCCESSES = "few_successes"
_REASON_LENGTH = 100


@dataclass
class EndedSession:
    """One session that has ended: `reason` says shortly why it failed, None where it did not. `trajectory` has its
    calls, rows and rewards; None where the session was never created."""

    session_id: str
    group_id: str
    task: Any
    runner: str
    reason: str | None
    trajectory: Trajectory | None


@dataclass(frozen=True)
class SessionStats:
    """Counts of sessions and groups, and of short reasons of failures."""

    sessions: int
    succeeded: int
    failed: int
    groups: int
    groups_left_out: int
    reasons: dict[str, int]


@dataclass
class SessionBatch:
    """The sessions of some prompts, group by group in their order. `left_out` are the groups that have fewer successes
    than they need: their rows say so."""

    sessions: list[EndedSession]
    left_out: list[str] = field(default_factory=list)

    @property
    def stats(self) -> SessionStats:
        failed = [ended.reason for ended in self.sessions if ended.reason is not None]
        return SessionStats(
            sessions=len(self.sessions),
            succeeded=len(self.sessions) - len(failed),
            failed=len(failed),
            groups=len({ended.group_id for ended in self.sessions}),
            groups_left_out=len(self.left_out),
            reasons=dict(Counter(failed)),
        )

    @property
    def trajectories(self) -> list[Trajectory]:
        """Those of the sessions that were created."""
        return [ended.trajectory for ended in self.sessions if ended.trajectory is not None]

    @property
    def rows(self) -> list[Row]:
        """What can be trained."""
        return [row for trajectory in self.trajectories for row in trajectory.rows if row.excluded is None]

    @property
    def tokens(self) -> dict[str, int]:
        """The sampled tokens: `trained`, and the others by why they are not. Raises ConservationError where some are
        in neither."""
        counts: Counter[str] = Counter()
        for trajectory in self.trajectories:
            for row in trajectory.rows:
                counts[row.excluded or "trained"] += sum(row.loss_mask)
            counts.update(trajectory.left_out)
            counts.update(trajectory.excluded)
        sampled = sum(each.sampled_tokens + sum(each.excluded.values()) for each in self.trajectories)
        if counts.total() != sampled:
            raise ConservationError(
                f"of {sampled} tokens that the sessions sampled, {counts.total()} are accounted for"
            )
        return dict(+counts)


def batch_of(sessions: Sequence[EndedSession], min_successful_sessions: int) -> SessionBatch:
    """The batch; groups with fewer successful sessions are left out of training."""
    groups: defaultdict[str, list[EndedSession]] = defaultdict(list)
    for ended in sessions:
        groups[ended.group_id].append(ended)
    left_out = [
        group_id
        for group_id, group in groups.items()
        if sum(ended.reason is None for ended in group) < min_successful_sessions
    ]
    for group_id in left_out:
        for ended in groups[group_id]:
            for row in ended.trajectory.rows if ended.trajectory is not None else ():
                row.excluded = row.excluded or FEW_SUCCESSES
    return SessionBatch(list(sessions), left_out)


def short_reason(kind: str, message: str) -> str:
    """A failure in one short line."""
    text = " ".join(message.split())
    reason = f"{kind}: {text}" if text else kind
    return reason if len(reason) <= _REASON_LENGTH else f"{reason[: _REASON_LENGTH - 3]}..."
