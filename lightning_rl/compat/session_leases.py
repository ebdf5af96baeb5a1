"""Keeps the leases of open sessions, from a thread of its own: a runner that blocks the event loop loses none."""

import logging
import threading
from collections.abc import Callable

from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Claim
from lightning_rl.store.errors import StoreError

_BEATS_PER_LEASE = 3
_log = logging.getLogger(__name__)


class Leases:
    """The leases of claims that are all asked for with the same `unresponsive_seconds`."""

    def __init__(self, store: HttpStore, unresponsive_seconds: float) -> None:
        self._store = store
        self._seconds = unresponsive_seconds / _BEATS_PER_LEASE
        self._lock = threading.Lock()
        self._held: dict[str, tuple[str, Callable[[], object]]] = {}  # attempt id: rollout id, what is told of its loss
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="session leases", daemon=True)
        self._thread.start()

    def hold(self, claim: Claim, lost: Callable[[], object]) -> None:
        """Keep it from now on; `lost` is called, in another thread, when it is no longer ours."""
        with self._lock:
            self._held[claim.attempt.attempt_id] = claim.rollout.rollout_id, lost

    def release(self, claim: Claim) -> None:
        """It ends now."""
        with self._lock:
            self._held.pop(claim.attempt.attempt_id, None)

    def close(self) -> None:
        """Stop: no lease is renewed after this."""
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._over.wait(self._seconds):
            with self._lock:
                held = dict(self._held)
            if held:
                self._renew(held)

    def _renew(self, held: dict[str, tuple[str, Callable[[], object]]]) -> None:
        try:
            leases = self._store.heartbeats([(rollout_id, attempt_id) for attempt_id, (rollout_id, _) in held.items()])
        except StoreError as error:
            _log.warning("no heartbeat for %d sessions: %s", len(held), error)
            return
        for attempt_id, (_, lost) in held.items():
            with self._lock:
                is_fine = attempt_id in leases or self._held.pop(attempt_id, None) is None
            if not is_fine:
                lost()
