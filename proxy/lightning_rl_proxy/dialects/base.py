"""What a dialect is translated into and from: one form of request, one of answer, one stream of deltas.

A dialect is a module of pure functions. Bytes become a `Request` by `parse`; answers become bytes by `serialize`, or
event by event by `Events`. Both are told the same things, so a stream adds up to the answer that comes whole, and
either can be made again from the recorded tokens.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from lightning_rl_proxy.dialects.wire.engine_fields import unsupported
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer
from lightning_rl_proxy.sampling import Sampling

# An escape of half a character without its other half.
_HALF = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]..")
_AT = re.compile(r"at `\$\.?(.+?)`")  # how msgspec names the place of an error


class NamedTool(msgspec.Struct, frozen=True):
    """The tool that the model must call."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def must_call(choice: ToolChoice, tools: Sequence[dict[str, Any]] | None) -> bool:
    """Whether an answer must be a tool call."""
    return choice not in ("auto", "none") and bool(tools)


def schema_of_text(
    field: str, schema: dict[str, Any] | None, choice: ToolChoice, tools: Sequence[dict[str, Any]] | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """The JSON schema that an answer is held to, and the field that is not followed, if it asks for one in vain.

    An answer that must be a call has no text. One that may be a call is held to no schema: an engine holds all that it
    samples to it, so that no call could ever be made.
    """
    if schema is None or must_call(choice, tools):
        return None, []
    return (None, [field]) if tools and choice != "none" else (schema, [])


def strict_tools(tools: Sequence[Any] | None, field: str = "strict") -> list[str]:
    """The places of tools, as they were sent, whose calls are to be held to their schemas, which is not done."""
    holders = ((i, tool.get("function", tool)) for i, tool in enumerate(tools or ()) if isinstance(tool, dict))
    return [f"tools[{i}].{field}" for i, holder in holders if isinstance(holder, dict) and holder.get("strict") is True]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request in internal form.

    `messages` and `tools` are as in Chat Completions: roles system (developer is one), user, assistant and tool;
    `content` is a text wherever the parts are texts alone, else a list of `text` and `image_url` parts; reasoning that
    a client sends back is `reasoning_content`; tools are `{"type": "function", "function": {...}}`. `prompt` is there
    instead of messages where the client writes the prompt itself: its text or its token ids. `max_context_tokens`
    bounds prompt and answer together.

    With `prefill` the last message is the assistant's, and the answer goes on from its text, without repeating it.

    The first `known` messages were in an earlier request of the attempt, and are as they were read there.

    `fields` is the request as it came, but for the known messages: serializers read from it what they must repeat.
    `ignored_fields` are those that no table of the dialect knows.
    """

    model: str
    messages: list[dict[str, Any]]
    known: int = 0
    prefill: bool = False
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    sampling: Sampling = Sampling()
    max_context_tokens: int | None = None
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    ignored_fields: list[str] = []
    fields: dict[str, Any] = {}

    @property
    def prompt_messages(self) -> list[dict[str, Any]]:
        """The messages that are to be answered: all but the beginning of the answer."""
        return self.messages[:-1] if self.prefill else self.messages

    @property
    def begun(self) -> str:
        """The beginning of the answer."""
        return str(self.messages[-1].get("content") or "") if self.prefill else ""

    @property
    def callable_tools(self) -> list[dict[str, Any]] | None:
        """The tools that an answer may call. `tool_choice` none leaves none, though the prompt shows them all."""
        return None if self.tool_choice == "none" else self.tools


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer before its text: id of its first call, model, time (s since epoch), prompt length.

    `prompt_ids` are the prompt's token ids, where the client asks for token ids and they are known.
    """

    call_id: str
    model: str
    created: int
    prompt_tokens: int
    prompt_ids: list[int] | None = None


class Events(Protocol):
    """The serializer of one streamed answer, of one or more choices. What it returns is written as it is.

    `start` comes first; then per choice any number of `delta` and one `stop`, choices interleaved as they come; `end`
    last. A call may return nothing (b"") where the dialect has nothing to say.
    """

    def start(self) -> bytes: ...

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def stop(self, index: int, answer: ParsedAnswer) -> bytes: ...

    def end(self, answers: Sequence[ParsedAnswer]) -> bytes: ...


class Dialect(Protocol):
    """A module that speaks one API. `NAME` stands in spans; `PING` keeps a silent stream alive."""

    NAME: str
    PING: bytes

    def parse(self, fields: dict[str, Any]) -> Request:
        """The request in internal form. Raises GatewayError(400) naming the field that is wrong or not honoured."""
        ...

    def serialize(self, request: Request, opening: Opening, answers: Sequence[ParsedAnswer]) -> bytes:
        """The whole answer."""
        ...

    def events(self, request: Request, opening: Opening) -> Events:
        """The answer as a stream."""
        ...

    def serialize_error(self, error: GatewayError) -> bytes:
        """An error, as the body of an answer."""
        ...

    def error_event(self, error: GatewayError) -> bytes:
        """An error in a stream that has begun; nothing follows it."""
        ...


class Tables(NamedTuple):
    """A dialect's fields: honoured; hints that change no token; those honoured only at values that mean "off"; and
    those relaxed, of which less is done than they ask for, with what that is.

    A field in none of them is accepted and told of, as a relaxed one is; null is always "not given".
    """

    honoured: frozenset[str]
    hints: frozenset[str]
    off: dict[str, tuple[Any, ...]]
    relaxed: Mapping[str, str] = MappingProxyType({})

    def ignored(self, fields: dict[str, Any]) -> list[str]:
        """The fields that no table knows, and the relaxed ones that ask for something.

        Raises GatewayError(400) naming one that cannot be honoured.
        """
        unknown = []
        for name, value in fields.items():
            if name in self.honoured or name in self.hints or value is None:
                continue
            if name in self.relaxed:
                if value and value != "disabled":
                    unknown.append(name)
            elif name not in self.off:
                unknown.append(name)
            elif value not in self.off[name]:
                raise unsupported(name, value)
        return unknown


def decode(body: bytes) -> dict[str, Any]:
    """The fields of a request. Raises GatewayError(400) for a body that is no JSON object."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is one too
        may_be_half = "truncated" in str(error) or "surrogate" in str(error)  # what msgspec says of half a character
        half = _HALF.search(body) if may_be_half else None
        why = f"{half[0].decode()} is half of a surrogate pair, and no character" if half else error
        raise no_request("", why) from error


def left_out(
    tools: Sequence[dict[str, Any] | None], place: str = "tools[{}]"
) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """The tools that the model is shown, and the places of those that it is not, for the record."""
    places = [place.format(index) for index, tool in enumerate(tools) if tool is None]
    return [tool for tool in tools if tool is not None] or None, places


def allowed(where: str, mode: Any, named: Any, tools: Sequence[dict[str, Any]] | None) -> tuple[Any, Any]:
    """What a choice of `allowed_tools` leaves: the tools that the model is shown, and the choice among them.

    Raises GatewayError(400) for one that names what there is not.
    """
    names = []
    for one in named if isinstance(named, list) else ():
        choice = one if isinstance(one, dict) else {}
        function = choice.get("function")
        tool_name = function.get("name") if isinstance(function, dict) else choice.get("name")
        names.append(str(tool_name or choice.get("type")))
    tools_by_name = {tool["function"]["name"]: tool for tool in tools or ()}
    if mode not in ("auto", "required") or not names or not tools_by_name.keys() >= set(names):
        raise GatewayError(
            400,
            f"{where} allows {names} in mode {mode!r}; there are {list(tools_by_name)}, and auto and required",
            param=where,
        )
    return [tool for name, tool in tools_by_name.items() if name in names], mode


def check_prefill(where: str, message: dict[str, Any]) -> None:
    """Raises GatewayError(400) for a beginning of an answer that none can go on from as it stands."""
    content = message.get("content")
    problem = None
    if message.get("tool_calls") or message.get("function_call"):
        problem = "calls tools; an answer goes on from text"
    elif message.get("reasoning_content") or message.get("reasoning"):
        problem = "holds reasoning; an answer goes on from text"
    elif not isinstance(content, str) or not content:
        problem = "holds no text to go on from"
    elif content != content.rstrip():
        problem = "ends with white space, which the next token would repeat; leave it out"
    if problem is not None:
        raise GatewayError(400, f"{where}: the assistant's message, which is to be continued, {problem}", param=where)


def no_request(kind: str, error: Exception | str) -> GatewayError:
    """The body is not a request of the dialect; `kind` names the dialect's requests."""
    at = _AT.search(str(error))
    return GatewayError(
        400, f"the request body is not a {kind or 'JSON'} request: {error}", param=None if at is None else at[1]
    )


def refused(where: str, problem: str, kind: str = "invalid_request_error") -> GatewayError:
    """What stands at `where` in a request is not as it has to be."""
    return GatewayError(400, f"{where} {problem}", param=where, kind=kind)


def text_of(where: str, holder: Any, name: str) -> str:
    """The text that an object of a request has under that name. Raises GatewayError(400) where there is none."""
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, str):
        raise refused(f"{where}.{name}", "is missing" if value is None else "is no text")
    return value


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
