"""Anthropic Messages: blocks <-> one text, one reasoning and tool calls. Pure.

A turn is what the API calls one: the neighbouring messages of one role. Its tool results become `tool` messages, its
other blocks one message. An answer's blocks stand in the order thinking, text, tool use. A stream opens its blocks as
the deltas come; where they come in that order it adds up to the whole answer's blocks, else to the same blocks cut in
pieces. White space alone never makes a block beside others, since clients drop such blocks when they send them back.

Whether the policy thinks is up to its chat format, the same for every call of a conversation, so that a turn stays a
pure continuation. So `thinking` and `output_config.effort` are neither refused, since every agent sends them, nor
hints, since they ask for another answer: they are told of in `ignored_fields`.
"""

import base64
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from lightning_rl_proxy.dialects.base import (
    NamedTool,
    Opening,
    Request,
    Tables,
    ToolChoice,
    check_prefill,
    left_out,
    schema_of_text,
    sse,
)
from lightning_rl_proxy.dialects.wire.engine_fields import ENGINE_FIELDS, ENGINE_OFF
from lightning_rl_proxy.dialects.wire.messages import (
    Assistant,
    CountWire,
    Document,
    ImageBlock,
    MessagesTool,
    MessagesToolChoice,
    MessagesWire,
    PlainSource,
    RedactedThinking,
    SearchResult,
    System,
    Text,
    Thinking,
    ToolResultBlock,
    ToolUse,
    Url,
    User,
)
from lightning_rl_proxy.errors import GatewayError, PromptTooLong
from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer, tool_call

NAME = "messages"
PING = sse({"type": "ping"}, "ping")

TABLES = Tables(
    honoured=frozenset(
        {
            "model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "temperature",
            "top_p", "top_k", "stream", "output_config", "output_format",
            # No fields of the API; clients send them as extra fields.
            "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "seed",
        }
        | ENGINE_FIELDS
    ),
    hints=frozenset(
        {
            "metadata", "cache_control", "service_tier", "inference_geo", "speed", "diagnostics", "user_profile_id",
            "workspace_id", "billing_policy", "fallbacks", "fallback_credit_token", "betas", "anthropic_beta",
            "anthropic_version",
        }
    ),
    off=ENGINE_OFF
    | {
        "n": (1,),
        "logprobs": (False,),
        "mcp_servers": ([],),
        "container": (),
        "compaction": (),
        "thread": (),
    },
    relaxed={"context_management": "nothing is cleared or compacted; `applied_edits` is empty"},
)  # fmt: skip

# Arguments that are no JSON object have no place in `input`; Anthropic's documentation names this key for them.
_INVALID = "INVALID_JSON"
_BREAK = {"type": "text", "text": "\n\n"}
# What litellm writes where an assistant said nothing, since Anthropic takes no empty text: so it says nothing here.
_NOTHING = "[System: Empty message content sanitised to satisfy protocol]"
# Claude Code's first system block: billing data, no prompt; it differs in every request, so each would fork.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
_TOOL_FIELDS = frozenset(
    {"name", "description", "input_schema", "type", "cache_control", "allowed_callers", "eager_input_streaming"}
)
_TEXT, _NUMBER, _YES = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_RANGE = {"type": "array", "items": _NUMBER}
_EDITS = {
    "command": _TEXT, "path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _NUMBER,
    "insert_text": _TEXT, "view_range": _RANGE,
}  # fmt: skip
# Anthropic's own tools that a client runs: what they are for, their arguments, and those that are needed.
_CLIENTS_TOOLS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "bash": ("Run a command in a shell that stays open.", {"command": _TEXT, "restart": _YES}, []),
    "text_editor": (
        "View, make and edit files. The command is view, create, str_replace or insert.", _EDITS, ["command", "path"],
    ),
    "memory": (
        "Keep notes as files below /memories. The command is view, create, str_replace, insert, delete or rename.",
        _EDITS | {"old_path": _TEXT, "new_path": _TEXT}, ["command"],
    ),
}  # fmt: skip
_ERRORS = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
T = TypeVar("T")


def parse(fields: dict[str, Any]) -> Request:
    """See `Dialect`."""
    wire = _converted(fields, MessagesWire)
    request = _request(fields, wire, wire.max_tokens)
    if not isinstance(wire.messages[-1], Assistant):
        return request
    check_prefill(f"messages.{len(wire.messages) - 1}", request.messages[-1])
    if len(request.messages) == 1:
        raise GatewayError(400, "messages: a user's message comes before the assistant's", param="messages")
    return msgspec.structs.replace(request, prefill=True)


def parse_count(fields: dict[str, Any]) -> Request:
    """A request to count the tokens of its prompt. Raises GatewayError(400) as `parse` does.

    It needs no `max_tokens`, and may end with any message of the assistant's, since it asks for no answer: with the
    beginning of one, where it can be that, else with a turn that has ended.
    """
    wire = _converted(fields, CountWire)
    request = _request(fields, wire, None)
    if not isinstance(wire.messages[-1], Assistant) or len(request.messages) == 1:
        return request
    try:
        check_prefill("messages", request.messages[-1])
    except GatewayError:
        return request
    return msgspec.structs.replace(request, prefill=True)


def serialize(request: Request, opening: Opening, answers: Sequence[ParsedAnswer]) -> bytes:
    """See `Dialect`."""
    (answer,) = answers
    message = _message(opening, _blocks(answer), answer)
    if request.fields.get("context_management"):
        message["context_management"] = {"applied_edits": []}
    return msgspec.json.encode(message)


def count(tokens: int) -> bytes:
    """The answer to a request to count tokens."""
    return msgspec.json.encode({"input_tokens": tokens})


def events(request: Request, opening: Opening) -> "BlockEvents":
    """See `Dialect`."""
    return BlockEvents(opening)


class BlockEvents:
    """See `Events`: blocks opened, filled and closed in the order of the deltas."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._index = -1  # of the latest block
        self._open: str | None = None  # the kind of the block that text is being added to
        self._held = {"content": "", "reasoning": ""}  # white space that may begin a block
        self._signature = _signature()
        self._answers = False  # whether there was a block of text or of a tool call

    def start(self) -> bytes:
        return sse({"type": "message_start", "message": _message(self._opening, [], None)}, "message_start")

    def delta(self, index: int, delta: Delta) -> bytes:
        if delta.tool_call is not None:
            return self._close() + self._call(_tool_use(delta.tool_call))
        if self._open == delta.kind:
            return self._add(delta.text)
        text = self._held[delta.kind] + delta.text
        self._held[delta.kind] = "" if text.strip() else text
        return self._close() + self._begin(delta.kind) + self._add(text) if text.strip() else b""

    def stop(self, index: int, answer: ParsedAnswer) -> bytes:
        written = self._close()
        if not self._answers:
            written += self._begin("content") + self._add(self._held["content"]) + self._close()
        reason, sequence = _stop(answer)
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        usage = _usage(self._opening, answer)
        return written + sse({"type": "message_delta", "delta": delta, "usage": usage}, "message_delta")

    def end(self, answers: Sequence[ParsedAnswer]) -> bytes:
        return sse({"type": "message_stop"}, "message_stop")

    def _begin(self, kind: str) -> bytes:
        self._open = kind
        self._signature = _signature()
        self._answers |= kind == "content"
        return self._start(_text("") if kind == "content" else _thinking("", ""))

    def _add(self, text: str) -> bytes:
        if not text:
            return b""
        if self._open == "content":
            return self._delta(type="text_delta", text=text)
        self._signature.update(text.encode())
        return self._delta(type="thinking_delta", thinking=text)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "reasoning":
            signed = self._delta(type="signature_delta", signature=_signed(self._signature))
        self._open = None
        return signed + self._stop()

    def _call(self, block: dict[str, Any]) -> bytes:
        self._answers = True
        text = bytes(block["input"]).decode()
        return (
            self._start(block | {"input": {}}) + self._delta(type="input_json_delta", partial_json=text) + self._stop()
        )

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return sse({"type": "content_block_start", "index": self._index, "content_block": block}, "content_block_start")

    def _delta(self, **delta: str) -> bytes:
        return sse({"type": "content_block_delta", "index": self._index, "delta": delta}, "content_block_delta")

    def _stop(self) -> bytes:
        return sse({"type": "content_block_stop", "index": self._index}, "content_block_stop")


def serialize_error(error: GatewayError) -> bytes:
    """See `Dialect`: the shape that Anthropic's SDKs read."""
    return msgspec.json.encode(_error(error))


def error_event(error: GatewayError) -> bytes:
    """See `Dialect`."""
    return sse(_error(error), "error")


def _request(fields: dict[str, Any], wire: CountWire, max_tokens: int | None) -> Request:
    if not wire.messages:
        raise GatewayError(400, "messages: at least one message is required", param="messages")
    read = [_tool(f"tools.{i}", tool) for i, tool in enumerate(wire.tools or ())]
    tools, unseen = left_out(read, "tools.{}")
    tools = _callable(wire, tools)
    choice = _tool_choice(wire.tool_choice, tools)
    wanted = (wire.output_config and wire.output_config.format) or wire.output_format
    place = "output_format" if wire.output_format else "output_config.format"
    schema, unheld = schema_of_text(place, wanted.schema if wanted else None, choice, tools)
    return Request(
        model=wire.model,
        messages=_system(wire.system) + _conversation(wire.messages),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not (wire.tool_choice and wire.tool_choice.disable_parallel_tool_use),
        sampling=wire.sampling(
            top_k=-1 if wire.top_k == 0 else wire.top_k,
            max_tokens=max_tokens,
            stop=wire.stop_sequences or None,
            json_schema=schema,
        ),
        stream=bool(wire.stream),
        ignored_fields=TABLES.ignored(fields) + _ignored_within(fields) + unseen + unheld,
        fields=fields,
    )


def _ignored_within(fields: dict[str, Any]) -> list[str]:
    """What is not followed of `output_config` and of tools."""
    config = fields.get("output_config") or {}
    ignored = [f"output_config.{name}" for name, value in config.items() if name != "format" and value is not None]
    for index, tool in enumerate(fields.get("tools") or ()):
        if tool.get("type") not in (None, "custom"):
            continue
        ignored += [f"tools.{index}.{name}" for name, value in tool.items() if value and name not in _TOOL_FIELDS]
    return ignored


def _converted(fields: dict[str, Any], wanted: type[T], within: str = "") -> T:
    """The fields as `wanted`. Raises GatewayError(400) that names the field at fault by its path, as Anthropic does."""
    try:
        return msgspec.convert(fields, wanted)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at `$.")
        path = [name for name in (within, at.rstrip("`").replace("[", ".").replace("]", "")) if name]
        if missing := re.fullmatch("Object missing required field `(.*)`", problem):
            path.append(missing[1])
            problem = "Field required"
        elif path and path[-1].endswith((".type", ".role")) and problem.startswith("Invalid value"):
            problem += ", which is not supported here"
        where = ".".join(path)
        raise GatewayError(400, f"{where}: {problem}" if where else problem, param=where or None) from error


def _system(system: str | list[Text] | None) -> list[dict[str, Any]]:
    text = "".join(_BILLING.sub("", block.text) for block in _listed(system))
    return [{"role": "system", "content": text}] if text else []


def _conversation(messages: Sequence[User | Assistant | System]) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    for role, turn in itertools.groupby(messages, type):
        contents: list[Sequence[Any]] = [_listed(message.content) for message in turn]
        if role is User:
            read += _user(contents)
        elif role is Assistant:
            read.append(_assistant(itertools.chain.from_iterable(contents)))
        else:
            read += [{"role": "system", "content": _content([_part(b) for b in blocks])} for blocks in contents]
    return read


def _user(contents: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """A user turn: the tool results first, as chat formats want them, then what the user says."""
    results: list[dict[str, Any]] = []
    content: list[dict[str, Any]] = []
    for blocks in contents:
        results += [_tool_result(block) for block in blocks if isinstance(block, ToolResultBlock)]
        parts = [_part(block) for block in blocks if not isinstance(block, ToolResultBlock)]
        content += [_BREAK, *parts] if content and parts else parts
    return results + ([{"role": "user", "content": _content(content)}] if content or not results else [])


def _tool_result(block: ToolResultBlock) -> dict[str, Any]:
    """A tool message. Chat formats have no mark for a failed call, so the model is told so in a word."""
    parts = [_part(inner) for inner in _listed(block.content)]
    if block.is_error:
        parts.insert(0, {"type": "text", "text": "Error: "})
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(parts)}


def _assistant(blocks: Iterable[Text | Thinking | RedactedThinking | ToolUse]) -> dict[str, Any]:
    """An assistant turn: pieces of text or thinking are joined as they were sampled, with nothing between."""
    text = reasoning = ""
    calls = []
    for block in blocks:
        if isinstance(block, Text):
            text += "" if block.text == _NOTHING else block.text
        elif isinstance(block, Thinking):
            reasoning += block.thinking
        elif isinstance(block, ToolUse):
            calls.append(tool_call(block.id, block.name, _arguments(block.input)))
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _listed(content: str | Sequence[T] | None) -> Sequence[T | Text]:
    return [Text(content)] if isinstance(content, str) else content or []


def _part(block: Text | ImageBlock | Document | SearchResult) -> dict[str, Any]:
    if isinstance(block, Text):
        return _text(block.text)
    if isinstance(block, Document):
        inner = block.source.data if isinstance(block.source, PlainSource) else _joined(block.source.content)
        return _text(_quoted("document", {"title": block.title, "context": block.context}, inner))
    if isinstance(block, SearchResult):
        return _text(_quoted("search_result", {"source": block.source, "title": block.title}, _joined(block.content)))
    source = block.source
    url = source.url if isinstance(source, Url) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _joined(content: str | Sequence[Text]) -> str:
    return "".join(block.text for block in _listed(content))


def _quoted(kind: str, about: dict[str, str | None], text: str) -> str:
    """A text that somebody else wrote, as models are used to see such."""
    head = "".join(f"<{name}>{value}</{name}>\n" for name, value in about.items() if value)
    return f"<{kind}>\n{head}{text}\n</{kind}>\n"


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _callable(wire: CountWire, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools, where the choice among them can be met."""
    if wire.tools and not tools and wire.tool_choice is not None and wire.tool_choice.type in ("any", "tool"):
        raise GatewayError(400, "tool_choice.type: none of the tools can be called here", param="tool_choice.type")
    return tools


def _tool(where: str, tool: dict[str, Any]) -> dict[str, Any] | None:
    """A tool as a function; None for one that Anthropic's servers run, which the model is not shown.

    Of those that its clients run, the model knows no more than any other: they are told of in full.
    """
    kind = tool.get("type")
    if kind not in (None, "custom"):
        name = str(kind).rstrip("0123456789").rstrip("_")
        if name not in _CLIENTS_TOOLS:
            return None
        description, properties, required = _CLIENTS_TOOLS[name]
        parameters = {"type": "object", "properties": properties, "required": required}
        tool = {"name": tool.get("name"), "description": description, "input_schema": parameters}
    definition = _converted(tool, MessagesTool, where)
    about = {} if definition.description is None else {"description": definition.description}
    return {"type": "function", "function": {"name": definition.name, **about, "parameters": definition.input_schema}}


def _tool_choice(choice: MessagesToolChoice | None, tools: list[dict[str, Any]] | None) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "none":
        return "none"
    if choice.type == "any":
        if not tools:
            raise GatewayError(400, "tool_choice.type: 'any' needs tools, and there are none", param="tool_choice.type")
        return "required"
    names = [tool["function"]["name"] for tool in tools or ()]
    if choice.name is None or choice.name not in names:
        raise GatewayError(
            400, f"tool_choice.name: {choice.name!r} is none of the tools {names}", param="tool_choice.name"
        )
    return NamedTool(choice.name)


def _message(opening: Opening, content: list[dict[str, Any]], answer: ParsedAnswer | None) -> dict[str, Any]:
    reason, sequence = (None, None) if answer is None else _stop(answer)
    return {
        "id": f"msg_{opening.call_id}",
        "type": "message",
        "role": "assistant",
        "model": opening.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "stop_details": None,
        "usage": _usage(opening, answer),
    }


def _usage(opening: Opening, answer: ParsedAnswer | None) -> dict[str, int]:
    """The whole prompt counts as input: what an engine kept of it from earlier calls is not told."""
    return {
        "input_tokens": opening.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0 if answer is None else answer.output_tokens,
    }


def _stop(answer: ParsedAnswer) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`."""
    if answer.stop_match is not None:
        return "stop_sequence", answer.stop_match
    if answer.tool_calls and answer.finish_reason == "stop":
        return "tool_use", None
    return _STOP_REASONS.get(answer.finish_reason, answer.finish_reason), None


def _blocks(answer: ParsedAnswer) -> list[dict[str, Any]]:
    """An answer's blocks. There is always a text or a tool call, so that what clients look for first is there."""
    blocks = []
    if answer.reasoning and answer.reasoning.strip():
        blocks.append(_thinking(answer.reasoning, _signed(_signature(answer.reasoning))))
    if answer.content.strip() or not answer.tool_calls:
        blocks.append(_text(answer.content))
    return blocks + [_tool_use(call) for call in answer.tool_calls]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking(thinking: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def _signature(text: str = "") -> "hashlib.blake2b":
    return hashlib.blake2b(text.encode(), digest_size=24)


def _signed(digest: "hashlib.blake2b") -> str:
    """The signature of reasoning: never looked at again, but clients send reasoning without one back as plain text."""
    return base64.b64encode(digest.digest()).decode()


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}


def _input(arguments: str | None) -> msgspec.Raw:
    """Arguments as an object, written as the model wrote it; other text stands in an object of one key.

    An object that looks like such a one is wrapped too, so that `_arguments` gives every text back.
    """
    text = arguments if arguments and arguments.strip() else "{}"
    try:
        values = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        values = None
    if values is None or _wrapped(values) is not None:
        return msgspec.Raw(msgspec.json.encode({_INVALID: text}))
    return msgspec.Raw(text.encode())


def _arguments(values: dict[str, Any]) -> str:
    """The text of arguments that a client sends back."""
    wrapped = _wrapped(values)
    return msgspec.json.encode(values).decode() if wrapped is None else wrapped


def _wrapped(values: dict[str, Any]) -> str | None:
    """The text in an object that holds arguments which are no object."""
    text = values.get(_INVALID) if len(values) == 1 else None
    return text if isinstance(text, str) else None


def _error(error: GatewayError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
        message += " (or more: it was counted no further)" if error.at_least else ""
    return {"type": "error", "error": {"type": kind, "message": message}}
