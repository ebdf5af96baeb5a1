"""Results on their way to the server: those of one gateway that are there together leave together, behind their spans.

Invariant: a result is told until the server has answered it, or its claim is no longer ours; which of the two is told
once, to its `over`. That one of several is refused changes nothing for the others, and while nobody can say how calls
at one gateway ended, the results of other gateways go on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from lightning_rl.runner.error_classification import error_info
from lightning_rl.runner.leases import ActiveClaims
from lightning_rl.runner.outcome import SpanBatch, SpansOf
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import AttemptLog, Claim, Ending, Finish, Log
from lightning_rl.store.errors import Conflict, Invalid, NotFound, Unreachable

_LOOK_SECONDS = 0.1  # so soon it is seen that the process stops, while a server is away
_GATHER_SECONDS = 0.005  # groups end nearly together: engines sample them in one batch
_TOGETHER = 64
_BACKOFF_SECONDS = 0.2
_MAX_BACKOFF_SECONDS = 5.0
_REFUSED = (Conflict, NotFound, Invalid)
_log = logging.getLogger(__name__)


class Result(NamedTuple):
    """How the attempt of `claim` ended, what it printed and emitted; `over` is called with whether the server has taken
    the result, and whether its rollout is tried again."""

    claim: Claim
    ending: Ending
    log: Log | None
    spans: Sequence[SpanBatch]
    over: Callable[[bool, bool], None]


@dataclass(eq=False)  # two groups are never the same one
class _Group:
    """Results of attempts at one gateway, which are told in one request; `due` (monotonic seconds) is when."""

    results: list[Result]
    due: float = 0.0
    backoff: float = 0.0


class Results:
    """The results of one process; safe to share between threads. `stop` ends waiting for a server that is away.

    `deliver` sends the spans that agents emitted, before their results, and raises nothing.
    """

    def __init__(
        self,
        store: HttpStore,
        active: ActiveClaims,
        stop: threading.Event,
        deliver: Callable[[Sequence[SpansOf]], None],
    ) -> None:
        self._store = store
        self._active = active
        self._stop = stop
        self._deliver = deliver
        self._there = threading.Condition()
        self._waiting: deque[Result] = deque()
        self._again: list[_Group] = []  # of the sending thread alone

    def put(self, result: Result) -> None:
        """Send it soon."""
        with self._there:
            self._waiting.append(result)
            self._there.notify()

    def send(self) -> None:
        """Send what there is, for as long as the process lives."""
        while True:
            self._send_due()

    def _send_due(self) -> None:
        """Wait for results, new ones or such as are to be told again, and tell them."""
        if not self._again:
            with self._there:
                self._there.wait_for(lambda: self._waiting)
            time.sleep(_GATHER_SECONDS)
        else:
            soonest = min(group.due for group in self._again) - time.monotonic()
            with self._there:
                self._there.wait_for(lambda: self._waiting, max(0.0, min(soonest, _LOOK_SECONDS)))
        now = time.monotonic()
        due = [group for group in self._again if group.due <= now or self._stop.is_set()]
        self._again = [group for group in self._again if group not in due]
        for group in [*due, *self._new_groups()]:
            self._tell(group)

    def _new_groups(self) -> list[_Group]:
        with self._there:
            results = [self._waiting.popleft() for _ in range(min(_TOGETHER, len(self._waiting)))]
        if emitted := [(result.ending.rollout_id, batch) for result in results for batch in result.spans]:
            self._deliver(emitted)
        groups: dict[str | None, _Group] = {}
        for result in results:
            groups.setdefault(result.claim.gateway_url, _Group([])).results.append(result)
        return list(groups.values())

    def _tell(self, group: _Group) -> None:
        results = group.results
        try:
            again = self._report(results)
        except Unreachable as away:
            names = ", ".join(result.ending.rollout_id for result in results)
            _log.warning("not finished yet: rollouts %s: %s", names, away)
            self._keep(group)
        except _REFUSED as refused:
            if len(results) > 1:
                for result in results:
                    self._tell(_Group([result]))
            else:
                _log.warning("dropped the result of rollout %s: %s", results[0].ending.rollout_id, refused)
                results[0].over(False, False)
        else:
            for result in results:
                result.over(True, result.ending.rollout_id in again)

    def _keep(self, group: _Group) -> None:
        """Tell those again later that are still ours."""
        backoff = min(2 * group.backoff, _MAX_BACKOFF_SECONDS) if group.backoff else _BACKOFF_SECONDS
        again = _Group([], time.monotonic() + backoff, backoff)
        for result in group.results:
            if not self._stop.is_set() and self._active.holds(result.claim):
                again.results.append(result)
            else:
                result.over(False, False)
        if again.results:
            self._again.append(again)

    def _report(self, results: Sequence[Result]) -> Sequence[str]:
        """Tell how attempts ended; the rollouts that are tried again."""
        endings = [result.ending for result in results]
        logs = [
            AttemptLog(rollout_id=ending.rollout_id, attempt_id=ending.attempt_id, log=result.log)
            for ending, result in zip(endings, results, strict=True)
            if result.log is not None
        ]
        if logs:
            self._store.add_logs(logs)
        try:
            return self._store.finish_many(endings).again
        except Invalid as error:
            if len(results) > 1:
                raise
            refused = Finish(status="failed", error=error_info(error, results[0].claim))
            return self._store.finish_many([msgspec.structs.replace(endings[0], finish=refused, rewards=[])]).again
