"""The life of a rollout and of an attempt, as two tables.

Invariant: no status is ever written that the tables do not allow after the one before it, so a
rollout ends once, and what has ended stays as it is.
"""

from collections.abc import Mapping
from typing import Literal

RolloutStatus = Literal["queued", "running", "succeeded", "failed", "cancelled"]
AttemptStatus = Literal["running", "succeeded", "failed", "lost", "cancelled"]

ROLLOUT_TRANSITIONS: Mapping[RolloutStatus, frozenset[RolloutStatus]] = {
    "queued": frozenset({"running", "cancelled"}),
    "running": frozenset({"queued", "succeeded", "failed", "cancelled"}),  # queued: a retry
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
ATTEMPT_TRANSITIONS: Mapping[AttemptStatus, frozenset[AttemptStatus]] = {
    "running": frozenset({"succeeded", "failed", "lost", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "lost": frozenset(),
    "cancelled": frozenset(),
}
ENDED: frozenset[RolloutStatus] = frozenset(
    status for status, following in ROLLOUT_TRANSITIONS.items() if not following
)


class IllegalTransition(Exception):
    """A status was about to follow one that it must not follow: a bug, never a user's error."""


def next_rollout_status(old: RolloutStatus, new: RolloutStatus) -> RolloutStatus:
    """`new`, when a rollout may go there from `old`.

    Raises:
        IllegalTransition: when the table says that it may not.
    """
    if new not in ROLLOUT_TRANSITIONS[old]:
        raise IllegalTransition(f"a rollout cannot go from {old} to {new}")
    return new


def next_attempt_status(old: AttemptStatus, new: AttemptStatus) -> AttemptStatus:
    """`new`, when an attempt may go there from `old`.

    Raises:
        IllegalTransition: when the table says that it may not.
    """
    if new not in ATTEMPT_TRANSITIONS[old]:
        raise IllegalTransition(f"an attempt cannot go from {old} to {new}")
    return new
