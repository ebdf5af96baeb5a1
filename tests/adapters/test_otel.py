"""OTLP becomes spans of attempts, in both its forms; nothing that comes by it passes for a call."""

import json
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lightning_rl_adapters import otel, semconv
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.call_names import names_of
from lightning_rl_adapters.otel import NotOtlp, SpanPlace
from lightning_rl_adapters.span import Span, pack, to_json, unpack

TRACE, SPAN, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"
WHOSE = {semconv.ROLLOUT_ID: "r", semconv.ATTEMPT_ID: "a"}


def key_values(attributes: dict[str, str]) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in attributes.items()]


def wire(*spans: dict[str, Any], resource: dict[str, str] | None = None) -> bytes:
    """A JSON request with these spans."""
    whole = [{"traceId": TRACE, "spanId": SPAN, "name": "chat"} | span for span in spans]
    of_resource = {"attributes": key_values(WHOSE if resource is None else resource)}
    scopes = [{"scope": {"name": "openinference"}, "spans": whole}]
    return json.dumps({"resourceSpans": [{"resource": of_resource, "scopeSpans": scopes}]}).encode()


def read(body: bytes, **more: Any) -> list[Span]:
    spans, rejected = otel.spans_of(otel.from_json(body), emitted=more.pop("emitted", False), **more)
    assert rejected == []
    return spans


def test_a_span_keeps_all_that_it_says() -> None:
    values: list[dict[str, Any]] = [
        {"key": "text", "value": {"stringValue": "é"}},
        {"key": "yes", "value": {"boolValue": True}},
        {"key": "int", "value": {"intValue": "9007199254740993"}},
        {"key": "double", "value": {"doubleValue": 0.5}},
        {"key": "bytes", "value": {"bytesValue": "AAE="}},
        {"key": "list", "value": {"arrayValue": {"values": [{"intValue": 1}, {"stringValue": "b"}]}}},
        {"key": "map", "value": {"kvlistValue": {"values": [{"key": "in", "value": {"boolValue": False}}]}}},
        {"key": "nothing", "value": {}},
    ]
    span = {
        "parentSpanId": PARENT, "startTimeUnixNano": "5", "endTimeUnixNano": 7, "attributes": values, "newField": 1,
        "kind": 3,
        "status": {"code": 2, "message": "bad"}, "links": [{"traceId": TRACE, "spanId": PARENT}],
        "events": [{"name": "exception", "timeUnixNano": "6", "attributes": key_values({"exception.type": "E"})}],
    }  # fmt: skip
    [found] = read(wire(span, resource=WHOSE | {"service.name": "agent"}))
    assert (found.span_id, found.rollout_id, found.attempt_id) == (f"a:{TRACE}:{SPAN}", "r", "a")
    assert (found.name, found.number, found.start_ns, found.end_ns) == ("chat", 5, 5, 7)
    assert found.attributes == {
        "text": "é", "yes": True, "int": 9007199254740993, "double": 0.5, "bytes": b"\0\1", "list": [1, "b"],
        "map": {"in": False}, "nothing": None,
        semconv.PARENT_SPAN: f"a:{TRACE}:{PARENT}", semconv.STATUS_CODE: "ERROR", semconv.STATUS_DESCRIPTION: "bad",
        semconv.SCOPE: "openinference", semconv.RESOURCE: {"service.name": "agent"},
        semconv.KIND: "CLIENT",
        semconv.EVENTS: [{"name": "exception", "time_ns": 6, "attributes": {"exception.type": "E"}}],
    }  # fmt: skip
    assert unpack(pack(found).record) == found
    assert json.loads(msgspec.json.encode(to_json(found)))["attributes"]["bytes"] == "AAE="


def test_both_forms_say_the_same() -> None:
    body = wire({"startTimeUnixNano": "5", "parentSpanId": PARENT, "attributes": key_values({"a": "b"})}, {})
    as_protobuf = otel.from_json(body).SerializeToString()
    assert otel.spans_of(otel.from_protobuf(as_protobuf), emitted=False) == otel.spans_of(
        otel.from_json(body), emitted=False
    )


def test_whose_a_span_is_stands_on_it_or_on_its_resource_or_in_the_key() -> None:
    [of_resource] = read(wire({}))
    [of_span] = read(wire({"attributes": key_values({semconv.ATTEMPT_ID: "a2"})}))
    [of_key] = read(wire({}, resource={}), own=SpanPlace("r3", "a3"))
    assert [(s.rollout_id, s.attempt_id) for s in (of_resource, of_span, of_key)] == [
        ("r", "a"), ("r", "a2"), ("r3", "a3"),
    ]  # fmt: skip
    assert of_span.attributes == {semconv.SCOPE: "openinference"}
    assert len({span.span_id for span in (of_resource, of_span, of_key)}) == 3  # none can take another attempt's id


THEIRS = {"agentlightning.rollout_id": "r4", "agentlightning.attempt_id": "a4"}


def test_agent_lightnings_names_say_whose_a_span_is_too_and_ours_count_first() -> None:
    [of_resource] = read(wire({}, resource=THEIRS | {"service.name": "agent"}))
    [of_span] = read(wire({"attributes": key_values(THEIRS)}, resource={}))
    [ours] = read(wire({"attributes": key_values(THEIRS)}))
    assert [(s.rollout_id, s.attempt_id) for s in (of_resource, of_span, ours)] == [
        ("r4", "a4"),
        ("r4", "a4"),
        ("r", "a"),
    ]
    assert of_resource.attributes[semconv.RESOURCE] == {"service.name": "agent"}
    assert of_span.attributes == {semconv.SCOPE: "openinference"}


@pytest.mark.parametrize(
    ("span", "resource", "own", "why"),
    [
        ({}, {}, None, "has no attempt: set lightning_rl.rollout_id"),
        ({}, {semconv.ROLLOUT_ID: "r"}, None, "has no attempt"),
        ({}, WHOSE, SpanPlace("r", "b"), "is of another attempt than the one that the key opens"),
        ({}, WHOSE, SpanPlace("q", "a"), "is of another attempt"),
        ({"traceId": "00" * 16}, WHOSE, None, "has the trace id '0000"),
        ({"traceId": ""}, WHOSE, None, "has the trace id ''"),
        ({"spanId": "ab"}, WHOSE, None, "has the span id 'ab': it must be 8 bytes"),
        ({"startTimeUnixNano": str(2**63)}, WHOSE, None, "has a time"),
        ({"endTimeUnixNano": str(2**64 - 1)}, WHOSE, None, "has a time"),
    ],
)
def test_what_cannot_be_taken_is_named(span: dict[str, Any], resource: Any, own: SpanPlace | None, why: str) -> None:
    spans, rejected = otel.spans_of(otel.from_json(wire(span, resource=resource)), emitted=True, own=own)
    assert spans == []
    answer = otel.response(rejected)
    assert answer.partial_success.rejected_spans == 1
    assert f"'chat' {why}" in answer.partial_success.error_message


def test_an_answer_names_a_few_of_many_and_nothing_where_all_were_taken() -> None:
    spans = [{"name": f"n{number}"} for number in range(100)]
    _, rejected = otel.spans_of(otel.from_json(wire(*spans, resource={})), emitted=False)
    told = otel.response(rejected).partial_success
    assert (told.rejected_spans, "'n4'" in told.error_message, "'n5'" in told.error_message) == (100, True, False)
    assert told.error_message.endswith("and 95 more")
    assert otel.response([]).SerializeToString() == b""


OUR_NAMES = sorted(value for name, value in vars(semconv).items() if name.isupper() and isinstance(value, str))
NAMES = st.sampled_from(OUR_NAMES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.one_of(
    st.builds(lambda v: {"stringValue": v}, st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
    st.builds(lambda v: {"intValue": v}, st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda v: {"boolValue": v}, st.booleans()),
    st.just({"bytesValue": "AAEC"}),
    st.just({}),
)


@given(name=NAMES, attributes=st.lists(st.tuples(NAMES, VALUES)), emitted=st.booleans())
def test_whatever_it_says_it_passes_for_no_call(name: str, attributes: list[Any], emitted: bool) -> None:
    span = {"name": name, "attributes": [{"key": key, "value": value} for key, value in attributes]}
    [found] = read(wire(span), own=SpanPlace("r", "a"), emitted=emitted) if not _places(attributes) else [None]
    if found is None:
        return
    assert calls_of([found]) == []
    assert names_of([found]) == {}
    read_by_gateway = set(OUR_NAMES) - semconv.EMITTED_ATTRIBUTES - set(otel_says())
    reserved = {key for key in found.attributes if key in read_by_gateway and key.startswith("lightning_rl.")}
    assert reserved == set()
    assert isinstance(found.attributes.get(semconv.RESPONSE_MODEL, ""), str)
    assert to_json(unpack(pack(found).record))
    if not emitted:
        assert not found.name.startswith("lightning_rl.")
        assert not {key for key in found.attributes if key in semconv.EMITTED_ATTRIBUTES}


def _places(attributes: list[Any]) -> bool:
    return any(key in (semconv.ROLLOUT_ID, semconv.ATTEMPT_ID) for key, _ in attributes)


def otel_says() -> list[str]:
    """What the reader itself says of a span."""
    return [semconv.PARENT_SPAN, semconv.EVENTS, semconv.RESOURCE]


def test_what_agents_emit_keeps_its_names_when_a_runner_sends_it_alone() -> None:
    body = wire({"name": "lightning_rl.reward", "attributes": key_values({semconv.REWARD_NAME: "style"})})
    [runners], [others] = read(body, emitted=True), read(body, own=SpanPlace("r", "a"))
    assert (runners.name, runners.attributes[semconv.REWARD_NAME]) == ("lightning_rl.reward", "style")
    assert (others.name, others.attributes["foreign.lightning_rl.reward.name"]) == (
        "foreign.lightning_rl.reward",
        "style",
    )


@given(st.binary())
def test_no_bytes_are_more_than_refused(body: bytes) -> None:
    for reader in (otel.from_protobuf, otel.from_json):
        try:
            otel.spans_of(reader(body), emitted=False)
        except NotOtlp as error:
            assert "the body is no" in str(error)  # noqa: PT017 - either is right


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["resourceSpans", "scopeSpans", "spans", "links", "traceId", "attributes", "key", "value"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_no_json_is_more_than_refused(told: Any) -> None:
    try:
        otel.spans_of(otel.from_json(json.dumps(told).encode()), emitted=False)
    except NotOtlp as error:
        assert str(error)  # noqa: PT017 - either is right


def test_deep_nesting_and_ids_that_are_no_hexadecimal_are_refused() -> None:
    for body in (b"[" * 100_000, wire({"traceId": "xyz"}), wire({"links": [{"spanId": "nope"}]})):
        with pytest.raises(NotOtlp):
            otel.from_json(body)
    deep: dict[str, Any] = {"stringValue": "x"}
    for _ in range(120):
        deep = {"arrayValue": {"values": [deep]}}
    with pytest.raises(NotOtlp):
        otel.from_json(wire({"attributes": [{"key": "k", "value": deep}]}))


def test_the_request_of_the_tests_is_otlp() -> None:
    """Protobuf's own reader takes the same JSON, but for ids, which it wants in base64."""
    told = json.loads(wire({}))
    assert (
        json_format.ParseDict(told, ExportTraceServiceRequest()).resource_spans[0].scope_spans[0].spans[0].name
        == "chat"
    )
