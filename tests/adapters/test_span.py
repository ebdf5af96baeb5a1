"""A call survives its span: packed, stored, read back, nothing changed."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, VersionRange, from_span, to_span
from lightning_rl_adapters.span import Span, to_json

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
    stored = msgspec.msgpack.encode(to_span(call))
    assert from_span(msgspec.msgpack.decode(stored, type=Span)) == call


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
        return len(msgspec.msgpack.encode(to_span(call)))

    assert size(2000) - size(1000) <= 12 * 1000 + 16


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"logprobs": [-1.0]}, "2 response tokens but 1 logprobs"),
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
