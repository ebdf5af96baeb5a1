"""Responses as OpenAI's own SDK reads it: fields, items, errors, whole answers, and streams that add up to them."""

import asyncio
import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import openai
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.responses import Response

from lightning_rl_proxy.dialects import responses, responses_tools
from lightning_rl_proxy.dialects.base import NamedTool, Opening, Request
from lightning_rl_proxy.errors import GatewayError, PromptTooLong
from lightning_rl_proxy.forest import message_fingerprint
from lightning_rl_proxy.rendering.base import (
    Delta,
    ParsedAnswer,
    SampledToken,
    tool_call,
)

httpx: Any = importlib.import_module("httpx" if openai.VERSION.startswith("2.") else "httpx2")  # what the SDK takes

CALL_ID, OTHER_ID = "a" * 32, "b" * 32
USER = {"role": "user", "content": "hi"}
LOOK_UP: dict[str, Any] = {
    "type": "function",
    "name": "look_up",
    "description": None,
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    "strict": False,
}
NESTED = {
    "type": "function",
    "function": {"name": "look_up", "parameters": LOOK_UP["parameters"], "strict": False},
}
SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: A"}
OPENING = Opening(call_id=CALL_ID, model="policy", created=1_700_000_000, prompt_tokens=7)
LOGPROBS = {"include": ["message.output_text.logprobs"]}


PATCH = "*** Begin Patch\n*** {} File: a.py\n{}*** End Patch"
TOOLS_OF_ALL_KINDS = [LOOK_UP, {"type": "custom", "name": "code"}, {"type": "local_shell"}, {"type": "apply_patch"}]
CALLS: list[dict[str, Any]] = [  # each is told as an item of its tool's kind, as far as it says what that needs
    {"q": "x"},
    {"name": "code", "input": "print(1)"},
    {"name": "code", "code": "print(1)"},
    {"name": "code", "input": "x", "more": 1},
    {"name": "local_shell", "command": "ls"},
    {"name": "local_shell", "command": "bash -lc ls"},
    {"name": "local_shell", "command": ["ls", "-l"]},
    {"name": "local_shell", "cmd": "ls"},
    {"name": "apply_patch", "patch": PATCH.format("Update", "+x\n")},
    {"name": "apply_patch", "patch": PATCH.format("Update", "+x\n") + "\n"},
    {"name": "apply_patch", "patch": PATCH.format("Add", "+x\n\n")},
    {"name": "apply_patch", "patch": PATCH.format("Add", "")},
    {"name": "apply_patch", "patch": PATCH.format("Delete", "")},
    {"name": "apply_patch", "patch": PATCH.format("Delete", "*** Delete File: b.py\n")},
    {"name": "apply_patch", "patch": "what"},
]


class City(pydantic.BaseModel):
    name: str
    rivers: list[str]


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "input": "hi", **fields}


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return responses.parse(asked(input=list(items), **fields)).messages


def answer(content: str = "", **more: Any) -> ParsedAnswer:
    given = {"reasoning": None, "tool_calls": [], "finish_reason": "stop", "token_ids": [1, 2, 3], "logprobs": None}
    return ParsedAnswer(content=content, decode=lambda ids: f"<{ids[0]}>", output_tokens=3, **(given | more))


def called(number: int = 0, call_id: str = CALL_ID, name: str = "look_up", **arguments: Any) -> dict[str, Any]:
    return tool_call(f"call_{call_id}_{number}", name, arguments)


FULL = answer("Let me see.", reasoning="hm", tool_calls=[called(q="x"), called(1, q="y")])


def transport(body: bytes, *, stream: bool = False, status: int = 200) -> Any:
    kind = "text/event-stream" if stream else "application/json"
    return httpx.MockTransport(lambda _: httpx.Response(status, content=body, headers={"content-type": kind}))


def client(body: bytes, *, stream: bool = False, status: int = 200) -> openai.OpenAI:
    http = httpx.Client(transport=transport(body, stream=stream, status=status))
    return openai.OpenAI(api_key="k", base_url="http://x/v1", http_client=http)


def async_client(body: bytes, *, stream: bool = False) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=transport(body, stream=stream))
    return openai.AsyncOpenAI(api_key="k", base_url="http://x/v1", http_client=http)


def whole(given: ParsedAnswer, **fields: Any) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.json.decode(responses.serialize(request(**fields), OPENING, [given]))
    return told


def request(**fields: Any) -> Request:
    return responses.parse(asked(**fields))


def deltas_of(given: ParsedAnswer) -> list[Delta]:
    """An answer in deltas of one character, in the usual order."""
    told = [Delta(kind="reasoning", text=c) for c in given.reasoning or ""]
    told += [Delta(kind="content", text=c) for c in given.content]
    return told + [Delta(kind="tool_call", tool_call=c, tool_index=i) for i, c in enumerate(given.tool_calls)]


def streamed(given: ParsedAnswer, deltas: Sequence[Delta] | None = None, **fields: Any) -> bytes:
    events = responses.events(request(stream=True, **fields), OPENING)
    begun = events.start()
    told = b"".join(events.delta(0, delta) for delta in (deltas_of(given) if deltas is None else deltas))
    return begun + told + events.stop(0, given) + events.end([given])


def events_of(body: bytes) -> list[dict[str, Any]]:
    read = []
    for event in body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def accumulated(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a client has put together from the events before the last one, checking each against it."""
    output: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
            continue
        item = output[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            assert event["content_index"] == len(item["content"])
            item["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
            item["content"][event["content_index"]].setdefault("seen", []).extend(event.get("logprobs", ()))
        elif kind in ("output_text.done", "reasoning_text.done"):
            part = item["content"][event["content_index"]]
            assert part["text"] == event["text"]
            assert event.get("logprobs", [])[: len(part.get("seen", ()))] == part.pop("seen", [])
        elif kind == "content_part.done":
            assert event["part"]["text"] == item["content"][event["content_index"]]["text"]
            item["content"][event["content_index"]] = event["part"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
        elif kind == "custom_tool_call_input.delta":
            item["input"] += event["delta"]
        elif kind == "custom_tool_call_input.done":
            assert event["input"] == item["input"]
        else:
            assert kind == "output_item.done"
            assert event["item"] | {"status": None} == item | {"status": None}
            output[event["output_index"]] = event["item"]
    return output


# ---- fields


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"max_output_tokens": 5}, lambda r: r.sampling.max_tokens == 5),
        ({"temperature": 0.5, "top_p": 0.9}, lambda r: (r.sampling.temperature, r.sampling.top_p) == (0.5, 0.9)),
        ({"seed": 3, "top_k": 4, "min_p": 0.1}, lambda r: (r.sampling.seed, r.sampling.top_k) == (3, 4)),
        ({"stop": "x"}, lambda r: r.sampling.stop == ["x"]),
        ({"stop": ["x", "y"]}, lambda r: r.sampling.stop == ["x", "y"]),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, lambda r: r.sampling.json_schema is None),
        ({"text": {"format": {"type": "json_object"}}}, lambda r: r.sampling.json_schema == {}),
        ({"text": {"format": SCHEMA}}, lambda r: r.sampling.json_schema == {"type": "object"}),
        (  # a call has no text
            {"text": {"format": SCHEMA}, "tools": [LOOK_UP], "tool_choice": "required"},
            lambda r: r.sampling.json_schema is None,
        ),
        (
            {
                "text": {"format": SCHEMA, "verbosity": "low"},
                "tools": [{"type": "web_search"}, LOOK_UP | {"strict": True}],
            },
            lambda r: (
                (r.sampling.json_schema, r.ignored_fields)
                == (None, ["tools[0]", "text.format", "tools[1].strict", "text.verbosity"])
            ),
        ),
        ({"tools": [LOOK_UP]}, lambda r: r.tools == [NESTED] and r.tool_choice == "auto" and r.parallel_tool_calls),
        (
            {"tools": [{"type": "custom", "name": "code"}], "tool_choice": {"type": "custom", "name": "code"}},
            lambda r: r.tool_choice == NamedTool("code"),
        ),
        (
            {"tools": [{"type": "local_shell"}], "tool_choice": {"type": "local_shell"}},
            lambda r: r.tool_choice == NamedTool("local_shell"),
        ),
        (
            {"tools": [{"type": "custom", "name": "code", "description": "SQL", "format": GRAMMAR}]},
            lambda r: r.tools[0]["function"]["description"] == "SQL\nThe input is a text of this grammar:\nstart: A",
        ),
        (
            {"tools": [{"type": "local_shell"}, {"type": "local_shell", "description": "In a box."}]},
            lambda r: (
                [tool["function"]["description"] for tool in r.tools]
                == ["Run a command in a shell on this machine.", "In a box."]
            ),
        ),
        (
            {"tools": [{"type": "apply_patch"}]},
            lambda r: (
                r.tools[0]["function"]["parameters"]
                == {"type": "object", "properties": {"patch": {"type": "string"}}, "required": ["patch"]}
            ),
        ),
        ({"tools": [LOOK_UP], "tool_choice": "required"}, lambda r: r.tool_choice == "required"),
        ({"tools": [LOOK_UP], "tool_choice": "none"}, lambda r: r.tool_choice == "none"),
        (
            {"tools": [LOOK_UP], "tool_choice": {"type": "function", "name": "look_up"}},
            lambda r: r.tool_choice == NamedTool("look_up"),
        ),
        ({"tools": [LOOK_UP], "parallel_tool_calls": False}, lambda r: not r.parallel_tool_calls),
        ({"stream": True}, lambda r: r.stream),
        (LOGPROBS, lambda r: r.logprobs),
        ({"include": ["reasoning.encrypted_content"]}, lambda r: not r.logprobs),
        ({"instructions": "be brief"}, lambda r: r.messages == [{"role": "system", "content": "be brief"}, USER]),
        ({"reasoning": {"effort": "high", "summary": "auto"}, "store": False}, lambda r: r.ignored_fields == []),
        ({"truncation": "disabled", "background": False, "top_logprobs": 0}, lambda r: r.ignored_fields == []),
        ({"what_is_this": 1, "user": "me"}, lambda r: r.ignored_fields == ["what_is_this"]),
        ({"truncation": "auto", "top_logprobs": 2}, lambda r: r.ignored_fields == ["truncation", "top_logprobs"]),
        ({"context_management": [{"type": "compaction"}]}, lambda r: r.ignored_fields == ["context_management"]),
        (
            {"tools": [{"type": "web_search"}, LOOK_UP]},
            lambda r: (r.ignored_fields, len(r.tools)) == (["tools[0]"], 1),
        ),
        ({"tools": [{"type": "web_search"}]}, lambda r: r.tools is None),
        (
            {
                "tools": [LOOK_UP, LOOK_UP | {"name": "g"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            lambda r: ([t["function"]["name"] for t in r.tools], r.tool_choice) == (["g"], "required"),
        ),
    ],
)
def test_a_field_is_honoured(fields: dict[str, Any], read: Callable[[Any], bool]) -> None:
    assert read(request(**fields))


def test_every_honoured_field_is_read_and_every_field_is_in_one_table() -> None:
    tables = [responses.TABLES.honoured, responses.TABLES.hints, frozenset(responses.TABLES.off)]
    read = set(responses.ResponsesWire.__struct_fields__)
    assert responses.TABLES.honoured <= read <= responses.TABLES.honoured | responses.TABLES.hints
    assert sum(map(len, tables)) == len(frozenset.union(*tables))


def test_every_parameter_of_the_sdk_is_in_a_table() -> None:
    from openai.types.responses import response_create_params as params

    known = responses.TABLES.honoured | responses.TABLES.hints | set(responses.TABLES.off)
    known |= set(responses.TABLES.relaxed)
    assert set(params.ResponseCreateParamsBase.__annotations__) | {"stream"} <= known


@pytest.mark.parametrize(
    "name",
    sorted((responses.TABLES.honoured | responses.TABLES.hints | set(responses.TABLES.off)) - {"model", "input"}),
)
def test_null_means_not_given(name: str) -> None:
    told, bare = request(**{name: None}), request()
    assert msgspec.structs.replace(told, fields=bare.fields) == bare
    assert whole(answer("hi"), **{name: None}) == whole(answer("hi"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"model": None}, "model"),
        ({"temperature": "warm"}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": 3}, "metadata"),
        ({"stop": ""}, "stop"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"include": ["everything"]}, "include[0]"),
        ({"include": [{}]}, "include[0]"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"tools": ["f"]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": [LOOK_UP | {"parameters": "none"}]}, "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [LOOK_UP]}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [USER, {"type": "web_search_call", "id": "ws"}]}, "input[1].type"),
        ({"input": [{"type": []}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
        (
            {"input": [USER, USER, {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[2].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "content": [{}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"id": f"msg_{CALL_ID}_0"}]}, "input[0].id"),
    ],
)
def test_what_cannot_be_honoured_is_refused_and_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as refused:
        request(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_request_without_a_model_is_refused_by_name() -> None:
    with pytest.raises(GatewayError) as refused:
        responses.parse({"input": "hi"})
    assert refused.value.param == "model"


@given(
    st.dictionaries(
        st.sampled_from(sorted({*responses.ResponsesWire.__struct_fields__, *responses.TABLES.off} - {"model"})),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(
                    st.sampled_from(["type", "role", "id", "call_id", "content", "text", "output", "format", "name"]),
                    inner
                    | st.sampled_from(["message", "user", "assistant", "function", "reasoning", "input_text", "text"]),
                    max_size=4,
                )
            ),
            max_leaves=6,
        ),
    )
)
def test_any_json_is_a_request_or_is_refused(fields: dict[str, Any]) -> None:
    try:
        said: Request | GatewayError = responses.parse({"model": "policy"} | fields)
    except GatewayError as refused:
        said = refused
    assert isinstance(said, Request) or (said.status == 400 and said.param)


# ---- input items


def test_messages_are_read_in_both_forms() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages(
        {"role": "developer", "content": "d"},
        {"type": "message", "id": "m", "status": "completed", "role": "user", "content": parts},
        {"role": "assistant", "content": "easy", "phase": "final_answer"},
        {"role": "user", "content": []},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "refusal", "refusal": "no"}]},
        instructions="i",
    ) == [
        {"role": "system", "content": "i"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "easy"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "no"},
    ]


@pytest.mark.parametrize("text", ["hi", ""])
def test_a_text_is_what_the_user_says(text: str) -> None:
    assert request(input=text).messages == [{"role": "user", "content": text}]


def test_images_stay_parts_of_their_message() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"}
    read = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
    ]
    content = [{"type": "input_text", "text": "see"}, image]
    assert messages(
        {"role": "user", "content": content}, {"type": "function_call_output", "call_id": "c", "output": content}
    ) == [{"role": "user", "content": read}, {"role": "tool", "tool_call_id": "c", "content": read}]


def test_tool_results_are_tool_messages() -> None:
    assert messages(
        {"type": "function_call_output", "call_id": "c", "output": "1", "id": "fco", "status": "completed"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "2"}]},
    ) == [
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "d", "content": "2"},
    ]


def call_item(call_id: str, name: str = "f") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}


def reasoning_item(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **more}


def test_reasoning_is_read_in_full_where_it_is_there_else_in_summary() -> None:
    summary = [{"type": "summary_text", "text": "s"}, {"type": "summary_text", "text": "t"}]
    for item, read in (
        (reasoning_item("r", summary=summary), "r"),
        ({"type": "reasoning", "summary": summary}, "s\nt"),
    ):
        assert messages(item, {"role": "assistant", "content": "a"})[0]["reasoning_content"] == read


@pytest.mark.parametrize(
    ("item", "arguments"),
    [
        ({"type": "local_shell_call", "action": {"command": ["bash", "-lc", "ls a"]}}, {"command": "ls a"}),
        ({"type": "local_shell_call", "action": {"command": ["ls", "a b"]}}, {"command": "ls 'a b'"}),
        (
            {"type": "local_shell_call", "action": {"command": ["bash", "-lc", "$0", "x"]}},
            {"command": "bash -lc '$0' x"},
        ),
        ({"type": "local_shell_call", "action": {"command": ["bash", "-c", "ls a"]}}, {"command": "bash -c 'ls a'"}),
        (
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a.py"}},
            {"patch": "*** Begin Patch\n*** Delete File: a.py\n*** End Patch"},
        ),
    ],
)
def test_a_call_of_a_tool_that_takes_a_text_is_one_of_a_function(
    item: dict[str, Any], arguments: dict[str, str]
) -> None:
    [message] = messages(item | {"call_id": "c"})
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == arguments


def test_outputs_of_such_calls_may_lack_what_other_outputs_have() -> None:
    assert messages(
        {"type": "local_shell_call_output", "id": "c", "output": "1"},
        {"type": "local_shell_call_output", "id": "item", "call_id": "e", "output": "2"},
        {"type": "apply_patch_call_output", "call_id": "d", "status": "completed"},
    ) == [
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "e", "content": "2"},
        {"role": "tool", "tool_call_id": "d", "content": ""},
    ]


@pytest.mark.parametrize(
    ("tool", "arguments", "item"),
    [
        ("custom", {"input": "x", "more": 1}, {"input": '{"input": "x", "more": 1}'}),
        ("custom", {"input": 1}, {"input": '{"input": 1}'}),
        (
            "apply_patch",
            {"patch": "*** Begin Patch\n*** Delete File: a.py\n*** End Patch"},
            {"operation": {"type": "delete_file", "path": "a.py"}},
        ),
        ("local_shell", {"cmd": "ls"}, {"type": "function_call", "arguments": '{"cmd": "ls"}'}),
        ("local_shell", {"command": []}, {"type": "function_call", "arguments": '{"command": []}'}),
        ("local_shell", {"command": ["ls", "-l"]}, {"action": {"type": "exec", "command": ["ls", "-l"], "env": {}}}),
        (
            "apply_patch",
            {"patch": "*** Begin Patch\n*** Delete File: a.py\n*** Delete File: b.py\n*** End Patch"},
            {"type": "function_call"},
        ),
        ("apply_patch", {"patch": "what"}, {"type": "function_call", "arguments": '{"patch": "what"}'}),
    ],
)
def test_a_call_holds_the_text_that_its_tool_takes(tool: str, arguments: Any, item: dict[str, Any]) -> None:
    name = "code" if tool == "custom" else tool
    said = answer(tool_calls=[tool_call("c", name, json.dumps(arguments))])
    [told] = whole(said, tools=[{"type": tool, "name": name}])["output"]
    assert told == told | item


SPACE = {
    "type": "namespace",
    "name": "db",
    "tools": [LOOK_UP, {"type": "custom", "name": "sql"}, {"type": "web_search"}],
}


def test_tools_of_a_namespace_are_named_by_it_to_the_model_alone() -> None:
    """The client's own tool of the same name is another one."""
    tools = [SPACE, LOOK_UP]
    read = request(tools=tools)
    assert [tool["function"]["name"] for tool in read.tools or ()] == ["db__look_up", "db__sql", "look_up"]
    assert read.ignored_fields == ["tools[0].tools[2]"]
    names = {"db__look_up": '{"q": "x"}', "db__sql": '{"input": "select 1"}', "look_up": "{}"}
    made = answer(tool_calls=[tool_call(f"c{n}", *named) for n, named in enumerate(names.items())])
    output = whole(made, tools=tools)["output"]
    assert [(item["type"], item["name"], item.get("namespace")) for item in output] == [
        ("function_call", "look_up", "db"),
        ("custom_tool_call", "sql", "db"),
        ("function_call", "look_up", None),
    ]
    assert output[1]["input"] == "select 1"
    [back] = messages(*output)
    assert [call["function"]["name"] for call in back["tool_calls"]] == [*names]


def test_another_kind_of_item_is_not_the_call_that_was_recorded_under_its_id() -> None:
    """The call was told as one of a function: it says not what is to be run."""
    made = answer(tool_calls=[called(name="local_shell", cmd="ls")])
    known = {responses.response_id(CALL_ID): responses.kept(request(), made)}
    item = {"type": "local_shell_call", "call_id": made.tool_calls[0]["id"], "action": {"command": ["pwd"]}}
    [_, said] = responses.parse(asked(input=[USER, item]), known).messages
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"command": "pwd"}


def test_items_of_one_answer_become_one_message() -> None:
    assert messages(
        USER,
        reasoning_item("hm"),
        {"role": "assistant", "content": "so"},
        call_item("c1"),
        call_item("c2"),
        {"type": "function_call_output", "call_id": "c1", "output": "x"},
        call_item("c3"),
    ) == [
        USER,
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [tool_call("c1", "f", "{}"), tool_call("c2", "f", "{}")],
            "reasoning_content": "hm",
        },
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [tool_call("c3", "f", "{}")]},
    ]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
            [(None, "a", 0), (None, "b", 0)],
        ),
        (
            [
                reasoning_item("r"),
                {"role": "assistant", "content": "a"},
                reasoning_item("s"),
                {"role": "assistant", "content": "b"},
            ],
            [("r", "a", 0), ("s", "b", 0)],
        ),
        ([call_item(f"call_{CALL_ID}_0"), call_item(f"call_{OTHER_ID}_0")], [(None, "", 1), (None, "", 1)]),
        (
            [
                {"role": "assistant", "content": "a", "id": f"msg_{CALL_ID}_0"},
                call_item(f"call_{OTHER_ID}_0"),
                reasoning_item("r", id=f"rs_{OTHER_ID}_0"),
            ],
            [(None, "a", 0), ("r", "", 1)],
        ),
        ([reasoning_item("r"), reasoning_item("s"), {"role": "assistant", "content": "a"}], [("r\ns", "a", 0)]),
        ([call_item("c1"), reasoning_item("r"), call_item("c2")], [(None, "", 1), ("r", "", 1)]),
        (  # an item without an id is of the answer before it
            [
                {"role": "assistant", "content": "a", "id": f"msg_{CALL_ID}_0"},
                call_item("c"),
                call_item(f"call_{OTHER_ID}_0"),
            ],
            [(None, "a", 1), (None, "", 1)],
        ),
        ([reasoning_item("r")], [("r", "", 0)]),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}], []),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}], "content": None}], [("r", "", 0)]),
    ],
)
def test_answers_that_follow_each_other_are_told_apart(items: list[dict[str, Any]], said: list[Any]) -> None:
    read = [
        (m.get("reasoning_content"), m["content"], len(m.get("tool_calls", ()))) for m in messages(*items, USER)[:-1]
    ]
    assert read == said


def test_an_item_reference_finds_the_item_that_it_names() -> None:
    known = {responses.response_id(CALL_ID): responses.kept(request(), FULL)}
    items = [{"type": "item_reference", "id": item["id"]} for item in whole(FULL)["output"]]
    read = responses.parse(asked(input=[USER, *items]), known).messages
    assert read == [USER, FULL.message() | {"reasoning_content": "hm"}]
    with pytest.raises(GatewayError, match="no item of an answer that is known here"):
        responses.parse(asked(input=[{"id": f"fc_{CALL_ID}_2"}]), known)


@pytest.mark.parametrize("call", range(len(CALLS)))
def test_a_call_that_comes_back_as_it_was_told_is_the_call_that_was_sampled(call: int) -> None:
    made = answer(tool_calls=[called(**CALLS[call])])
    known = {responses.response_id(CALL_ID): responses.kept(request(), made)}
    [item] = whole(made, tools=TOOLS_OF_ALL_KINDS)["output"]
    assert responses.parse(asked(input=[USER, item]), known).messages == [USER, made.message()]
    other = json.loads(json.dumps(item).replace("ls", "rm").replace("print(1)", "2").replace("a.py", "c.py"))
    if other != item:  # the client's own words count
        assert responses.parse(asked(input=[USER, other]), known).messages != [USER, made.message()]


def test_of_two_calls_that_come_back_each_is_the_one_of_its_id() -> None:
    made = answer(
        tool_calls=[called(number, name="local_shell", command=word) for number, word in enumerate(("ls", "pwd"))]
    )
    known = {responses.response_id(CALL_ID): responses.kept(request(), made)}
    for item, call in zip(whole(made, tools=TOOLS_OF_ALL_KINDS)["output"], made.tool_calls, strict=True):
        [_, said] = responses.parse(asked(input=[USER, item]), known).messages
        assert said["tool_calls"] == [call]


# ---- continuing a response


def test_a_continued_response_brings_its_messages_but_not_its_instructions() -> None:
    first = request(instructions="old", input="one")
    history = responses.kept(first, answer("two"))
    second = responses.continued(
        request(instructions="new", input="three", previous_response_id=responses.response_id(CALL_ID)), history
    )
    assert [m["content"] for m in second.messages] == ["new", "one", "two", "three"]
    assert [m["content"] for m in responses.kept(second, answer("four"))] == ["one", "two", "three", "four"]


def test_a_response_is_continued_without_new_input() -> None:
    again = responses.parse({"model": "policy", "previous_response_id": "resp_1"})
    assert responses.continued(again, [USER]).messages == [USER]


def test_the_response_that_a_request_continues_is_read() -> None:
    assert responses.previous(asked(previous_response_id="resp_1")) == "resp_1"
    assert responses.previous(asked(previous_response_id=None)) is None
    assert responses.previous(asked()) is None
    assert responses.previous(asked(previous_response_id=["resp_1"])) is None


def test_an_unknown_previous_response_is_told_in_openais_words() -> None:
    body = responses.serialize_error(responses.unknown_previous("resp_9"))
    with pytest.raises(openai.BadRequestError) as refused:
        client(body, status=400).responses.create(model="policy", input="hi", previous_response_id="resp_9")
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    assert "Previous response with id 'resp_9' not found." in refused.value.message


# ---- whole answers


def test_the_sdk_reads_an_answer() -> None:
    fields = {"tools": [LOOK_UP], "metadata": {"a": "b"}, "temperature": 0.5, "text": {"verbosity": "low"}}
    told = client(responses.serialize(request(**fields), OPENING, [FULL])).responses.create(**asked(**fields))
    assert Response.model_validate(told.model_dump(by_alias=True)).id == responses.response_id(CALL_ID)
    reasoning, message, first, second = told.output
    assert (reasoning.type, message.type, first.type, second.type) == (
        "reasoning",
        "message",
        "function_call",
        "function_call",
    )
    assert reasoning.content is not None
    assert reasoning.content[0].text == "hm"
    assert told.output_text == "Let me see."
    assert (first.call_id, first.name, json.loads(second.arguments)) == (f"call_{CALL_ID}_0", "look_up", {"q": "y"})
    assert len({item.id for item in told.output}) == 4
    assert (told.status, told.error, told.incomplete_details) == ("completed", None, None)
    assert (told.metadata, told.temperature, told.top_p) == ({"a": "b"}, 0.5, None)
    assert told.tools[0].model_dump(exclude_unset=True) == LOOK_UP
    assert told.text is not None
    assert told.text.format is not None
    assert (told.text.verbosity, told.text.format.type) == ("low", "text")
    assert told.usage is not None
    assert (told.usage.input_tokens, told.usage.output_tokens, told.usage.total_tokens) == (7, 3, 10)


@pytest.mark.parametrize("given", [answer("hi"), answer(), FULL, answer(tool_calls=[called()]), answer(reasoning="r")])
def test_an_answer_is_what_the_sdks_types_say(given: ParsedAnswer) -> None:
    fields = {"tools": [LOOK_UP], "tool_choice": {"type": "function", "name": "look_up"}, "text": {"format": SCHEMA}}
    Response.model_validate(whole(given, **fields), strict=True)


@pytest.mark.parametrize(
    ("finish_reason", "status", "reason"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
        ("eos", "completed", None),
    ],
)
def test_an_answer_that_was_cut_says_so(finish_reason: str, status: str, reason: str | None) -> None:
    told = Response.model_validate(whole(answer("a", finish_reason=finish_reason)))
    assert told.status == status
    assert (told.incomplete_details and told.incomplete_details.reason) == reason
    assert told.output[0].type == "message"
    assert told.output[0].status == status
    last = events_of(streamed(answer("a", finish_reason=finish_reason)))[-1]
    assert last["type"] == f"response.{status}"


def test_an_answer_leaves_a_message_or_a_call_for_the_history() -> None:
    kinds = [
        [item["type"] for item in whole(given)["output"]]
        for given in (answer(), answer(reasoning="r"), answer(tool_calls=[called()]))
    ]
    assert kinds == [["message"], ["reasoning", "message"], ["function_call"]]


def test_logprobs_are_told_where_they_are_asked_for() -> None:
    given = answer("ab", logprobs=[-0.5, -1.0, -1.5])
    told = Response.model_validate(whole(given, **LOGPROBS))
    assert told.output[0].type == "message"
    part = told.output[0].content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [(token.token, token.logprob) for token in part.logprobs] == [("<1>", -0.5), ("<2>", -1.0), ("<3>", -1.5)]
    assert whole(given)["output"][0]["content"][0]["logprobs"] == []


def test_the_sdk_parses_structured_output() -> None:
    body = responses.serialize(request(), OPENING, [answer('{"name": "Bonn", "rivers": ["Rhine"]}')])
    told = client(body).responses.parse(model="policy", input="hi", text_format=City)
    assert told.output_parsed == City(name="Bonn", rivers=["Rhine"])


def test_the_sdks_schema_and_tools_are_what_the_model_is_given() -> None:
    sent: list[dict[str, Any]] = []

    def reply(asking: Any) -> Any:
        sent.append(json.loads(asking.content))
        body = responses.serialize(responses.parse(sent[-1]), OPENING, [answer(tool_calls=[called()])])
        return httpx.Response(200, content=body, headers={"content-type": "application/json"})

    http = httpx.Client(transport=httpx.MockTransport(reply))
    sdk = openai.OpenAI(api_key="k", base_url="http://x/v1", http_client=http)
    tools: list[Any] = [LOOK_UP]
    sdk.responses.parse(model="policy", input="hi", tools=tools, tool_choice="none", text_format=City)
    read = responses.parse(sent[0])
    assert read.tools == [NESTED]
    assert read.sampling.json_schema is not None
    assert read.sampling.json_schema["required"] == ["name", "rivers"]


# ---- streams


def test_a_stream_is_events_in_openais_order() -> None:
    text = ["output_item.added", "content_part.added"]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    told = events_of(streamed(answer("a", reasoning="r", tool_calls=[called()])))
    assert [event["type"].removeprefix("response.") for event in told] == [
        "created",
        "in_progress",
        *text,
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        *text,
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *call,
        "completed",
    ]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert (told[0]["response"]["status"], told[0]["response"]["output"]) == ("in_progress", [])


def test_text_reaches_the_client_as_it_comes() -> None:
    events = responses.events(request(stream=True), OPENING)
    assert b'"delta":"a"' in events.delta(0, Delta(kind="content", text="a"))
    assert b'"delta":"b"' in events.delta(0, Delta(kind="content", text="b"))


texts = st.text("ab \n", max_size=3)
tokens = st.lists(st.builds(SampledToken, st.integers(0, 9), st.sampled_from("xy"), st.floats(-9, 0)), max_size=2)


@st.composite
def told(draw: st.DrawFn, *, thinks_first: bool) -> tuple[ParsedAnswer, list[Delta], bool]:
    """An answer, the deltas that add up to it, and whether logprobs are asked for."""
    wants = draw(st.booleans())
    kinds: list[Any] = draw(st.lists(st.sampled_from(["reasoning", "content", "tool_call"]), max_size=8))
    if thinks_first:
        kinds.sort(key=lambda kind: kind != "reasoning")
    deltas: list[Delta] = []
    calls: list[dict[str, Any]] = []
    sampled: list[SampledToken] = []
    for kind in kinds:
        new = draw(tokens) if wants else None
        sampled += new or ()
        if kind == "tool_call":
            calls.append(called(len(calls), **draw(st.sampled_from(CALLS))))
            deltas.append(Delta(kind=kind, tool_call=calls[-1], tool_index=len(calls) - 1, tokens=new))
        else:
            deltas.append(Delta(kind=kind, text=draw(texts), tokens=new))
    said = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content")}
    given = ParsedAnswer(
        content=said["content"],
        reasoning=said["reasoning"] or None,
        tool_calls=calls,
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        token_ids=list(range(len(sampled))),
        logprobs=[token.logprob for token in sampled] if wants else None,
        decode=lambda ids: sampled[ids[0]].text,
        output_tokens=len(sampled),
    )
    return given, deltas, wants


@given(told(thinks_first=True))
@example(
    (
        answer(reasoning="r", tool_calls=[called(name="local_shell", command="ls")]),
        [Delta(kind="reasoning", text="r")],
        False,
    )
)
def test_a_stream_adds_up_to_the_whole_answer(case: tuple[ParsedAnswer, list[Delta], bool]) -> None:
    given, deltas, wants = case
    fields = (LOGPROBS if wants else {}) | {"tools": TOOLS_OF_ALL_KINDS}
    events = events_of(streamed(given, deltas, **fields))
    final = whole(given, stream=True, **fields)
    assert accumulated(events) == final["output"]
    assert events[-1]["response"] == final
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@given(told(thinks_first=False))
def test_the_last_event_is_the_whole_answer_in_whatever_order_it_came(
    case: tuple[ParsedAnswer, list[Delta], bool],
) -> None:
    given, deltas, wants = case
    fields = LOGPROBS if wants else {}
    events = events_of(streamed(given, deltas, **fields))
    assert events[-1]["response"] == whole(given, stream=True, **fields)
    shown = [item for item in accumulated(events) if item["type"] != "reasoning"]
    assert shown == [item for item in events[-1]["response"]["output"] if item["type"] != "reasoning"]


def test_reasoning_ends_once_before_several_calls() -> None:
    said = answer(reasoning="r", tool_calls=[called(), called(1)])
    assert accumulated(events_of(streamed(said))) == whole(said)["output"]


def test_the_sdk_reads_a_stream() -> None:
    told = list(client(streamed(FULL), stream=True).responses.create(model="policy", input="hi", stream=True))
    assert "".join(event.delta for event in told if event.type == "response.output_text.delta") == "Let me see."
    assert "".join(event.delta for event in told if event.type == "response.reasoning_text.delta") == "hm"
    assert told[-1].type == "response.completed"
    assert told[-1].response.model_dump(exclude_unset=True) == whole(FULL, stream=True)
    for event in told:
        type(event).model_validate(event.model_dump(by_alias=True))


def test_the_sdks_own_stream_gives_the_final_response() -> None:
    given = answer('{"name": "Bonn", "rivers": []}', reasoning="hm", tool_calls=[called(q="x")])
    tools: list[Any] = [LOOK_UP | {"strict": True}]
    with client(streamed(given, tools=tools), stream=True).responses.stream(
        model="policy", input="hi", text_format=City, tools=tools
    ) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == given.content
    assert final.output_parsed == City(name="Bonn", rivers=[])
    assert final.output[-1].type == "function_call"
    assert final.output[-1].parsed_arguments == {"q": "x"}


def test_the_async_sdk_reads_both_forms() -> None:
    async def ask() -> tuple[str, str, str]:
        body = responses.serialize(request(), OPENING, [FULL])
        plain = await async_client(body).responses.create(model="policy", input="hi")
        stream = await async_client(streamed(FULL), stream=True).responses.create(
            model="policy", input="hi", stream=True
        )
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        async with async_client(streamed(FULL), stream=True).responses.stream(model="policy", input="hi") as events:
            final = await events.get_final_response()
        return plain.output_text, text, final.output_text

    assert asyncio.run(ask()) == ("Let me see.",) * 3


def test_a_ping_is_nothing_to_the_sdk() -> None:
    body = responses.PING + streamed(answer("hi")) + responses.PING
    with client(body, stream=True).responses.stream(model="policy", input="hi") as stream:
        assert stream.get_final_response().output_text == "hi"


# ---- errors


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GatewayError(400, "m", param="input[0]"), openai.BadRequestError),
        (GatewayError(401, "m"), openai.AuthenticationError),
        (GatewayError(409, "m", kind="conflict"), openai.ConflictError),
        (GatewayError(429, "m"), openai.RateLimitError),
        (GatewayError(503, "m", kind="server_error"), openai.InternalServerError),
    ],
)
def test_errors_are_the_sdks_errors(error: GatewayError, kind: type[openai.APIStatusError]) -> None:
    sdk = client(responses.serialize_error(error), status=error.status).with_options(max_retries=0)
    with pytest.raises(kind) as raised:
        sdk.responses.create(model="policy", input="hi")
    assert (raised.value.type, raised.value.param, raised.value.code) == (error.kind, error.param, None)


def test_a_prompt_that_is_too_long_is_told_in_openais_words() -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client(responses.serialize_error(PromptTooLong(9, 8)), status=400).responses.create(model="m", input="hi")
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "input")
    assert "maximum context length is 8 tokens" in raised.value.message


def test_an_error_in_a_stream_is_raised() -> None:
    events = responses.events(request(stream=True), OPENING)
    error = GatewayError(503, "the engine is gone", kind="server_error", code="gone")
    body = events.start() + events.delta(0, Delta(kind="content", text="a")) + responses.error_event(error)
    with pytest.raises(openai.APIError, match="the engine is gone") as raised:
        list(client(body, stream=True).responses.create(model="policy", input="hi", stream=True))
    assert raised.value.code == "gone"
    flat = events_of(responses.error_event(error))[0]
    assert (flat["type"], flat["message"], flat["code"], flat["param"]) == ("error", "the engine is gone", "gone", None)


# ---- what is sent back


def sent_back(items: Sequence[Any], *, ids: bool, reasoning: bool, **dumped: Any) -> list[Any]:
    """Output as clients keep it: as the SDK's objects or dumped, with or without what may be dropped."""
    kept = [item.model_dump(mode="json", **dumped) for item in items if reasoning or item.type != "reasoning"]
    return [{k: v for k, v in item.items() if ids or k not in ("id", "status")} for item in kept]


answers = st.builds(
    answer,
    texts,
    reasoning=st.none() | texts,
    tool_calls=st.lists(texts, max_size=3).map(lambda asked: [called(i, q=q) for i, q in enumerate(asked)]),
    finish_reason=st.sampled_from(["stop", "length"]),
)


@given(
    answers,
    st.booleans(),
    st.booleans(),
    st.sampled_from([{}, {"exclude_unset": True}, {"exclude_none": True}]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_an_answer_that_is_sent_back_is_the_same_message(
    given: ParsedAnswer, ids: bool, reasoning: bool, dumped: dict[str, Any], shuffled: bool, dice: Any
) -> None:
    output = Response.model_validate(whole(given)).output
    items = sent_back(output, ids=ids, reasoning=reasoning, **dumped)
    if shuffled and ids:
        first = len(items) - len(given.tool_calls)
        calls, others = items[first:], items[:first]
        for item in others:
            calls.insert(dice.randint(0, len(calls)), item)
        items = calls
    results = [{"type": "function_call_output", "call_id": call["id"], "output": "x"} for call in given.tool_calls]
    read = messages(USER, *items, *results, USER)
    assert [m["role"] for m in read] == ["user", "assistant", *["tool"] * len(results), "user"]
    assert message_fingerprint.fingerprint_of(read[1]) == message_fingerprint.fingerprint_of(given.message())
    thought = given.reasoning if reasoning else None
    assert read[1].get("reasoning_content") == (thought or None)


@given(answers, answers.filter(lambda a: not a.tool_calls))
def test_answers_that_are_sent_back_behind_each_other_stay_two(first: ParsedAnswer, second: ParsedAnswer) -> None:
    opening = msgspec.structs.replace(OPENING, call_id=OTHER_ID)
    later = msgspec.json.decode(responses.serialize(request(), opening, [second]))["output"]
    read = messages(USER, *whole(first)["output"], *later)
    assert [message_fingerprint.fingerprint_of(m) for m in read[1:]] == [
        message_fingerprint.fingerprint_of(a.message()) for a in (first, second)
    ]


def test_the_sdk_sends_its_output_back() -> None:
    sent: list[dict[str, Any]] = []

    def reply(asking: Any) -> Any:
        sent.append(json.loads(asking.content))
        body = responses.serialize(responses.parse(sent[-1]), OPENING, [FULL])
        return httpx.Response(200, content=body, headers={"content-type": "application/json"})

    http = httpx.Client(transport=httpx.MockTransport(reply))
    sdk = openai.OpenAI(api_key="k", base_url="http://x/v1", http_client=http)
    history: list[Any] = [USER]
    for call in (sdk.responses.create, sdk.responses.parse):
        told = call(model="policy", input=history)
        history += told.output
        history += [{"type": "function_call_output", "call_id": c["id"], "output": "x"} for c in FULL.tool_calls]
    sdk.responses.create(model="policy", input=history)
    read = responses.parse(sent[-1]).messages
    assert [m["role"] for m in read] == ["user", *["assistant", "tool", "tool"] * 2]
    assert all(
        message_fingerprint.fingerprint_of(read[i]) == message_fingerprint.fingerprint_of(FULL.message())
        for i in (1, 4)
    )


@pytest.mark.parametrize(
    "arguments", ['{"command": ' + "[" * 100_000, '{"command": "\ud800"}'], ids=["deep", "surrogate"]
)
def test_a_shell_call_whose_arguments_no_json_can_be_is_a_functions(arguments: str) -> None:
    call = {"id": "c", "function": {"name": "local_shell", "arguments": arguments}}
    assert responses_tools._details(call, "local_shell") is None
