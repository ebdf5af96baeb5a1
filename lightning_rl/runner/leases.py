"""The claims that a process works on now, and the thread that keeps their leases.

Invariant: a claim is finished by its worker or lost by a refused heartbeat, never both. One that is lost while its
agent runs is told of as soon as its deadline has passed: it gets a heartbeat then too.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Claim
from lightning_rl.store.errors import Unreachable

_BEATS_PER_LEASE = 3
_LATE_BEAT_SECONDS = 1.0  # past the deadline, which the server may have moved
_log = logging.getLogger(__name__)


@dataclass
class _Held:
    """A claim that is ours; `lost` is called when it is no more while its agent runs."""

    claim: Claim
    deadline: float
    next_beat: float = 0.0
    finishing: bool = False
    lost: Callable[[], object] = lambda: None

    def set_next_beat(self, now: float) -> None:
        interval = self.claim.rollout.config.unresponsive_seconds / _BEATS_PER_LEASE
        to_deadline = self.deadline - now if now < self.deadline else _LATE_BEAT_SECONDS
        self.next_beat = now + min(interval, to_deadline)


class ActiveClaims:
    """All claims of one process; safe to share between its threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[str, _Held] = {}

    def add(self, claim: Claim, lost: Callable[[], object] = lambda: None) -> None:
        """Its lease is kept from now on; `lost` is called when it is refused while the agent runs."""
        now, seconds = time.monotonic(), claim.rollout.config.timeout_seconds
        held = _Held(claim, deadline=math.inf if seconds is None else now + seconds, lost=lost)
        held.set_next_beat(now)
        with self._changed:
            self._held[claim.attempt.attempt_id] = held
            self._changed.notify_all()

    def holds(self, claim: Claim) -> bool:
        """Whether the claim is still ours."""
        with self._changed:
            return claim.attempt.attempt_id in self._held

    def finishing(self, claim: Claim) -> bool:
        """Its agent is done and its result is on its way; whether it was still ours."""
        with self._changed:
            held = self._held.get(claim.attempt.attempt_id)
            if held is not None:
                held.finishing = True
            return held is not None

    def remove(self, claim: Claim) -> None:
        """Let go of the claim."""
        self._pop(claim)

    def _pop(self, claim: Claim) -> _Held | None:
        with self._changed:
            self._changed.notify_all()
            return self._held.pop(claim.attempt.attempt_id, None)

    def take_running(self) -> list[Claim]:
        """Let go of the claims whose agents still run; these."""
        with self._changed:
            running = [held.claim for held in self._held.values() if not held.finishing]
            for claim in running:
                del self._held[claim.attempt.attempt_id]
            return running

    def wait_until_finished(self, seconds: float) -> bool:
        """Wait until no result is on its way any more; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, seconds)

    def keep_leases(self, store: HttpStore) -> None:
        """Send the heartbeats that are due, for as long as the process lives."""
        while True:
            self._beat(store, self._wait_for_due())

    def _wait_for_due(self) -> list[Claim]:
        with self._changed:
            while True:
                now = time.monotonic()
                due = [held for held in self._held.values() if held.next_beat <= now]
                if due:
                    for held in due:
                        held.set_next_beat(now)
                    return [held.claim for held in due]
                soonest = min((held.next_beat for held in self._held.values()), default=None)
                self._changed.wait(None if soonest is None else soonest - now)

    def _beat(self, store: HttpStore, claims: Sequence[Claim]) -> None:
        try:
            leases = store.heartbeats([(claim.rollout.rollout_id, claim.attempt.attempt_id) for claim in claims])
        except Unreachable as error:
            _log.warning("no heartbeat for %d rollouts: %s", len(claims), error)
            return
        for claim in claims:
            held = None if claim.attempt.attempt_id in leases else self._pop(claim)
            if held is not None:
                _log.warning(
                    "lost rollout %s: its attempt %s has ended", claim.rollout.rollout_id, claim.attempt.attempt_id
                )
                if not held.finishing:
                    held.lost()
