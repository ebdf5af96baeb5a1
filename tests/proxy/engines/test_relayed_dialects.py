"""A frozen chat model answers every dialect: requests are translated to its chat, answers back, streams as they are."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from lightning_rl_adapters import semconv
from lightning_rl_adapters.tool_schemas import tools_of
from lightning_rl_proxy.engines.chat_backend import LitellmBackend, OpenAIBackend
from tests.proxy.conftest import Served, calls_in
from tests.proxy.engines.service import Service, running
from tests.proxy.test_gateway import client, user

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
LOOK_UP = {"name": "look_up", "description": "Looks up.", "input_schema": {"type": "object"}}
CALLED: dict[str, Any] = {
    "content": "let me see",
    "reasoning_content": "hm",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"what": "cats"}'}}],
}


@pytest.fixture
def service() -> Iterator[Service]:
    with running() as service:
        service.tokens = False
        yield service


@pytest.fixture
def helped(served: Served, service: Service) -> Served:
    """The gateway of the policy, with the model `helper` at the service."""
    served.gateway.router.register_backend(OpenAIBackend("helper", service.url, "the-secret-key", "remote"))
    return served


def claude(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.base_url().removesuffix("/v1"), api_key=served.key(), max_retries=0)


def test_a_message_becomes_a_chat_and_its_answer_a_message(helped: Served, service: Service) -> None:
    service.script.append(CALLED)
    answer = claude(helped).messages.create(
        model="helper", max_tokens=50, system="be brief", tools=[LOOK_UP], tool_choice={"type": "any"},  # type: ignore[list-item]
        messages=[{"role": "user", "content": "cats?"}], stop_sequences=["END"],
    )  # fmt: skip
    sent = service.requests[-1]
    assert sent["messages"] == [{"role": "system", "content": "be brief"}, user("cats?")]
    assert sent["tools"][0]["function"]["name"] == "look_up"
    assert (sent["tool_choice"], sent["max_tokens"], sent["stop"]) == ("required", 50, ["END"])
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert (answer.stop_reason, answer.usage.input_tokens, answer.usage.output_tokens) == ("tool_use", 11, 5)
    helped.seal()
    [span] = calls_in(helped.ledger.spans)
    assert span.attributes[semconv.DIALECT] == "messages"
    assert span.attributes[semconv.SAMPLING_REQUESTED] == {"max_tokens": 50, "stop": ["END"]}


def test_a_tool_result_continues_the_services_call(helped: Served, service: Service) -> None:
    service.script.extend([CALLED, "three"])
    history: list[Any] = [{"role": "user", "content": "cats?"}]
    first = claude(helped).messages.create(model="helper", max_tokens=50, tools=[LOOK_UP], messages=history)  # type: ignore[list-item]
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "3"}  # type: ignore[union-attr]
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    claude(helped).messages.create(model="helper", max_tokens=50, tools=[LOOK_UP], messages=history)  # type: ignore[list-item]
    helped.seal()
    one, two = helped.ledger.calls()
    assert two.parent_id == one.call_id


def test_a_message_is_streamed_whole(helped: Served, service: Service) -> None:
    service.script.append(CALLED)
    with claude(helped).messages.stream(
        model="helper", max_tokens=50, messages=[{"role": "user", "content": "cats?"}]
    ) as stream:
        assert "".join(stream.text_stream) == "let me see"
        assert stream.get_final_message().usage.input_tokens == 11


def test_a_chat_is_streamed_though_the_service_is_not_asked_to(helped: Served, service: Service) -> None:
    service.script.append(CALLED)
    stream = client(helped).chat.completions.create(model="helper", messages=[user("one")], stream=True)  # type: ignore[list-item]
    chunks = [chunk.choices[0] for chunk in stream]
    assert "stream" not in service.requests[-1]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "let me see"
    assert [call.function.name for chunk in chunks for call in chunk.delta.tool_calls or () if call.function] == [
        "look_up"
    ]
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_response_goes_on_by_its_id(helped: Served, service: Service) -> None:
    service.script.extend(["one", "two"])
    sdk = client(helped)
    first = sdk.responses.create(model="helper", input="first")
    second = sdk.responses.create(model="helper", input="second", previous_response_id=first.id)
    assert second.output_text == "two"
    roles = [message["role"] for message in service.requests[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    helped.seal()
    one, two = helped.ledger.calls()
    assert two.parent_id == one.call_id


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_images_reach_a_service_that_may_see_them(helped: Served, service: Service, dialect: str) -> None:
    url = f"data:image/png;base64,{PIXEL}"
    if dialect == "chat":
        parts: Any = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
        client(helped).chat.completions.create(model="helper", messages=[{"role": "user", "content": parts}])
    elif dialect == "responses":
        parts = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": url, "detail": "auto"}]
        client(helped).responses.create(model="helper", input=[{"role": "user", "content": parts}])
    else:
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        parts = [{"type": "text", "text": "what?"}, {"type": "image", "source": source}]
        claude(helped).messages.create(model="helper", max_tokens=5, messages=[{"role": "user", "content": parts}])
    [text, image] = service.requests[-1]["messages"][0]["content"]
    assert text == {"type": "text", "text": "what?"}
    assert (image["type"], image["image_url"]["url"]) == ("image_url", url)


def test_a_chat_service_completes_no_prompts_and_counts_no_tokens(helped: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="it completes no prompts"):
        client(helped).completions.create(model="helper", prompt="Once")
    with pytest.raises(anthropic.BadRequestError, match="its tokens cannot be counted here"):
        claude(helped).messages.count_tokens(model="helper", messages=[{"role": "user", "content": "one"}])


def test_tokens_are_counted_as_the_prompt_has_them_and_nothing_is_recorded(served: Served) -> None:
    messages: Any = [{"role": "user", "content": "one"}]
    counted = claude(served).messages.count_tokens(model="policy", messages=messages)
    answer = claude(served).messages.create(model="policy", max_tokens=5, messages=messages)
    assert counted.input_tokens == answer.usage.input_tokens
    served.seal()
    assert len(served.ledger.calls()) == 1


def test_embeddings_are_relayed_and_the_policy_has_none(helped: Served, service: Service) -> None:
    answer = client(helped).embeddings.create(model="helper", input="cats", encoding_format="float")
    assert answer.data[0].embedding == [0.5, -0.25]
    assert service.requests[-1] == {"model": "remote", "input": "cats", "encoding_format": "float"}
    with pytest.raises(openai.BadRequestError, match="has no embeddings"):
        client(helped).embeddings.create(model="policy", input="cats")
    service.status = 503
    with pytest.raises(openai.InternalServerError) as failed:
        client(helped).embeddings.create(model="helper", input="cats")
    assert failed.value.response.headers["x-should-retry"] == "true"


def test_a_services_failure_has_the_dialects_shape(helped: Served, service: Service) -> None:
    service.status, service.error = 503, "busy"
    with pytest.raises(anthropic.InternalServerError) as failed:
        claude(helped).messages.create(model="helper", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    body: Any = failed.value.body
    assert body["error"]["type"] == "overloaded_error"
    assert "busy" in body["error"]["message"]


# Each kind of service, and each dialect that an agent may ask it in.
SERVICES = ["openai", "litellm to OpenAI", "litellm to Anthropic"]
DIALECTS = ["chat", "responses", "messages"]
FUNCTION: dict[str, Any] = {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object"}}


@pytest.fixture
def beside(served: Served, service: Service, kind: str) -> Served:
    """The gateway of the policy, with the model `helper` at a service of a kind."""
    anthropics = service.url.removesuffix("/v1")
    made = {
        "openai": lambda: OpenAIBackend("helper", service.url, "the-secret-key", "remote"),
        "litellm to OpenAI": lambda: LitellmBackend("helper", "openai/remote", service.url, "the-secret-key"),
        "litellm to Anthropic": lambda: LitellmBackend(
            "helper", "anthropic/claude-3-5-haiku-20241022", anthropics, "the-secret-key"
        ),
    }
    served.gateway.router.register_backend(made[kind]())
    return served


def asked(served: Served, dialect: str, *, stream: bool = False, retries: int = 0) -> tuple[str, list[Any], int]:
    """An answer's text, its tool calls as (name, arguments), and its output tokens."""
    question: Any = [{"role": "user", "content": "cats?"}]
    if dialect == "messages":
        sdk = claude(served).with_options(max_retries=retries)
        tools: Any = [LOOK_UP]
        more: dict[str, Any] = {"model": "helper", "max_tokens": 50, "messages": question, "tools": tools}
        if stream:
            with sdk.messages.stream(**more) as events:
                answer = events.get_final_message()
        else:
            answer = sdk.messages.create(**more)
        said = [block.text for block in answer.content if block.type == "text"]
        called = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
        return "".join(said), called, answer.usage.output_tokens
    openais = client(served).with_options(max_retries=retries)
    if dialect == "responses":
        more = {"model": "helper", "input": question, "tools": [{"type": "function", "strict": False, **FUNCTION}]}
        if stream:
            with openais.responses.create(**more, stream=True) as parts:
                [whole] = [part.response for part in parts if part.type == "response.completed"]
        else:
            whole = openais.responses.create(**more)
        calls = [(item.name, json.loads(item.arguments)) for item in whole.output if item.type == "function_call"]
        return whole.output_text, calls, whole.usage.output_tokens
    more = {"model": "helper", "messages": question, "tools": [{"type": "function", "function": FUNCTION}]}
    if not stream:
        chat = openais.chat.completions.create(**more)
        message = chat.choices[0].message
        of_message = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
        return message.content or "", of_message, chat.usage.completion_tokens
    chunks = list(openais.chat.completions.create(**more, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    parts = [call.function for delta in deltas for call in delta.tool_calls or ()]
    text = "".join(delta.content or "" for delta in deltas)
    return text, [(part.name, json.loads(part.arguments)) for part in parts], chunks[-1].usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", SERVICES)
def test_text_tools_and_usage_come_back_in_the_dialect_that_asked(
    beside: Served, service: Service, kind: str, dialect: str, stream: bool
) -> None:
    arguments = {"what": "cats"}
    if kind == "litellm to Anthropic":
        tool_use = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": arguments}
        service.script.append({"content": [{"type": "text", "text": "let me see"}, tool_use]})
    else:
        service.script.append({name: value for name, value in CALLED.items() if name != "reasoning_content"})
    tokens = 2 if kind == "litellm to Anthropic" else 5
    assert asked(beside, dialect, stream=stream) == ("let me see", [("look_up", arguments)], tokens)
    [sent] = service.requests
    [tool] = sent["tools"]
    assert (tool.get("function") or tool)["name"] == "look_up"
    beside.seal()
    [span] = calls_in(beside.ledger.spans)
    [shown] = tools_of(beside.ledger.spans).values()
    assert [each["function"]["name"] for each in shown] == ["look_up"]
    assert (span.attributes[semconv.OUTPUT_TOKENS], span.attributes[semconv.REQUEST_MODEL]) == (tokens, "helper")
    [message] = span.attributes[semconv.OUTPUT_MESSAGES]
    assert (message["content"], message["tool_calls"][0]["function"]["name"]) == ("let me see", "look_up")
    assert (span.attributes[semconv.EXACT], span.attributes[semconv.POLICY_VERSIONS]) == (False, [])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize("status", [401, 404, 429, 500])
def test_an_error_is_the_services_own_in_the_dialect_that_asked(
    beside: Served, service: Service, kind: str, dialect: str, stream: bool, status: int
) -> None:
    service.status, service.error = status, "no model remote for the-secret-key"
    service.headers = {"retry-after": "7"}
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as failed:
        asked(beside, dialect, stream=stream)
    names = {401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError", 500: "InternalServerError"}
    assert (failed.value.status_code, type(failed.value).__name__) == (status, names[status])
    assert "no model remote for ***" in str(failed.value)
    assert f"answered {status}" in str(failed.value)
    headers = failed.value.response.headers
    retried = ("true", "7") if status >= 429 else ("false", None)
    assert (headers["x-should-retry"], headers.get("retry-after")) == retried
    beside.seal()
    assert beside.ledger.spans == []
    assert len(service.requests) == 1


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", SERVICES)
def test_a_service_that_breaks_off_or_is_not_there_may_be_asked_again(
    beside: Served, service: Service, kind: str, dialect: str
) -> None:
    service.cuts = True
    with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="or broke off") as failed:
        asked(beside, dialect)
    assert (failed.value.status_code, failed.value.response.headers["x-should-retry"]) == (503, "true")
    service.cuts = False
    assert asked(beside, dialect)[0] == "ok"


@pytest.mark.parametrize("kind", SERVICES)
def test_n_choices_of_a_service_are_n_calls(beside: Served, service: Service, kind: str) -> None:
    service.script.extend(["one", "two", "three"])
    answer = client(beside).chat.completions.create(model="helper", messages=[user("x")], n=3)  # type: ignore[list-item]
    assert sorted(choice.message.content or "" for choice in answer.choices) == ["one", "three", "two"]
    beside.seal()
    assert len(beside.ledger.calls()) == len(service.requests) == 3
