"""Which of an attempt's calls spans tell of, each once; and what a run that trusts spans makes of them."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from lightning_rl_adapters import forest, rows, semconv
from lightning_rl_adapters.call import Call, calls_of, to_span
from lightning_rl_adapters.conventions import calls_with_otel, spans_with_otel, told_of, triplets_of_otel
from lightning_rl_adapters.span import Span
from lightning_rl_adapters.triplet import prompt_ids
from tests.adapters.otel.record import ANSWER, LOGPROBS, PROMPT
from tests.adapters.test_conventions import answer, recorded, span

GEN_AI = {"gen_ai__operation__name": "chat", "gen_ai__request__model": "policy"}
OLDER = {"llm__request__type": "chat", "gen_ai__request__model": "policy"}
WITH_IDS = {"token_ids": ANSWER, "prompt_token_ids": PROMPT, "logprobs": LOGPROBS}
SAID = {"role": "assistant", "parts": [{"type": "text", "content": "I add."}], "finish_reason": "length"}


def event(name: str, **attributes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "time_ns": 1,
        "attributes": {key.replace("__", "."): value for key, value in attributes.items()},
    }


RETURNED = ChatCompletion.model_validate(
    {
        "id": "c", "object": "chat.completion", "created": 1, "model": "policy", "prompt_token_ids": PROMPT,
        "choices": [{
            "index": 0, "message": {"role": "assistant", "content": "I add."}, "finish_reason": "length",
            "token_ids": ANSWER, "logprobs": {"content": [
                {"token": "x", "logprob": each, "top_logprobs": []} for each in LOGPROBS
            ]},
        }],
    }
)  # fmt: skip
PLACES = {
    "beside the message of GenAI": span(**GEN_AI, gen_ai__output__messages=json.dumps([SAID | WITH_IDS])),
    "where litellm keeps what it does not know": span(
        **GEN_AI, gen_ai__output__messages=json.dumps([SAID | {"provider_specific_fields": WITH_IDS}])
    ),
    "in the event with GenAI's details": span(
        **GEN_AI,
        **{
            semconv.EVENTS: [
                event(
                    "gen_ai.client.inference.operation.details", gen_ai__output__messages=json.dumps([SAID | WITH_IDS])
                )
            ]
        },
    ),
    "in GenAI's event of a choice": span(
        **GEN_AI, **{semconv.EVENTS: [event("gen_ai.choice", finish_reason="length", index=0, **WITH_IDS)]}
    ),
    "numbered, as OpenLLMetry": span(
        **OLDER, gen_ai__completion__0__finish_reason="length", gen_ai__completion__0__token_ids=ANSWER,
        gen_ai__completion__0__prompt_token_ids=json.dumps(PROMPT),
        gen_ai__completion__0__logprobs=json.dumps({"content": [{"logprob": each} for each in LOGPROBS]}),
    ),
    "in what traceloop's @task says that a function returned": span(
        name="ask.task", traceloop__span__kind="task",
        traceloop__entity__output=json.dumps(RETURNED.to_json()),  # as its encoder writes what has `to_json`
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_token_ids_are_read_from_where_they_are_written(place: str) -> None:
    told = told_of([PLACES[place]])
    [call] = told.calls
    assert (call.prompt_ids, call.response_ids, call.logprobs) == (PROMPT, ANSWER, LOGPROBS)
    assert (call.model, call.finish_reason, call.trainable, call.exact) == ("policy", "length", False, True)
    assert (told.diagnoses, told.messages) == ([], [])


@pytest.mark.parametrize("where", [GEN_AI, {"gen_ai__operation__name": "invoke_agent"}, {}])
def test_token_ids_as_strands_vllm_writes_them_are_read_in_whichever_span_they_are(where: dict[str, Any]) -> None:
    ids = {"llm__hosted_vllm__prompt_token_ids": PROMPT, "llm__hosted_vllm__response_token_ids": json.dumps(ANSWER)}
    [call] = told_of([span(**where, **ids)]).calls
    assert (call.prompt_ids, call.response_ids, call.logprobs) == (PROMPT, ANSWER, None)


def test_choices_of_one_answer_are_calls_of_their_own_though_they_be_equal() -> None:
    both = json.dumps([SAID | WITH_IDS, SAID | WITH_IDS])
    told = told_of([span(7, **GEN_AI, gen_ai__response__id="c", gen_ai__output__messages=both)])
    first, second = told.calls
    assert (second.call_id, second.response_ids) == (f"{first.call_id}#1", first.response_ids)
    assert told.answer_ids == {"c": first.call_id}


@pytest.mark.parametrize(
    ("temperature", "kind"), [(1.0, "sampled"), (0.0, "greedy"), (0.5, "raw"), (None, "raw"), (-1.0, "raw")]
)
def test_logprobs_are_the_samplers_where_the_agent_asked_for_a_temperature_of_one(
    temperature: float | None, kind: str
) -> None:
    asked = {} if temperature is None else {"gen_ai__request__temperature": temperature}
    [call] = told_of([span(**GEN_AI, **asked, gen_ai__output__messages=json.dumps([SAID | WITH_IDS]))]).calls
    assert call.logprob_kind == kind


@pytest.mark.parametrize("name", ["openllmetry", "openllmetry_before_1_0", "gen_ai"])
def test_calls_without_token_ids_are_triplets_of_messages_that_nobody_trains(name: str) -> None:
    told = told_of(recorded(name))
    triplets = triplets_of_otel(told, {each.call.call_id: 1.0 for each in told.messages})
    assert len(triplets) == 3
    for triplet in triplets:
        assert (triplet.exact, triplet.verified, triplet.reward, triplet.model) == (False, False, 1.0, "policy")
        assert (triplet.prompt_token_ids, triplet.response_token_ids, triplet.response_logprobs) == ([], [], None)
        assert triplet.prompt_messages == [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "1 + 2?"},
        ]
        assert [each["content"] for each in triplet.response_messages] == ["I add."]
    [called] = triplets[0].response_messages[0]["tool_calls"]
    assert (called["id"], called["function"]["name"]) == ("call_1", "add")
    assert json.loads(called["function"]["arguments"]) == {"a": 1, "b": 2}
    if name != "gen_ai":  # which does not say which tools there were
        [tool] = triplets[0].tools
        assert (tool["function"]["name"], tool["function"]["parameters"]["type"]) == ("add", "object")
    calls = calls_with_otel([], [each.call for each in told.messages])
    assert {row.excluded for row in rows.cut(forest.build(calls), {})} == {"inexact"}


def test_messages_in_events_and_instructions_are_read() -> None:
    events = [
        event("gen_ai.system.message", content="Add."),
        event("gen_ai.user.message", content="1 + 2?"),
        event("gen_ai.choice", message=json.dumps({"role": "assistant", "content": "3"}), index=0),
    ]
    part = {"type": "tool_call_response", "id": "t", "result": {"sum": 3}}
    brief = span(
        **GEN_AI,
        gen_ai__system_instructions='[{"type": "text", "content": "Be brief."}]',
        gen_ai__input__messages=json.dumps([{"role": "tool", "parts": [part]}]),
    )
    [told] = told_of([brief]).messages
    assert told.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "tool", "tool_call_id": "t", "content": '{"sum":3}'},
    ]
    [told] = told_of([span(**GEN_AI, **{semconv.EVENTS: events})]).messages
    assert [(each["role"], each["content"]) for each in (*told.messages, *told.answers)] == [
        ("system", "Add."), ("user", "1 + 2?"), ("assistant", "3"),
    ]  # fmt: skip


def test_a_run_that_trusts_spans_sees_them_as_calls_with_their_messages() -> None:
    first = to_span(gateways(response_ids=[9], start_ns=1))
    both = json.dumps([SAID | WITH_IDS, SAID | WITH_IDS | {"parts": [{"type": "text", "content": "Two."}]}])
    asked = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "1 + 2?"}]}])
    theirs = span(5, **GEN_AI, gen_ai__input__messages=asked, gen_ai__output__messages=both)
    tool = span(6, name="tool")
    spans = spans_with_otel([tool, theirs, first])
    assert [(call.call_id, call.number) for call in calls_of(spans)] == [
        ("c9", 0), (theirs.span_id, 1), (f"{theirs.span_id}#1", 2),
    ]  # fmt: skip
    assert [each.name for each in spans[3:]] == ["tool"]
    for told, answer_text in zip(spans[1:3], ("I add.", "Two."), strict=True):
        assert told.attributes[semconv.INPUT_MESSAGES] == [{"role": "user", "content": "1 + 2?"}]
        assert [each["content"] for each in told.attributes[semconv.OUTPUT_MESSAGES]] == [answer_text]
    assert spans_with_otel([first, tool]) == [first, tool]


LLM_KIND = {"openinference__span__kind": "LLM"}


def gateways(call_id: str = "c9", **more: Any) -> Call:
    given: dict[str, Any] = {"prompt_ids": PROMPT, "response_ids": ANSWER, "number": 0, "model": "policy"} | more
    return Call(
        call_id=call_id, rollout_id="r", attempt_id="a", logprobs=None, versions=[], temperature=1.0,
        finish_reason="stop", **given,
    )  # fmt: skip


def test_a_call_of_the_gateways_is_known_by_its_tokens_where_a_proxy_gave_its_answer_another_id() -> None:
    theirs = span(3, **LLM_KIND, output__value=answer("chatcmpl-of-a-proxy"))
    first = gateways("c1", prompt_ids=PROMPT[:2], response_ids=PROMPT[2:])
    second = gateways("c2", prompt_ids=[], number=1, parent_id="c1")  # its whole prompt is PROMPT
    assert told_of([to_span(first), to_span(second), theirs]).calls == []
    assert len(told_of([to_span(first), theirs]).calls) == 1


def test_a_span_beside_the_gateways_calls_is_a_call_of_its_own() -> None:
    beside = span(5, **LLM_KIND, output__value=answer("other"))
    spans = [to_span(gateways(response_ids=[9])), beside]
    told = told_of(spans)
    assert [call.call_id for call in told.calls] == [beside.span_id]
    both = calls_with_otel(calls_of(spans), told.calls)
    assert [(call.call_id, call.number, call.trainable) for call in both] == [
        ("c9", 0, True),
        (beside.span_id, 1, True),
    ]


@pytest.mark.parametrize(
    ("spans", "kept"),
    [
        ([span(1, **LLM_KIND, output__value=answer("")), span(2, **LLM_KIND, output__value=answer("x"))], [2]),
        ([span(1, **LLM_KIND, output__value=answer("")), span(2, **LLM_KIND, output__value=answer(""))], [1]),
        ([span(1, **LLM_KIND, output__value=answer("x")), span(2, **LLM_KIND, output__value=answer("y"))], [1, 2]),
        ([span(1, **LLM_KIND, output__value=answer("x")), span(2, 1, **LLM_KIND, output__value=answer("y"))], [1]),
        ([span(1, **LLM_KIND, output__value=answer("x")), span(2, **LLM_KIND, output__value=answer("x"))], [1]),
    ],
    ids=["one without an id", "both without", "two answers", "one within the other", "one answer"],
)
def test_equal_tokens_are_two_calls_only_where_two_answers_say_so(spans: list[Span], kept: list[int]) -> None:
    assert [call.number for call in told_of(spans).calls] == kept
    cut = rows.cut(forest.build(calls_with_otel([], told_of(spans).calls)), {})
    assert sum(sum(row.loss_mask) for row in cut) == len(kept) * len(ANSWER)


def test_told_calls_continue_what_their_prompts_begin_with_and_each_token_is_in_one_mask() -> None:
    def told(number: int, prompt: list[int], response: list[int]) -> Span:
        said = {"model": "policy", "prompt_token_ids": prompt, "choices": [{"token_ids": response}], "id": f"c{number}"}
        return span(number, **LLM_KIND, output__value=json.dumps(said))

    spans = [
        told(1, [1, 2], [3, 4]),
        told(2, [1, 2, 3, 4, 5], [6]),  # the next turn
        told(3, [1, 2, 3, 4, 7], [8]),  # another branch
        told(4, [1, 2, 9], [3]),  # begins otherwise: nothing was answered with 9
    ]
    calls = calls_with_otel([], told_of(spans).calls)
    grown = forest.build(calls)
    assert [(call.parent_id, call.prompt_ids) for call in calls] == [
        (None, [1, 2]), (calls[0].call_id, [5]), (calls[0].call_id, [7]), (None, [1, 2, 9]),
    ]  # fmt: skip
    assert [prompt_ids(node) for node in grown.nodes.values()] == [[1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 7], [1, 2, 9]]
    cut = rows.cut(grown, {})
    assert [row.token_ids for row in cut] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 9, 3]]
    assert [sum(row.loss_mask) for row in cut] == [3, 1, 1]
    assert {row.excluded for row in cut} == {None}


def test_a_told_call_may_continue_one_of_the_gateways() -> None:
    first = gateways(start_ns=1)
    said = {"model": "policy", "prompt_token_ids": [*PROMPT, *ANSWER, 5], "choices": [{"token_ids": [6]}]}
    later = span(9, **LLM_KIND, output__value=json.dumps(said))
    spans = [to_span(first), later]
    one, two = calls_with_otel(calls_of(spans), told_of(spans).calls)
    assert (two.parent_id, two.prompt_ids) == (one.call_id, [5])


def test_a_choice_with_ids_has_its_own_text_behind_one_without() -> None:
    other = {"role": "assistant", "parts": [{"type": "text", "content": "zero"}], "finish_reason": "stop"}
    both = json.dumps([other | {"prompt_token_ids": PROMPT}, SAID | WITH_IDS])
    [call, *_] = spans_with_otel([span(7, **GEN_AI, gen_ai__output__messages=both)])
    [answer] = call.attributes[semconv.OUTPUT_MESSAGES]
    assert answer["content"] == "I add."


def test_numbers_beyond_doubles_are_no_temperature_and_no_logprobs() -> None:
    huge = 10**400
    parameters = f'{{"temperature": {huge}}}'
    answer = json.dumps([SAID | WITH_IDS | {"logprobs": [huge] * len(ANSWER)}])
    [call] = told_of([span(7, **GEN_AI, llm__invocation_parameters=parameters, gen_ai__output__messages=answer)]).calls
    assert (call.temperature, call.logprobs) == (1.0, None)
