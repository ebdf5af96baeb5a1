"""A call survives its span: packed, stored, read back, nothing changed."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, VersionRange, from_span, to_span
from lightning_rl_adapters.span import Span, name_of, pack, packed, to_json, unpack
from lightning_rl_adapters.tool_schemas import tools_of, tools_span

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=8)


@st.composite
def recorded_calls(draw: st.DrawFn) -> Call:
    response = draw(token_ids)
    cut = draw(st.integers(0, len(response)))
    logprobs = [float(np.float32(draw(st.floats(-50, 0)))) for _ in response]
    return Call(
        call_id="c",
        rollout_id="r",
        attempt_id="a",
        number=draw(st.integers(0, 10)),
        model="m",
        agent=draw(st.none() | st.just("writer")),
        prompt_ids=draw(token_ids),
        response_ids=response,
        logprobs=draw(st.none() | st.just(logprobs)),
        versions=[r for r in (VersionRange(3, 0, cut), VersionRange(4, cut, len(response))) if r.end > r.start],
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        delivered=draw(st.booleans()),
        exact=draw(st.booleans()),
        trainable=draw(st.booleans()),
    )


@given(recorded_calls())
def test_a_call_comes_back_from_its_stored_span(call: Call) -> None:
    assert from_span(unpack(pack(to_span(call)).record)) == call


@given(
    recorded_calls(),
    st.dictionaries(st.text(max_size=8), st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8), max_size=3),
)
def test_a_span_comes_back_whatever_its_attributes_and_so_do_those_of_earlier_releases(
    call: Call, more: dict[str, object]
) -> None:
    span = to_span(call, **{semconv.INPUT_MESSAGES: [more]} | {f"their.{name}": value for name, value in more.items()})
    stored = pack(span)
    assert unpack(stored.record) == span
    assert packed(stored.record) == stored
    earlier = msgspec.msgpack.encode(span)
    assert unpack(earlier) == span
    assert packed(earlier) == stored
    assert name_of(stored.record) == name_of(earlier) == span.name


def test_the_numbers_of_attributes_in_stores_stay() -> None:
    names = [semconv.OPERATION, semconv.PARENT, semconv.PROMPT_IDS, semconv.RESPONSE_IDS, semconv.TRAINABLE]
    span = Span(
        span_id="s", rollout_id="r", attempt_id="a", name="n", number=1, start_ns=2, end_ns=3,
        attributes=dict.fromkeys(names),
    )  # fmt: skip
    stored = msgspec.msgpack.decode(pack(span).record, strict=False)
    assert stored == ["s", "r", "a", "n", 1, 2, 3, dict.fromkeys([0, 10, 14, 15, 24])]


TOOLS = [{"type": "function", "function": {"name": f"tool_{n}", "description": "does things " * 20}} for n in range(20)]


@pytest.mark.parametrize("value", [json.dumps(TOOLS), "[]", "é 🌲", "", None, b"", b"x\x9c", {"a": 1}, ["[]"], 7])
def test_tools_come_back_and_so_does_whatever_else_has_their_name(value: Any) -> None:
    span = tools_span("r", "a", "d", TOOLS, at_ns=1)
    span.attributes[semconv.TOOL_SCHEMAS] = value
    stored = pack(span)
    assert unpack(stored.record) == span
    assert packed(stored.record) == stored


def test_tools_take_a_fifth_of_their_text_and_stores_that_have_the_text_are_read() -> None:
    span = tools_span("r", "a", "d", TOOLS, at_ns=1)
    text = span.attributes[semconv.TOOL_SCHEMAS]
    assert len(pack(span).record) < len(text) / 5
    assert tools_of([unpack(pack(span).record)]) == {"d": TOOLS}
    [*fields, attributes] = msgspec.msgpack.decode(pack(span).record, strict=False)
    [number] = [number for number, value in attributes.items() if isinstance(value, bytes)]
    earlier = msgspec.msgpack.encode([*fields, attributes | {number: text}])
    assert unpack(earlier) == span


@given(recorded_calls())
def test_spans_of_earlier_releases_are_exact_and_trainable(call: Call) -> None:
    span = to_span(call)
    del span.attributes[semconv.EXACT], span.attributes[semconv.TRAINABLE]
    assert (from_span(span).exact, from_span(span).trainable) == (True, True)


@given(recorded_calls())
def test_json_spans_show_numbers(call: Call) -> None:
    attributes = json.loads(json.dumps(to_json(to_span(call))))["attributes"]
    assert attributes[semconv.PROMPT_IDS] == call.prompt_ids
    assert attributes[semconv.LOGPROBS] == call.logprobs


def test_a_stored_token_costs_its_weight() -> None:
    """4 bytes per prompt token and 8 per sampled one, apart from a constant."""

    def size(n: int) -> int:
        ids = list(range(n))
        call = Call(
            call_id="c", rollout_id="r", attempt_id="a", number=0, model="m", prompt_ids=ids, response_ids=ids,
            logprobs=[-1.0] * n, versions=[VersionRange(0, 0, n)], temperature=1.0, finish_reason="stop",
        )  # fmt: skip
        return len(pack(to_span(call)).record)

    assert size(2000) - size(1000) <= 12 * 1000 + 16
    assert size(0) < 150


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"logprobs": [-1.0]}, "2 response tokens but 1 logprobs"),
        ({"logprobs": [-1.0] * 3}, "2 response tokens but 3 logprobs"),
        ({"versions": [VersionRange(0, 1, 2)]}, "have gaps"),
        ({"versions": [VersionRange(0, 0, 1)]}, "cover 1 of 2"),
    ],
)
def test_a_call_that_does_not_add_up_cannot_be_made(changes: dict[str, object], complaint: str) -> None:
    whole: dict[str, object] = {
        "call_id": "c", "rollout_id": "r", "attempt_id": "a", "number": 0, "model": "m", "prompt_ids": [1],
        "response_ids": [2, 3], "logprobs": [-1.0, -2.0], "versions": [], "temperature": 1.0, "finish_reason": "stop",
    }  # fmt: skip
    with pytest.raises(ValueError, match=complaint):
        Call(**(whole | changes))  # type: ignore[arg-type]
