"""A tracker at a service that may be away for a while: the run goes on, and the metrics wait for it.

Invariant: steps go there in their order, and none is left out that the service takes, as long as it comes back before
the run ends; `metrics.jsonl` has them all in any case.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lightning_rl.errors import Explained

if TYPE_CHECKING:
    from lightning_rl.telemetry.metrics import Tracker

_TRIES = 2  # of a step, until it is seen whether the service takes the one behind it
_PAUSES = 20  # times as long as a try took until the next one: libraries try for minutes by themselves
_log = logging.getLogger(__name__)


class TrackerUnusable(Explained, RuntimeError):
    """A tracker of `trainer.logger` that cannot be opened."""


class ServiceTracker:
    """The tracker that `open_it` opens, called `name` in messages. Raises TrackerUnusable where it cannot be opened."""

    def __init__(self, name: str, open_it: "Callable[[], Tracker]") -> None:
        self._name = name
        self._waiting: deque[tuple[int, dict[str, float]]] = deque()
        self._tries = 0  # of the first that waits
        self._not_before = 0.0
        try:
            self._tracker = open_it()
        except Exception as error:  # libraries of services raise whatever they like
            raise TrackerUnusable(
                f"trainer.logger has {name!r}, which cannot be opened: {_text_of(error)}. Mend that, or leave it out: "
                "metrics.jsonl has all metrics in any case"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the service the metrics of `step`, or keep them until it is back."""
        self._waiting.append((step, dict(metrics)))
        if time.monotonic() >= self._not_before:
            self._send()

    def close(self) -> None:
        """Try once more to give what waits, and close the tracker."""
        if self._waiting:
            self._send()
        if self._waiting:
            first, last = self._waiting[0][0], self._waiting[-1][0]
            _log.warning("%s lacks steps %d to %d: metrics.jsonl has them", self._name, first, last)
        try:
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 - see above
            _log.warning("%s could not be closed: %s", self._name, _text_of(error))

    def _send(self) -> None:
        began, was_away = time.monotonic(), self._not_before > 0
        try:
            while self._waiting:
                self._tracker.log(*self._waiting[0])
                self._waiting.popleft()
                self._tries = 0
        except Exception as error:  # noqa: BLE001 - see above; no metric is worth the run
            self._tries += 1
            if self._tries >= _TRIES and self._passes_over(error):
                return self._send()
            now = time.monotonic()
            self._not_before = now + _PAUSES * (now - began)
            if not was_away:
                _log.warning(
                    "%s does not take the metrics of step %d (%s): the run goes on, and they wait for it",
                    self._name,
                    self._waiting[0][0],
                    _text_of(error),
                )
        else:
            self._not_before = 0.0
            if was_away:
                _log.warning("%s takes metrics again, and has those that waited", self._name)

    def _passes_over(self, refusal: Exception) -> bool:
        """Whether the service takes the second step that waits: then the first is one that it never takes."""
        if len(self._waiting) < 2:
            return False
        try:
            self._tracker.log(*self._waiting[1])
        except Exception:  # noqa: BLE001 - see above: it is away
            return False
        step, _ = self._waiting.popleft()
        self._waiting.popleft()
        self._tries = 0
        _log.warning("%s never takes step %d (%s): metrics.jsonl has it", self._name, step, _text_of(refusal))
        return True


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300] or '(no message)'}"
