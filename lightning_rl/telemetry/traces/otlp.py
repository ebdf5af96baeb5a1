"""Traces to an endpoint that takes OTLP over HTTP: Jaeger, Tempo, Phoenix, Langfuse, a collector, and many more."""

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from lightning_rl.telemetry.traces.writer import NotTaken
from lightning_rl_adapters.otel_out import readable
from lightning_rl_adapters.span import Span


class OtlpTraces:
    """Headers, time-out and certificates come from OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_HEADERS, ...)."""

    def __init__(self, url: str) -> None:
        self.name = url
        self._exporter = OTLPSpanExporter(endpoint=url, compression=Compression.Gzip)

    def take(self, spans: Sequence[Span]) -> None:
        """One request a trace. Raises NotTaken."""
        if self._exporter.export([readable(span) for span in spans]) is not SpanExportResult.SUCCESS:
            raise NotTaken(f"{self.name} does not take spans (what it said is in the log)")

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
