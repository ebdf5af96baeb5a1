"""`ChatModel` as LangChain's users use it, against the real gateway: tools, streams, sampling, usage, errors."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from pydantic import BaseModel

from lightning_rl.agents.resources import LLM
from lightning_rl.langgraph import ChatModel
from lightning_rl.langgraph.wire import to_wire
from lightning_rl_proxy.engines.base import TokenRequest
from lightning_rl_proxy.errors import PromptTooLong
from tests.lightning_rl.langgraph.conftest import Recorded, calls_tool
from tests.proxy.conftest import Served

Ask = Callable[[Any, Any], AIMessage]


def look_up(what: str) -> str:
    """Look a word up."""
    return f"{what} is a word"


def streamed(model: Any, messages: Any) -> AIMessage:
    whole: AIMessageChunk | None = None
    for chunk in model.stream(messages):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


async def astreamed(model: Any, messages: Any) -> AIMessage:
    whole: AIMessageChunk | None = None
    async for chunk in model.astream(messages):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


WAYS: dict[str, Ask] = {
    "whole": lambda model, messages: model.invoke(messages),
    "streamed": streamed,
    "async": lambda model, messages: asyncio.run(model.ainvoke(messages)),
    "async streamed": lambda model, messages: asyncio.run(astreamed(model, messages)),
}


@pytest.fixture(params=WAYS)
def ask(request: pytest.FixtureRequest) -> Ask:
    return WAYS[request.param]


def test_parallel_tool_calls_and_their_results_make_one_row(
    served: Served, llm: LLM, recorded: Recorded, ask: Ask
) -> None:
    served.engine.script.extend([f"Both.\n{calls_tool('look_up', 'cat', 'dog')}", "Two words."])
    model = ChatModel.of(llm).bind_tools([look_up])
    history: list[Any] = [SystemMessage("Be brief."), HumanMessage("cat and dog?")]
    first = ask(model, history)
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [
        ("look_up", {"what": "cat"}),
        ("look_up", {"what": "dog"}),
    ]
    assert first.text.strip() == "Both."
    assert first.response_metadata["finish_reason"] == "tool_calls"
    results = [ToolMessage("a word", tool_call_id=call["id"]) for call in first.tool_calls]
    second = ask(model, [*history, first, *results])
    assert (second.text, second.response_metadata["finish_reason"]) == ("Two words.", "stop")
    calls, [row] = recorded()
    assert [call.parent_id for call in calls] == [None, calls[0].call_id]
    assert [id for id, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask] == [
        id for call in calls for id in call.response_ids
    ]
    usage = {name: count for name, count in (first.usage_metadata or {}).items() if not name.endswith("_details")}
    assert usage == {
        "input_tokens": len(served.engine.prompts[0]),
        "output_tokens": len(calls[0].response_ids),
        "total_tokens": len(served.engine.prompts[0]) + len(calls[0].response_ids),
    }
    assert first.id == f"chatcmpl-{calls[0].call_id}"


def test_reasoning_is_told_and_sent_back(served: Served, llm: LLM, recorded: Recorded, ask: Ask) -> None:
    served.engine.script.extend(["<think>\nI count.\n</think>\n\nThree.", "Four."])
    model = ChatModel.of(llm)
    first = ask(model, "how many?")
    assert (first.text, first.additional_kwargs) == ("Three.", {"reasoning_content": "I count."})
    assert to_wire([first])[0]["reasoning_content"] == "I count."
    ask(model, [HumanMessage("how many?"), first, HumanMessage("and one more?")])
    calls, rows = recorded()
    assert [call.parent_id for call in calls] == [None, calls[0].call_id]
    assert len(rows) == 1


def test_a_stream_comes_in_pieces(served: Served, llm: LLM) -> None:
    served.engine.script.append("one two three four")
    pieces = [chunk.text for chunk in ChatModel.of(llm).stream("count") if chunk.text]
    assert len(pieces) > 1
    assert "".join(pieces) == "one two three four"


def test_a_call_that_cannot_be_read_is_sent_back_as_it_was(served: Served, llm: LLM) -> None:
    broken = {"name": "look_up", "args": "{what: cat", "id": "call_1", "error": "no JSON"}
    [sent] = to_wire([AIMessage("", invalid_tool_calls=[broken])])
    assert sent["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{what: cat"}}
    ]


def test_what_other_providers_keep_among_the_content_is_left_out() -> None:
    content: list[Any] = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "One "}, "two"]
    assert to_wire([AIMessage(content)]) == [{"role": "assistant", "content": "One two"}]


def test_sampling_is_that_of_the_model_unless_a_node_binds_its_own(served: Served, llm: LLM) -> None:
    served.ledger.sampling = {}
    model = ChatModel.of(llm, temperature=0.5, max_tokens=9, seed=3)
    model.invoke("one")
    model.bind(temperature=0.25, top_k=4).invoke("two", stop=["."])
    first, second = served.engine.samplings
    assert (first.temperature, first.max_tokens, first.stop) == (0.5, 9, None)
    assert (second.temperature, second.max_tokens, second.top_k, second.stop) == (0.25, 9, 4, ["."])


@pytest.mark.scripted("stops are scripted")
def test_a_stop_string_ends_the_text(served: Served, llm: LLM, ask: Ask) -> None:
    served.engine.script.append("one. two")
    answer = ask(ChatModel.of(llm, stop="."), "count")
    assert (answer.text, answer.response_metadata["finish_reason"]) == ("one", "stop")


def test_a_tool_can_be_forced_by_name_or_any(served: Served, llm: LLM) -> None:
    model = ChatModel.of(llm)
    for choice in ("any", "required", True, "look_up"):
        served.engine.script.append('{"what": "cat"}}\n</tool_call>')
        answer = model.bind_tools([look_up], tool_choice=choice).invoke("one")
        assert [call["args"] for call in answer.tool_calls] == [{"what": "cat"}], choice
    with pytest.raises(ValueError, match=r"tool_choice names 'nothing', but the tools are \['look_up'\]"):
        model.bind_tools([look_up], tool_choice="nothing")


def test_several_answers_are_several_generations_with_ids_of_their_own(
    served: Served, llm: LLM, recorded: Recorded
) -> None:
    served.engine.script.extend(["first", "second"])
    generations: list[Any] = ChatModel.of(llm).generate([[HumanMessage("one")]], n=2).generations[0]
    assert sorted(generation.text for generation in generations) == ["first", "second"]
    assert len({generation.message.id for generation in generations}) == 2
    assert len(recorded()[0]) == 2
    with pytest.raises(ValueError, match="n=2: a stream has one answer"):
        list(ChatModel.of(llm).bind(n=2).stream("one"))


class Word(BaseModel):
    """A word."""

    what: str


def test_structured_output_is_a_forced_call(served: Served, llm: LLM) -> None:
    served.engine.script.append('{"what": "cat"}}\n</tool_call>')
    assert ChatModel.of(llm).with_structured_output(Word).invoke("which?") == Word(what="cat")


def test_errors_are_those_of_the_openai_sdk(served: Served, llm: LLM, ask: Ask) -> None:
    served.ledger.closed.add("a1")
    with pytest.raises(openai.ConflictError, match="closed"):
        ask(ChatModel.of(llm), "too late")


def test_a_prompt_that_is_too_long_is_langchains_error_too(
    served: Served, llm: LLM, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(request: TokenRequest) -> Any:
        raise PromptTooLong(len(request.prompt), 8)
        yield

    monkeypatch.setattr(served.engine, "generate", refuse)
    with pytest.raises(ContextOverflowError) as caught:
        ask(ChatModel.of(llm), "a long story")
    assert isinstance(caught.value, openai.BadRequestError)


def test_a_model_that_nobody_names_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_MODEL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="set OPENAI_MODEL"):
        ChatModel().invoke("hi")
    with pytest.raises(ValueError, match="set OPENAI_API_KEY"):
        ChatModel(model="m").invoke("hi")


def test_no_key_is_shown(llm: LLM) -> None:
    assert llm.api_key not in repr(ChatModel.of(llm))


def test_a_call_may_wait_for_new_weights_as_long_as_it_takes() -> None:
    assert ChatModel().stream_chunk_timeout is None


def test_what_the_constructor_was_given_can_be_read_and_a_field_without_effect_is_refused() -> None:
    model = ChatModel(model="m", base_url="http://127.0.0.1:9/v1", api_key="secret", timeout=3.0)
    assert (model.model, model.base_url, model.timeout) == ("m", "http://127.0.0.1:9/v1", 3.0)
    assert model.api_key is not None
    assert model.api_key.get_secret_value() == "secret"
    with pytest.raises(ValueError, match="use_responses_api has no effect"):
        ChatModel(use_responses_api=True)


def test_a_history_can_be_cut_by_the_models_own_count() -> None:
    model = ChatModel()
    messages = [HumanMessage("a" * 400), AIMessage("b" * 40), HumanMessage("c" * 40)]
    kept = trim_messages(messages, max_tokens=60, token_counter=model)
    assert [message.content[:1] for message in kept] == ["b", "c"]
    assert model.get_num_tokens("c" * 40) == pytest.approx(10, abs=10)


def test_headers_of_the_model_are_sent(served: Served, llm: LLM, recorded: Recorded) -> None:
    model = ChatModel.of(llm, default_headers={"baggage": "lightning_rl.agent=planner"})
    model.invoke("hi")
    assert recorded()[0][0].agent == "planner"


def test_arguments_with_half_a_surrogate_pair_can_be_sent() -> None:
    call = {"name": "look_up", "args": {"é": "smile \ud83d"}, "id": "c1", "type": "tool_call"}
    [message] = to_wire([AIMessage("", tool_calls=[call])])
    sent = message["tool_calls"][0]["function"]["arguments"].encode()
    assert json.loads(sent) == call["args"]
