"""A frozen chat model answers every dialect: requests are translated to its chat, answers back, streams as they are."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from lightning_rl_adapters import semconv
from lightning_rl_proxy.engines.chat_backend import OpenAIBackend
from tests.proxy.conftest import Served
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
    [span] = helped.ledger.spans
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
