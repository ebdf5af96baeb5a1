"""Frozen chat models behind the gateway, through the official SDK: relayed as they are, recorded like any call."""

import asyncio
import base64
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest

from lightning_rl_adapters import credit, forest, rows, semconv
from lightning_rl_adapters.media import media_of
from lightning_rl_adapters.span import Span
from lightning_rl_proxy.engines.base import EngineRefused
from lightning_rl_proxy.engines.chat_backend import LitellmBackend, OpenAIBackend
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.routing.router import Router
from tests import seeing
from tests.proxy.conftest import SECRET, MemoryLedger, Served, calls_in, listening
from tests.proxy.engines.service import Service, prompt_ids, running
from tests.proxy.test_gateway import Message, client, post, say, user

OPENAI_FIELDS = frozenset({"model", "messages", "tools", "temperature", "seed", "max_tokens", "logprobs"})


@pytest.fixture
def service() -> Iterator[Service]:
    with running() as service:
        yield service


@pytest.fixture
def helped(served: Served, service: Service) -> Served:
    """The gateway of the policy, with the model `helper` at the service."""
    served.gateway.router.register_backend(OpenAIBackend("helper", service.url, "the-secret-key", "remote"))
    return served


def ask(served: Served, messages: list[Any], **more: Any) -> str:
    return say(client(served), messages, model="helper", **more)


def spans(served: Served) -> list[Span]:
    served.seal()
    return sorted(calls_in(served.ledger.spans), key=lambda span: span.number)


def answered(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_a_request_goes_on_as_it_is_and_its_answer_comes_back_as_it_is(helped: Served, service: Service) -> None:
    service.script.append({"content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "run", "arguments": "{}"}}]})  # fmt: skip
    asked: dict[str, Any] = {
        "messages": [user("one")], "tool_choice": "required", "response_format": {"type": "json_object"},
        "tools": [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}],
        "temperature": 0.25, "stop": ["x"], "logit_bias": {"5": 1}, "frequency_penalty": 0.5,
    }  # fmt: skip
    answer = client(helped).chat.completions.create(model="helper", **asked, extra_body={"novelty": {"a": 1}})
    [sent] = service.requests
    asked_for_tokens = {"return_token_ids": True, "logprobs": True}
    assert sent == asked | {"novelty": {"a": 1}, "model": "remote"} | asked_for_tokens
    assert service.keys == ["Bearer the-secret-key"]
    got = answer.model_dump(exclude_unset=True)
    assert (got["id"], got["model"], got["created"]) == (
        "chatcmpl-service-1", "the-service-model-2026", 1700000000)  # fmt: skip
    assert got["provider_extra"] == {"region": "here"}
    assert got["usage"] == {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
    assert got["choices"][0]["finish_reason"] == "tool_calls"
    assert got["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "run", "arguments": "{}"}
    assert "prompt_token_ids" not in got
    assert "token_ids" not in got["choices"][0]
    assert got["choices"][0]["logprobs"] is None
    assert helped.engine.prompts == []


def test_what_the_agent_asked_to_know_of_tokens_it_is_told(helped: Served) -> None:
    answer = client(helped).chat.completions.create(
        model="helper", messages=[{"role": "user", "content": "one"}], logprobs=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert answer.model_dump()["prompt_token_ids"] == prompt_ids([user("one")])
    assert answer.choices[0].model_dump()["token_ids"] == [ord("o"), ord("k"), 2]
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or []) == 3


def test_a_call_is_recorded_with_its_tokens_where_the_service_tells_them(helped: Served) -> None:
    first = [user("one")]
    second = [*first, answered(ask(helped, first, temperature=0.5)), user("two")]
    ask(helped, second)
    one, two = spans(helped)
    assert one.attributes[semconv.INPUT_TOKENS] == 11
    assert one.attributes[semconv.OUTPUT_TOKENS] == 5
    assert one.attributes[semconv.REQUEST_MODEL] == one.attributes[semconv.RESPONSE_MODEL] == "helper"
    assert one.attributes[semconv.SAMPLING_REQUESTED] == {"temperature": 0.5}
    assert two.attributes[semconv.INPUT_MESSAGES] == [user("two")]
    assert two.attributes[semconv.OUTPUT_MESSAGES] == [answered("ok")]
    first_call, second_call = helped.ledger.calls()
    assert first_call.prompt_ids == prompt_ids(first)
    assert first_call.response_ids == [ord("o"), ord("k"), 2]
    assert first_call.logprobs == [-0.5, -1.0, -1.5]
    assert first_call.versions == []
    assert (first_call.logprob_kind, first_call.temperature, first_call.finish_reason) == ("raw", 0.5, "stop")
    assert second_call.parent_id == first_call.call_id
    whole = first_call.prompt_ids + first_call.response_ids + second_call.prompt_ids
    assert whole == prompt_ids(second)
    assert first_call.exact
    built = forest.build(helped.ledger.calls())
    [row] = rows.cut(built, credit.final_values(built, 1.0))
    assert (row.exact, row.excluded, sum(row.loss_mask)) == (True, "frozen", 6)


def test_a_prompt_that_is_not_the_continuation_is_a_root_with_its_cause(helped: Served, service: Service) -> None:
    first = [user("one")]
    again = [*first, answered(ask(helped, first)), user("two")]
    service.retokenizes = lambda ids: [9, *ids[1:]]  # a template that dropped something of the history
    ask(helped, again)
    _, two = spans(helped)
    assert two.attributes[semconv.FORK_CAUSE] == "not_append_only"
    assert two.attributes[semconv.FORK_AT] == {"token": 0}
    assert two.attributes[semconv.INPUT_MESSAGES] == again
    assert helped.gateway.state()["counters"]["fork_not_append_only"] == 1
    second = helped.ledger.calls()[1]
    assert second.parent_id is None
    assert second.prompt_ids == [9, *prompt_ids(again)[1:]]


def test_logprobs_that_do_not_fit_the_tokens_are_not_invented(helped: Served, service: Service) -> None:
    service.drops_logprobs = 1
    ask(helped, [user("one")])
    helped.seal()
    [call] = helped.ledger.calls()
    assert (call.logprobs, call.exact, len(call.response_ids)) == (None, True, 3)


def test_without_token_ids_the_forest_is_the_same_and_the_row_is_inexact(helped: Served, service: Service) -> None:
    service.tokens = False
    service.script.extend(["A", "B", "C", "D"])
    first = [user("one")]
    then = [*first, answered(ask(helped, first)), user("two")]
    ask(helped, then)
    ask(helped, [*then[:2], user("another")])
    ask(helped, [user("edited"), *then[1:]])
    found = spans(helped)
    calls = helped.ledger.calls()
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, calls[0].call_id, None]
    assert [span.attributes.get(semconv.FORK_CAUSE) for span in found] == [None, None, None, "edited_text"]
    assert all(not call.exact and call.prompt_ids == call.response_ids == [] for call in calls)
    assert all(call.logprobs is None for call in calls)
    built = forest.build(calls)
    cut = rows.cut(built, credit.final_values(built, 1.0))
    assert [(row.exact, row.excluded, row.token_ids) for row in cut] == [(False, "inexact", [])] * 3


def test_a_service_without_token_ids_is_asked_for_them_once(helped: Served, service: Service) -> None:
    service.tokens = False
    ask(helped, [user("one")])
    ask(helped, [user("two")])
    assert ["return_token_ids" in request for request in service.requests] == [True, False]


@pytest.mark.parametrize(
    ("of_answer", "of_choice", "ids"),
    [
        ({"prompt_token_ids": [1]}, {"token_ids": [2]}, ([1], [2])),
        ({}, {"prompt_token_ids": [1], "token_ids": [2]}, ([1], [2])),
        ({}, {"token_ids": [2]}, (None, None)),
        ({"prompt_token_ids": [1]}, {}, (None, None)),
        ({"prompt_token_ids": ["1"]}, {"token_ids": [2]}, (None, None)),
        ({"prompt_token_ids": [1]}, {"token_ids": [-2]}, (None, None)),
    ],
)
def test_tokens_are_known_where_those_of_prompt_and_answer_are_told(
    of_answer: dict[str, Any], of_choice: dict[str, Any], ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, sent = OpenAIBackend("helper", "http://h/v1"), []
    logprobs = {"content": [{"logprob": -0.5}]}

    async def answers(_: str, body: dict[str, Any]) -> bytes:
        sent.append(body)
        choice = {"message": {"content": "a"}, "logprobs": logprobs, **of_choice}
        return msgspec.json.encode({"choices": [choice], **of_answer})

    monkeypatch.setattr(backend, "_send", answers)
    for _ in range(2):
        answer = asyncio.run(backend.complete({"messages": []}))
        assert (answer.prompt_ids, answer.response_ids) == ids
        assert answer.logprobs == (ids[1] and [-0.5])
        assert answer.body == {"choices": [{"message": {"content": "a"}, "logprobs": None}]}
    assert ["return_token_ids" in body for body in sent] == [True, ids[1] is not None]


@pytest.mark.parametrize("status", [400, 403, 405, 422])
def test_a_service_that_refuses_unknown_fields_is_asked_without_from_then_on(
    helped: Served, service: Service, status: int
) -> None:
    service.known_fields, service.unknown_status = OPENAI_FIELDS, status
    assert ask(helped, [user("one")], temperature=0.5) == "ok"
    assert ask(helped, [user("two")]) == "ok"
    assert [sorted(set(request) - {"model", "messages"}) for request in service.requests] == [
        ["logprobs", "return_token_ids", "temperature"], ["temperature"], [],
    ]  # fmt: skip
    helped.seal()
    assert [call.exact for call in helped.ledger.calls()] == [False, False]


def test_half_a_surrogate_pair_from_litellm_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LitellmBackend("helper", "openai/m")
    body = {"choices": [{"message": {"role": "assistant", "content": "a\ud800b"}}]}

    async def answers(*_: Any) -> Any:
        return SimpleNamespace(model_dump=lambda mode: body)

    monkeypatch.setattr(backend, "_ask", answers)
    with pytest.raises(EngineRefused, match="text that is no Unicode, half a surrogate pair") as refused:
        asyncio.run(backend.complete({"messages": []}))
    assert refused.value.status == 502


def test_what_a_call_shows_is_recorded_with_it_where_another_choice_fails(helped: Served, service: Service) -> None:
    service.tokens = False
    service.failures.append((500, {}))
    cat = seeing.picture(1, 16, 24)
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": seeing.data_url(cat)}}]}
    tool = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
    asked: dict[str, Any] = {"model": "helper", "n": 2, "messages": [shown], "tools": [tool]}
    with pytest.raises(openai.InternalServerError):
        client(helped).chat.completions.create(**asked)
    helped.seal()
    recorded = helped.ledger.spans
    [call] = [span for span in recorded if span.name == semconv.CALL_SPAN]  # the answered choice, which nobody received
    assert call.attributes[semconv.INPUT_MESSAGES][0]["content"][0]["image_url"]["url"].startswith("sha256:")
    assert media_of(recorded) == {hashlib.sha256(cat).hexdigest(): cat}
    assert any(span.name == semconv.TOOLS_SPAN for span in recorded)


@pytest.mark.parametrize(
    "url", ["http://me:secret@h/v1", "http://me@h/v1", "http://h/v1?api_key=secret", "http://h/#x"]
)
def test_a_url_that_holds_more_than_a_place_is_refused(url: str) -> None:
    for make in (lambda: OpenAIBackend("m", url), lambda: LitellmBackend("m", "openai/m", url)):
        with pytest.raises(ValueError, match="the url of model 'm' holds a user, a query or a fragment") as refused:
            make()
        assert "secret" not in str(refused.value)


def test_an_agents_own_mistake_does_not_end_the_asking_for_tokens(helped: Served, service: Service) -> None:
    service.status = 400
    with pytest.raises(openai.BadRequestError, match="scripted"):
        ask(helped, [user("one")])
    service.status = 200
    ask(helped, [user("one")])
    helped.seal()
    [call] = helped.ledger.calls()
    assert call.exact


def test_n_choices_are_n_requests_n_calls_and_one_answer(helped: Served, service: Service) -> None:
    service.script.extend(["first", "second", "third"])
    answer = client(helped).chat.completions.create(
        model="helper", messages=[{"role": "user", "content": "one"}], n=3, seed=5
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert sorted(map(str, texts)) == ["first", "second", "third"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (11, 15, 26)
    assert all("n" not in request for request in service.requests)
    assert sorted(request["seed"] for request in service.requests) == [5, 6, 7]
    ask(helped, [user("one"), answered("second"), user("go on")])
    helped.seal()
    calls = helped.ledger.calls()
    assert [call.number for call in calls] == [0, 1, 2, 3]
    assert calls[3].parent_id == calls[texts.index("second")].call_id


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (400, openai.BadRequestError, "scripted"),
        (401, openai.AuthenticationError, "check the api_key"),
        (403, openai.PermissionDeniedError, "check the api_key"),
        (404, openai.NotFoundError, "check the url"),
        (422, openai.UnprocessableEntityError, "scripted"),
        (402, openai.APIStatusError, "answered 402: scripted"),
        (409, openai.BadRequestError, "answered 409: scripted"),
        (307, openai.BadRequestError, "redirects"),
    ],
)
def test_what_the_service_refuses_the_agent_hears_and_need_not_retry(
    helped: Served, service: Service, status: int, error: type[openai.APIStatusError], said: str
) -> None:
    service.status = status
    with pytest.raises(error, match=said) as refused:
        ask(helped, [user("one")])
    assert f"the service at {service.url}, asked for 'remote', answered {status}: scripted" in str(refused.value)
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert len(service.requests) == (1 if status in (401, 404) else 2)  # it may be the fields that we added
    helped.seal()
    assert helped.ledger.calls() == []


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (408, openai.APIStatusError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
        (529, openai.InternalServerError),
    ],
)
def test_a_service_in_trouble_is_told_of_with_its_own_status_and_may_be_tried_again(
    helped: Served, service: Service, status: int, error: type[openai.APIStatusError]
) -> None:
    service.status, service.headers = status, {"retry-after": "7"}
    with pytest.raises(error, match=f"answered {status}: scripted") as failed:
        ask(helped, [user("one")])
    assert failed.value.status_code == status
    assert failed.value.response.headers["x-should-retry"] == "true"
    assert failed.value.response.headers["retry-after"] == "7"
    assert len(service.requests) == 1
    service.status = 200
    assert ask(helped, [user("one")]) == "ok"
    assert "return_token_ids" in service.requests[1]


def test_an_error_has_the_services_own_type_code_and_parameter(helped: Served, service: Service) -> None:
    told = {"message": "too long", "type": "theirs", "param": "messages", "code": "context_length_exceeded"}
    service.status, service.told = 400, {"error": told}
    with pytest.raises(openai.BadRequestError) as failed:
        ask(helped, [user("one")])
    error = failed.value
    assert (error.type, error.param, error.code) == ("theirs", "messages", "context_length_exceeded")


def test_a_service_that_says_not_to_try_again_is_not_contradicted(helped: Served, service: Service) -> None:
    service.status, service.headers = 429, {"x-should-retry": "false"}
    with pytest.raises(openai.RateLimitError) as failed:
        ask(helped, [user("one")])
    assert failed.value.response.headers["x-should-retry"] == "false"


def test_an_sdk_tries_a_busy_service_again_and_has_one_call(helped: Served, service: Service) -> None:
    service.failures.append((429, {"retry-after": "1"}))
    sdk = openai.OpenAI(base_url=helped.base_url(), api_key=helped.key(), max_retries=1)
    answer = sdk.chat.completions.create(model="helper", messages=[user("one")])  # type: ignore[list-item]
    assert answer.choices[0].message.content == "ok"
    helped.seal()
    assert (len(service.requests), len(helped.ledger.calls())) == (2, 1)


def test_a_client_that_times_out_and_asks_again_gets_the_answer_to_its_first_request(
    helped: Served, service: Service
) -> None:
    service.tokens, service.hold = False, threading.Event()
    sdk = openai.OpenAI(base_url=helped.base_url(), api_key=helped.key(), max_retries=1, timeout=1)
    impatient = sdk.with_options(max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(model="helper", messages=[user("one")])  # type: ignore[list-item]
    service.hold.set()
    assert say(sdk, [user("one")], model="helper") == "ok"
    helped.seal()
    assert (len(service.requests), len(helped.ledger.calls())) == (1, 1)


@pytest.mark.parametrize("kind", ["openai", "litellm"])
def test_an_answer_that_is_cut_off_is_a_retryable_503(served: Served, service: Service, kind: str) -> None:
    if kind == "openai":
        served.gateway.router.register_backend(OpenAIBackend("helper", service.url))
    else:
        litellm_helper(served, "openai/whatever", service.url)
    service.cuts = True
    with pytest.raises(openai.InternalServerError, match="cannot be reached, or broke off") as failed:
        ask(served, [user("one")])
    assert (failed.value.status_code, failed.value.response.headers["x-should-retry"]) == (503, "true")
    served.seal()
    assert served.ledger.calls() == []


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("7", 7), ("0", 1), ("1.2", 2), ("900", 60), ("-3", 1), ("inf", 60), ("nan", 60), ("soon", 1), ("", 1),
        ("Sat, 01 Jan 2000 00:00:00 GMT", 1), ("Sat, 01 Jan 2400 00:00:00 GMT", 60),
        ("Sat, 01 Jan 2400 00:00:00 -0000", 60),
    ],
)  # fmt: skip
def test_the_time_to_wait_is_read_as_services_write_it(
    helped: Served, service: Service, said: str, seconds: int
) -> None:
    service.status, service.headers = 503, {"retry-after": said}
    with pytest.raises(openai.InternalServerError) as failed:
        ask(helped, [user("one")])
    assert failed.value.response.headers["retry-after"] == str(seconds)


@pytest.mark.parametrize("key", ["two words", "a-line\n", "schl\u00fcssel-lang"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str) -> None:
    for make in (lambda: OpenAIBackend("helper", "http://h/v1", key), lambda: LitellmBackend("helper", "m", None, key)):
        with pytest.raises(ValueError, match="the api_key of model 'helper' holds what no header can") as refused:
            make()
        assert key.strip() not in str(refused.value)


def test_a_service_that_is_not_there_is_a_retryable_503(served: Served) -> None:
    served.gateway.router.register_backend(OpenAIBackend("helper", "http://127.0.0.1:1/v1"))
    with pytest.raises(openai.InternalServerError, match=r"http://127\.0\.0\.1:1/v1 cannot be reached") as failed:
        ask(served, [user("one")])
    assert failed.value.response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("raw", [b"<html>welcome</html>", b'{"choices": []}', b'{"error": "busy"}', b"[1]"])
def test_what_is_no_chat_completion_is_an_error_that_shows_it(helped: Served, service: Service, raw: bytes) -> None:
    service.raw = raw
    with pytest.raises(openai.APIStatusError, match="what is no chat completion") as failed:
        ask(helped, [user("one")])
    assert failed.value.status_code == 502
    assert failed.value.response.headers["x-should-retry"] == "false"


def test_a_key_that_the_service_repeats_is_not_handed_on(helped: Served, service: Service) -> None:
    service.status, service.error = 401, "wrong key the-secret-key"
    with pytest.raises(openai.AuthenticationError) as refused:
        ask(helped, [user("one")])
    assert "wrong key ***" in str(refused.value)
    assert "the-secret-key" not in str(refused.value)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{nope", None),
        (b'{"model": "helper"}', None),
        (b'{"model": "helper", "messages": "one"}', "messages"),
        (b'{"model": "helper", "messages": ["one"]}', "messages[0]"),
        (b'{"model": "helper", "messages": [{"role": "user", "content": "x"}], "n": 0}', "n"),
        (b'{"model": "helper", "messages": [{"role": "user", "content": "x"}], "stream": 3}', "stream"),
    ],
)
def test_only_what_no_service_could_be_asked_is_refused(
    helped: Served, service: Service, body: bytes, param: str | None
) -> None:
    answer = post(helped, "/v1/chat/completions", body, helped.key())
    assert answer.status == 400
    assert answer.json()["error"]["param"] == param
    assert service.requests == []


def test_messages_that_only_the_service_understands_go_on_and_are_continued(helped: Served, service: Service) -> None:
    service.tokens = False
    pixel = "data:image/png;base64," + base64.b64encode(b"pixel").decode()
    first = [{"role": "user", "content": [{"type": "text", "text": "what is it?"},
                                          {"type": "image_url", "image_url": {"url": pixel}}]}]  # fmt: skip
    odd = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "custom", "custom": {"name": "f", "input": "1"}}]}  # fmt: skip
    service.script.append({key: value for key, value in odd.items() if key != "role"})
    ask(helped, first)
    ask(helped, [*first, odd, {"role": "tool", "tool_call_id": "c", "content": "2"}])
    other = [
        {"role": "user", "content": [first[0]["content"][0], {"type": "image_url", "image_url": {"url": "other"}}]}
    ]
    ask(helped, [*other, odd, user("two")])
    helped.seal()
    calls = helped.ledger.calls()
    assert [call.parent_id for call in calls] == [None, calls[0].call_id, None]


def test_images_go_on_whole_and_are_recorded_once(helped: Served, service: Service) -> None:
    service.tokens = False
    cat = seeing.picture(1, 16, 24)
    shown = {"type": "image_url", "image_url": {"url": seeing.data_url(cat), "detail": "low"}}
    first: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, shown]}]
    said = ask(helped, first)
    ask(helped, [*first, answered(said), {"role": "user", "content": [shown]}])
    assert [request["messages"][-1]["content"][-1] for request in service.requests] == [shown, shown]
    helped.seal()
    one, two = helped.ledger.calls()
    assert two.parent_id == one.call_id
    assert media_of(helped.ledger.spans) == {hashlib.sha256(cat).hexdigest(): cat}
    assert sum(span.name == semconv.MEDIA_SPAN for span in helped.ledger.spans) == 1
    recorded = [s.attributes[semconv.INPUT_MESSAGES] for s in helped.ledger.spans if s.name == semconv.CALL_SPAN]
    reference = {"url": f"sha256:{hashlib.sha256(cat).hexdigest()}", "detail": "low"}
    assert [messages[-1]["content"][-1]["image_url"] for messages in recorded] == [reference, reference]


def test_a_helper_keeps_the_agents_sampling_and_the_policy_takes_what_is_published(
    helped: Served, service: Service
) -> None:
    helped.ledger.sampling = {"temperature": 0.0, "top_p": 0.5, "top_k": -1, "max_tokens": 8}
    asked = {"temperature": 0.7, "max_completion_tokens": 20, "extra_body": {"top_k": 4}}
    ask(helped, [user("one")], **asked)
    helped.gateway.router.policy = "helper"
    ask(helped, [user("one")], **asked)
    ask(helped, [user("one")], max_tokens=3)
    ask(helped, [user("one")])
    names = ("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens")
    sent = [{name: request[name] for name in names if name in request} for request in service.requests]
    published = {"temperature": 0.0, "top_p": 0.5}
    assert sent == [
        {"temperature": 0.7, "max_completion_tokens": 20, "top_k": 4},
        published | {"max_completion_tokens": 8},
        published | {"max_tokens": 3},
        published | {"max_tokens": 8},
    ]
    effective = [span.attributes[semconv.SAMPLING_EFFECTIVE] for span in spans(helped)]
    assert [found["temperature"] for found in effective] == [0.7, 0.0, 0.0, 0.0]


def test_nothing_published_leaves_the_body_alone(helped: Served, service: Service) -> None:
    helped.ledger.sampling = {}
    helped.gateway.router.policy = "helper"
    say(client(helped), [user("one")], model="any-other-name", max_tokens=9, seed=4)
    [sent] = service.requests
    assert sent == {
        "model": "remote", "messages": [user("one")], "max_tokens": 9, "seed": 4, "return_token_ids": True,
        "logprobs": True,
    }  # fmt: skip
    [span] = spans(helped)
    assert span.attributes[semconv.REQUEST_MODEL] == "any-other-name"
    assert span.attributes[semconv.RESPONSE_MODEL] == "helper"


def test_policy_and_helper_in_one_attempt_are_trees_of_their_own(helped: Served) -> None:
    messages = [user("one")]
    assert say(client(helped), messages) == ask(helped, messages) == "ok"
    more = [*messages, answered("ok"), user("two")]
    say(client(helped), more)
    ask(helped, more)
    found = spans(helped)
    calls = helped.ledger.calls()
    assert [call.model for call in calls] == ["policy", "helper", "policy", "helper"]
    assert [call.parent_id for call in calls] == [None, None, calls[0].call_id, calls[1].call_id]
    assert [call.trainable for call in calls] == [True, False, True, False]
    assert all(semconv.FORK_CAUSE not in span.attributes for span in found)


def test_state_models_and_pauses_know_backends(helped: Served, service: Service) -> None:
    ask(helped, [user("one")])
    state = helped.gateway.state()["models"]
    assert state["helper"] == {
        "engines": 1, "in_flight": 0, "parked": 0, "tokens_received": 0, "paused": False, "paused_seconds": None,
        "policy_version": 0, "trainable": False,
        "waiting": 0, "capacity": None,
    }  # fmt: skip
    assert state["policy"]["trainable"] is True
    assert [model.id for model in client(helped).models.list()] == ["policy", "helper"]
    helped.run(lambda: helped.gateway.pause("helper"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, helped, [user("two")])
        assert say(client(helped), [user("the policy goes on")]) == "ok"
        assert helped.gateway.state()["models"]["helper"]["paused"] is True
        assert (len(service.requests), waiting.done()) == (1, False)
        helped.run(lambda: helped.gateway.resume(None, 8))
        assert waiting.result(20) == "ok"
    state = helped.gateway.state()["models"]
    assert (state["helper"]["policy_version"], state["policy"]["policy_version"]) == (0, 8)


def test_two_backends_of_a_model_share_its_calls(helped: Served, service: Service) -> None:
    with running() as other:
        helped.gateway.router.register_backend(OpenAIBackend("helper", other.url))
        service.hold = other.hold = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(ask, helped, [user(text)]) for text in ("one", "two")]
            helped.eventually(lambda: len(service.requests) == len(other.requests) == 1)
            assert helped.gateway.state()["models"]["helper"]["in_flight"] == 2
            service.hold.set()
            assert [answer.result(20) for answer in both] == ["ok", "ok"]


def test_a_name_is_of_engines_or_of_chat_backends(helped: Served) -> None:
    with pytest.raises(ValueError, match="'policy' has token engines already"):
        helped.gateway.router.register_backend(OpenAIBackend("policy", "http://127.0.0.1:1/v1"))
    helped.engine.model = "helper"
    with pytest.raises(ValueError, match="'helper' is a chat backend's already"):
        helped.gateway.router.register(helped.engine)


def test_sealing_aborts_a_call_at_a_service(helped: Served, service: Service) -> None:
    service.hold = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(ask, helped, [user("one")])
        helped.eventually(lambda: len(service.requests) == 1)
        helped.seal()
        with pytest.raises(openai.ConflictError):
            calling.result(20)
        service.hold.set()
    assert helped.ledger.calls() == []
    assert helped.gateway.state()["models"]["helper"]["in_flight"] == 0


def test_a_gateway_without_a_renderer_serves_chat_backends_and_names_what_is_missing(
    tmp_path: Path, service: Service
) -> None:
    ledger, router = MemoryLedger(), Router("gpt")
    gateway = Gateway(ledger=ledger, secret=SECRET, journal=tmp_path / "journal", renderer=None, router=router)
    with listening(gateway) as (url, loop):
        chat_only = Served(url, gateway, ledger, None, loop)  # type: ignore[arg-type]
        with pytest.raises(openai.InternalServerError, match="no engine serves model 'gpt'"):
            say(client(chat_only), [user("one")], model="gpt")
        router.register_backend(OpenAIBackend("gpt", service.url))
        assert say(client(chat_only), [user("one")], model="whatever") == "ok"


def litellm_helper(served: Served, model: str, url: str, key: str = "x") -> None:
    served.gateway.router.register_backend(LitellmBackend("helper", model, api_base=url, api_key=key))


def test_litellm_relays_what_an_agent_may_say_and_nothing_else(served: Served, service: Service) -> None:
    litellm_helper(served, "openai/whatever", service.url)
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    not_the_agents = {"api_base": "http://127.0.0.1:1", "mock_response": "forged", "novelty": 1}
    assert ask(served, [user("one")], tools=tools, temperature=0.5, extra_body=not_the_agents) == "ok"
    [sent] = service.requests
    assert sent == {"model": "whatever", "messages": [user("one")], "tools": tools, "temperature": 0.5}
    assert service.keys == ["Bearer x"]
    [span] = spans(served)
    assert sorted(span.attributes[semconv.IGNORED_FIELDS]) == ["api_base", "mock_response", "novelty"]
    assert (span.attributes[semconv.INPUT_TOKENS], span.attributes[semconv.OUTPUT_TOKENS]) == (11, 5)
    [call] = served.ledger.calls()
    assert (call.exact, call.prompt_ids, call.finish_reason) == (False, [], "stop")


def test_litellm_speaks_other_dialects(served: Served, service: Service) -> None:
    litellm_helper(served, "anthropic/claude-3-5-haiku-20241022", service.url.removesuffix("/v1"), "an-anthropic-key")
    service.script.extend(["hello", "again"])
    first = [user("one")]
    second = [*first, answered(ask(served, first)), user("two")]
    assert ask(served, second) == "again"
    assert service.keys == ["an-anthropic-key"] * 2
    assert [message["role"] for message in service.requests[1]["messages"]] == ["user", "assistant", "user"]
    found = spans(served)
    one, two = served.ledger.calls()
    assert two.parent_id == one.call_id
    assert found[0].attributes[semconv.INPUT_TOKENS] == 7


@pytest.mark.parametrize(
    ("status", "error", "retry"),
    [
        (400, openai.BadRequestError, "false"),
        (401, openai.AuthenticationError, "false"),
        (404, openai.NotFoundError, "false"),
        (429, openai.RateLimitError, "true"),
        (500, openai.InternalServerError, "true"),
    ],
)
def test_litellms_errors_are_told_like_the_services_own(
    served: Served, service: Service, status: int, error: type[openai.APIStatusError], retry: str
) -> None:
    litellm_helper(served, "openai/whatever", service.url, "a-secret-key")
    service.status, service.error, service.headers = status, "no, a-secret-key", {"retry-after": "7"}
    with pytest.raises(error, match=r"no, \*\*\*") as failed:
        ask(served, [user("one")])
    assert failed.value.status_code == status
    assert failed.value.response.headers["x-should-retry"] == retry
    assert failed.value.response.headers.get("retry-after") == ("7" if retry == "true" else None)
    assert f"litellm's openai/whatever at {service.url} answered {status}" in str(failed.value)
    assert len(service.requests) == 1  # no retries of litellm's own


def test_a_key_that_litellm_finds_in_the_environment_is_not_told(
    served: Served, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the-environments-key")
    url = service.url.removesuffix("/v1")
    served.gateway.router.register_backend(LitellmBackend("helper", "anthropic/claude-3-5-haiku-20241022", url))
    assert ask(served, [user("one")]) == "ok"
    service.status, service.error = 401, "you sent the-environments-key"
    with pytest.raises(openai.AuthenticationError, match=r"you sent \*\*\*"):
        ask(served, [user("two")])
    assert service.keys == ["the-environments-key"] * 2


def test_litellms_service_that_is_not_there_is_a_retryable_503(served: Served) -> None:
    litellm_helper(served, "openai/whatever", "http://127.0.0.1:1/v1")
    with pytest.raises(openai.InternalServerError) as failed:
        ask(served, [user("one")])
    assert (failed.value.status_code, failed.value.response.headers["x-should-retry"]) == (503, "true")


def test_without_litellm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-rl\[litellm\]'"):
        LitellmBackend("helper", "openai/whatever")
