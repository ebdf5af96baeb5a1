"""Spans of real instrumentations become triplets where they carry token ids; where not, it is said what is missing."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_adapters import conventions, forest, otel, rows, semconv
from lightning_rl_adapters.call import Call, to_span
from lightning_rl_adapters.conventions import ConventionDiagnosis, OtelCalls, told_of, triplets_of_otel
from lightning_rl_adapters.otel import SpanPlace
from lightning_rl_adapters.span import Span
from tests.adapters.otel.record import ANSWER, LOGPROBS, PROMPT

FIXTURES = Path(__file__).parent / "otel"
OWN = SpanPlace("r", "a")
RECORDED = sorted(file.stem for file in FIXTURES.glob("*.json"))


def recorded(name: str, place: SpanPlace = OWN) -> list[Span]:
    """What a real instrumentation exported, as it came in by OTLP."""
    told = json.loads((FIXTURES / f"{name}.json").read_text())
    spans, rejected = otel.spans_of(otel.from_json(json.dumps(told["request"]).encode()), emitted=False, own=place)
    assert rejected == []
    return spans


def span(number: int = 0, parent: int | None = None, name: str = "llm", **attributes: Any) -> Span:
    """A span that came by OTLP; `__` in a name stands for a dot."""
    said = {key.replace("__", "."): value for key, value in attributes.items()}
    if parent is not None:
        said[semconv.PARENT_SPAN] = f"a:t:{parent:016x}"
    return Span(
        span_id=f"a:t:{number:016x}", rollout_id="r", attempt_id="a", name=name, number=number, start_ns=number,
        end_ns=number + 1, attributes=said,
    )  # fmt: skip


def only(told: OtelCalls) -> ConventionDiagnosis:
    assert told.calls == []
    [diagnosis] = told.diagnoses
    return diagnosis


def test_openinference_gives_triplets_where_the_engine_was_asked_for_ids_streamed_or_not() -> None:
    spans = recorded("openinference")
    triplets = [each for each in triplets_of_otel(told_of(spans)) if each.exact]
    assert [
        (each.prompt_token_ids, each.response_token_ids, each.response_logprobs, each.model) for each in triplets
    ] == [(PROMPT, ANSWER, LOGPROBS, "policy")] * 2
    assert {(each.convention, each.verified, each.exact) for each in triplets} == {("openinference", False, True)}
    diagnosis = only(OtelCalls([], [], told_of(spans).diagnoses))
    assert (diagnosis.convention, diagnosis.model, diagnosis.told) == ("openinference", "policy", ("messages",))
    assert diagnosis.missing == ("prompt token ids", "response token ids", "logprobs")
    assert "llm.base_url" in diagnosis.advice
    assert '"return_token_ids": True' in diagnosis.advice


def test_litellm_gives_triplets_of_what_is_not_streamed_and_tells_of_each_call_once() -> None:
    told = told_of(recorded("litellm"))
    assert [(call.prompt_ids, call.response_ids, call.logprobs) for call in told.calls] == [(PROMPT, ANSWER, LOGPROBS)]
    assert [each.convention for each in told.diagnoses] == ["litellm", "litellm"]
    assert "without streaming" in told.diagnoses[1].advice


@pytest.mark.parametrize("name", ["openllmetry", "openllmetry_before_1_0", "gen_ai"])
def test_what_has_messages_alone_is_diagnosed_call_by_call(name: str) -> None:
    told = told_of(recorded(name))
    assert (len(told.calls), len(told.diagnoses)) == (0, 3)
    for diagnosis in told.diagnoses:
        assert diagnosis.told == ("messages",)
        assert diagnosis.missing == ("prompt token ids", "response token ids", "logprobs")
        assert "openinference-instrumentation-openai" in diagnosis.advice
        assert diagnosis.server is not None
        assert "127.0.0.1" in diagnosis.server


def test_each_convention_is_known_by_its_own_name() -> None:
    seen = {name: {each.convention for each in told_of(recorded(name)).diagnoses} for name in RECORDED}
    assert seen == {
        "gen_ai": {"gen_ai"}, "litellm": {"litellm"}, "openinference": {"openinference"}, "openllmetry": {"gen_ai"},
        "openllmetry_before_1_0": {"openllmetry"},
    }  # fmt: skip


def test_agent_lightnings_attributes_are_read() -> None:
    content = json.dumps([{"token": "x", "logprob": value} for value in LOGPROBS])
    agentops = span(
        name="openai.chat.completion", prompt_token_ids=PROMPT, response_token_ids=ANSWER, logprobs__content=content,
        gen_ai__response__id="c", gen_ai__request__model="policy", gen_ai__request__temperature=0.5,
        gen_ai__response__finish_reasons=["length"],
    )  # fmt: skip
    [call] = told_of([agentops]).calls
    assert (call.prompt_ids, call.response_ids, call.logprobs) == (PROMPT, ANSWER, LOGPROBS)
    assert (call.temperature, call.finish_reason, call.model) == (0.5, "length", "policy")
    [triplet] = triplets_of_otel(told_of([agentops]), {call.call_id: 1.0})
    assert (triplet.reward, triplet.convention) == (1.0, "agent-lightning")


def test_litellms_fields_of_an_older_vllm_are_read() -> None:
    """As Agent-lightning's patched vLLM answered, before vLLM told token ids itself."""
    raw = span(
        name="raw_gen_ai_request", llm__hosted_vllm__prompt_token_ids=str(PROMPT),
        llm__hosted_vllm__response_token_ids=str([ANSWER, ANSWER[:1]]), llm__hosted_vllm__model="policy",
        llm__hosted_vllm__choices=str([{"index": n, "finish_reason": "stop", "logprobs": None} for n in range(2)]),
    )  # fmt: skip
    calls = told_of([raw]).calls
    assert [(call.call_id, call.response_ids) for call in calls] == [
        (raw.span_id, ANSWER),
        (f"{raw.span_id}#1", ANSWER[:1]),
    ]
    assert len(triplets_of_otel(told_of([raw]))) == 2


def answer(answer_id: str, **choice: Any) -> str:
    return json.dumps({"id": answer_id, "prompt_token_ids": PROMPT, "choices": [{"token_ids": ANSWER, **choice}]})


LLM_KIND = {"openinference__span__kind": "LLM"}


def test_a_layer_around_an_instrumented_client_is_no_second_call() -> None:
    chain = span(1, name="ChatOpenAI", **LLM_KIND, output__value='{"generations": []}')
    client = span(2, parent=1, **LLM_KIND, output__value=answer("c1"))
    other = span(3, gen_ai__operation__name="chat", gen_ai__response__id="c1", gen_ai__request__model="policy")
    again = span(4, **LLM_KIND, output__value=answer("c1"))
    told = told_of([other, again, client, chain])
    assert ([call.call_id for call in told.calls], told.diagnoses) == ([client.span_id], [])
    assert len(told_of([chain, other]).diagnoses) == 2


def test_calls_that_the_gateway_recorded_are_left_out() -> None:
    """An agent that uses the gateway and is instrumented: the gateway has the call, by the id of its answer."""
    call = Call(
        call_id="c9", rollout_id="r", attempt_id="a", number=0, model="policy", prompt_ids=[1], response_ids=[2],
        logprobs=None, versions=[], temperature=1.0, finish_reason="stop",
    )  # fmt: skip
    seen = span(1, gen_ai__operation__name="chat", gen_ai__response__id="chatcmpl-c9", gen_ai__request__model="policy")
    assert told_of([to_span(call), seen]) == OtelCalls([], [], [])
    assert len(told_of([seen]).diagnoses) == 1


def test_what_comes_this_way_is_never_trained() -> None:
    calls = told_of(recorded("openinference")).calls
    assert {call.trainable for call in calls} == {False}
    cut = rows.cut(forest.build(calls), {call.call_id: 1.0 for call in calls})
    assert {row.excluded for row in cut} == {"frozen"}


def test_logprobs_that_do_not_fit_the_tokens_are_none() -> None:
    short = answer("c", logprobs={"content": [{"logprob": -0.5}]})
    [call] = told_of([span(**LLM_KIND, output__value=short)]).calls
    assert call.logprobs is None


@pytest.mark.parametrize("ids", ["[1.5]", "[true]", "[-1]", "[]", "{}", '"x"', "[4294967296]", "[null]"])
def test_what_are_no_token_ids_are_missing(ids: str) -> None:
    told = f'{{"prompt_token_ids": {ids}, "choices": [{{"token_ids": [1]}}]}}'
    diagnosis = only(told_of([span(**LLM_KIND, output__value=told)]))
    assert diagnosis.missing == ("prompt token ids", "logprobs")
    assert diagnosis.told == ("response token ids",)


def test_other_spans_are_no_calls() -> None:
    others = [
        span(1, openinference__span__kind="TOOL"),
        span(2, gen_ai__operation__name="execute_tool", gen_ai__request__model="m"),
        span(3, name="foreign.lightning_rl.call"),
        span(4, gen_ai__operation__name="embeddings", gen_ai__request__model="m"),
        span(5, name="raw_gen_ai_request"),
    ]
    assert told_of(others) == OtelCalls([], [], [])
    assert triplets_of_otel(told_of(others)) == []


NAMES = st.sampled_from([
    "openinference.span.kind", "output.value", "llm.invocation_parameters", "llm.model_name", "llm.x.choices",
    "llm.x.prompt_token_ids", "llm.x.response_token_ids", "llm.x.id", "llm.x.temperature", "prompt_token_ids",
    "response_token_ids", "logprobs.content", "gen_ai.operation.name", "gen_ai.request.model", "gen_ai.response.id",
    "gen_ai.response.finish_reasons", "gen_ai.request.temperature", "server.address", "server.port",
    "gen_ai.openai.api_base", "llm.request.type", "gen_ai.input.messages",
])  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["LLM", "chat", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "token_ids", "prompt_token_ids", "logprobs", "content", "logprob", "id"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)
VALUES = JSON | JSON.map(json.dumps) | JSON.map(repr)


@given(
    st.lists(st.tuples(st.sampled_from(["x", "raw_gen_ai_request", "litellm_request"]), st.dictionaries(NAMES, VALUES)))
)
def test_whatever_spans_say_nothing_is_raised_and_all_can_be_told(said: list[tuple[str, dict[str, Any]]]) -> None:
    spans = [
        Span(
            span_id=f"a:t:{number:016x}", rollout_id="r", attempt_id="a", name=name, number=number, start_ns=number,
            end_ns=number, attributes=attributes,
        )
        for number, (name, attributes) in enumerate(said)
    ]  # fmt: skip
    assert msgspec.json.encode(told_of(spans))
    triplets = triplets_of_otel(told_of(spans))
    assert sum(triplet.exact for triplet in triplets) == len(told_of(spans).calls)
    assert msgspec.json.encode(triplets)
    for each in spans:
        found, told = conventions.read(each), told_of([each])
        assert told.calls == (found if isinstance(found, list) else [])
        assert told.diagnoses == ([found] if isinstance(found, conventions.ConventionDiagnosis) else [])
        for call in told.calls:
            assert call.response_ids
            assert call.logprobs is None or len(call.logprobs) == len(call.response_ids)
        for diagnosis in told.diagnoses:
            assert diagnosis.missing
