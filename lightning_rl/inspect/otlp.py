"""Recorded spans as OTLP/JSON: what `POST /v1/traces` and other collectors take, ids in hexadecimal.

Pure; the inverse of `lightning_rl_adapters.otel`. Invariant: token ids and logprobs come out as the numbers that were
recorded. An attempt is one trace; a call's parent span is the call that it continues. Spans that came by OTLP have the
trace and span ids with which they came.
"""

import base64
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span, to_json

SCOPE = "lightning_rl"
_INT64 = range(-(2**63), 2**63)
_INTERNAL, _CLIENT = 1, 3  # kinds of spans
_STATUS = {"OK": 1, "ERROR": 2}
# What OTLP has fields of its own for.
_FIELDS = frozenset({
    semconv.PARENT_SPAN, semconv.EVENTS, semconv.RESOURCE, semconv.SCOPE, semconv.STATUS_CODE,
    semconv.STATUS_DESCRIPTION,
})  # fmt: skip


def requests(spans: Sequence[Span], *, line_bytes: int = 2**18) -> Iterator[bytes]:
    """The spans of one attempt as `ExportTraceServiceRequest`s in JSON, a line each, of about `line_bytes` at most:
    a span that is larger has a line of its own."""
    part: list[tuple[Span, bytes]] = []
    size = 0
    for span in spans:
        wire = msgspec.json.encode(_span(span))
        if part and size + len(wire) > line_bytes:
            yield _request(part)
            part, size = [], 0
        part.append((span, wire))
        size += len(wire)
    if part:
        yield _request(part)


def trace_id(attempt_id: str) -> str:
    """The trace of an attempt, 32 hexadecimal digits; that of what its agent emits outside of anybody's span too."""
    return hashlib.blake2b(attempt_id.encode(), digest_size=16).hexdigest()


def _request(part: Sequence[tuple[Span, bytes]]) -> bytes:
    """One request; spans that follow each other with the same resource and scope stand together."""
    by_resource = []
    for resource, of_resource in itertools.groupby(part, key=lambda item: _resource(item[0])):
        by_scope = [
            {"scope": {"name": scope}, "spans": [msgspec.Raw(wire) for _, wire in of_scope]}
            for scope, of_scope in itertools.groupby(of_resource, key=lambda item: _scope(item[0]))
        ]
        by_resource.append({"resource": {"attributes": _attributes(resource)}, "scopeSpans": by_scope})
    return msgspec.json.encode({"resourceSpans": by_resource})


def _resource(span: Span) -> dict[str, Any]:
    said = span.attributes.get(semconv.RESOURCE) or {"service.name": "lightning_rl"}
    return said | {semconv.ROLLOUT_ID: span.rollout_id, semconv.ATTEMPT_ID: span.attempt_id}


def _scope(span: Span) -> str:
    return str(span.attributes.get(semconv.SCOPE) or SCOPE)


def _span(span: Span) -> dict[str, Any]:
    said = to_json(span)["attributes"]
    its_trace, its_id = _ids(span.attempt_id, span.span_id)
    parent = said.get(semconv.PARENT) or said.get(semconv.PARENT_SPAN)
    wire: dict[str, Any] = {
        "traceId": its_trace,
        "spanId": its_id,
        "name": span.name,
        "kind": _CLIENT if span.name == semconv.CALL_SPAN else _INTERNAL,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes({name: value for name, value in said.items() if name not in _FIELDS}),
    }
    if parent:
        wire["parentSpanId"] = _ids(span.attempt_id, str(parent))[1]
    if events := said.get(semconv.EVENTS):
        wire["events"] = [
            {
                "name": event["name"],
                "timeUnixNano": str(event["time_ns"]),
                "attributes": _attributes(event["attributes"]),
            }
            for event in events
        ]
    if semconv.STATUS_CODE in said:
        status = {"code": _STATUS.get(said[semconv.STATUS_CODE], 0), "message": said.get(semconv.STATUS_DESCRIPTION)}
        wire["status"] = {name: value for name, value in status.items() if value}
    return wire


def _ids(attempt_id: str, span_id: str) -> tuple[str, str]:
    """Trace and span id: those with which a span came by OTLP, else made of our own."""
    attempt, _, came = span_id.partition(":")
    its_trace, _, its_id = came.partition(":")
    if attempt == attempt_id and its_id:
        return its_trace, its_id
    return trace_id(attempt_id), hashlib.blake2b(span_id.encode(), digest_size=8).hexdigest()


def _attributes(named: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in named.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    """A value as OTLP's `AnyValue`; whole numbers are text, since JSON readers round them."""
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)} if value in _INT64 else {"stringValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else _not_finite(value)}
    if isinstance(value, bytes):
        return {"bytesValue": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        pairs = [{"key": str(name), "value": _value(inner)} for name, inner in value.items()]
        return {"kvlistValue": {"values": pairs}}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {"arrayValue": {"values": [_value(inner) for inner in value]}}
    return {"stringValue": str(value)}


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
