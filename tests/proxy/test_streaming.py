"""Streams: they leave as tokens come, stay alive, break honestly, and add up to what is recorded."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import from_span
from lightning_rl_proxy.dialects import chat_completions, completions, messages, responses
from lightning_rl_proxy.dialects.base import Dialect, Opening
from lightning_rl_proxy.forest.raw_prompts import RawPromptReader
from lightning_rl_proxy.rendering.parsing import AnswerEnd, AnswerParser
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.proxy.conftest import EITHER_SERVER, Served, calls_in
from tests.random_examples import examples

USER = {"role": "user", "content": "how many?"}
ASKED: dict[str, Any] = {"model": "policy", "messages": [USER], "stream": True}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"what": "cats"}}\n</tool_call>'


@contextmanager
def streaming(
    served: Served,
    path: str = "/v1/chat/completions",
    timeout: float = 20,
    headers: Mapping[str, str] = MappingProxyType({}),
    **body: Any,
) -> Iterator[Any]:
    sent = {"authorization": f"Bearer {served.key()}", **headers}
    with httpx.stream("POST", served.url + path, json=ASKED | body, headers=sent, timeout=timeout) as response:
        yield response


def events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def permit(served: Served, tokens: int) -> None:
    async def release() -> None:
        assert served.engine.steps is not None
        for _ in range(tokens):
            served.engine.steps.release()

    served.run(release)


def text_of(chunks: Iterator[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_the_first_bytes_leave_with_the_first_tokens(served: Served) -> None:
    served.engine.steps = asyncio.Semaphore(0)
    served.engine.script.append("one two three four")
    threading.Timer(0.05, lambda: permit(served, 2)).start()
    with streaming(served) as response:
        chunks = events(response)
        assert next(chunks)["choices"][0]["delta"]["role"] == "assistant"
        first = next(chunks)["choices"][0]["delta"]["content"]
        assert first
        assert first != "one two three four"
        permit(served, 100)
        assert first + text_of(chunks) == "one two three four"


def test_a_silent_stream_gets_pings(served: Served) -> None:
    served.gateway.patience.ping_seconds = 0.02
    served.engine.steps = asyncio.Semaphore(0)
    with streaming(served) as response:
        lines = response.iter_lines()
        assert next(lines) == ": ping"
        assert next(lines) == ""
        assert next(lines) == ": ping"
        permit(served, 100)
        assert "data: [DONE]" in list(lines)
    served.seal()
    [call] = served.ledger.calls()
    assert call.delivered


@EITHER_SERVER
def test_a_client_that_leaves_a_stream_gets_nothing_trained(served: Served) -> None:
    served.gateway.patience.ping_seconds = 3600  # what does not write hears of it all the same
    served.engine.steps = asyncio.Semaphore(1)
    served.engine.script.append("one two three four")
    with streaming(served) as response:
        next(response.iter_lines())
    served.eventually(lambda: served.engine.aborted == 1)  # after the grace time
    served.seal()
    [call] = served.ledger.calls()
    assert not call.delivered
    assert call.finish_reason == "abort"
    assert len(call.response_ids) == 1 == served.gateway.state()["models"]["policy"]["tokens_received"]


def test_a_retry_joins_a_stream_and_reads_it_from_the_start(served: Served) -> None:
    served.gateway.patience.grace_seconds = 30
    served.engine.steps = asyncio.Semaphore(1)
    served.engine.script.append("one two three four")
    with streaming(served) as response:
        next(response.iter_lines())
    served.eventually(lambda: any(e.client_gone for a in served.gateway.attempts
                                  for es in a.inflight.values() for e in es))  # fmt: skip
    threading.Timer(0.05, lambda: permit(served, 100)).start()
    with streaming(served) as response:
        assert text_of(events(response)) == "one two three four"
    served.seal()
    [call] = served.ledger.calls()
    assert call.delivered
    assert len(served.engine.prompts) == 1


def test_sealing_breaks_a_stream_off_and_keeps_its_tokens_as_undelivered(served: Served) -> None:
    served.engine.steps = asyncio.Semaphore(2)
    served.engine.script.append("one two three four")
    with streaming(served) as response:
        chunks = events(response)
        next(chunks)
        threading.Timer(0.05, served.seal).start()
        *_, last = chunks
    assert last["error"]["code"] == 409
    served.eventually(lambda: len(served.ledger.calls()) == 1)
    [call] = served.ledger.calls()
    assert (call.delivered, len(call.response_ids)) == (False, 2)


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", {}, b'"finish_reason":"stop"'),
        ("/v1/messages", {"max_tokens": 9}, b"message_delta"),
        ("/v1/responses", {"input": "x"}, b"response.completed"),
        ("/v1/completions", {"prompt": "x"}, b'"finish_reason":"stop"'),
    ],
)
def test_how_a_stream_ended_is_said_only_when_its_call_is_recorded(
    served: Served, path: str, body: dict[str, Any], end: bytes
) -> None:
    """Many clients stop reading there, and have had the whole answer."""
    with streaming(served, path, **body) as response:
        assert end in response.read()
    [inflight] = [e for a in served.gateway.attempts for es in a.inflight.values() for e in es]
    assert end not in b"".join(inflight.pieces())


def test_a_delivered_stream_is_kept_in_little_room_and_told_again_whole(served: Served) -> None:
    served.gateway.patience.grace_seconds = 30
    served.engine.script += [" ".join(f"word{i}" for i in range(400))]
    with streaming(served) as response:
        first = response.read()
    [inflight] = [e for a in served.gateway.attempts for es in a.inflight.values() for e in es]
    served.eventually(lambda: inflight._packed is not None)
    assert 10 * len(inflight._packed or b"") < len(first)
    retry = {"x-stainless-retry-count": "1"}
    with streaming(served, headers=retry) as response:
        assert response.read() == first
    assert served.gateway.counters["joined_retries"] == 1
    served.eventually(lambda: inflight._packed is not None)


def test_stop_strings_end_an_answer_and_its_generation(served: Served, tokenizer: FastTokenizer) -> None:
    served.engine.script.append("SELECT 1; and then a lot that nobody asked for")
    sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key())
    answer = sdk.chat.completions.create(model="policy", messages=[USER], stop=["; and", "never"])  # type: ignore[arg-type, list-item]
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("SELECT 1", "stop")
    assert served.engine.aborted == 1
    served.seal()
    [call] = served.ledger.calls()
    assert tokenizer.decode(call.response_ids).startswith("SELECT 1; and")
    assert call.finish_reason == "stop"
    assert answer.usage is not None
    received = served.gateway.state()["models"]["policy"]["tokens_received"]
    assert received == answer.usage.completion_tokens + call.overshoot == call.sampled_tokens


def test_the_next_turn_keeps_the_tokens_of_a_stop_string(served: Served) -> None:
    served.engine.script.extend(["SELECT 1; and more", "done"])
    sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key())
    history: list[Any] = [USER]
    for _ in range(2):
        said = sdk.chat.completions.create(model="policy", messages=history, stop=";").choices[0].message.content
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    served.seal()
    one, two = served.ledger.calls()
    assert two.parent_id == one.call_id
    assert served.engine.prompts[1][: len(one.prompt_ids + one.response_ids)] == one.prompt_ids + one.response_ids


def test_one_tool_call_is_all_where_parallel_ones_are_not_wanted(served: Served) -> None:
    served.engine.script.append(f"{CALL}\n{CALL}")
    sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key())
    answer = sdk.chat.completions.create(
        model="policy", messages=[USER], tools=[LOOK_UP], parallel_tool_calls=False  # type: ignore[arg-type, list-item]
    )  # fmt: skip
    assert len(answer.choices[0].message.tool_calls or ()) == 1
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_forced_tool_call_begins_with_tokens_that_nobody_sampled(served: Served, tokenizer: FastTokenizer) -> None:
    served.engine.script.append('{"what": "cats"}}\n</tool_call>')
    sdk = openai.OpenAI(base_url=served.base_url(), api_key=served.key())
    answer = sdk.chat.completions.create(
        model="policy", messages=[USER], tools=[LOOK_UP],  # type: ignore[arg-type, list-item]
        tool_choice={"type": "function", "function": {"name": "look_up"}},
    )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"what": "cats"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    sdk.chat.completions.create(
        model="policy", messages=[USER, answer.choices[0].message.to_dict(), result], tools=[LOOK_UP]  # type: ignore[arg-type, list-item]
    )  # fmt: skip
    served.seal()
    one, two = served.ledger.calls()
    assert tokenizer.decode(one.prompt_ids).endswith('{"name": "look_up", "arguments": ')
    assert tokenizer.decode(one.response_ids).startswith('{"what": "cats"}}')
    assert two.parent_id == one.call_id


def test_several_choices_are_streamed_side_by_side(served: Served) -> None:
    served.engine.script.extend(["first one", "second one"])
    with streaming(served, n=2, stream_options={"include_usage": True}) as response:
        chunks = list(events(response))
    said = [
        "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"] if c["index"] == i)
        for i in range(2)
    ]
    assert sorted(said) == ["first one", "second one"]
    served.seal()
    assert chunks[-1]["usage"]["completion_tokens"] == sum(len(call.response_ids) for call in served.ledger.calls())


DIALECTS: dict[str, tuple[Dialect, str, dict[str, Any]]] = {
    "chat": (chat_completions, "/v1/chat/completions", ASKED | {"tools": [LOOK_UP]}),
    "completions": (completions, "/v1/completions", {"model": "policy", "prompt": "Once", "stream": True}),
    "responses": (
        responses,
        "/v1/responses",
        {"model": "policy", "input": "how many?", "stream": True, "tools": [{"type": "function", "name": "look_up"}]},
    ),
    "messages": (
        messages,
        "/v1/messages",
        {
            "model": "policy",
            "messages": [USER],
            "stream": True,
            "max_tokens": 64,
            "tools": [{"name": "look_up", "input_schema": {"type": "object"}}],
        },
    ),
}
PIECES = st.lists(
    st.sampled_from(
        ["SELECT", " 1", "<think>", "</think>", "\n", " ", "é", "🙂", CALL, "<tool_call>", "{", '"a"', "STOP"]
    ),
    max_size=8,
)


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=PIECES, stop=st.booleans())
def test_the_recorded_ids_through_the_serializer_are_the_streamed_events(
    served: Served, renderer: LibraryRenderer, name: str, pieces: list[str], stop: bool
) -> None:
    dialect, path, fields = DIALECTS[name]
    stop_field = {"messages": {"stop_sequences": ["STOP"]}}.get(name, {"stop": ["STOP"]}) if stop else {}
    fields = fields | stop_field
    served.ledger.spans.clear()
    served.engine.script.append("".join(pieces))
    key = {"authorization": f"Bearer {served.key()}"}
    streamed = httpx.post(served.url + path, json=fields, headers=key, timeout=20).content
    served.run(served.gateway._recorder.stored)
    [span] = calls_in(served.ledger.spans)
    call, request = from_span(span), dialect.parse(fields)
    opening = Opening(
        call_id=call.call_id,
        model=call.model,
        created=span.start_ns // 10**9,
        prompt_tokens=span.attributes[semconv.INPUT_TOKENS],
    )
    told = dialect.events(request, opening)
    renderer = served.gateway._renderer
    assert renderer is not None
    parser = AnswerParser(
        renderer if request.prompt is None else RawPromptReader(renderer), call.call_id, call.prompt_ids, request.tools,
        AnswerEnd(request.sampling.stop or ()),
    )  # fmt: skip
    out = [told.start()]
    for token, logprob in zip(call.response_ids, call.logprobs or [], strict=True):
        out += [told.delta(0, delta) for delta in parser.push([token], [logprob])]
    answer, rest = parser.finish(call.finish_reason)
    out += [told.delta(0, delta) for delta in rest] + [told.stop(0, answer), told.end([answer])]
    assert b"".join(out) == streamed
