"""Spans -> OTLP/JSON, whole: what `POST /v1/traces` and other collectors take, ids in hexadecimal.

Pure; the inverse of `otel`. Invariant: token ids and logprobs come out as the numbers that were recorded. An attempt is
one trace; a call's parent span is the call that it continues. Spans that came by OTLP have the trace and span ids with
which they came. OpenTelemetry's encoder writes protobuf alone, and leaves out values that attributes of its SDK lack.
"""

import base64
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lightning_rl_adapters import semconv
from lightning_rl_adapters.otel_out import FIELDS, kind_of, span_id_of, status_of, trace_id_of
from lightning_rl_adapters.span import Span, to_json

_SCOPE = "lightning_rl"
_INT64 = range(-(2**63), 2**63)


def requests(spans: Sequence[Span], *, line_bytes: int = 2**18) -> Iterator[bytes]:
    """The spans of one attempt as `ExportTraceServiceRequest`s in JSON, a line each, of about `line_bytes` at most:
    a span that is larger has a line of its own."""
    part: list[tuple[Span, bytes]] = []
    size = 0
    for span in spans:
        encoded = msgspec.json.encode(_span(span))
        if part and size + len(encoded) > line_bytes:
            yield _request(part)
            part, size = [], 0
        part.append((span, encoded))
        size += len(encoded)
    if part:
        yield _request(part)


def _request(part: Sequence[tuple[Span, bytes]]) -> bytes:
    """One request; spans that follow each other with the same resource and scope stand together."""
    by_resource = []
    for resource, of_resource in itertools.groupby(part, key=lambda item: _resource(item[0])):
        by_scope = [
            {"scope": {"name": scope}, "spans": [msgspec.Raw(encoded) for _, encoded in of_scope]}
            for scope, of_scope in itertools.groupby(of_resource, key=lambda item: _scope(item[0]))
        ]
        by_resource.append({"resource": {"attributes": _key_values(resource)}, "scopeSpans": by_scope})
    return msgspec.json.encode({"resourceSpans": by_resource})


def _resource(span: Span) -> dict[str, Any]:
    resource = span.attributes.get(semconv.RESOURCE) or {"service.name": _SCOPE}
    return resource | {semconv.ROLLOUT_ID: span.rollout_id, semconv.ATTEMPT_ID: span.attempt_id}


def _scope(span: Span) -> str:
    return str(span.attributes.get(semconv.SCOPE) or _SCOPE)


def _span(span: Span) -> dict[str, Any]:
    attributes = to_json(span)["attributes"]
    parent = attributes.get(semconv.PARENT) or attributes.get(semconv.PARENT_SPAN)
    status = status_of(span)
    encoded: dict[str, Any] = {
        "traceId": f"{_trace_id(span):032x}",
        "spanId": f"{span_id_of(span.span_id):016x}",
        "name": span.name,
        "kind": kind_of(span).value + 1,  # OTLP counts from 1
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _key_values({name: value for name, value in attributes.items() if name not in FIELDS}),
        "events": [
            {
                "name": event["name"],
                "timeUnixNano": str(event["time_ns"]),
                "attributes": _key_values(event["attributes"]),
            }
            for event in attributes.get(semconv.EVENTS) or ()
        ],
    }
    if parent:
        encoded["parentSpanId"] = f"{span_id_of(str(parent)):016x}"
    if not status.is_unset:
        encoded["status"] = {"code": status.status_code.value, "message": status.description or ""}
    return encoded


def _trace_id(span: Span) -> int:
    """The trace in which a span came by OTLP, else that of its attempt."""
    _, came, its_ids = span.span_id.partition(":")
    return int(its_ids.partition(":")[0], 16) if came else trace_id_of(span.attempt_id)


def _key_values(named: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": str(name), "value": _any_value(value)} for name, value in named.items() if value is not None]


def _any_value(value: Any) -> dict[str, Any]:
    """A value as OTLP's `AnyValue`; whole numbers are text, since JSON readers round them."""
    match value:
        case None:
            return {}
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue" if value in _INT64 else "stringValue": str(value)}
        case float():
            return {"doubleValue": value if math.isfinite(value) else _not_finite(value)}
        case bytes():
            return {"bytesValue": base64.b64encode(value).decode()}
        case Mapping():
            pairs = [{"key": str(name), "value": _any_value(inner)} for name, inner in value.items()]
            return {"kvlistValue": {"values": pairs}}
        case list() | tuple():
            return {"arrayValue": {"values": [_any_value(inner) for inner in value]}}
        case _:
            return {"stringValue": str(value)}


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
