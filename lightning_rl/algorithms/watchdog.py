"""Who waits for whom: told when no rollout has ended for long, since a run that hangs says nothing by itself.

It only looks and warns. What is slow goes on, and is told again as long as nothing ends.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from lightning_rl.store.contract import RolloutDetail

_NAMED = 5  # rollouts that a warning names
_log = logging.getLogger(__name__)


class Watched(Protocol):
    """What is asked about the rollouts that are waited for: a store."""

    def rollout(self, rollout_id: str, /) -> RolloutDetail:
        """The rollout with its attempts."""
        ...

    def state(self) -> dict[str, Any]:
        """The gateway's state."""
        ...


class Watchdog:
    """Of a wait for rollouts: `look` after every turn of it, and `begin` where it is to be of another one.

    Args:
        seconds: warn when nothing has ended for so long; None: never.
        clock: seconds, of any beginning; `now`: seconds since the epoch, the store's time.
    """

    def __init__(
        self,
        store: Watched,
        seconds: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._seconds = seconds
        self._clock = clock
        self._now = now
        self.begin()

    def begin(self) -> None:
        """A wait begins: what was before it does not count."""
        self._quiet_since = self._told_at = self._clock()

    def look(self, waiting: Collection[str], *, any_ended: bool) -> None:
        """`waiting` has the ids of the rollouts that are waited for; warn where nothing has ended for long."""
        now = self._clock()
        if any_ended or not waiting:
            self._quiet_since = self._told_at = now
        elif self._seconds is not None and now - self._told_at >= self._seconds:
            self._told_at = now
            _log.warning("%s", self._report(sorted(waiting), now - self._quiet_since))

    def _report(self, waiting: list[str], quiet: float) -> str:
        state = self._store.state()
        rollouts = [self._store.rollout(rollout_id) for rollout_id in waiting[:_NAMED]]
        lines = [f"no rollout has ended for {quiet:.0f} s; the trainer waits for {len(waiting)} rollouts:"]
        lines += [f"- {self._of_rollout(rollout)}" for rollout in rollouts]
        if len(waiting) > _NAMED:
            lines.append(f"- and {len(waiting) - _NAMED} more")
        return "\n".join(lines + [f"- {text}" for text in _around(state)])

    def _of_rollout(self, rollout: RolloutDetail) -> str:
        name, now = f"rollout {rollout.rollout_id}", self._now()
        running = [attempt for attempt in rollout.attempts if attempt.status == "running"]
        if running:
            attempt = running[-1]
            return (
                f"{name}: attempt {attempt.attempt_id} is open since {now - attempt.started_at:.0f} s, claimed by "
                f"worker {attempt.worker_id}"
            )
        tries = f" after {rollout.attempt_count} attempts" if rollout.attempt_count else ""
        return f"{name}: {rollout.status}{tries}, asked for {now - rollout.created_at:.0f} s ago, no runner has it"


def _around(state: Mapping[str, Any]) -> list[str]:
    """What in the server or the engines may be the cause, in sentences."""
    sentences = []
    for name, model in state["models"].items():
        if model["paused"]:
            sentences.append(f"calls of model {name} wait: it is paused since {model['paused_seconds']:.0f} s")
        elif model["in_flight"]:
            sentences.append(f"model {name} samples {model['in_flight']} calls now")
    sentences += [
        f"engine {name} is away: {engine['away']}" for name, engine in state["engines"].items() if engine["away"]
    ]
    if state["claims_held_back"]:
        sentences.append(f"{state['claims_held_back']} slots of runners wait until the engines bear one more rollout")
    elif not state["claims_waiting"]:
        sentences.append("no runner asks for a rollout: all are busy, or none runs")
    return sentences or ["no model samples and no engine is away: the agents are busy with something else"]
