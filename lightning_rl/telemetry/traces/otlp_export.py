"""Every span that the store takes, sent on to an OTLP endpoint too: a copy for people's tracing tools.

Invariant: nothing waits for it. A span is handed over after the store has it and never comes back; what waits is
bounded, and what does not fit, or is not taken, is dropped, counted and told of. The store alone is the record.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult
from prometheus_client import Counter, Gauge
from prometheus_client.registry import Collector

from lightning_rl.store.contract import Attempt, Ending, ErrorInfo, Finish, Overdue, Rollout
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.traces.root import root_span
from lightning_rl_adapters.otel_out import readable
from lightning_rl_adapters.span import Packed, pack, unpack
from lightning_rl_proxy.recording.alerts import Alert

_WAITING_BYTES = 64 * 2**20
_BATCH, _BATCH_BYTES = 512, 4 * 2**20
_LINGER_SECONDS = 1.0  # more spans gather meanwhile
_LAST_SECONDS = 2.0  # for what waits when the server stops
_log = logging.getLogger(__name__)


class SpansOut:
    """Sends spans to one endpoint from a thread of its own; safe to share between threads.

    `url` is the one that spans are posted to. Headers, time-out and certificates come from OpenTelemetry's own
    variables of the environment (OTEL_EXPORTER_OTLP_HEADERS, ..._TIMEOUT, ..._CERTIFICATE). No more than
    `waiting_bytes` of packed spans wait.
    """

    def __init__(self, url: str, *, waiting_bytes: int = _WAITING_BYTES) -> None:
        self._exporter = OTLPSpanExporter(endpoint=url, compression=Compression.Gzip)
        self._limit = waiting_bytes
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._sending = 0
        self._closing = False
        self._changed = threading.Condition()
        self._sent = Counter("lightning_rl_otlp_sent", "Spans that the OTLP endpoint took.", registry=None)
        self._dropped = Counter(
            "lightning_rl_otlp_dropped",
            "Spans that were not sent, since too many waited (full), the endpoint did not take them (failed), or the "
            "server stopped (stopped).",
            ["why"],
            registry=None,
        )
        waiting = Gauge("lightning_rl_otlp_waiting", "Spans on their way to the OTLP endpoint.", registry=None)
        waiting.set_function(lambda: len(self._waiting))
        self.collectors: Sequence[Collector] = (self._sent, self._dropped, waiting)
        self._trouble = Alert(f"the OTLP endpoint {url}")
        self._thread = threading.Thread(target=self._run, name="spans out", daemon=True)
        self._thread.start()

    def put(self, spans: Iterable[Packed]) -> None:
        """Take these along; returns at once."""
        for record in (span.record for span in spans):
            with self._changed:
                fits = self._bytes + len(record) <= self._limit
                if fits:
                    self._waiting.append(record)
                    self._bytes += len(record)
                    self._changed.notify()
            if not fits:
                self._drop(1, "full", "it is slower than the spans come: what does not fit is dropped")

    def close(self, seconds: float = _LAST_SECONDS) -> None:
        """Send what waits, for so long at most; the rest is dropped."""
        end = time.monotonic() + seconds
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(max(0.0, end - time.monotonic()))
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        with self._changed:
            unsent = len(self._waiting) + self._sending
            self._waiting.clear()
        if unsent:
            self._dropped.labels("stopped").inc(unsent)
            _log.warning("%d spans were not sent to the OTLP endpoint before the end", unsent)

    def _run(self) -> None:
        while batch := self._next():
            spans = [readable(unpack(record)) for record in batch]
            if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                self._sent.inc(len(spans))
                if self._bytes < self._limit // 2:  # while it is too slow, no batch that it takes is an end of that
                    self._trouble.end()
            else:
                self._drop(len(spans), "failed", "it does not take spans (server.log says why): they are dropped")

    def _next(self) -> list[bytes]:
        """What is sent next; nothing when all is sent and no more comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._changed.wait_for(self._is_much, _LINGER_SECONDS)
            batch: list[bytes] = []
            size = 0
            while self._waiting and len(batch) < _BATCH and (not batch or size + len(self._waiting[0]) <= _BATCH_BYTES):
                batch.append(self._waiting.popleft())
                size += len(batch[-1])
            self._bytes -= size
            self._sending = len(batch)
            return batch

    def _is_much(self) -> bool:
        return self._closing or len(self._waiting) >= _BATCH or self._bytes >= _BATCH_BYTES

    def _drop(self, count: int, why: str, text: str) -> None:
        self._dropped.labels(why).inc(count)
        self._trouble.begin(f"{text}; nothing that is recorded is lost")


class MirroredStore(SqlStore):
    """A store that hands on every span that it has taken, and of each attempt that ends the root span of its trace."""

    def __init__(self, url: str, out: SpansOut) -> None:
        super().__init__(url)
        self._out = out

    def close(self) -> None:
        """See `SqlStore`; the spans that wait have a moment to go out."""
        super().close()
        self._out.close()

    def add_packed(self, spans: Sequence[Packed]) -> None:
        """See `SqlStore`."""
        super().add_packed(spans)
        self._out.put(spans)

    def finish(
        self, rollout_id: str, attempt_id: str, finish: Finish, lack: ErrorInfo | None = None
    ) -> tuple[Rollout, Attempt]:
        """See `SqlStore`."""
        rollout, attempt = super().finish(rollout_id, attempt_id, finish, lack)
        self._out.put([pack(root_span(rollout, attempt))])
        return rollout, attempt

    def finish_many(
        self, endings: Sequence[Ending], lacks: Sequence[ErrorInfo | None] | None = None
    ) -> list[tuple[Rollout, Attempt]]:
        """See `SqlStore`."""
        outcomes = super().finish_many(endings, lacks)
        self._out.put(pack(root_span(*outcome)) for outcome in outcomes)
        return outcomes

    def cancel(self, rollout_id: str) -> Rollout:
        """See `SqlStore`."""
        rollout = super().cancel(rollout_id)
        if rollout.attempt_id is not None:
            current_rollout, attempt = self.attempt(rollout_id, rollout.attempt_id)
            if attempt.status == "cancelled":
                self._out.put([pack(root_span(current_rollout, attempt))])
        return rollout

    def expire(self, overdue: Sequence[Overdue]) -> list[Rollout]:
        """See `SqlStore`."""
        moved = super().expire(overdue)
        ended = {late.rollout_id: late.attempt_id for late in overdue}
        self._out.put(pack(root_span(*self.attempt(each.rollout_id, ended[each.rollout_id]))) for each in moved)
        return moved
