"""What a dialect is translated into and from: one form of request, one of answer, one stream of deltas.

A dialect is a module of pure functions. Bytes become a `Request` by `parse`; answers become bytes by `serialize`, or
event by event by `Events`. Both are told the same things, so a stream adds up to the answer that comes whole, and
either can be made again from the recorded tokens.
"""

import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering import Answer, Delta
from lightning_rl_proxy.sampling import Sampling

_AT = re.compile(r"at `\$\.?(.+?)`")  # how msgspec names the place of an error


class NamedTool(msgspec.Struct, frozen=True):
    """The tool that the model must call."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request in internal form.

    `messages` and `tools` are as in Chat Completions: roles system (developer is one), user, assistant and tool;
    `content` is a text wherever the parts are texts alone, else a list of `text` and `image_url` parts; reasoning that
    a client sends back is `reasoning_content`; tools are `{"type": "function", "function": {...}}`. `prompt` is there
    instead of messages where the client writes the prompt itself: its text or its token ids. `max_context_tokens`
    bounds prompt and answer together.

    The first `known` messages were in an earlier request of the attempt, and are as they were read there.

    `fields` is the request as it came, but for the known messages: serializers read from it what they must repeat.
    `ignored_fields` are those that no table of the dialect knows.
    """

    model: str
    messages: list[dict[str, Any]]
    known: int = 0
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    sampling: Sampling = Sampling()
    max_context_tokens: int | None = None
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    ignored_fields: list[str] = []
    fields: dict[str, Any] = {}

    @property
    def callable_tools(self) -> list[dict[str, Any]] | None:
        """The tools that an answer may call. `tool_choice` none leaves none, though the prompt shows them all."""
        return None if self.tool_choice == "none" else self.tools


_MAX = 2**31
Count = Annotated[int, msgspec.Meta(ge=1, lt=_MAX)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class SamplingWire(msgspec.Struct, kw_only=True):
    """The fields of sampling that every dialect spells alike; those that are not its API's own come as extra fields."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=_MAX)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    seed: int | None = None

    def sampling(self, **spelt_otherwise: Any) -> Sampling:
        """These fields as they are, and what the dialect has other words for."""
        return Sampling(**(dict(zip(_ALIKE, _alike(self), strict=True)) | spelt_otherwise))


_ALIKE = SamplingWire.__struct_fields__
_alike = attrgetter(*_ALIKE)


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer before its text: id of its first call, model, time (s since epoch), prompt length."""

    call_id: str
    model: str
    created: int
    prompt_tokens: int


class Events(Protocol):
    """The serializer of one streamed answer, of one or more choices. What it returns is written as it is.

    `start` comes first; then per choice any number of `delta` and one `stop`, choices interleaved as they come; `end`
    last. A call may return nothing (b"") where the dialect has nothing to say.
    """

    def start(self) -> bytes: ...

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def stop(self, index: int, answer: Answer) -> bytes: ...

    def end(self, answers: Sequence[Answer]) -> bytes: ...


class Dialect(Protocol):
    """A module that speaks one API. `NAME` stands in spans; `PING` keeps a silent stream alive."""

    NAME: str
    PING: bytes

    def parse(self, fields: dict[str, Any]) -> Request:
        """The request in internal form. Raises GatewayError(400) naming the field that is wrong or not honoured."""
        ...

    def serialize(self, request: Request, opening: Opening, answers: Sequence[Answer]) -> bytes:
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
    """A dialect's fields: honoured; hints that change no token; those honoured only at values that mean "off".

    A field in none of them is accepted and told of; null is always "not given".
    """

    honoured: frozenset[str]
    hints: frozenset[str]
    off: dict[str, tuple[Any, ...]]

    def ignored(self, fields: dict[str, Any]) -> list[str]:
        """The fields that no table knows. Raises GatewayError(400) naming one that cannot be honoured."""
        unknown = []
        for name, value in fields.items():
            if name in self.honoured or name in self.hints or value is None:
                continue
            if name not in self.off:
                unknown.append(name)
            elif value not in self.off[name]:
                raise unsupported(name, value)
        return unknown


def decode(body: bytes) -> dict[str, Any]:
    """The fields of a request. Raises GatewayError(400) for a body that is no JSON object."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is one too
        raise no_request("", error) from error


def no_request(what: str, error: Exception) -> GatewayError:
    """The body is not a request of the dialect; `what` names the dialect's requests."""
    at = _AT.search(str(error))
    return GatewayError(
        400, f"the request body is not a {what or 'JSON'} request: {error}", param=None if at is None else at[1]
    )


def unsupported(name: str, value: Any) -> GatewayError:
    """A field changes the answer and cannot be honoured."""
    return GatewayError(
        400,
        f"{name}={str(value)[:200]!r} is not supported here; leave it out",
        param=name,
        kind="unsupported_parameter",
    )


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
