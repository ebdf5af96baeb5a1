"""One worker: claim a rollout, run the agent on it, finish it; again and again.

Invariant: whatever the agent does ends as exactly one `finish`, or as a dropped result when the claim was lost. A
thread whose claim was lost while its agent ran was replaced: it ends when the agent returns.
"""

import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from lightning_rl.agent import Agent, run_agent
from lightning_rl.runner.active import ActiveClaims
from lightning_rl.runner.blame import error_info
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Claim, Finish, Reward
from lightning_rl.store.errors import Conflict, Invalid, NotFound, Unreachable
from lightning_rl_adapters.credit import FINAL

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from lightning_rl.emitted import Emitted

Submit = Callable[[Awaitable[Any]], "Future[Any]"]

CLAIM_WAIT_SECONDS = 30.0
_BACKOFF_SECONDS = 0.2
_MAX_BACKOFF_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Worker:
    """Runs `agent` on one rollout at a time. `stop` ends it after the present one.

    `submit` runs what an async agent returns. `deliver` sends the spans that an agent emitted, and raises nothing.
    `replace` is called from another thread with this worker when its own thread is left behind, `finished` after every
    rollout that ended.
    """

    def __init__(
        self,
        *,
        store: HttpStore,
        agent: Agent,
        worker_id: str,
        active: ActiveClaims,
        stop: threading.Event,
        submit: Submit,
        deliver: Callable[[Sequence["ReadableSpan"]], None],
        replace: Callable[["Worker"], None],
        finished: Callable[[], None],
    ) -> None:
        self.worker_id = worker_id
        self._store = store
        self._agent = agent
        self._active = active
        self._stop = stop
        self._submit = submit
        self._deliver = deliver
        self._replace = replace
        self._finished = finished

    def work(self) -> bool:
        """Take rollouts until `stop`; a server that is not there is tried again. Whether this thread was replaced."""
        backoff = _BACKOFF_SECONDS
        while not self._stop.is_set():
            try:
                claims = self._store.claim(self.worker_id, wait_seconds=CLAIM_WAIT_SECONDS)
            except Unreachable as error:
                _log.warning("no claim: %s", error)
                self._stop.wait(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)
                continue
            backoff = _BACKOFF_SECONDS
            for claim in claims:
                if not self.run(claim):
                    return True
        return False

    def run(self, claim: Claim) -> bool:
        """Run the agent on one claimed rollout and finish it; False when it was lost before the agent was done."""
        self._active.add(claim, lost=lambda: self._replace(self))
        from lightning_rl.emitted import Emitted  # the trainer has this module too, and no use for OpenTelemetry

        emitted = Emitted(claim.rollout.rollout_id, claim.attempt.attempt_id)
        rewards, finish = self._outcome(claim, emitted)
        backoff = _BACKOFF_SECONDS
        # The lease is kept until the answer is there; a lost claim's result is nobody's.
        ours = self._active.finishing(claim)
        if not ours:
            _log.warning("dropped the result of rollout %s: it was lost before", claim.rollout.rollout_id)
            return False
        if emitted.spans:
            self._deliver(emitted.spans)
        while ours:
            try:
                self._report(claim, rewards, finish)
            except Unreachable as error:
                _log.warning("rollout %s is not finished yet: %s", claim.rollout.rollout_id, error)
                ours = not self._stop.wait(backoff) and self._active.holds(claim)
                backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)
            except (Conflict, NotFound) as error:
                _log.warning("dropped the result of rollout %s: %s", claim.rollout.rollout_id, error)
                ours = False
            else:
                ours = False
                self._finished()
        self._active.remove(claim)
        return True

    def _outcome(self, claim: Claim, emitted: "Emitted") -> tuple[list[Reward], Finish]:
        """The rewards to post, those of calls and those of an agent that gave no final one, and the finish.

        A failed agent's calls keep what they were given: they are trained with it.
        """
        try:
            await_result = functools.partial(self._result, claim)
            rewards = run_agent(self._agent, claim, await_result, emitted=emitted)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever an agent raises is data
            _log.info("the agent failed on rollout %s", claim.rollout.rollout_id, exc_info=error)
            return emitted.call_rewards, Finish(status="failed", error=error_info(error, claim))
        if rewards is None or FINAL in rewards:
            return emitted.call_rewards, Finish(status="succeeded", reward=rewards)
        return emitted.call_rewards + _named(claim, rewards), Finish(status="succeeded")

    def _result(self, claim: Claim, awaitable: Awaitable[Any]) -> Any:
        future = self._submit(awaitable)
        self._active.on_loss(claim, future.cancel)
        return future.result()

    def _report(self, claim: Claim, rewards: list[Reward], finish: Finish) -> None:
        place = (claim.rollout.rollout_id, claim.attempt.attempt_id)
        if rewards:
            self._store.add_rewards(*place, rewards)
        try:
            self._store.finish(*place, finish)
        except Invalid as error:
            self._store.finish(*place, Finish(status="failed", error=error_info(error, claim)))


def _named(claim: Claim, rewards: dict[str, float]) -> list[Reward]:
    """Rewards of the attempt, under ids that are the same however often they are posted."""
    return [
        Reward(value=value, name=name, reward_id=f"{claim.attempt.attempt_id}-{number}")
        for number, (name, value) in enumerate(rewards.items())
    ]
