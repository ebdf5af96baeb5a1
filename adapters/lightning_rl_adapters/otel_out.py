"""Spans -> OpenTelemetry's own, as its exporters send them to tracing tools; `otlp_json` writes them whole.

Invariant: an attempt is one trace, whoever told of its spans. A span without a parent of its own hangs below the
attempt's root span; one that came by OTLP keeps its span id, its resource and its scope, and links to the trace that
its agent knew it in. The same span always has the same ids. Token ids and logprobs stay in the store, which has them
under the call's id; what OTLP's plain attributes cannot hold of a call, such as its messages, is JSON.
"""

import hashlib
from typing import Any

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span

_LEFT_OUT = frozenset({semconv.PROMPT_IDS, semconv.RESPONSE_IDS, semconv.LOGPROBS, semconv.MEDIA_DATA})
FIELDS = frozenset({
    semconv.PARENT_SPAN, semconv.EVENTS, semconv.RESOURCE, semconv.SCOPE, semconv.STATUS_CODE,
    semconv.STATUS_DESCRIPTION, semconv.KIND,
})  # fmt: skip
"""Attributes that OpenTelemetry has fields of its own for."""
_RESOURCE = Resource({"service.name": "lightning_rl"})
_SCOPE = InstrumentationScope("lightning_rl")
_PLAIN = (str, bool, int, float)


def readable(span: Span) -> ReadableSpan:
    """The span as an exporter of OpenTelemetry takes it."""
    attributes = span.attributes
    trace_id, span_id, link = _ids(span)
    return ReadableSpan(
        name=span.name,
        context=_context(trace_id, span_id),
        parent=_parent(span, trace_id),
        resource=Resource(attributes[semconv.RESOURCE]) if semconv.RESOURCE in attributes else _RESOURCE,
        attributes=_attributes(span),
        events=[
            Event(event["name"], attributes=event["attributes"], timestamp=event["time_ns"])
            for event in attributes.get(semconv.EVENTS, ())
        ],
        links=[] if link is None else [Link(link)],
        kind=kind_of(span),
        status=status_of(span),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope(str(attributes[semconv.SCOPE]))
        if semconv.SCOPE in attributes
        else _SCOPE,
    )


def trace_id_of(attempt_id: str) -> int:
    """The trace of an attempt; that of what its agent emits outside of anybody's span too."""
    return int.from_bytes(hashlib.blake2b(attempt_id.encode(), digest_size=16).digest())


def span_id_of(name: str) -> int:
    """The id that a span came with by OTLP; of a call, and of an attempt for its root, one that is made of its id."""
    _, came, its_id = name.rpartition(":")
    if came:
        return int(its_id, 16)
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def kind_of(span: Span) -> SpanKind:
    """A call is the request of a client; of others, what they came with."""
    if span.name == semconv.CALL_SPAN:
        return SpanKind.CLIENT
    return SpanKind[span.attributes.get(semconv.KIND, SpanKind.INTERNAL.name)]


def status_of(span: Span) -> Status:
    """What a span came with."""
    code = span.attributes.get(semconv.STATUS_CODE)
    if code != StatusCode.ERROR.name:
        return Status(StatusCode.OK if code == StatusCode.OK.name else StatusCode.UNSET)
    return Status(StatusCode.ERROR, str(span.attributes.get(semconv.STATUS_DESCRIPTION, "")) or None)


def _ids(span: Span) -> tuple[int, int, SpanContext | None]:
    """Trace id, span id, and the span as its own agent knows it where that is in another trace."""
    trace_id = trace_id_of(span.attempt_id)
    _, came, its_ids = span.span_id.partition(":")
    span_id = span_id_of(span.span_id)
    if not came:
        return trace_id, span_id, None
    its_trace = int(its_ids.partition(":")[0], 16)
    return trace_id, span_id, None if its_trace == trace_id else _context(its_trace, span_id)


def _parent(span: Span, trace_id: int) -> SpanContext | None:
    if span.name == semconv.ROLLOUT_SPAN:
        return None
    parent = span.attributes.get(semconv.PARENT_SPAN)
    return _context(trace_id, span_id_of(span.attempt_id if parent is None else parent))


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _attributes(span: Span) -> dict[str, Any]:
    is_call = span.name == semconv.CALL_SPAN
    attributes = {
        name: value if _is_plain(value) or not is_call else msgspec.json.encode(value).decode()
        for name, value in span.attributes.items()
        if value is not None and name not in FIELDS and name not in _LEFT_OUT
    }
    ids = {semconv.ROLLOUT_ID: span.rollout_id, semconv.ATTEMPT_ID: span.attempt_id}
    return attributes | ids | ({semconv.CALL_ID: span.span_id} if is_call else {})


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(each, _PLAIN) for each in value))
