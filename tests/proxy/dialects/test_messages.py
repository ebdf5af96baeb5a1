"""The Messages dialect, judged by Anthropic's own SDK: it reads our bytes, and its types write the requests."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import anthropic
import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from lightning_rl_proxy.dialects import messages
from lightning_rl_proxy.dialects.base import NamedTool, Opening, Request, decode
from lightning_rl_proxy.errors import GatewayError, PromptTooLong
from lightning_rl_proxy.forest import message_fingerprint
from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer, tool_call

OPENING = Opening(call_id="c7", model="policy", created=1_700_000_000, prompt_tokens=25)
USER = {"role": "user", "content": "hi"}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {}}}
PIXEL = {"type": "base64", "media_type": "image/png", "data": "aGk="}


def fields(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 64, "messages": list(turns) or [USER], **more}


def parsed(*turns: dict[str, Any], **more: Any) -> Request:
    return messages.parse(fields(*turns, **more))


def refused(given: dict[str, Any]) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        messages.parse(given)
    assert caught.value.status == 400
    return caught.value


def blocks(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def result(call_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **more}


def use(call_id: str, given: Any, name: str = "weather") -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def answer(content: str = "", reasoning: str | None = None, calls: Sequence[str] = (), **more: Any) -> ParsedAnswer:
    return ParsedAnswer(
        **{
            "content": content,
            "reasoning": reasoning,
            "tool_calls": [tool_call(f"call_{i}", "weather", arguments) for i, arguments in enumerate(calls)],
            "finish_reason": "stop",
            "token_ids": [1, 2, 3],
            "logprobs": None,
            "decode": lambda ids: "",
            "output_tokens": 3,
            **more,
        }
    )


def streamed(deltas: Sequence[Delta], said: ParsedAnswer) -> bytes:
    events = messages.events(parsed(stream=True), OPENING)
    return b"".join(
        [events.start(), *(events.delta(0, delta) for delta in deltas), events.stop(0, said), events.end([said])]
    )


def whole(said: ParsedAnswer) -> bytes:
    return messages.serialize(parsed(), OPENING, [said])


class Service:
    """Answers every request with the same bytes, and keeps what was asked."""

    def __init__(self, body: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.asked: list[dict[str, Any]] = []
        self._body, self._status = body, status
        kind = b"text/event-stream" if body.startswith(b"event:") else b"application/json"
        self._headers = [(b"content-type", kind), *headers]

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(decode(request.content))
        return httpx2.Response(self._status, headers=self._headers, content=self._body)

    def client(self) -> anthropic.Anthropic:
        http = httpx2.Client(transport=httpx2.MockTransport(self))
        return anthropic.Anthropic(api_key="k", base_url="http://gateway", http_client=http, max_retries=0)

    def async_client(self) -> anthropic.AsyncAnthropic:
        http = httpx2.AsyncClient(transport=httpx2.MockTransport(self))
        return anthropic.AsyncAnthropic(api_key="k", base_url="http://gateway", http_client=http, max_retries=0)


def created(said: ParsedAnswer) -> anthropic.types.Message:
    return Service(whole(said)).client().messages.create(model="m", max_tokens=64, messages=[USER])


def accumulated(deltas: Sequence[Delta], said: ParsedAnswer) -> anthropic.types.Message:
    client = Service(streamed(deltas, said)).client()
    with client.messages.stream(model="m", max_tokens=64, messages=[USER]) as stream:
        return stream.get_final_message()


def deltas_of(said: ParsedAnswer, size: int = 3) -> list[Delta]:
    """An answer's deltas in the usual order."""
    cut = [
        Delta(kind=kind, text=whole_text[i : i + size])
        for kind, whole_text in (("reasoning", said.reasoning or ""), ("content", said.content))
        for i in range(0, len(whole_text), size)
    ]
    calls = [Delta(kind="tool_call", tool_call=call, tool_index=i) for i, call in enumerate(said.tool_calls)]
    return cut + calls


# Requests


def test_a_plain_request_becomes_its_message_and_its_sampling():
    request = parsed(system="be kind", temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["END"], stream=True, seed=7)
    assert request.messages == [{"role": "system", "content": "be kind"}, USER]
    assert request.model == "m"
    assert request.stream
    assert request.n == 1
    assert request.ignored_fields == []
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.max_tokens, sampling.stop, sampling.seed) == (64, ["END"], 7)


def test_fields_that_the_api_lacks_are_honoured_where_the_engine_has_them():
    sampling = parsed(min_p=0.1, frequency_penalty=0.2, presence_penalty=0.3, repetition_penalty=1.1).sampling
    assert (sampling.min_p, sampling.frequency_penalty, sampling.presence_penalty) == (0.1, 0.2, 0.3)
    assert sampling.repetition_penalty == 1.1
    assert parsed(logit_bias={"5": -100}).sampling.logit_bias == {"5": -100}


def test_a_temperature_above_one_is_taken_and_top_k_zero_means_all():
    sampling = parsed(temperature=1.7, top_k=0).sampling
    assert (sampling.temperature, sampling.top_k) == (1.7, -1)


def test_every_optional_field_may_be_null():
    optional = set(messages.TABLES.honoured | messages.TABLES.hints | set(messages.TABLES.off))
    nulls = dict.fromkeys(optional - {"model", "messages", "max_tokens"})
    assert msgspec.structs.replace(parsed(**nulls, thinking=None), fields=fields()) == parsed()


def test_system_blocks_are_one_text_and_an_empty_system_is_none():
    system = [{**text("one "), "cache_control": {"type": "ephemeral"}}, text("two")]
    assert parsed(system=system).messages[0] == {"role": "system", "content": "one two"}
    assert parsed(system="").messages == [USER]
    assert parsed(system=[]).messages == [USER]


def test_a_billing_header_in_the_system_is_no_prompt():
    header = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    agent = "You are an agent."
    first = parsed(system=[text(header.format("fa690")), text(agent)])
    again = parsed(system=[text(header.format("0aaa9")), text(agent)])
    line = parsed(system=header.format("12345") + "\n" + agent)
    assert first.messages == again.messages == line.messages == [{"role": "system", "content": agent}, USER]
    kept = "about x-anthropic-billing-header: nothing"
    assert parsed(system=kept).messages[0]["content"] == kept


def test_a_system_message_in_the_conversation_stays_where_it_is():
    said = parsed(USER, {"role": "system", "content": [text("now "), text("rhyme")]}).messages
    assert said == [USER, {"role": "system", "content": "now rhyme"}]


def test_images_become_data_urls_beside_text():
    asked = blocks(
        text("what is"),
        {"type": "image", "source": PIXEL},
        {"type": "image", "source": PIXEL | {"media_type": "image/webp"}},
        {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
    )
    assert parsed(asked).messages[0]["content"] == [
        text("what is"),
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "image_url", "image_url": {"url": "data:image/webp;base64,aGk="}},
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
    ]


def test_neighbouring_messages_of_one_role_are_one_turn():
    said = parsed(
        USER,
        blocks(text("you"), text("there")),
        blocks(text("a"), role="assistant"),
        blocks(use("t", {}), role="assistant"),
        blocks(result("t")),
        USER,
    ).messages
    assert said == [
        {"role": "user", "content": "hi\n\nyouthere"},
        {"role": "assistant", "content": "a", "tool_calls": [tool_call("t", "weather", "{}")]},
        {"role": "tool", "tool_call_id": "t", "content": ""},
        USER,
    ]


def test_tool_results_come_before_what_the_user_says_and_in_order():
    turn = blocks(
        text("and "),
        result("b", content="2"),
        result("a", content=[text("1"), {"type": "image", "source": PIXEL}]),
        text("so?"),
    )
    assert parsed(turn).messages == [
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {
            "role": "tool",
            "tool_call_id": "a",
            "content": [text("1"), {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}],
        },
        {"role": "user", "content": "and so?"},
    ]


def test_a_turn_without_text_adds_no_break_and_is_not_lost():
    assert parsed(USER, blocks(result("t"))).messages == [{"role": "tool", "tool_call_id": "t", "content": ""}, USER]
    assert parsed(blocks()).messages == [{"role": "user", "content": ""}]


def test_the_model_is_told_that_a_call_failed():
    turn = blocks(
        result("a", content="no such file", is_error=True), result("b", is_error=True), result("c", is_error=False)
    )
    assert [message["content"] for message in parsed(turn).messages] == ["Error: no such file", "Error: ", ""]


def test_thinking_that_is_sent_back_is_reasoning_and_redacted_thinking_is_dropped():
    turn = blocks(
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "secret"},
        {"type": "thinking", "thinking": ", yes", "signature": "y"},
        text("4"),
        role="assistant",
    )
    assert parsed(USER, turn, USER).messages[1] == {"role": "assistant", "content": "4", "reasoning_content": "hm, yes"}


def test_cache_control_anywhere_changes_nothing():
    mark = {"cache_control": {"type": "ephemeral"}}
    tool_turn = (blocks(use("t", {"a": 1}), role="assistant"), blocks(result("t", content=[text("1")]), text("x")))
    marked = (
        blocks(use("t", {"a": 1}) | mark, role="assistant"),
        blocks(result("t", content=[text("1") | mark]) | mark, text("x") | mark),
    )
    plain = parsed(USER, *tool_turn, tools=[WEATHER])
    cached = parsed(USER, *marked, tools=[WEATHER | mark], **mark)
    assert cached.messages == plain.messages
    assert cached.tools == plain.tools
    assert cached.ignored_fields == []


def test_custom_tools_become_functions():
    request = parsed(tools=[WEATHER | {"type": "custom"}, {"name": "f", "input_schema": {}, "strict": False}])
    assert request.tools == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "of a city", "parameters": WEATHER["input_schema"]},
        },
        {"type": "function", "function": {"name": "f", "parameters": {}}},
    ]
    assert request.ignored_fields == []


@pytest.mark.parametrize("kind", ["web_search_20260318", "computer_20250124", "code_execution_20250825", "mcp_toolset"])
def test_tools_that_anthropics_servers_run_are_left_out_and_told_of(kind):
    request = parsed(tools=[WEATHER, {"type": kind, "name": "x"}])
    assert [tool["function"]["name"] for tool in request.tools] == ["weather"]
    assert request.ignored_fields == ["tools.1"]
    alone = parsed(tools=[{"type": kind, "name": "x"}])
    assert alone.tools is None
    for choice in ({"type": "any"}, {"type": "tool", "name": "x"}):
        error = refused(fields(tools=[{"type": kind, "name": "x"}], tool_choice=choice))
        assert error.message == "tool_choice.type: none of the tools can be called here"


@pytest.mark.parametrize(
    ("kind", "name", "needs"),
    [
        ("bash_20250124", "bash", []),
        ("text_editor_20250728", "str_replace_based_edit_tool", ["command", "path"]),
        ("memory_20250818", "memory", ["command"]),
    ],
)
def test_tools_of_anthropic_that_a_client_runs_are_functions(kind, name, needs):
    request = parsed(tools=[{"type": kind, "name": name}])
    [tool] = request.tools
    assert (tool["function"]["name"], tool["function"]["parameters"]["required"]) == (name, needs)
    assert request.ignored_fields == []


def test_documents_and_search_results_are_text():
    document = {
        "type": "document",
        "title": "Cats",
        "context": "of pets",
        "source": {"type": "text", "media_type": "text/plain", "data": "3."},
    }
    found = {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "4."}]}
    content = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "5."}]}}
    [said] = parsed(messages=[{"role": "user", "content": [document, found, content]}]).messages
    assert said["content"] == (
        "<document>\n<title>Cats</title>\n<context>of pets</context>\n3.\n</document>\n"
        "<search_result>\n<source>u</source>\n<title>t</title>\n4.\n</search_result>\n"
        "<document>\n5.\n</document>\n"
    )
    result = {"type": "tool_result", "tool_use_id": "x", "content": [found]}
    [said] = parsed(messages=[{"role": "user", "content": [result]}]).messages
    assert (said["role"], "4." in said["content"]) == ("tool", True)


def test_a_managed_context_stays_as_it_is_and_says_so():
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    assert parsed(context_management=edits).ignored_fields == ["context_management"]
    for asked, told in ({"context_management": edits}, {"applied_edits": []}), ({}, None):
        message = json.loads(messages.serialize(parsed(**asked), OPENING, [answer("a")]))
        assert message.get("context_management") == told


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, NamedTool("weather"), False),
        ({"type": "none"}, "none", True),
    ],
)
def test_tool_choice_is_understood(choice, expected, parallel):
    request = parsed(tools=[WEATHER], tool_choice=choice)
    assert request.tool_choice == expected
    assert request.parallel_tool_calls is parallel


def test_a_format_is_a_schema_in_either_field():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "schema": schema}
    assert parsed(output_config={"format": wanted}).sampling.json_schema == schema
    assert parsed(output_config={"format": wanted}).ignored_fields == []
    assert parsed(output_format=wanted).sampling.json_schema == schema
    assert parsed(output_config={"format": None}).sampling.json_schema is None
    assert parsed(output_format=wanted, tools=[WEATHER], tool_choice={"type": "none"}).sampling.json_schema == schema
    assert parsed(output_format=wanted, tools=[WEATHER], tool_choice={"type": "any"}).sampling.json_schema is None
    may_call = parsed(output_config={"format": wanted}, tools=[WEATHER], tool_choice={"type": "auto"})
    assert (may_call.sampling.json_schema, may_call.ignored_fields) == (None, ["output_config.format"])


def test_what_is_not_followed_is_told():
    request = parsed(
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "low", "format": None, "other": None},
        tools=[
            WEATHER | {"strict": True, "allowed_callers": ["direct"]},
            WEATHER | {"type": "custom", "strict": True},
        ],
        whatever=1,
    )
    assert sorted(request.ignored_fields) == [
        "output_config.effort", "thinking", "tools.0.strict", "tools.1.strict", "whatever",
    ]  # fmt: skip


def test_the_beginning_of_an_answer_may_begin_with_white_space():
    request = parsed(USER, {"role": "assistant", "content": "\n a"})
    assert (request.prefill, request.begun) == (True, "\n a")


def test_no_stop_sequences_are_none():
    assert parsed(stop_sequences=[]).sampling.stop is None


def test_hints_are_taken_silently():
    assert parsed(**{name: {"any": "thing"} for name in messages.TABLES.hints}).ignored_fields == []


@pytest.mark.parametrize("name", sorted(messages.TABLES.off))
def test_what_would_change_the_answer_is_refused_but_for_off(name):
    for value in messages.TABLES.off[name]:
        assert parsed(**{name: value}).ignored_fields == []
    error = refused(fields(**{name: {"type": "something"}}))
    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "int"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", "a user's message comes before"),
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'tool', which is not supported"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "Field required"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
        ({"messages": [USER, blocks({"type": "video"})]}, "messages.1.content.0.type", "video"),
        ({"messages": [blocks({"type": "document"})]}, "messages.0.content.0.source", "required"),
        (
            {"messages": [blocks({"type": "document", "source": {"type": "base64", "data": ""}})]},
            "messages.0.content.0.source.type",
            "base64",
        ),
        ({"messages": [blocks(use("t", {}))]}, "messages.0.content.0.type", "tool_use"),
        ({"messages": [blocks(text("x"), {"type": "text"})]}, "messages.0.content.1.text", "Field required"),
        (
            {"messages": [blocks(result("t", content=[{"type": "tool_reference"}]))]},
            "messages.0.content.0.content.0.type",
            "tool_reference",
        ),
        (
            {"messages": [blocks({"type": "image", "source": {"type": "file", "file_id": "f"}})]},
            "messages.0.content.0.source.type",
            "file",
        ),
        (
            {"messages": [blocks({"type": "image", "source": PIXEL | {"media_type": "image/tiff"}})]},
            "messages.0.content.0.source.media_type",
            "tiff",
        ),
        ({"messages": [blocks(use("t", "x"), role="assistant"), USER]}, "messages.0.content.0.input", "object"),
        ({"messages": [USER, {"role": "assistant", "content": "The answer is "}]}, "messages.1", "white space"),
        ({"system": 3}, "system", "str"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences.1", "length"),
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"top_p": 0}, "top_p", ">="),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema", "Field required"),
        ({"tools": [{"name": "f", "input_schema": 3}]}, "tools.0.input_schema", "object"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name", "'g'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name", "None"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type", "any"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "xml"),
        ({"n": 2}, "n", "2"),
        ({"seed": "x"}, "seed", "int"),
    ],
)
def test_a_refusal_names_the_field(change, param, words):
    error = refused(fields() | change)
    assert error.param == param
    assert error.message.startswith(param)
    assert words in error.message


def test_a_missing_field_is_named():
    for name in ("model", "messages", "max_tokens"):
        given = fields()
        del given[name]
        assert refused(given).message == f"{name}: Field required"


def test_a_request_to_count_needs_no_limit_and_may_end_with_the_assistant():
    said = [USER, {"role": "assistant", "content": "ho"}]
    request = messages.parse_count({"model": "m", "system": "s", "messages": said, "tools": [WEATHER]})
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant"]
    assert request.tools is not None
    assert request.sampling.max_tokens is None
    with pytest.raises(GatewayError, match=r"messages.0.content"):
        messages.parse_count({"model": "m", "messages": [{"role": "user"}]})


def test_the_sdk_sends_what_is_parsed_and_reads_the_count():
    service = Service(messages.count(4711))
    counted = service.client().messages.count_tokens(model="m", messages=[USER], tools=[WEATHER])
    assert counted.input_tokens == 4711
    assert messages.parse_count(service.asked[0]).messages == [USER]


def test_the_sdks_structured_output_arrives_as_a_schema():
    class City(BaseModel):
        name: str

    service = Service(whole(answer('{"name": "Oslo"}')))
    message = service.client().messages.parse(model="m", max_tokens=64, messages=[USER], output_format=City)
    assert message.parsed_output == City(name="Oslo")
    schema = messages.parse(service.asked[0]).sampling.json_schema
    assert schema is not None
    assert "name" in schema["properties"]


# Answers


def test_an_answer_is_a_message_of_thinking_text_and_tool_use():
    message = created(answer("Let me look.", "Where?", ['{"city": "Oslo"}']))
    assert (message.id, message.model, message.role, message.type) == ("msg_c7", "policy", "assistant", "message")
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    thinking, said, called = message.content
    assert (thinking.thinking, said.text) == ("Where?", "Let me look.")
    assert thinking.signature
    assert (called.id, called.name, called.input) == ("call_0", "weather", {"city": "Oslo"})
    assert message.stop_reason == "tool_use"
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens, usage.cache_read_input_tokens) == (25, 3, 0)


@pytest.mark.parametrize(
    ("said", "reason", "sequence"),
    [
        (answer("a"), "end_turn", None),
        (answer("a", finish_reason="length"), "max_tokens", None),
        (answer("a", calls=["{}"], finish_reason="length"), "max_tokens", None),
        (answer("a", stop_match="END"), "stop_sequence", "END"),
        (answer("a", calls=["{}"], finish_reason="tool_calls"), "tool_use", None),
        (answer("a", finish_reason="content_filter"), "refusal", None),
    ],
)
def test_stop_reasons_say_what_happened_in_both_forms(said, reason, sequence):
    for message in (created(said), accumulated(deltas_of(said), said)):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize("content", ["", "\n\n"])
@pytest.mark.parametrize("reasoning", [None, "", " \n", "I wonder"])
def test_an_empty_answer_still_has_a_text(content, reasoning):
    said = answer(content, reasoning)
    message = created(said)
    assert [block.text for block in message.content if block.type == "text"] == [content]
    assert len(message.content) == (2 if (reasoning or "").strip() else 1)
    assert accumulated(deltas_of(said), said).to_dict() == message.to_dict()


def test_white_space_around_tool_calls_makes_no_block():
    said = answer("\n\n", "\n", ["{}", "{}"])
    assert [block.type for block in created(said).content] == ["tool_use", "tool_use"]


@pytest.mark.parametrize(
    "arguments", ["", " \n", "[1, 2]", "3", '{"a": ', "not json", '{"INVALID_JSON": "x"}', '{"a": NaN}', "null"]
)
def test_arguments_that_are_no_object_are_one_for_the_sdk_and_come_back_as_they_were(arguments):
    said = answer(calls=[arguments])
    (block,) = created(said).content
    assert isinstance(block.input, dict)
    back = parsed(USER, blocks(block.to_dict(), role="assistant"), USER).messages[1]
    assert back["tool_calls"][0]["function"]["arguments"] == (arguments if arguments.strip() else "{}")


@pytest.mark.parametrize("given", [{"INVALID_JSON": "x", "a": 1}, {"INVALID_JSON": 1}])
def test_an_object_that_only_resembles_such_arguments_is_taken_as_it_is(given):
    [block] = created(answer(calls=[json.dumps(given)])).content
    assert block.input == given
    [call] = parsed(USER, blocks(use("t", given), role="assistant"), USER).messages[1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == given


# Streams


def test_the_sdk_streams_text_and_events_in_order():
    said = answer("Hello there", "Greet.", ['{"city": "Oslo"}'])
    client = Service(messages.PING + streamed(deltas_of(said), said)).client()
    with client.messages.stream(model="m", max_tokens=64, messages=[USER]) as stream:
        assert "".join(stream.text_stream) == "Hello there"
    raw = client.messages.create(model="m", max_tokens=64, messages=[USER], stream=True)
    events = [(event.type, getattr(event, "index", None)) for event in raw]
    assert list(dict.fromkeys(events)) == [
        ("message_start", None),
        *((f"content_block_{what}", index) for index in range(3) for what in ("start", "delta", "stop")),
        ("message_delta", None),
        ("message_stop", None),
    ]


def test_a_ping_is_an_event_that_says_only_so():
    assert messages.PING == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_a_stream_starts_with_the_prompts_tokens():
    begun = messages.events(parsed(), OPENING).start()
    start = json.loads(begun.split(b"data: ")[1])["message"]
    assert start["usage"]["input_tokens"] == 25
    assert start["usage"]["output_tokens"] == 0
    assert start["content"] == []
    assert start["stop_reason"] is None


def test_the_async_client_reads_both_forms():
    said = answer("Hello there", "Greet.", ['{"city": "Oslo"}'])

    async def both() -> tuple[Any, Any, str]:
        asked: Any = {"model": "m", "max_tokens": 64, "messages": [USER]}
        message = await Service(whole(said)).async_client().messages.create(**asked)
        client = Service(streamed(deltas_of(said), said)).async_client()
        async with client.messages.stream(**asked) as stream:
            words = "".join([piece async for piece in stream.text_stream])
            return message, await stream.get_final_message(), words

    message, final, words = asyncio.run(both())
    assert words == "Hello there"
    assert final.to_dict() == message.to_dict()


def test_text_after_a_tool_call_opens_a_block_of_its_own():
    call = tool_call("call_0", "weather", "{}")
    deltas = [
        Delta(kind="content", text="a"),
        Delta(kind="tool_call", tool_call=call),
        Delta(kind="content", text="\n"),
        Delta(kind="content", text="b"),
        Delta(kind="reasoning", text="c"),
    ]
    said = answer("a\nb", "c", tool_calls=[call])
    message = accumulated(deltas, said)
    assert [block.type for block in message.content] == ["text", "tool_use", "text", "thinking"]
    assert message.content[2].text == "\nb"


TEXTS = st.text(max_size=6) | st.sampled_from(["", " ", "\n\n", "a", " b ", "\u2028", "\r\n"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)
ARGUMENTS = (
    st.dictionaries(TEXTS, JSON, max_size=3).map(json.dumps)
    | JSON.map(lambda value: json.dumps(value, ensure_ascii=False, indent=1))
    | st.sampled_from(["", "{", "NaN", '{"INVALID_JSON": "x"}', '{"INVALID_JSON": {}}', ' {"a": 1.0} '])
    | TEXTS
)
ANSWERS = st.builds(
    answer,
    TEXTS,
    st.none() | TEXTS,
    st.lists(ARGUMENTS, max_size=3),
    finish_reason=st.sampled_from(["stop", "length"]),
    stop_match=st.none() | st.just("END"),
)
DELTAS = st.lists(
    st.builds(Delta, kind=st.sampled_from(["content", "reasoning"]), text=TEXTS)
    | st.builds(lambda given: Delta(kind="tool_call", tool_call=tool_call("", "weather", given)), ARGUMENTS),
    max_size=8,
)


@given(ANSWERS, st.integers(1, 4))
def test_a_stream_in_the_usual_order_adds_up_to_the_whole_answer(said, size):
    assert accumulated(deltas_of(said, size), said).to_dict() == created(said).to_dict()


@given(DELTAS)
def test_a_stream_in_any_order_adds_up_to_the_whole_answers_pieces(deltas):
    said = answer(
        "".join(delta.text for delta in deltas if delta.kind == "content"),
        "".join(delta.text for delta in deltas if delta.kind == "reasoning"),
        tool_calls=[delta.tool_call for delta in deltas if delta.tool_call],
    )
    piecewise, at_once = accumulated(deltas, said).to_dict(), created(said).to_dict()
    assert joined(piecewise.pop("content")) == joined(at_once.pop("content"))
    assert piecewise == at_once


def joined(content: Any) -> tuple[str, str, list[Any]]:
    """Blocks without their order among kinds; white space at the very end may have found no block to stand in."""
    words = "".join(block["text"] for block in content if block["type"] == "text")
    thoughts = "".join(block["thinking"] for block in content if block["type"] == "thinking")
    return words.rstrip(), thoughts.rstrip(), [block for block in content if block["type"] == "tool_use"]


@given(ANSWERS, st.booleans(), st.booleans())
def test_an_answer_that_is_sent_back_is_heard_as_itself(said, with_thinking, in_pieces):
    message = accumulated(deltas_of(said), said) if in_pieces else created(said)
    content = [block for block in message.content if with_thinking or block.type != "thinking"]
    service = Service(whole(said))
    service.client().messages.create(
        model="m", max_tokens=64, messages=[USER, {"role": message.role, "content": content}, USER]
    )
    back = messages.parse(service.asked[0]).messages[1]
    heard, sent = message_fingerprint.fingerprint_of(back), message_fingerprint.fingerprint_of(said.message())
    assert heard.same(sent)
    assert heard.ids == sent.ids
    thought = said.reasoning if with_thinking and (said.reasoning or "").strip() else None
    assert back.get("reasoning_content") == thought


@given(DELTAS)
def test_a_stream_in_any_order_that_is_sent_back_is_heard_as_the_answer(deltas):
    calls = [delta.tool_call for delta in deltas if delta.tool_call]
    said = answer("".join(delta.text for delta in deltas if delta.kind == "content"), tool_calls=calls)
    back = blocks(*accumulated(deltas, said).to_dict()["content"], role="assistant")
    assert message_fingerprint.fingerprint_of(parsed(USER, back, USER).messages[1]).same(
        message_fingerprint.fingerprint_of(said.message())
    )


# Errors


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (401, "authentication_error", anthropic.AuthenticationError),
        (403, "permission_error", anthropic.PermissionDeniedError),
        (404, "not_found_error", anthropic.NotFoundError),
        (409, "conflict_error", anthropic.ConflictError),
        (413, "request_too_large", anthropic.APIStatusError),
        (422, "invalid_request_error", anthropic.UnprocessableEntityError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.InternalServerError),
        (504, "timeout_error", anthropic.InternalServerError),
        (529, "overloaded_error", anthropic.InternalServerError),
    ],
)
def test_errors_are_raised_as_the_sdk_knows_them(status, kind, raised):
    error = GatewayError(status, "the attempt is so and so", kind="anything")
    client = Service(messages.serialize_error(error), status, error.headers()).client()
    with pytest.raises(raised) as caught:
        client.messages.create(model="m", max_tokens=64, messages=[USER])
    assert caught.value.status_code == status
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "the attempt is so and so"}}


def test_a_prompt_that_is_too_long_is_told_in_anthropics_words():
    told = json.loads(messages.serialize_error(PromptTooLong(207791, 200000)))
    assert told["error"]["message"] == "prompt is too long: 207791 tokens > 200000 maximum"
    assert told["error"]["type"] == "invalid_request_error"


def test_an_error_in_a_stream_is_raised():
    events = messages.events(parsed(), OPENING)
    body = events.start() + events.delta(0, Delta(kind="content", text="a"))
    body += messages.error_event(GatewayError(503, "no engine", retry=True))
    with (
        pytest.raises(anthropic.APIStatusError, match="no engine"),
        Service(body).client().messages.stream(model="m", max_tokens=64, messages=[USER]) as stream,
    ):
        stream.until_done()


def test_litellms_word_for_an_empty_text_is_none():
    text = {"type": "text", "text": "[System: Empty message content sanitised to satisfy protocol]"}
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    [_, said] = parsed(messages=[USER, {"role": "assistant", "content": [text, call]}, USER]).messages[:2]
    assert said["content"] == ""
