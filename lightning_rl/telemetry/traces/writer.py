"""Writes traces from a thread of its own, behind the training.

Invariant: nothing waits for it but the end of a run, and that for a time at most. What waits is bounded; what does not
fit, or is not taken, is left out, counted and told of.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from lightning_rl.store.contract import RolloutTrace
from lightning_rl.telemetry.traces.trace_builder import Story
from lightning_rl.telemetry.traces.trace_sampling import TraceSampling
from lightning_rl_adapters.span import Span
from lightning_rl_proxy.recording.alerts import Alert

_MOST_WAITING = 1024  # rollouts
_LAST_SECONDS = 30.0  # for what waits when a run ends
_log = logging.getLogger(__name__)


class NotTaken(RuntimeError):
    """The backend did not take a trace."""


class TraceBackend(Protocol):
    """Where traces go."""

    name: str  # as a person knows it

    def take(self, spans: Sequence[Span]) -> None:
        """Keep the trace of one attempt, its root first. Raises NotTaken."""
        ...

    def close(self) -> None:
        """No more comes."""
        ...


class Writer:
    """Chooses among the rollouts that it is given and writes them. At most `most_waiting` rollouts wait."""

    def __init__(
        self, backend: TraceBackend, story: Story, choice: TraceSampling, *, most_waiting: int = _MOST_WAITING
    ) -> None:
        self._backend = backend
        self._story = story
        self._choice = choice
        self._most = most_waiting
        self._waiting: deque[RolloutTrace] = deque()
        self._busy = False
        self._closing = False
        self._written = self._left_out = 0
        self._changed = threading.Condition()
        self._trouble = Alert(f"the rollout traces to {backend.name}")
        self._thread = threading.Thread(target=self._run, name="rollout traces", daemon=True)
        self._thread.start()

    def chosen(self, batch: str, groups: Iterable[str]) -> set[str]:
        """The groups of a batch whose rollouts are to be given to `put`."""
        return self._choice.of(batch, list(dict.fromkeys(groups)))

    def put(self, trace: RolloutTrace) -> None:
        """Take this along; returns at once."""
        with self._changed:
            fits = len(self._waiting) < self._most and not self._closing
            if fits:
                self._waiting.append(trace)
                self._changed.notify_all()
        if not fits:
            self._leave_out("it is slower than rollouts end: what does not fit is left out")

    def metrics(self) -> dict[str, float]:
        """Rollouts so far."""
        with self._changed:
            return {"trace/written": float(self._written), "trace/left_out": float(self._left_out)}

    def close(self, seconds: float = _LAST_SECONDS) -> None:
        """Write what waits, for so long at most; the rest is left out."""
        end = time.monotonic() + seconds
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, end - time.monotonic()))
        with self._changed:
            self._left_out += len(self._waiting) + self._busy
            self._waiting.clear()
        if not self._thread.is_alive():
            self._backend.close()
        if self._left_out:
            _log.warning("%d rollouts are not among the traces of %s", self._left_out, self._backend.name)

    def _run(self) -> None:
        while (trace := self._next()) is not None:
            try:
                for spans in self._story.of(trace):
                    self._backend.take(spans)
            except Exception as error:  # noqa: BLE001 - a copy for people to read: whatever is wrong, training goes on
                _log.warning("rollout %s has no trace", trace.rollout.rollout_id, exc_info=error)
                self._leave_out(f"{error}; rollouts that are not taken are left out, and the store has them all")
            else:
                self._trouble.end()
                with self._changed:
                    self._written += 1

    def _next(self) -> RolloutTrace | None:
        """What is written next; None when all is written and no more comes."""
        with self._changed:
            self._busy = False
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if not self._waiting:
                return None
            self._busy = True
            return self._waiting.popleft()

    def _leave_out(self, text: str) -> None:
        with self._changed:
            self._left_out += 1
        self._trouble.begin(text)
