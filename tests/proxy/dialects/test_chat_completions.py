"""Chat Completions as OpenAI's own SDK reads it: fields, errors, whole answers, and streams that add up to them."""

from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_proxy.dialects import chat_completions
from lightning_rl_proxy.dialects.base import NamedTool, Opening
from lightning_rl_proxy.errors import GatewayError, PromptTooLong
from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer, tool_call

USER = {"role": "user", "content": "hi"}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
OPENING = Opening(call_id="c1", model="policy", created=1_700_000_000, prompt_tokens=7)


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [USER], **fields}


def answer(content: str = "", **more: Any) -> ParsedAnswer:
    given = {"reasoning": None, "tool_calls": [], "finish_reason": "stop", "token_ids": [1, 2, 3], "logprobs": None}
    return ParsedAnswer(content=content, decode=lambda ids: f"<{ids[0]}>", output_tokens=3, **(given | more))


def client(body: bytes, *, stream: bool = False, status: int = 200) -> openai.OpenAI:
    kind = "text/event-stream" if stream else "application/json"
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body, headers={"content-type": kind}))
    return openai.OpenAI(api_key="k", base_url="http://x/v1", http_client=httpx.Client(transport=transport))


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"max_tokens": 5}, lambda r: r.sampling.max_tokens == 5),
        ({"max_completion_tokens": 6}, lambda r: r.sampling.max_tokens == 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, lambda r: r.sampling.max_tokens == 6),
        ({"stop": "x"}, lambda r: r.sampling.stop == ["x"]),
        ({"stop": ["x", "y"]}, lambda r: r.sampling.stop == ["x", "y"]),
        ({"stop": []}, lambda r: r.sampling.stop is None),
        ({"response_format": {"type": "json_object"}}, lambda r: r.sampling.json_schema == {}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}},
            lambda r: r.sampling.json_schema == {"type": "array"},
        ),
        (  # a call has no text
            {"response_format": {"type": "json_object"}, "tools": [LOOK_UP], "tool_choice": "required"},
            lambda r: r.sampling.json_schema is None,
        ),
        ({"tools": [LOOK_UP], "tool_choice": "required"}, lambda r: r.tool_choice == "required"),
        (
            {"tools": [LOOK_UP], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
            lambda r: r.tool_choice == NamedTool("look_up"),
        ),
        ({"tools": [LOOK_UP], "parallel_tool_calls": False}, lambda r: not r.parallel_tool_calls),
        ({"stream": True}, lambda r: r.stream),
        ({"logit_bias": {"5": -100}}, lambda r: r.sampling.logit_bias == {"5": -100}),
        ({"what_is_this": 1, "user": "me"}, lambda r: r.ignored_fields == ["what_is_this"]),
    ],
)
def test_a_field_is_honoured(fields: dict[str, Any], read: Callable[[Any], bool]) -> None:
    assert read(chat_completions.parse(asked(**fields)))


@pytest.mark.parametrize(
    "name", sorted(set(chat_completions.ChatCompletionsWire.__struct_fields__) - {"model", "messages"})
)
def test_null_means_not_given(name: str) -> None:
    assert chat_completions.parse(asked(**{name: None})) == chat_completions.parse(asked()).__replace__(
        fields=asked(**{name: None})
    )


def test_every_honoured_field_is_read() -> None:
    tables = chat_completions.TABLES
    assert tables.honoured | set(tables.relaxed) == set(chat_completions.ChatCompletionsWire.__struct_fields__)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{"name": "f"}], "tools": [LOOK_UP]}, "functions"),
        ({"functions": {"name": "f"}}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"stop": [""]}, "stop"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}, "tools": [LOOK_UP]}, "tool_choice"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as error:
        chat_completions.parse(asked(**fields))
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize("fields", [{"messages": []}, {"n": 0}, {"temperature": -1}, {"max_tokens": 0}, {"stop": 1}])
def test_what_is_out_of_range_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(GatewayError, match=rf"\$\.{next(iter(fields))}"):
        chat_completions.parse(asked(**fields))


def test_developers_are_systems_and_texts_in_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    request = chat_completions.parse(
        asked(messages=[{"role": "developer", "content": parts}, {"role": "user", "content": [*parts, image]}])
    )
    assert request.messages[0] == {"role": "system", "content": "ab"}
    assert request.messages[1]["content"] == [*parts, image]


def test_an_answer_is_what_the_sdk_expects() -> None:
    call = tool_call("call_1", "look_up", {"what": "cats"})
    said = answer("look:", reasoning="hm", tool_calls=[call], logprobs=[-0.5, -1.0, -1.5])
    request = chat_completions.parse(asked(logprobs=True))
    read = client(chat_completions.serialize(request, OPENING, [said])).chat.completions.create(**asked())
    [choice] = read.choices
    assert (choice.message.content, choice.finish_reason) == ("look:", "tool_calls")
    assert choice.message.tool_calls[0].function.arguments == '{"what": "cats"}'
    assert choice.message.reasoning_content == "hm"
    assert [(token.token, token.logprob) for token in choice.logprobs.content] == [
        ("<1>", -0.5),
        ("<2>", -1.0),
        ("<3>", -1.5),
    ]
    assert (read.usage.prompt_tokens, read.usage.completion_tokens, read.usage.total_tokens) == (7, 3, 10)


def parts_of(said: ParsedAnswer, sizes: Sequence[int]) -> list[Delta]:
    """The deltas of an answer whose text comes in parts of these sizes."""
    deltas = []
    for kind, text in (("reasoning", said.reasoning or ""), ("content", said.content)):
        left = text
        for size in [*sizes, len(text)]:
            piece, left = left[:size], left[size:]
            if piece:
                deltas.append(Delta(kind=kind, text=piece))
    return deltas + [Delta(kind="tool_call", tool_call=call, tool_index=i) for i, call in enumerate(said.tool_calls)]


def streamed(fields: dict[str, Any], answers: Sequence[ParsedAnswer], sizes: Sequence[int]) -> bytes:
    events = chat_completions.events(chat_completions.parse(fields), OPENING)
    out = [events.start()]
    for index, said in enumerate(answers):
        out += [events.delta(index, delta) for delta in parts_of(said, sizes)] + [events.stop(index, said)]
    return b"".join([*out, events.end(answers)])


@given(
    st.lists(
        st.builds(
            answer,
            st.text(max_size=20),
            reasoning=st.none() | st.text(min_size=1, max_size=20),
            tool_calls=st.lists(
                st.builds(tool_call, st.uuids().map(str), st.sampled_from("ab"), st.dictionaries(st.text(), st.text())),
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.integers(1, 5), max_size=4),
)
def test_a_stream_adds_up_to_the_whole_answer(answers: list[ParsedAnswer], sizes: list[int]) -> None:
    fields = asked(n=len(answers), stream_options={"include_usage": True})
    whole = msgspec.json.decode(chat_completions.serialize(chat_completions.parse(fields), OPENING, answers))
    with client(streamed(fields, answers, sizes), stream=True).chat.completions.stream(**fields) as stream:
        read = stream.get_final_completion().to_dict()
    assert read["usage"] == whole["usage"]
    for got, expected in zip(read["choices"], whole["choices"], strict=True):
        message = expected["message"]
        assert got["finish_reason"] == expected["finish_reason"]
        assert (got["message"].get("content") or "") == (message["content"] or "")
        assert got["message"].get("reasoning_content") == message.get("reasoning_content")
        calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
        read_calls = [
            (c["id"], c["function"]["name"], c["function"]["arguments"]) for c in got["message"].get("tool_calls") or []
        ]
        assert read_calls == calls


def test_a_cut_answer_says_length_in_a_stream_too() -> None:
    body = streamed(asked(), [answer("a", finish_reason="length")], [])
    chunks = list(client(body, stream=True).chat.completions.create(**asked(stream=True)))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]


def test_usage_is_streamed_only_where_it_is_asked_for() -> None:
    assert b"usage" not in streamed(asked(), [answer("a")], [])


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (GatewayError(400, "no", param="n"), openai.BadRequestError),
        (PromptTooLong(9, 8), openai.BadRequestError),
        (GatewayError(404, "no"), openai.NotFoundError),
        (GatewayError(503, "no"), openai.InternalServerError),
    ],
)
def test_errors_are_the_sdks_own(error: GatewayError, raised: type[openai.APIStatusError]) -> None:
    sdk = client(chat_completions.serialize_error(error), status=error.status).with_options(max_retries=0)
    with pytest.raises(raised) as caught:
        sdk.chat.completions.create(**asked())
    assert error.message in str(caught.value)
    assert caught.value.body["param"] == error.param


def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for() -> None:
    told = msgspec.json.decode(chat_completions.serialize_error(PromptTooLong(9, 8)))["error"]
    assert told["code"] == "context_length_exceeded"
    assert "maximum context length is 8 tokens" in told["message"]


def test_an_error_ends_a_stream_as_an_error_of_the_sdk() -> None:
    events = chat_completions.events(chat_completions.parse(asked()), OPENING)
    body = events.start() + chat_completions.PING + chat_completions.error_event(GatewayError(503, "broke off"))
    stream = client(body, stream=True).chat.completions.create(**asked(stream=True))
    with pytest.raises(openai.APIError, match="broke off"):
        list(stream)
