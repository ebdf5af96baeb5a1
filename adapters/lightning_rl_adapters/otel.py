"""OTLP -> spans: what a client exports in OpenTelemetry's own form, as records of attempts.

Invariant: what came by OTLP never passes for a call. Its ids are of another shape than calls' ids, and a name that is
ours to give, of a span or of an attribute, is kept under `foreign.`.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span

FOREIGN = "foreign."
_OURS = "lightning_rl."
_TRACE_BYTES, _SPAN_BYTES = 16, 8
_LAST_NS = 2**63 - 1
_NAMED = 5  # rejected spans that an answer names
_HEX_IDS = ("traceId", "spanId", "parentSpanId")
_WHOSE = (
    (semconv.ROLLOUT_ID, semconv.AGENT_LIGHTNING_ROLLOUT_ID),
    (semconv.ATTEMPT_ID, semconv.AGENT_LIGHTNING_ATTEMPT_ID),
)  # the first that is there counts
_NO_ATTRIBUTE = frozenset(name for names in _WHOSE for name in names)
_KIND = {
    trace_pb2.Span.SPAN_KIND_CLIENT: "CLIENT",
    trace_pb2.Span.SPAN_KIND_SERVER: "SERVER",
    trace_pb2.Span.SPAN_KIND_PRODUCER: "PRODUCER",
    trace_pb2.Span.SPAN_KIND_CONSUMER: "CONSUMER",
}
_STATUS = {trace_pb2.Status.STATUS_CODE_OK: "OK", trace_pb2.Status.STATUS_CODE_ERROR: "ERROR"}


class NotOtlp(ValueError):
    """A body that is no OTLP request for traces."""


class SpanPlace(NamedTuple):
    """Whose a span is."""

    rollout_id: str
    attempt_id: str


class Rejected(NamedTuple):
    """A span that was not taken: its name, and what is wrong with it."""

    name: str
    why: str


def from_protobuf(body: bytes) -> ExportTraceServiceRequest:
    """The request of a protobuf body. Raises NotOtlp."""
    try:
        request: ExportTraceServiceRequest = ExportTraceServiceRequest.FromString(body)
        return request
    except DecodeError as error:
        raise NotOtlp(f"the body is no protobuf ExportTraceServiceRequest: {error}") from error


def from_json(body: bytes) -> ExportTraceServiceRequest:
    """The request of a JSON body, where ids are hexadecimal. Raises NotOtlp."""
    try:
        document = msgspec.json.decode(body)  # which refuses half surrogates, as protobuf cannot
        _hex_to_base64(document)
        request: ExportTraceServiceRequest = json_format.ParseDict(
            document, ExportTraceServiceRequest(), ignore_unknown_fields=True
        )
        return request
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError, json_format.ParseError) as error:
        raise NotOtlp(f"the body is no JSON of an ExportTraceServiceRequest: {error}") from error


def spans_of(
    request: ExportTraceServiceRequest, *, emitted: bool, own: SpanPlace | None = None
) -> tuple[list[Span], list[Rejected]]:
    """The spans of a request, and those that cannot be taken.

    Args:
        emitted: the names under which agents emit are not foreign: the request is a runner's.
        own: the only attempt whose spans are taken; they need not say so.
    """
    spans: list[Span] = []
    rejected: list[Rejected] = []
    for resource, scope, wire in _all(request):
        attributes = _values(wire.attributes)
        place, wrong = _place(attributes, resource, own), _wrong(wire)
        if isinstance(place, str):
            rejected.append(Rejected(wire.name, place))
        elif wrong is not None:
            rejected.append(Rejected(wire.name, wrong))
        else:
            spans.append(_span(wire, place, attributes, resource, scope, emitted))
    return spans, rejected


def response(rejected: list[Rejected]) -> ExportTraceServiceResponse:
    """The answer to a request that was taken but for these."""
    answer = ExportTraceServiceResponse()
    if rejected:
        named = [f"{span.name!r} {span.why}" for span in rejected[:_NAMED]]
        more = len(rejected) - len(named)
        answer.partial_success.rejected_spans = len(rejected)
        answer.partial_success.error_message = "; ".join(named + ([f"and {more} more"] if more else []))
    return answer


def _all(request: ExportTraceServiceRequest) -> Iterator[tuple[dict[str, Any], str, trace_pb2.Span]]:
    for of_resource in request.resource_spans:
        resource = _values(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for wire in of_scope.spans:
                yield resource, of_scope.scope.name, wire


def _place(attributes: Mapping[str, Any], resource: Mapping[str, Any], own: SpanPlace | None) -> SpanPlace | str:
    """Whose the span is, or why that is not known."""
    rollout_id, attempt_id = (
        next((holder[name] for name in names for holder in (attributes, resource) if name in holder), None)
        for names in _WHOSE
    )
    if own is not None:
        if rollout_id in (None, own.rollout_id) and attempt_id in (None, own.attempt_id):
            return own
        return "is of another attempt than the one that the key opens"
    if isinstance(rollout_id, str) and isinstance(attempt_id, str):
        return SpanPlace(rollout_id, attempt_id)
    return (
        f"has no attempt: set {semconv.ROLLOUT_ID} and {semconv.ATTEMPT_ID}, on it or on its resource, "
        "or send the key of an attempt"
    )


def _wrong(wire: trace_pb2.Span) -> str | None:
    for kind, id_bytes, size in (("trace", wire.trace_id, _TRACE_BYTES), ("span", wire.span_id, _SPAN_BYTES)):
        if len(id_bytes) != size or not any(id_bytes):
            return f"has the {kind} id {id_bytes.hex()!r}: it must be {size} bytes, not all of them zero"
    if max(wire.start_time_unix_nano, wire.end_time_unix_nano) > _LAST_NS:
        return "has a time that is no nanoseconds since the epoch"
    return None


def _span(
    wire: trace_pb2.Span,
    place: SpanPlace,
    attributes: dict[str, Any],
    resource: dict[str, Any],
    scope: str,
    emitted: bool,
) -> Span:
    span_attributes = {
        _stored_name(name, semconv.EMITTED_ATTRIBUTES if emitted else frozenset(), value): value
        for name, value in attributes.items()
        if name not in _NO_ATTRIBUTE
    }
    return Span(
        span_id=_span_id(place, wire.trace_id, wire.span_id),
        rollout_id=place.rollout_id,
        attempt_id=place.attempt_id,
        name=_stored_name(wire.name, semconv.EMITTED_SPANS if emitted else frozenset()),
        number=wire.start_time_unix_nano,
        start_ns=wire.start_time_unix_nano,
        end_ns=wire.end_time_unix_nano,
        attributes=span_attributes | _more(wire, place, resource, scope),
    )


def _more(wire: trace_pb2.Span, place: SpanPlace, resource: dict[str, Any], scope: str) -> dict[str, Any]:
    """What a span says beside its attributes, as far as it says anything."""
    of_resource = {name: value for name, value in resource.items() if name not in _NO_ATTRIBUTE}
    events = [
        {"name": event.name, "time_ns": event.time_unix_nano, "attributes": _values(event.attributes)}
        for event in wire.events
    ]
    more: dict[str, Any] = {
        semconv.PARENT_SPAN: _span_id(place, wire.trace_id, wire.parent_span_id) if any(wire.parent_span_id) else None,
        semconv.EVENTS: events,
        semconv.RESOURCE: of_resource,
        semconv.SCOPE: scope,
        semconv.STATUS_CODE: _STATUS.get(wire.status.code),
        semconv.STATUS_DESCRIPTION: wire.status.message,
        semconv.KIND: _KIND.get(wire.kind),
    }
    return {name: value for name, value in more.items() if value}


def _span_id(place: SpanPlace, trace_id: bytes, span_id: bytes) -> str:
    """An id that no call has, and that no other attempt can take: `:` stands in neither's."""
    return f"{place.attempt_id}:{trace_id.hex()}:{span_id.hex()}"


def _stored_name(name: str, allowed: frozenset[str], value: Any = "") -> str:
    """The name, or that of somebody else's: of what is ours, and of a model that is no name."""
    is_ours = name.startswith(_OURS) and name not in allowed
    model = name == semconv.RESPONSE_MODEL and not isinstance(value, str)
    return FOREIGN + name if is_ours or model else name


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(inner) for inner in value.array_value.values]
    if kind == "kvlist_value":
        return _values(value.kvlist_value.values)
    return None if kind is None else getattr(value, kind)


def _hex_to_base64(document: Any) -> None:
    """Write the ids of a request's spans and links as protobuf's JSON has bytes. Other forms are left to the parser."""
    for of_resource in _dicts(document, "resourceSpans"):
        for of_scope in _dicts(of_resource, "scopeSpans"):
            for span in _dicts(of_scope, "spans"):
                for holder in (span, *_dicts(span, "links")):
                    for name in _HEX_IDS:
                        if isinstance(holder.get(name), str):
                            holder[name] = _base64(name, holder[name])


def _base64(name: str, text: str) -> str:
    try:
        return base64.b64encode(bytes.fromhex(text)).decode()
    except (ValueError, binascii.Error) as error:
        raise NotOtlp(f"{name} {text[:64]!r} is not hexadecimal") from error


def _dicts(holder: Any, name: str) -> list[dict[str, Any]]:
    held = holder.get(name) if isinstance(holder, dict) else None
    return [each for each in held if isinstance(each, dict)] if isinstance(held, list) else []
