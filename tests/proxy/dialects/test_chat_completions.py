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
from lightning_rl_proxy.dialects.base import NamedTool, Opening, decode
from lightning_rl_proxy.errors import GatewayError, PromptTooLong
from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer, SampledToken, tool_call

USER = {"role": "user", "content": "hi"}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
FUNCTION_CALL = {"name": "f", "arguments": "{}"}
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
        (  # an engine would hold a call to it
            {"response_format": {"type": "json_object"}, "tools": [LOOK_UP]},
            lambda r: (r.sampling.json_schema, r.ignored_fields) == (None, ["response_format"]),
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            lambda r: r.ignored_fields == ["tools[0].function.strict"],
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
        ({"tools": [LOOK_UP], "tool_choice": "none"}, lambda r: r.tool_choice == "none"),
        ({"tools": [LOOK_UP]}, lambda r: r.parallel_tool_calls and r.tool_choice == "auto"),
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
        ({"stop": ["x", ""]}, "stop"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}, "tools": [LOOK_UP]}, "tool_choice"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "custom": {"name": "f", "input": "1"}}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {
                "tools": [LOOK_UP],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": ["f"]}]}},
            },
            "tool_choice",
        ),
        ({"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": True}, "messages[0]"),
        ({"messages": [USER, USER], "continue_final_message": True}, "messages[1]"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
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


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"content": None, "tool_calls": []}, {"content": "", "tool_calls": []}),
        ({"content": [{"type": "refusal", "refusal": "no"}, "t"]}, {"content": "not"}),
        ({"content": "a", "reasoning": "new"}, {"content": "a", "reasoning": "new", "reasoning_content": "new"}),
        (
            {"content": "a", "reasoning": "new", "reasoning_content": "old"},
            {"content": "a", "reasoning": "new", "reasoning_content": "old"},
        ),
    ],
)
def test_what_an_assistant_said_is_read_in_the_words_of_several_clients(
    message: dict[str, Any], read: dict[str, Any]
) -> None:
    request = chat_completions.parse(asked(messages=[{"role": "assistant", **message}]))
    assert request.messages == [{"role": "assistant", **read}]


def test_the_result_of_a_function_is_that_of_the_latest_call_also_of_an_earlier_request() -> None:
    def calls(number: int) -> dict[str, Any]:
        call = {"id": f"function_{number}", "type": "function", "function": FUNCTION_CALL}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def result(number: int) -> dict[str, Any]:
        return {"role": "tool", "name": "f", "content": "done", "tool_call_id": f"function_{number}"}

    read = [calls(0), result(0), calls(2)]
    said = {"role": "function", "name": "f", "content": "done"}
    again = {"role": "assistant", "content": None, "function_call": FUNCTION_CALL}
    request = chat_completions.parse(asked(messages=[said, again, said], functions=[{"name": "f"}]), read)
    assert request.messages == [*read, result(2), calls(4), result(4)]
    assert request.known == 3


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({}, ("", None, 1, False, False)),
        ({"model": "m", "tools": [1], "n": 2, "logprobs": True, "return_token_ids": True}, ("m", [1], 2, True, True)),
        ({"model": 1, "tools": "x", "n": None, "logprobs": 1, "return_token_ids": 1}, ("", None, 1, False, False)),
    ],
)
def test_of_a_request_that_goes_on_to_a_service_only_what_the_gateway_needs_is_read(
    fields: dict[str, Any], read: Any
) -> None:
    request = chat_completions.parse_relayed({"messages": [], **fields})
    assert (request.model, request.tools, request.n, request.logprobs, request.token_ids) == read


@pytest.mark.parametrize(
    ("usages", "merged"),
    [
        ([{"prompt_tokens": 7, "completion_tokens": 3}, {"prompt_tokens": 9, "completion_tokens": None}], (7, 3, 10)),
        ([{"prompt_tokens": None}, None], (0, 0, 0)),
        ([None, None], None),
    ],
)
def test_usages_of_several_answers_are_one_as_far_as_services_tell(usages: list[Any], merged: Any) -> None:
    answers = [{"choices": [{"index": 0, "text": str(i)}], "usage": usage} for i, usage in enumerate(usages)]
    told = msgspec.json.decode(chat_completions.merge(answers))
    assert [(choice["index"], choice["text"]) for choice in told["choices"]] == [(0, "0"), (1, "1")]
    assert (told["usage"] and tuple(told["usage"].values())) == merged


@pytest.mark.parametrize(
    ("fields", "known", "told"),
    [
        ({}, True, None),
        ({"logprobs": True}, False, None),
        ({"logprobs": True}, True, ("<1>", [])),
        ({"logprobs": True, "top_logprobs": 2}, True, ("<1>", ["<1>"])),
        ({"logprobs": True, "return_tokens_as_token_ids": True}, True, ("token_id:1", [])),
    ],
)
def test_logprobs_are_told_as_far_as_they_are_asked_for_and_known(
    fields: dict[str, Any], known: bool, told: Any
) -> None:
    said = answer("a", token_ids=[1], logprobs=[-0.5] if known else None)
    whole = chat_completions.serialize(chat_completions.parse(asked(**fields)), OPENING, [said])
    logprobs = msgspec.json.decode(whole)["choices"][0]["logprobs"]
    if told is None:
        assert logprobs is None
    else:
        [token] = logprobs["content"]
        assert (token["token"], [top["token"] for top in token["top_logprobs"]]) == told
        assert token["bytes"] == list(b"<1>")


def test_the_bytes_of_a_part_of_a_character_are_not_known() -> None:
    request = chat_completions.parse(asked(logprobs=True))
    [token] = chat_completions.token_logprobs([SampledToken(1, "\ufffd", -1.0)], request) or []
    assert token["bytes"] is None


@pytest.mark.parametrize("half", ["\\ud83d", "a\\ud83db", "\\udf32"])
def test_half_a_character_is_named(half: str) -> None:
    with pytest.raises(GatewayError, match="is half of a surrogate pair"):
        decode(b'{"a": "%s"}' % half.encode())
    assert decode(b'{"a": "\\ud83c\\udf32"}') == {"a": "🌲"}
    with pytest.raises(GatewayError, match="malformed"):  # of another cause
        decode(b'{"a": "\\\\ud83d", "b": }')


@pytest.mark.parametrize("fields", [{"tools": [LOOK_UP]}, {"functions": [{"name": "f"}]}])
def test_a_call_in_an_answer_that_was_cut_does_not_hide_the_cut(fields: dict[str, Any]) -> None:
    said = answer(tool_calls=[tool_call("call_1", "f", {})], finish_reason="length")
    whole = chat_completions.serialize(chat_completions.parse(asked(**fields)), OPENING, [said])
    [choice] = msgspec.json.decode(whole)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None


def test_a_client_that_knows_functions_gets_the_first_call_and_its_tokens() -> None:
    calls = [tool_call("call_1", "f", {}), tool_call("call_2", "g", {})]
    request = chat_completions.parse(asked(functions=[{"name": "f"}, {"name": "g"}], return_token_ids=True))
    whole = msgspec.json.decode(chat_completions.serialize(request, OPENING, [answer(tool_calls=calls)]))
    assert whole["choices"][0]["message"]["function_call"]["name"] == "f"
    events = chat_completions.events(request, OPENING)
    delta = Delta(kind="tool_call", tool_call=calls[0], tokens=[SampledToken(5, "f", -1.0)])
    [choice] = msgspec.json.decode(events.delta(0, delta).removeprefix(b"data: "))["choices"]
    assert choice["delta"] == {"function_call": calls[0]["function"]}
    assert choice["token_ids"] == [5]


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
    body = streamed(asked(stream_options={"include_usage": True}), [answer("a")], [])
    told = [chunk.usage for chunk in client(body, stream=True).chat.completions.create(**asked(stream=True))]
    assert [usage is None for usage in told] == [True, True, True, False]
    assert body.count(b'"usage":null') == 3


def test_a_stream_begins_every_choice() -> None:
    events = chat_completions.events(chat_completions.parse(asked(n=3)), OPENING)
    chunks = [msgspec.json.decode(line.removeprefix(b"data: ")) for line in events.start().split(b"\n\n") if line]
    assert [(choice["index"], choice["delta"]["role"]) for chunk in chunks for choice in chunk["choices"]] == [
        (0, "assistant"), (1, "assistant"), (2, "assistant"),
    ]  # fmt: skip


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
