"""The claims that a process works on now, and the thread that keeps their leases.

Invariant: a claim is finished by its worker or lost by a refused heartbeat, never both.
"""

import logging
import threading
import time

from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Claim
from lightning_rl.store.errors import Conflict, NotFound, Unreachable

_BEATS_PER_LEASE = 3
_log = logging.getLogger(__name__)


class ActiveClaims:
    """All claims of one process; safe to share between its threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._claims: dict[str, Claim] = {}
        self._next_beat: dict[str, float] = {}
        self._finishing: set[str] = set()

    def add(self, claim: Claim) -> None:
        """Its lease is kept from now on."""
        with self._changed:
            attempt_id = claim.attempt.attempt_id
            self._claims[attempt_id] = claim
            self._next_beat[attempt_id] = time.monotonic() + _interval(claim)
            self._changed.notify_all()

    def holds(self, claim: Claim) -> bool:
        """Whether the claim is still ours."""
        with self._changed:
            return claim.attempt.attempt_id in self._claims

    def finishing(self, claim: Claim) -> bool:
        """Its agent is done and its result is on its way; whether it was still ours."""
        with self._changed:
            self._finishing.add(claim.attempt.attempt_id)
            return claim.attempt.attempt_id in self._claims

    def remove(self, claim: Claim) -> bool:
        """Let go of the claim; whether it was still ours."""
        with self._changed:
            self._changed.notify_all()
            self._finishing.discard(claim.attempt.attempt_id)
            self._next_beat.pop(claim.attempt.attempt_id, None)
            return self._claims.pop(claim.attempt.attempt_id, None) is not None

    def take_running(self) -> list[Claim]:
        """Let go of the claims whose agents still run; these."""
        with self._changed:
            running = [claim for name, claim in self._claims.items() if name not in self._finishing]
            for claim in running:
                del self._claims[claim.attempt.attempt_id], self._next_beat[claim.attempt.attempt_id]
            return running

    def wait_until_finished(self, seconds: float) -> bool:
        """Wait until no result is on its way any more; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._claims, seconds)

    def keep_leases(self, store: HttpStore) -> None:
        """Send the heartbeats that are due, for as long as the process lives."""
        while True:
            for claim in self._wait_for_due():
                self._beat(store, claim)

    def _wait_for_due(self) -> list[Claim]:
        with self._changed:
            while True:
                now = time.monotonic()
                due = [attempt_id for attempt_id, at in self._next_beat.items() if at <= now]
                if due:
                    for attempt_id in due:
                        self._next_beat[attempt_id] = now + _interval(self._claims[attempt_id])
                    return [self._claims[attempt_id] for attempt_id in due]
                soonest = min(self._next_beat.values(), default=None)
                self._changed.wait(None if soonest is None else soonest - now)

    def _beat(self, store: HttpStore, claim: Claim) -> None:
        try:
            store.heartbeat(claim.rollout.rollout_id, claim.attempt.attempt_id)
        except (Conflict, NotFound) as error:
            if self.remove(claim):
                _log.warning("lost rollout %s: %s", claim.rollout.rollout_id, error)
        except Unreachable as error:
            _log.warning("no heartbeat for rollout %s: %s", claim.rollout.rollout_id, error)


def _interval(claim: Claim) -> float:
    return claim.rollout.config.unresponsive_seconds / _BEATS_PER_LEASE
