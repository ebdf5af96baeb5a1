"""Takes rollouts, runs the agent on them, finishes them; many at a time.

Invariant: whatever the agent does ends as exactly one `finish`, or as a dropped result when the claim was lost. What an
attempt printed is kept in both cases. The slot of a rollout is free when its result is durable, or its claim lost.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from lightning_rl.runner import output_capture
from lightning_rl.runner.executors import AgentRun, Executor
from lightning_rl.runner.leases import ActiveClaims
from lightning_rl.runner.outcome import Outcome
from lightning_rl.runner.output_capture import Printed
from lightning_rl.runner.results import Result, Results
from lightning_rl.runner.slots import Slots
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import RUNNER_STOPPED, Claim, Ending, ErrorInfo, Finish, Log
from lightning_rl.store.errors import StoreError, Unreachable
from lightning_rl_adapters.ids import new_id

CLAIM_WAIT_SECONDS = 10.0
LEFT_SECONDS = 5.0  # for an agent whose claim was lost, or given back, to end by itself
_CLAIMED_TOGETHER = 64
_BACKOFF_SECONDS = 0.2
_MAX_BACKOFF_SECONDS = 5.0
_STOPPED_FINISH = Finish(
    status="failed", error=ErrorInfo(type=RUNNER_STOPPED, message="the runner was stopped", infrastructure=True)
)
_log = logging.getLogger(__name__)


class _Running:
    """A claim, the run of the agent on it, and what that prints. `ending`: the agent was told to end; `over`: it is
    done."""

    run: AgentRun

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.place = (claim.rollout.rollout_id, claim.attempt.attempt_id)
        self.printed = Printed(claim.rollout.rollout_id)
        self.ending = False
        self.over = threading.Event()

    def log(self, where: str = "") -> Log | None:
        """What it printed so far, and where it was; None where there is nothing to keep."""
        log = Log(stdout=self.printed.stdout.text(), stderr=self.printed.stderr.text(), traceback=where)
        return None if log == Log() else log


class Worker:
    """The rollouts of one process.

    `finished` is called after every rollout that ended, `hangs` when an agent goes on although its claim was lost a
    while ago. `stop` ends all waiting.
    """

    def __init__(
        self,
        *,
        store: HttpStore,
        worker_id: str,
        slots: Slots,
        active: ActiveClaims,
        results: Results,
        runs: Executor,
        stop: threading.Event,
        finished: Callable[[], None],
        hangs: Callable[[], object],
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._slots = slots
        self._active = active
        self._results = results
        self._runs = runs
        self._stop = stop
        self._finished = finished
        self._hangs = hangs
        self._running: dict[str, _Running] = {}

    def take(self) -> None:
        """Take rollouts for as long as there are slots."""
        while number := self._slots.take(_CLAIMED_TOGETHER):
            still_ours = [claim for claim in self._claimed(number) if claim.attempt.status == "running"]
            self._slots.put_back(number - len(still_ours))
            for claim in still_ours:
                if self._stop.is_set():  # it came too late
                    self._refuse(claim)
                else:
                    self.begin(claim)

    def _claimed(self, number: int) -> list[Claim]:
        """So many rollouts at most; a server that is not there is asked again by the same claim id, for it may have
        claimed some and died before it said so."""
        backoff, claim_id = _BACKOFF_SECONDS, new_id("c")
        while self._slots.open:
            try:
                return self._store.claim(
                    self._worker_id, limit=number, wait_seconds=CLAIM_WAIT_SECONDS, claim_id=claim_id
                )
            except Unreachable as error:
                _log.warning("no claim: %s", error)
                self._stop.wait(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)
        return []

    def begin(self, claim: Claim) -> None:
        """Run the agent on a claimed rollout; returns soon."""
        running = _Running(claim)
        running.run = self._runs.run(claim, running.printed, lambda outcome: self._end(running, outcome))
        self._running[claim.attempt.attempt_id] = running
        self._active.add(claim, lost=lambda: self._lose(running))
        running.run.start()

    def give_back(self) -> None:
        """Let rollouts under way be retried now, not only when their leases are over; then end their agents.

        An agent that can be told to end has `LEFT_SECONDS` to clean up: with sandboxes, browsers, files of its own.
        """
        given_back = [self._running[claim.attempt.attempt_id] for claim in self._active.take_running()]
        self._let_be_retried(given_back)
        for running in given_back:
            running.ending = running.run.stop()
        until = time.monotonic() + LEFT_SECONDS
        for running in list(self._running.values()):
            if running.ending:
                running.over.wait(max(until - time.monotonic(), 0.0))

    def _let_be_retried(self, given_back: Sequence[_Running]) -> None:
        for running in given_back:
            try:
                self._keep(running, running.log())
                self._store.finish(*running.place, _STOPPED_FINISH)
            except Unreachable as error:
                _log.warning("rollouts were not given back: %s", error)
                return
            except StoreError as error:
                _log.info("rollout %s was not given back: %s", running.claim.rollout.rollout_id, error)

    def _refuse(self, claim: Claim) -> None:
        self._active.add(claim)
        self._active.finishing(claim)  # so that the process waits for it
        try:
            self._store.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, _STOPPED_FINISH)
        except StoreError as error:
            _log.warning("rollout %s was not given back: %s", claim.rollout.rollout_id, error)
        self._active.remove(claim)

    def _end(self, running: _Running, outcome: Outcome) -> None:
        """The agent is done: its result is sent."""
        running.over.set()
        claim, rollout_id = running.claim, running.claim.rollout.rollout_id
        failed = outcome.finish.error
        if failed is not None and not running.ending:
            with output_capture.named(rollout_id):
                _log.info("rollout %s failed\n%s", rollout_id, failed.traceback or failed.message)
        # The lease is renewed until the server has answered; the result of a lost claim is dropped.
        if not self._active.finishing(claim):
            if not self._stop.is_set():
                _log.warning("dropped the result of rollout %s: it was lost before", rollout_id)
            return
        ending = Ending(
            rollout_id=rollout_id,
            attempt_id=claim.attempt.attempt_id,
            finish=outcome.finish,
            rewards=list(outcome.rewards),
        )
        self._results.put(Result(claim, ending, running.log(), outcome.spans, partial(self._over, claim)))

    def _over(self, claim: Claim, accepted: bool, again: bool) -> None:
        if accepted:
            self._finished()
        self._active.remove(claim)
        del self._running[claim.attempt.attempt_id]
        self._slots.give_back(ended=not again)

    def _keep(self, running: _Running, log: Log | None) -> None:
        if log is not None:
            self._store.add_log(*running.place, log)

    def _lose(self, running: _Running) -> None:
        """The claim was lost, to another worker or altogether. Its slot is free, even if the agent still runs."""
        threading.Thread(target=self._look_after, args=(running,), name="lost rollout", daemon=True).start()

    def _look_after(self, running: _Running) -> None:
        running.ending = running.run.stop()
        self._slots.give_back()
        ended = running.over.wait(LEFT_SECONDS)
        del self._running[running.claim.attempt.attempt_id]
        try:
            self._keep(running, running.log(running.run.where))
        except StoreError as error:
            _log.warning("what rollout %s printed is not kept: %s", running.claim.rollout.rollout_id, error)
        if not ended:
            self._hangs()
