"""Spans become OpenTelemetry's own: one trace an attempt, and whatever came in goes out again."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from lightning_rl_adapters import otel, semconv
from lightning_rl_adapters.otel import SpanPlace
from lightning_rl_adapters.otel_out import readable, trace_id_of
from lightning_rl_adapters.span import Span
from tests.adapters.test_conventions import RECORDED, recorded
from tests.adapters.test_otel import OUR_NAMES, VALUES, read, wire
from tests.adapters.words import attempt_of, say

OWN = SpanPlace("r", "a")


def again(spans: list[Span]) -> list[Span]:
    """The spans after a way out and in."""
    back, rejected = otel.spans_of(encode_spans([readable(span) for span in spans]), emitted=False, own=OWN)
    assert rejected == []
    return back


@pytest.mark.parametrize("name", RECORDED)
def test_what_came_by_otlp_comes_back_the_same_in_the_attempts_trace(name: str) -> None:
    spans = recorded(name, OWN)
    back = {span.span_id.rpartition(":")[2]: span for span in again(spans)}
    for span in spans:
        its_id = span.span_id.rpartition(":")[2]
        found = back[its_id]
        assert found.span_id == f"a:{trace_id_of('a'):032x}:{its_id}"
        assert (found.name, found.start_ns, found.end_ns) == (span.name, span.start_ns, span.end_ns)
        theirs, ours = dict(found.attributes), dict(span.attributes)
        parent, came = theirs.pop(semconv.PARENT_SPAN), ours.pop(semconv.PARENT_SPAN, None)
        assert theirs == ours
        assert came is None or parent.rpartition(":")[2] == came.rpartition(":")[2]


def test_after_one_way_out_and_in_nothing_changes_any_more() -> None:
    once = again(recorded("openllmetry_before_1_0", OWN))
    assert again(once) == once


def test_a_call_goes_out_without_its_tokens_and_with_the_id_that_leads_to_them() -> None:
    [call] = attempt_of([say(1, "a", "b c")]).spans
    call.attributes[semconv.SAMPLING_EFFECTIVE] = {"temperature": 0.5}
    sent = readable(call)
    assert sent.attributes is not None
    assert not {semconv.PROMPT_IDS, semconv.RESPONSE_IDS, semconv.LOGPROBS} & sent.attributes.keys()
    assert sent.attributes[semconv.CALL_ID] == call.span_id
    assert sent.attributes[semconv.SAMPLING_EFFECTIVE] == '{"temperature":0.5}'
    assert sent.kind.name == "CLIENT"


NAMES = st.sampled_from([*OUR_NAMES, "x"])


@given(
    name=NAMES,
    attributes=st.lists(st.tuples(NAMES, VALUES)),
    resource=st.lists(st.tuples(NAMES, VALUES)),
    status=st.integers(0, 2),
    kind=st.integers(0, 5),
    emitted=st.booleans(),
)
def test_whatever_is_taken_can_go_out(
    name: str, attributes: list[Any], resource: list[Any], status: int, kind: int, emitted: bool
) -> None:
    whose = {semconv.ROLLOUT_ID, semconv.ATTEMPT_ID, *("agentlightning.rollout_id", "agentlightning.attempt_id")}
    told = [{"key": key, "value": value} for key, value in attributes if key not in whose]
    span = {"name": name, "attributes": told, "status": {"code": status, "message": "m"}, "kind": kind}
    [taken] = read(wire(span, resource={}), own=OWN, emitted=emitted)
    taken.attributes[semconv.RESOURCE] = {
        key: next(iter(value.values()), None) for key, value in resource if key not in whose
    }
    [back] = again([taken])
    assert back.start_ns == taken.start_ns
