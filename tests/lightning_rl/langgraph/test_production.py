"""The graph files of training run as they are against any OpenAI-compatible service: nothing of ours is on the way."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from lightning_rl.agents.resources import LLM
from lightning_rl.langgraph import ChatModel
from lightning_rl.langgraph.endpoint import answering, tagged
from tests.lightning_rl.langgraph import graphs
from tests.proxy.engines.service import Service, running

TOOL_CALL = {
    "content": None,
    "tool_calls": [
        {
            "id": f"call_{what}",
            "type": "function",
            "function": {"name": "look_up", "arguments": f'{{"what": "{what}"}}'},
        }
        for what in ("cat", "dog")
    ],
}


@pytest.fixture
def service() -> Iterator[Service]:
    with running() as service:
        service.tokens = False
        yield service


@pytest.fixture(params=["ours by arguments", "ours by the environment", "ChatOpenAI"])
def model(request: pytest.FixtureRequest, service: Service, monkeypatch: pytest.MonkeyPatch) -> BaseChatModel:
    key = SecretStr("sk-theirs")
    if request.param == "ChatOpenAI":
        return ChatOpenAI(model="theirs", base_url=service.url, api_key=key)
    if request.param == "ours by arguments":
        return ChatModel(model="theirs", base_url=service.url, api_key=key)
    for name, value in (("MODEL", "theirs"), ("BASE_URL", service.url), ("API_KEY", "sk-theirs")):
        monkeypatch.setenv(f"OPENAI_{name}", value)
    return ChatModel()


def test_a_graph_made_with_a_model(service: Service, model: BaseChatModel) -> None:
    service.script.append("hello")
    state = graphs.one_node(model).compile().invoke({"messages": [("user", "hi")]})
    assert state["messages"][-1].text == "hello"
    check(service)


def test_a_graph_whose_model_is_in_its_config(service: Service, model: BaseChatModel) -> None:
    service.script.append("hello")
    state = asyncio.run(graphs.from_config.ainvoke({"messages": [("user", "hi")]}, {"configurable": {"model": model}}))
    assert state["messages"][-1].text == "hello"
    check(service)


def test_a_graph_whose_model_is_in_its_context(service: Service, model: BaseChatModel) -> None:
    graph: Any = graphs.from_context.compile()
    state = graph.invoke({"messages": [("user", "hi")]}, context={"model": model})
    assert state["messages"][-1].text == "ok"
    check(service)


def test_tools_and_branches(service: Service, model: BaseChatModel) -> None:
    service.script.extend(["A plan.", TOOL_CALL, "Two words."])
    state = graphs.team(model).compile().invoke({"messages": [("user", "cat and dog?")]})
    assert [message.text for message in state["messages"][-3:]] == ["cat is a word", "dog is a word", "Two words."]
    check(service, calls=3)


def test_the_default_model_is_that_of_the_environment(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MODEL", "theirs"), ("BASE_URL", service.url), ("API_KEY", "sk-theirs")):
        monkeypatch.setenv(f"OPENAI_{name}", value)
    service.script.extend([TOOL_CALL, "Two words."])
    state = graphs.tools.invoke({"messages": [("user", "cat and dog?")]})
    assert state["messages"][-1].text == "Two words."
    check(service, calls=2)


def test_a_frozen_helper_with_an_endpoint_of_its_own_is_asked_there_in_a_rollout_too(service: Service) -> None:
    llm = LLM("policy", "http://gateway.invalid/rollout/r/attempt/a/v1", "key")
    helper = ChatModel(model="theirs", base_url=service.url, api_key=SecretStr("sk-theirs"))
    with answering(llm):
        assert graphs.one_node(helper).compile().invoke({"messages": [("user", "hi")]})["messages"][-1].text == "ok"
    check(service)


def check(service: Service, calls: int = 1) -> None:
    """The service was asked with its own model and key, and with no field that it may not know."""
    known = {"model", "messages", "tools", "temperature", "stream", "stream_options"}
    assert len(service.requests) == calls
    assert {request["model"] for request in service.requests} == {"theirs"}
    assert set(service.keys) == {"Bearer sk-theirs"}
    assert not {field for request in service.requests for field in request} - known


@pytest.mark.parametrize(
    ("url", "then"),
    [
        ("http://g/rollout/r/attempt/a/v1", "http://g/rollout/r/attempt/a/agent/n/v1"),
        ("http://g/behind/rollout/r/attempt/a/v1/", "http://g/behind/rollout/r/attempt/a/agent/n/v1"),
        ("http://g/rollout/r/attempt/a/agent/mine/v1", None),
        ("http://g/v1", None),
        ("https://api.openai.com/v1", None),
        ("https://service/rollout/v1", None),
    ],
)
def test_only_an_attempts_door_is_tagged(url: str, then: Any) -> None:
    assert tagged(url, "n") == (then or url)
    assert tagged(url, None) == url
