"""What agents emitted, on its way to the server: by OTLP, as any other program's spans.

Invariant: delivery takes a few seconds at most and raises nothing. Spans are told of a rollout, never its condition.
"""

import functools
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_rl_adapters import semconv

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan

_SECONDS = 2.0  # for one request, and for the last to begin: a stopped process leaves 5 to results on their way
_BATCH = 512
_log = logging.getLogger(__name__)


class Delivery:
    """Sends spans to the server at `url`, with a runner key of it; one for each thread."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key

    def __call__(self, spans: Sequence["ReadableSpan"]) -> None:
        """Send the spans of one attempt. What cannot be sent in time is given up, and told in the log."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        end = time.monotonic() + _SECONDS
        for start in range(0, len(spans), _BATCH):
            sent = time.monotonic() < end and self._exporter.export(spans[start : start + _BATCH])
            if sent is not SpanExportResult.SUCCESS:
                whose, left = spans[0].attributes or {}, len(spans) - start
                told = "%d of the %d spans that rollout %s emitted did not reach the server"
                _log.warning(told, left, len(spans), whose.get(semconv.ROLLOUT_ID))
                return

    @functools.cached_property
    def _exporter(self) -> "OTLPSpanExporter":
        import requests
        from opentelemetry.exporter.otlp.proto.http import Compression
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        session = requests.Session()
        session.trust_env = False  # an agent's proxies, and a .netrc that would replace the key
        return OTLPSpanExporter(
            endpoint=f"{self._url.rstrip('/')}/v1/traces",
            headers={"authorization": f"Bearer {self._key}"},
            timeout=_SECONDS,
            compression=Compression.Gzip,
            session=session,
        )
