"""OpenAI Responses: input items become messages, an answer becomes output items. Pure.

An answer's items are its reasoning, its text, then its tool calls. It leaves at least a message or a call, if only an
empty message: clients send back the items that they were given, and an answer without any would be lost to the history.
Its items name its call in their ids, so that those of one answer become one message again, whatever their order.

`previous_response_id` goes on from `kept`, what the response was asked and answered, by `continued`. Instructions are
not carried over.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from lightning_rl_proxy.dialects.base import (
    NamedTool,
    Opening,
    Request,
    Tables,
    ToolChoice,
    allowed,
    no_request,
    schema_of_text,
    sse,
)
from lightning_rl_proxy.dialects.chat_completions import PING, stops, token_logprobs
from lightning_rl_proxy.dialects.wire.engine_fields import ENGINE_FIELDS, ENGINE_OFF, unsupported
from lightning_rl_proxy.dialects.wire.responses import INCLUDABLE, LOGPROBS, ResponsesWire
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer, SampledToken

__all__ = [
    "NAME", "PING", "TABLES", "ResponseEvents", "continued", "error_event", "events", "instructed", "kept", "parse",
    "previous", "response_id", "serialize", "serialize_error", "unknown_previous",
]  # fmt: skip

NAME = "responses"

TABLES = Tables(
    honoured=frozenset(
        {
            "model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls",
            "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
            "logit_bias", "seed", "stop", "max_output_tokens", "text", "include", "stream",
        }
        | ENGINE_FIELDS
    ),
    hints=frozenset(
        {
            # Whether and how long a model thinks is decided by its chat format and its weights.
            "reasoning",
            "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention",
            "prompt_cache_options", "safety_identifier", "stream_options", "access_programs",
            "client_metadata",
            "background_options",  # of what `background` would need
            "image",  # how images are shrunk
        }
    ),
    off=ENGINE_OFF
    | {
        "background": (False,),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        # Names that other dialects have for what this one says otherwise.
        "n": (1,),
        "max_tokens": (),
        "max_completion_tokens": (),
        "response_format": ({"type": "text"},),
    },
    relaxed={
        "context_management": "nothing is compacted",
        "top_logprobs": "each token's list holds the sampled one alone",
        "truncation": "nothing is dropped: a prompt that is too long is a 400",
    },
)  # fmt: skip

# What a response repeats of its request, and says where the request says nothing. The temperature that nobody asked for
# is the algorithm's business.
_REPEATED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}

_ROLES = ("user", "assistant", "system", "developer")
_OUR_ID = re.compile(r"(rs|msg|fc|call|ctc|lsh|apc)_([0-9a-f]{32})_(\d+)")
# Tools whose calls are a text: what they are to the model, and the one argument that holds it.
_TEXT_TOOLS = {
    "custom": ("input", ""),
    "local_shell": ("command", "Run a command in a shell on this machine."),
    "apply_patch": ("patch", "Change files: *** Begin Patch, *** Update File: PATH, the difference, *** End Patch."),
}
_PATCH = re.compile(
    r"\*\*\* Begin Patch\n\*\*\* (Add|Update|Delete) File: ([^\n]+)\n(.*?)\n?\*\*\* End Patch\s*", re.DOTALL
)
_VERBS = {"Add": "create_file", "Update": "update_file", "Delete": "delete_file"}
_MAX = 2**31


class _Piece(NamedTuple):
    """What one item says of an answer: its reasoning, its text or a call. `answer` is the call that it came from."""

    kind: Literal["reasoning", "message", "call"]
    value: Any
    answer: str | None


class _Said(msgspec.Struct):
    """One answer, put together from the items that a client sends back."""

    content: str | list[dict[str, Any]] | None = None
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    answer: str | None = None

    def ends_before(self, piece: _Piece) -> bool:
        """Whether an item is another answer's. Ids tell; where there are none, reasoning comes first, and text once."""
        if piece.kind == "message" and self.content is not None:
            return True
        if piece.answer is not None and self.answer is not None:
            return piece.answer != self.answer
        return piece.kind == "reasoning" and (self.content is not None or bool(self.calls))

    def add(self, piece: _Piece) -> None:
        self.answer = self.answer or piece.answer
        if piece.kind == "message":
            self.content = piece.value
        elif piece.kind == "call":
            self.calls.append(piece.value)
        elif piece.value:
            self.reasoning.append(piece.value)

    def empty(self) -> bool:
        """Whether this is reasoning that cannot be read and led to nothing."""
        return self.content is None and not self.calls and not self.reasoning

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or ""}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.reasoning:
            message["reasoning_content"] = "\n".join(self.reasoning)
        return message


def parse(fields: dict[str, Any], known: Mapping[str, list[dict[str, Any]]] | None = None) -> Request:
    """See `Dialect`. What is `kept` of the responses `known` by id is where an `item_reference` finds its item."""
    try:
        wire = msgspec.convert(fields, ResponsesWire)
    except msgspec.ValidationError as error:
        raise _no_request(error) from error
    ignored = TABLES.ignored(fields)
    tools, unseen = _tools(wire.tools or ())
    tools, choice = _tool_choice(wire.tool_choice, tools)
    return Request(
        model=wire.model,
        messages=_messages(wire, known or {}),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        sampling=wire.sampling(
            max_tokens=wire.max_output_tokens,
            stop=stops("stop", wire.stop),
            json_schema=schema_of_text(_json_schema(wire.text), choice, tools),
        ),
        stream=bool(wire.stream),
        logprobs=LOGPROBS in _included(wire.include),
        ignored_fields=ignored + unseen,
        fields=fields,
    )


def previous(fields: Mapping[str, Any]) -> str | None:
    """The response that a request continues."""
    named = fields.get("previous_response_id")
    return named if isinstance(named, str) else None


def unknown_previous(previous_id: str) -> GatewayError:
    """A request continues a response that its attempt never gave."""
    return GatewayError(
        400,
        f"Previous response with id '{previous_id}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def response_id(call_id: str) -> str:
    """The id by which clients continue the answer of a call."""
    return f"resp_{call_id}"


def continued(request: Request, earlier: Sequence[dict[str, Any]]) -> Request:
    """The request behind the messages of the response that it continues; its own instructions stay first."""
    own = instructed(request)
    messages = [*request.messages[:own], *earlier, *request.messages[own:]]
    return msgspec.structs.replace(request, messages=messages)


def kept(request: Request, answer: ParsedAnswer) -> list[dict[str, Any]]:
    """The messages that a later request continues: all that was asked but the instructions, and the answer."""
    reasoned = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return [*request.messages[instructed(request) :], answer.message() | reasoned]


def serialize(request: Request, opening: Opening, answers: Sequence[ParsedAnswer]) -> bytes:
    """See `Dialect`."""
    return msgspec.json.encode(_response(request, opening, answers[0]))


def events(request: Request, opening: Opening) -> "ResponseEvents":
    """See `Dialect`."""
    return ResponseEvents(request, opening)


class ResponseEvents:
    """See `Events`: numbered `response.*` events, whose last is the response as `serialize` gives it.

    Text may come behind a call. So the message stays open until the answer is complete, and the calls are told then.
    Reasoning that comes when text has begun stands in the last event alone.
    """

    def __init__(self, request: Request, opening: Opening) -> None:
        self._request = request
        self._opening = opening
        self._number = 0
        self._index = 0  # of the item that is open, or comes next
        self._reasoning: list[str] = []
        self._writing = False
        self._tokens: list[SampledToken] = []  # since the last text

    def start(self) -> bytes:
        response = _response(self._request, self._opening, None)
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def delta(self, index: int, delta: Delta) -> bytes:
        self._tokens += delta.tokens or ()
        if not delta.text or delta.kind == "tool_call":
            return b""
        return self._think(delta.text) if delta.kind == "reasoning" else self._write(delta.text)

    def stop(self, index: int, answer: ParsedAnswer) -> bytes:
        told = []
        for item in _output(self._request, self._opening, answer):
            if item["type"] == "message":
                told.append(self._begin_message() + self._end(item))
            elif item["type"] == "function_call":
                told.append(self._end_reasoning() + self._call(item))
            elif item["type"] == "custom_tool_call":
                told.append(self._end_reasoning() + self._custom_call(item))
            elif item["type"] != "reasoning":
                begun = self._event("output_item.added", output_index=self._index, item=item)
                told.append(self._end_reasoning() + begun + self._done(item))
        return b"".join(told)

    def end(self, answers: Sequence[ParsedAnswer]) -> bytes:
        response = _response(self._request, self._opening, answers[0])
        return self._event(response["status"], response=response)

    def _think(self, text: str) -> bytes:
        if self._writing:
            return b""
        item = _reasoning(self._opening, "")
        begun = b"" if self._reasoning else self._begin(item)
        self._reasoning.append(text)
        return begun + self._event("reasoning_text.delta", **self._at(item), delta=text)

    def _write(self, text: str) -> bytes:
        begun = self._begin_message()
        at = self._at(_message(self._opening, "", "in_progress", []))
        logprobs, self._tokens = _logprobs(self._tokens, self._request), []
        return begun + self._event("output_text.delta", **at, delta=text, logprobs=logprobs)

    def _begin_message(self) -> bytes:
        if self._writing:
            return b""
        ended = self._end_reasoning()
        self._writing = True
        return ended + self._begin(_message(self._opening, "", "in_progress", []))

    def _end_reasoning(self) -> bytes:
        if self._index or not self._reasoning or self._writing:
            return b""
        return self._end(_reasoning(self._opening, "".join(self._reasoning)))

    def _begin(self, item: dict[str, Any]) -> bytes:
        added = self._event("output_item.added", output_index=self._index, item=item | {"content": []})
        return added + self._event("content_part.added", **self._at(item), part=item["content"][0])

    def _end(self, item: dict[str, Any]) -> bytes:
        part = item["content"][0]
        said = {name: part[name] for name in ("text", "logprobs") if name in part}
        done = self._event(f"{part['type']}.done", **self._at(item), **said)
        return done + self._event("content_part.done", **self._at(item), part=part) + self._done(item)

    def _call(self, item: dict[str, Any]) -> bytes:
        at = {"item_id": item["id"], "output_index": self._index}
        begun = item | {"arguments": "", "status": "in_progress"}
        return b"".join(
            (
                self._event("output_item.added", output_index=self._index, item=begun),
                self._event("function_call_arguments.delta", **at, delta=item["arguments"]),
                self._event("function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"]),
                self._done(item),
            )
        )

    def _custom_call(self, item: dict[str, Any]) -> bytes:
        at = {"item_id": item["id"], "output_index": self._index}
        return b"".join(
            (
                self._event("output_item.added", output_index=self._index, item=item | {"input": ""}),
                self._event("custom_tool_call_input.delta", **at, delta=item["input"]),
                self._event("custom_tool_call_input.done", **at, input=item["input"]),
                self._done(item),
            )
        )

    def _done(self, item: dict[str, Any]) -> bytes:
        done = self._event("output_item.done", output_index=self._index, item=item)
        self._index += 1
        return done

    def _at(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._index, "content_index": 0}

    def _event(self, name: str, /, **data: Any) -> bytes:
        kind = f"response.{name}"
        number, self._number = self._number, self._number + 1
        return sse({"type": kind, "sequence_number": number} | data, kind)


def serialize_error(error: GatewayError) -> bytes:
    """See `Dialect`: the shape that OpenAI's SDKs read."""
    return msgspec.json.encode({"error": _error(error)})


def error_event(error: GatewayError) -> bytes:
    """See `Dialect`. OpenAI's reference has the fields in the event, its service sends them in `error`: here are both.

    Only for the second do its SDKs raise. What came before is not known here; the highest number is behind it.
    """
    said = _error(error)
    flat = {name: said[name] for name in ("code", "message", "param")}
    return sse({"type": "error", "sequence_number": _MAX - 1, "error": said} | flat, "error")


def _no_request(error: msgspec.ValidationError) -> GatewayError:
    refused = no_request("responses", error)
    refused.param = refused.param or "model"  # the one field that must be there
    return refused


def _wrong(where: str, what: str, kind: str = "invalid_request_error") -> GatewayError:
    return GatewayError(400, f"{where} {what}", param=where, kind=kind)


def instructed(request: Request) -> int:
    """How many of the messages are instructions: one or none."""
    return 1 if request.fields.get("instructions") else 0


def _messages(wire: ResponsesWire, known: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": wire.instructions}] if wire.instructions else []
    if isinstance(wire.input, str):
        return [*messages, {"role": "user", "content": wire.input}]
    if not wire.input and wire.previous_response_id is None:
        raise _wrong("input", "is missing; it is a text or a list of items")
    pieces: list[_Piece] = []
    for index, item in enumerate(wire.input or ()):
        read = _item(f"input[{index}]", item, known)
        if isinstance(read, dict):
            messages += [*_answers(pieces), read]
            pieces = []
        else:
            pieces += read
    return messages + _answers(pieces)


def _item(where: str, item: Any, known: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any] | list[_Piece]:
    """An item as a message, or as what it says of an answer."""
    if not isinstance(item, dict):
        raise _wrong(where, f"is no item but {type(item).__name__}")
    if isinstance(space := item.get("namespace"), str):
        item = _named_in(space, item)
    kind = item.get("type")
    match ("message" if "role" in item else "item_reference") if kind is None else kind:
        case "message":
            return _said(where, item)
        case "function_call":
            return [_Piece("call", _called(where, item), _answer_of(item))]
        case "custom_tool_call" | "local_shell_call" | "apply_patch_call":
            return [_Piece("call", _called_with_text(where, str(kind), item), _answer_of(item))]
        case "local_shell_call_output" if "call_id" not in item:
            return {"role": "tool", "tool_call_id": _text(where, item, "id"), "content": _text(where, item, "output")}
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output" | "apply_patch_call_output":
            content = _content(f"{where}.output", item.get("output", "" if kind == "apply_patch_call_output" else None))
            return {"role": "tool", "tool_call_id": _text(where, item, "call_id"), "content": content}
        case "reasoning":
            return [_Piece("reasoning", _reasoned(where, item), _answer_of(item))]
        case "item_reference":
            return _referred(where, item, known)
        case _:
            raise _wrong(
                f"{where}.type",
                f"is {kind!r}; items are message, reasoning, item_reference, and calls and outputs of function_call, "
                "custom_tool_call, local_shell_call, apply_patch_call",
                "unsupported_parameter",
            )


def _said(where: str, item: dict[str, Any]) -> dict[str, Any] | list[_Piece]:
    role = item.get("role")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"is {role!r}; it is one of {list(_ROLES)}")
    content = _content(f"{where}.content", item.get("content"))
    if role == "assistant":
        return [_Piece("message", content, _answer_of(item))]
    return {"role": "system" if role == "developer" else role, "content": content}


def _called(where: str, item: dict[str, Any]) -> dict[str, Any]:
    function = {name: _text(where, item, name) for name in ("name", "arguments")}
    return {"id": _text(where, item, "call_id"), "type": "function", "function": function}


def _called_with_text(where: str, kind: str, item: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool whose calls are a text, as one of a function."""
    tool = kind.removesuffix("_call").removesuffix("_tool")
    name = _text(where, item, "name") if tool == "custom" else tool
    inner = item.get("action" if tool == "local_shell" else "operation")
    if tool == "custom":
        text = _text(where, item, "input")
    elif not isinstance(inner, dict):
        raise _wrong(where, f"is no {kind}: it says not what is to be done")
    elif tool == "local_shell":
        text = _command_of(f"{where}.action", inner)
    else:
        verb = next((verb for verb, known in _VERBS.items() if known == inner.get("type")), None)
        if verb is None:
            raise _wrong(f"{where}.operation.type", f"is {inner.get('type')!r}; it is one of {list(_VERBS.values())}")
        text = _patch(verb, _text(f"{where}.operation", inner, "path"), inner.get("diff") or "")
    arguments = msgspec.json.encode({_TEXT_TOOLS[tool][0]: text}).decode()
    return {"id": _text(where, item, "call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _command_of(where: str, action: dict[str, Any]) -> str:
    words = action.get("command")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise _wrong(f"{where}.command", "is no list of words")
    return words[2] if words[:2] == ["bash", "-lc"] and len(words) == 3 else shlex.join(words)


def _patch(verb: str, path: str, diff: str) -> str:
    return f"*** Begin Patch\n*** {verb} File: {path}\n{diff}\n*** End Patch"


def _reasoned(where: str, item: dict[str, Any]) -> str:
    """The reasoning as far as it can be read: in full, else in summary."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if not isinstance(parts, list | None):
            raise _wrong(f"{where}.{name}", "is no list of parts")
        if parts:
            return "\n".join(_text(f"{where}.{name}[{i}]", part, "text") for i, part in enumerate(parts))
    return ""


def _referred(where: str, item: dict[str, Any], known: Mapping[str, list[dict[str, Any]]]) -> list[_Piece]:
    """What the item that is named says, from the answer that it was an item of."""
    named = _text(where, item, "id")
    ours = _OUR_ID.fullmatch(named)
    messages = known.get(response_id(ours[2])) if ours else None
    if ours and messages:
        kind, number, message = ours[1], int(ours[3]), messages[-1]
        if kind == "rs":
            return [_Piece("reasoning", message.get("reasoning_content"), ours[2])]
        if kind == "msg":
            return [_Piece("message", message["content"], ours[2])]
        if number < len(calls := message.get("tool_calls", ())):
            return [_Piece("call", calls[number], ours[2])]
    raise _wrong(f"{where}.id", f"is {named!r}, no item of an answer that is known here; send the item itself")


def _content(where: str, content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "is neither text nor parts")
    parts = [_part(f"{where}[{i}]", part) for i, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(where: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise _wrong(where, f"is no part but {type(part).__name__}")
    match part.get("type"):
        case "input_text" | "output_text":
            return {"type": "text", "text": _text(where, part, "text")}
        case "refusal":
            return {"type": "text", "text": _text(where, part, "refusal")}
        case "input_image":
            if part.get("file_id") is not None:
                raise _wrong(f"{where}.file_id", "names a file, and no files are kept here", "unsupported_parameter")
            detail = {"detail": part["detail"]} if part.get("detail") else {}
            return {"type": "image_url", "image_url": {"url": _text(where, part, "image_url")} | detail}
        case kind:
            raise _wrong(
                f"{where}.type",
                f"is {kind!r}; parts are input_text, input_image, output_text, refusal",
                "unsupported_parameter",
            )


def _text(where: str, holder: Any, name: str) -> str:
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", "is missing" if value is None else "is no text")
    return value


def _answer_of(item: dict[str, Any]) -> str | None:
    """The call whose answer an item is part of, where its ids still tell."""
    for name in ("id", "call_id"):
        ours = _OUR_ID.fullmatch(item[name]) if isinstance(item.get(name), str) else None
        if ours:
            return ours[2]
    return None


def _answers(pieces: Sequence[_Piece]) -> list[dict[str, Any]]:
    """Assistant messages of items that follow each other: one per answer."""
    said: list[_Said] = []
    for piece in pieces:
        if not said or said[-1].ends_before(piece):
            said.append(_Said())
        said[-1].add(piece)
    return [answer.message() for answer in said if not answer.empty()]


def _tools(tools: Sequence[Any]) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """The tools that the model is shown, and the places of those that it is not.

    Those of a `namespace` are shown one by one, each with the namespace in its name.
    """
    shown, unseen = [], []
    for index, tool in enumerate(tools):
        named = {f"tools[{index}]": tool}
        if _is_namespace(tool):
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise _wrong(f"tools[{index}].tools", "is no list of tools")
            space = _text(f"tools[{index}]", tool, "name")
            named = {f"tools[{index}].tools[{i}]": _named_in(space, one) for i, one in enumerate(inner)}
        for where, one in named.items():
            function = _tool(where, one)
            if function is None:
                unseen.append(where)
            else:
                shown.append(function)
    return shown or None, unseen


def _is_namespace(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "namespace"


def _named_in(space: str, tool: Any) -> Any:
    """A tool or a call under the name that the model knows it by."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return tool
    return tool | {"name": f"{space}__{tool['name']}"}


def _tool(where: str, tool: Any) -> dict[str, Any] | None:
    """A tool as a function; None for one that OpenAI's servers run, which the model is not shown."""
    if not isinstance(tool, dict) or not isinstance(kind := tool.get("type"), str):
        raise _wrong(f"{where}.type", "is missing; a tool is an object with a type")
    if kind in _TEXT_TOOLS:
        argument, description = _TEXT_TOOLS[kind]
        name = _text(where, tool, "name") if kind == "custom" else kind
        known = {"name": name, "description": tool.get("description") or description}
        if isinstance(form := tool.get("format"), dict) and form.get("type") == "grammar":
            known["description"] += f"\nThe {argument} is a text of this grammar:\n{form.get('definition')}"
        properties = {argument: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [argument]}
        return {"type": "function", "function": {**known, "parameters": parameters}}
    if kind != "function":
        return None
    function: dict[str, Any] = {"name": _text(where, tool, "name")}
    for name, form in (("description", str), ("parameters", dict), ("strict", bool)):
        value = tool.get(name)
        if not isinstance(value, form | None):
            raise _wrong(f"{where}.{name}", f"is no {form.__name__}")
        if value is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _tool_choice(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]] | None, ToolChoice]:
    """The tools that the model is shown, and the choice among them."""
    known = [tool["function"]["name"] for tool in tools or ()]
    match choice:
        case None | "auto":
            return tools, "auto"
        case "none":
            return tools, "none"
        case "required":
            if not known:
                raise _wrong("tool_choice", "is 'required', but there are no tools")
            return tools, "required"
        case {"type": "allowed_tools", **named}:
            return allowed("tool_choice", named.get("mode"), named.get("tools"), tools)
        case {"type": "function" | "custom" | "local_shell" | "apply_patch" as kind}:
            name = _text("tool_choice", choice, "name") if kind in ("function", "custom") else kind
            if name not in known:
                raise _wrong("tool_choice.name", f"is {name!r}, but tools are {known}")
            return tools, NamedTool(name)
        case {"type": kind}:
            raise unsupported("tool_choice.type", kind)
    raise unsupported("tool_choice", choice)


def _json_schema(text: dict[str, Any] | None) -> dict[str, Any] | None:
    wanted = (text or {}).get("format")
    match wanted:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {}
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
        case {"type": "json_schema"}:
            raise _wrong("text.format.schema", "is missing or no object")
        case {"type": kind}:
            raise unsupported("text.format.type", kind)
    raise _wrong("text.format", "has no type")


def _included(include: Sequence[Any] | None) -> Sequence[Any]:
    for index, name in enumerate(include or ()):
        if name not in INCLUDABLE:
            raise _wrong(f"include[{index}]", f"is {name!r}; it is one of {list(INCLUDABLE)}")
    return include or ()


def _response(request: Request, opening: Opening, answer: ParsedAnswer | None) -> dict[str, Any]:
    """The response; before its answer it is in progress and empty."""
    status, reason = ("in_progress", None) if answer is None else _status(answer)
    return {name: _repeated(default, request.fields.get(name)) for name, default in _REPEATED.items()} | {
        "id": response_id(opening.call_id),
        "object": "response",
        "created_at": opening.created,
        "model": opening.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "output": [] if answer is None else _output(request, opening, answer),
        "usage": None if answer is None else _usage(opening, answer),
    }


def _repeated(default: Any, given: Any) -> Any:
    if given is None:
        return default
    return default | given if isinstance(default, dict) else given


def _status(answer: ParsedAnswer) -> tuple[Literal["completed", "incomplete"], str | None]:
    if answer.finish_reason == "length":
        return "incomplete", "max_output_tokens"
    if answer.finish_reason == "content_filter":
        return "incomplete", "content_filter"
    return "completed", None


def _output(request: Request, opening: Opening, answer: ParsedAnswer) -> list[dict[str, Any]]:
    items = [_reasoning(opening, answer.reasoning)] if answer.reasoning else []
    if answer.content or not answer.tool_calls:
        # As in Chat Completions they are those of all tokens: which of them are the text's is not known.
        logprobs = _logprobs(answer.tokens(), request) if request.logprobs else []
        items.append(_message(opening, answer.content, _status(answer)[0], logprobs))
    kinds: dict[str, str] = {}
    spaces: dict[str, dict[str, str]] = {}
    for tool in request.fields.get("tools") or ():
        if _is_namespace(tool):
            for one in (one for one in tool["tools"] if "name" in one):
                name = _named_in(tool["name"], one)["name"]
                kinds[name], spaces[name] = one["type"], {"namespace": tool["name"], "name": one["name"]}
        else:
            kinds[tool.get("name") or tool["type"]] = tool["type"]
    calls = (_call(opening, index, call, kinds) for index, call in enumerate(answer.tool_calls))
    return items + [item | spaces.get(item.get("name", ""), {}) for item in calls]


def _reasoning(opening: Opening, text: str) -> dict[str, Any]:
    """Reasoning is there in full, so it is no summary."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{opening.call_id}_0", "type": "reasoning", "summary": [], "content": content}


def _message(opening: Opening, text: str, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {
        "id": f"msg_{opening.call_id}_0",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [part],
    }


def _call(opening: Opening, index: int, call: dict[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """A call as an item of the kind that its tool is; one that says not what its kind needs is a function's."""
    kind, text = kinds.get(call["function"]["name"], "function"), call["function"]["arguments"]
    if kind in _TEXT_TOOLS:
        text = _only_text(_TEXT_TOOLS[kind][0], text)
    item = {"status": "completed", "call_id": call["id"]}
    if kind == "custom":
        named = {"type": "custom_tool_call", "name": call["function"]["name"], "input": text}
        return {"id": f"ctc_{opening.call_id}_{index}"} | named | item
    if kind == "local_shell":
        action = {"type": "exec", "command": ["bash", "-lc", text], "env": {}}
        return {"id": f"lsh_{opening.call_id}_{index}", "type": "local_shell_call", "action": action} | item
    if kind == "apply_patch" and (patch := _PATCH.fullmatch(text)) is not None:
        operation = {"type": _VERBS[patch[1]], "path": patch[2]} | ({} if patch[1] == "Delete" else {"diff": patch[3]})
        return {"id": f"apc_{opening.call_id}_{index}", "type": "apply_patch_call", "operation": operation} | item
    return _function_call(opening, index, call)


def _only_text(name: str, arguments: str) -> str:
    """The text that arguments hold under that name; all of them, where they hold something else."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return arguments
    return given[name] if given.keys() == {name} and isinstance(given[name], str) else arguments


def _function_call(opening: Opening, index: int, call: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"fc_{opening.call_id}_{index}",
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
    }


def _logprobs(tokens: Sequence[SampledToken], request: Request) -> list[dict[str, Any]]:
    return token_logprobs(tokens, request) or []


def _usage(opening: Opening, answer: ParsedAnswer) -> dict[str, Any]:
    """The tokens; those of reasoning are not counted apart, nor is what an engine cached."""
    return {
        "input_tokens": opening.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": opening.prompt_tokens + answer.output_tokens,
    }


def _error(error: GatewayError) -> dict[str, Any]:
    """What lies at the messages' door lies at the input's: its items are counted otherwise."""
    param = "input" if error.param and error.param.startswith("messages") else error.param
    return {"type": error.kind, "code": error.code, "message": error.message, "param": param}
