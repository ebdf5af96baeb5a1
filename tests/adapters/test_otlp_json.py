"""Spans go out whole as OTLP/JSON, and come back by `otel` as they were."""

import json

import pytest

from lightning_rl_adapters import otel, otlp_json, semconv
from lightning_rl_adapters.call import to_span
from lightning_rl_adapters.otel import SpanPlace
from lightning_rl_adapters.otel_out import trace_id_of
from tests.adapters.test_conventions import RECORDED, recorded
from tests.adapters.test_otel import read
from tests.adapters.words import attempt_of, say

OWN = SpanPlace("r", "a")


@pytest.mark.parametrize("name", RECORDED)
def test_spans_that_came_by_otlp_come_back_as_they_were(name: str) -> None:
    spans = recorded(name, OWN)
    lines = otlp_json.requests(spans, line_bytes=1_000)
    assert [span for line in lines for span in read(line, own=OWN)] == spans


def test_values_that_otlp_has_no_type_for_are_text_and_nested_ones_stay() -> None:
    [call] = attempt_of([say(1, "a", "b")]).spans
    nested = {"deep": [{"x": None}, float("inf"), True]}
    call.attributes |= {"large": 2**70, "nested": nested, semconv.RESOURCE: {"host": {"cpus": [1, 2]}}}
    [line] = otlp_json.requests([call])
    [back] = read(line, own=SpanPlace("r", "a1"))
    assert back.attributes["large"] == str(2**70)
    assert back.attributes["nested"] == nested
    assert back.attributes[semconv.RESOURCE] == {"host": {"cpus": [1, 2]}}


def test_what_was_sent_by_otlp_goes_out_as_it_came() -> None:
    """Trace and span ids, parent, events, status, scope and resource; and the call that it stands beside."""
    line = {
        "resourceSpans": [{
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "theirs"}}]},
            "scopeSpans": [{"scope": {"name": "their.scope"}, "spans": [{
                "traceId": "0af7651916cd43dd8448eb211c80319c", "spanId": "b7ad6b7169203331",
                "parentSpanId": "00f067aa0ba902b7", "name": "look it up", "startTimeUnixNano": "5",
                "endTimeUnixNano": "9", "status": {"code": 2, "message": "no such table"},
                "events": [{"name": "exception", "timeUnixNano": "7", "attributes": [
                    {"key": "n", "value": {"intValue": "3"}}]}],
                "attributes": [{"key": "deep", "value": {"kvlistValue": {"values": [
                    {"key": "x", "value": {"arrayValue": {"values": [{"doubleValue": 0.5}, {"boolValue": True}]}}}]}}}],
            }]}],
        }]
    }  # fmt: skip
    own = SpanPlace("r", "a1")
    [came], _ = otel.spans_of(otel.from_json(json.dumps(line).encode()), emitted=False, own=own)
    call = to_span(say(1, "a", "b"))
    [out] = otlp_json.requests([call, came])
    _, back = otel.spans_of(otel.from_json(out), emitted=True, own=own)[0]
    assert back == came
    told = json.loads(out)
    [of_call, of_came] = told["resourceSpans"]
    assert of_call["scopeSpans"][0]["spans"][0]["traceId"] == f"{trace_id_of('a1'):032x}"
    assert of_came["resource"]["attributes"][0] == {"key": "service.name", "value": {"stringValue": "theirs"}}


def test_a_call_is_the_child_of_the_one_that_it_continues() -> None:
    [line] = otlp_json.requests(attempt_of([say(1, "a", "b c"), say(2, "d", "e", after=1)]).spans)
    one, two = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert two["parentSpanId"] == one["spanId"]
    assert one["traceId"] == two["traceId"]
    assert "parentSpanId" not in one


def test_long_attempts_are_several_lines_of_whole_spans() -> None:
    spans = attempt_of([say(number, "a " * 50, "b " * 50) for number in range(1, 9)]).spans
    lines = list(otlp_json.requests(spans, line_bytes=10_000))
    assert len(lines) > 1
    back = [span for line in lines for span in otel.spans_of(otel.from_json(line), emitted=True)[0]]
    assert [span.start_ns for span in back] == [span.start_ns for span in spans]
    assert len(back) == 8
