"""Results on their way to the server: those that are there together leave together.

Invariant: a result is told until the server has answered it, or its claim is no longer ours; which of the two is told
once, to its `over`. That one of several is refused changes nothing for the others.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from lightning_rl.runner.error_classification import error_info
from lightning_rl.runner.leases import ActiveClaims
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Claim, Ending, Finish, Log
from lightning_rl.store.errors import Conflict, Invalid, NotFound, Unreachable

_GATHER_SECONDS = 0.005  # groups end nearly together: engines sample them in one batch
_TOGETHER = 64
_BACKOFF_SECONDS = 0.2
_MAX_BACKOFF_SECONDS = 5.0
_REFUSED = (Conflict, NotFound, Invalid)
_log = logging.getLogger(__name__)


class Result(NamedTuple):
    """How the attempt of `claim` ended, and what it printed; `over` is called with whether the server has taken it."""

    claim: Claim
    ending: Ending
    log: Log | None
    over: Callable[[bool], None]


class Results:
    """The results of one process; safe to share between threads. `stop` ends waiting for a server that is away."""

    def __init__(self, store: HttpStore, active: ActiveClaims, stop: threading.Event) -> None:
        self._store = store
        self._active = active
        self._stop = stop
        self._there = threading.Condition()
        self._waiting: deque[Result] = deque()

    def put(self, result: Result) -> None:
        """Send it soon."""
        with self._there:
            self._waiting.append(result)
            self._there.notify()

    def send(self) -> None:
        """Send what there is, for as long as the process lives."""
        while True:
            self._send(self._taken())

    def _taken(self) -> list[Result]:
        with self._there:
            self._there.wait_for(lambda: self._waiting)
        time.sleep(_GATHER_SECONDS)
        with self._there:
            return [self._waiting.popleft() for _ in range(min(_TOGETHER, len(self._waiting)))]

    def _send(self, results: Sequence[Result]) -> None:
        backoff, ours = _BACKOFF_SECONDS, list(results)
        while ours:
            try:
                self._report(ours)
            except Unreachable as away:
                names = ", ".join(result.ending.rollout_id for result in ours)
                _log.warning("not finished yet: rollouts %s: %s", names, away)
                goes_on = not self._stop.wait(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)
                waiting, ours = ours, []
                for result in waiting:
                    if goes_on and self._active.holds(result.claim):
                        ours.append(result)
                    else:
                        result.over(False)
            except _REFUSED as refused:
                if len(ours) > 1:
                    for result in ours:
                        self._send([result])
                else:
                    _log.warning("dropped the result of rollout %s: %s", ours[0].ending.rollout_id, refused)
                    ours[0].over(False)
                return
            else:
                for result in ours:
                    result.over(True)
                return

    def _report(self, results: Sequence[Result]) -> None:
        for result in results:
            if result.log is not None:
                self._store.add_log(result.ending.rollout_id, result.ending.attempt_id, result.log)
        endings = [result.ending for result in results]
        try:
            self._store.finish_many(endings)
        except Invalid as error:
            if len(results) > 1:
                raise
            refused = Finish(status="failed", error=error_info(error, results[0].claim))
            self._store.finish_many([msgspec.structs.replace(endings[0], finish=refused, rewards=[])])
