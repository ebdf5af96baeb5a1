"""LangChain's own `ChatOpenAI` and `ChatAnthropic` at the gateway: tools, streams, and the doors that name a node."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from lightning_rl.agents.resources import LLM
from lightning_rl.langgraph import react_agent
from tests.lightning_rl.langgraph.conftest import Recorded, calls_tool
from tests.lightning_rl.langgraph.graphs import look_up
from tests.proxy.conftest import Served

Make = Callable[..., BaseChatModel]


def chat_openai(llm: LLM, **fields: Any) -> BaseChatModel:
    return ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=SecretStr(llm.api_key), **fields)


def responses(llm: LLM, **fields: Any) -> BaseChatModel:
    return chat_openai(llm, use_responses_api=True, **fields)


def chat_anthropic(llm: LLM, **fields: Any) -> BaseChatModel:
    return ChatAnthropic(
        model_name=llm.model,
        base_url=llm.anthropic_base_url,
        api_key=SecretStr(llm.api_key),
        max_tokens_to_sample=64,
        **fields,
    )


@pytest.mark.parametrize("make", [chat_openai, responses, chat_anthropic])
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_loop_of_tools_makes_one_row_of_named_calls(
    served: Served, llm: LLM, recorded: Recorded, make: Make, streaming: bool, asynchronous: bool
) -> None:
    served.engine.script.extend(
        [f"Both.\n{calls_tool('look_up', 'cat', 'dog')}", calls_tool("look_up", "cow"), "Three words."]
    )
    model = make(llm.for_agent("researcher"), streaming=streaming)
    graph = react_agent([look_up], model=model, prompt="Be brief.")
    question: Any = {"messages": [("user", "cat, dog and cow?")]}
    state = asyncio.run(graph.ainvoke(question)) if asynchronous else graph.invoke(question)
    said = [message.text for message in state["messages"]]
    assert said[2:4] == ["cat is a word", "dog is a word"]
    assert said[-1] == "Three words."
    calls, [row] = recorded()
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[1].call_id]
    assert {call.agent for call in calls} == {"researcher"}
    assert sum(row.loss_mask) == sum(len(call.response_ids) for call in calls)


@pytest.mark.parametrize("make", [chat_openai, chat_anthropic])
def test_what_they_stream_comes_in_pieces(served: Served, llm: LLM, make: Make) -> None:
    served.engine.script.append("one two three four")
    pieces = [chunk.text for chunk in make(llm).stream("count") if chunk.text]
    assert len(pieces) > 1
    assert "".join(pieces) == "one two three four"
