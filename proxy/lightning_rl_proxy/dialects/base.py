"""What a dialect is translated into and from: one form of request, one of answer, one stream of deltas.

A dialect is a module of pure functions. Bytes become a `Request` by `parse`; answers become bytes by `serialize`, or
event by event by `Events`. Both are told the same things, so a stream adds up to the answer that comes whole, and
either can be made again from the recorded tokens.
"""

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer
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
    ignored_fields: list[str] = []
    fields: dict[str, Any] = {}

    @property
    def asked(self) -> list[dict[str, Any]]:
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


_MAX = 2**31
Count = Annotated[int, msgspec.Meta(ge=1, lt=_MAX)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


# Of vLLM's and SGLang's own fields, which clients send as extra ones: what says the same in every dialect ...
ENGINE_FIELDS = frozenset(
    {
        "stop_token_ids", "min_tokens", "bad_words", "allowed_token_ids", "structured_outputs", "guided_json",
        "guided_regex", "guided_choice", "guided_grammar", "guided_json_object", "regex", "ebnf",
        "chat_template_kwargs", "enable_thinking",
    }
)  # fmt: skip
# ... and what would change the answer and is not done here, but for the values that ask for nothing.
ENGINE_OFF: dict[str, tuple[Any, ...]] = {
    "ignore_eos": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "no_stop_trim": (False,),
    "stop_regex": ([],),
    "structural_tag": (),
    "guided_whitespace_pattern": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "chat_template": (),
    "documents": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    "thinking_token_budget": (),
    "lora_path": (),
    "typical_p": (1,),
}
# Why what is refused is refused, by the name of the field.
WHY = {
    "ignore_eos": "an answer ends with its turn; a prompt of Completions may go on",
    "continue_final_message": "Chat Completions' word; Messages goes on from a last message of the assistant",
    "add_generation_prompt": "without it there is no answer to give, but with continue_final_message",
    "use_beam_search": "tokens of a beam were not sampled: they have no log probability to train on",
    "length_penalty": "of beam search",
    "early_stopping": "of beam search",
    "include_stop_str_in_output": "the text of an answer ends before what stopped it; its tokens do not",
    "skip_special_tokens": "a text that shows special tokens would come back as other tokens",
    "no_stop_trim": "the text of an answer ends before what stopped it; its tokens do not",
    "stop_regex": "stop strings are looked for in the gateway, as texts",
    "structural_tag": "its marks differ between chat formats and engines",
    "guided_whitespace_pattern": "no engine here takes it with a request",
    "truncate_prompt_tokens": "a shorter prompt is another one: leave messages out instead",
    "prompt_logprobs": "prompts are not scored",
    "chat_template": "the chat format is the policy's, the same in every call",
    "documents": "chat formats here have no place for them: put them into a message",
    "logits_processors": "an engine would run what an agent sends",
    "custom_logit_processor": "an engine would run what an agent sends",
    "custom_params": "of custom_logit_processor",
    "vllm_xargs": "what they do is not known here",
    "thinking_token_budget": "no engine here takes it with a request",
    "lora_path": "which weights answer is the run's business",
    "typical_p": "no engine here has it",
    "modalities": "answers are text",
    "audio": "answers are text",
    "web_search_options": "nothing here searches the web",
    "response_format": "this dialect says it otherwise, or not at all",
    "suffix": "an answer is sampled behind its prompt, not into it",
    "background": "answers are given while their client waits",
    "conversation": "conversations are not kept: send the items, or previous_response_id",
    "max_tool_calls": "no tool is run here",
    "moderation": "nothing is moderated here",
    "prompt": "stored prompts are not kept here: send the text",
    "n": "this API has one answer",
    "max_tokens": "this dialect's word is max_output_tokens",
    "max_completion_tokens": "this dialect's word is max_output_tokens",
    "logprobs": "this API has none",
    "mcp_servers": "no tool is run here",
    "container": "no tool is run here",
    "compaction": "nothing is compacted here",
    "thread": "conversations are not kept here: send the messages",
}
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=_MAX)]
_Word = Annotated[str, msgspec.Meta(min_length=1)]


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
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, lt=_MAX)] | None = None
    bad_words: list[_Word] | None = None
    allowed_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[_Word], msgspec.Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None

    def sampling(self, **spelt_otherwise: Any) -> Sampling:
        """These fields as they are, and what the dialect has other words for."""
        given = dict(zip(_ALIKE, _alike(self), strict=True)) | spelt_otherwise
        if any(value is not None for value in _constraining(self)):
            given |= self._constraint(given.get("json_schema"))
        given |= {name: given[name] or None for name in ("stop_token_ids", "min_tokens", "bad_words")}
        if given["min_tokens"] and given.get("stop"):
            raise GatewayError(
                400,
                "min_tokens holds the model's own end back, not stop strings; leave one of the two out",
                param="min_tokens",
                kind="unsupported_parameter",
            )
        return Sampling(**given)

    def _constraint(self, json_schema: dict[str, Any] | None) -> dict[str, Any]:
        """What the answer must fit, as `Sampling` says it. Raises GatewayError(400) where that is several things."""
        asked: list[tuple[str, str, Any]] = [] if json_schema is None else [("response_format", "json_schema", "")]
        for field, name in _CONSTRAINTS.items():
            if (value := getattr(self, field)) is not None:
                asked.append((field, name, value))
        if self.guided_json_object:
            asked.append(("guided_json_object", "json_schema", {}))
        for inner, value in (self.structured_outputs or {}).items():
            if value is None or value is False or inner == "disable_any_whitespace":
                continue
            if inner not in _STRUCTURED:
                raise unsupported(f"structured_outputs.{inner}", value)
            asked.append((f"structured_outputs.{inner}", _STRUCTURED[inner], {} if inner == "json_object" else value))
        if len(asked) > 1:
            fields = ", ".join(field for field, _, _ in asked)
            raise GatewayError(400, f"an answer fits one constraint, not {fields}; leave one", param=asked[-1][0])
        if json_schema is not None or not asked:
            return {}
        [(field, name, value)] = asked
        return {name: _constraint_of(field, name, value)}


_CONSTRAINTS = {
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "regex": "regex", "ebnf": "grammar",
}  # fmt: skip
_STRUCTURED = {
    "json": "json_schema", "json_object": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"
}  # fmt: skip
_constraining = attrgetter(*_CONSTRAINTS, "guided_json_object", "structured_outputs")
_NO_SAMPLING = ("guided_json_object", "structured_outputs", "chat_template_kwargs", "enable_thinking")
_ALIKE = tuple(name for name in SamplingWire.__struct_fields__ if name not in _CONSTRAINTS and name not in _NO_SAMPLING)
_alike = attrgetter(*_ALIKE)


def _constraint_of(field: str, name: str, value: Any) -> Any:
    """A constraint's value. Raises GatewayError(400) for one of another form than its kind has."""
    if name == "json_schema" and isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise GatewayError(400, f"{field} is no JSON: {error}", param=field) from error
    form = {"json_schema": dict[str, Any], "choice": list[str]}.get(name, str)
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise GatewayError(400, f"{field}: {error}", param=field) from error


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
        raise no_request("", error) from error


def left_out(
    tools: Sequence[dict[str, Any] | None], place: str = "tools[{}]"
) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """The tools that the model is shown, and the places of those that it is not, for the record."""
    told = [place.format(index) for index, tool in enumerate(tools) if tool is None]
    return [tool for tool in tools if tool is not None] or None, told


def allowed(where: str, mode: Any, named: Any, tools: Sequence[dict[str, Any]] | None) -> tuple[Any, Any]:
    """What a choice of `allowed_tools` leaves: the tools that the model is shown, and the choice among them.

    Raises GatewayError(400) for one that names what there is not.
    """
    names = []
    for one in named if isinstance(named, list) else ():
        function = one.get("function") if isinstance(one, dict) else None
        found = (
            function.get("name") if isinstance(function, dict) else one.get("name") if isinstance(one, dict) else None
        )
        names.append(found or (one.get("type") if isinstance(one, dict) else None))
    known = {tool["function"]["name"]: tool for tool in tools or ()}
    if mode not in ("auto", "required") or not names or not known.keys() >= set(names):
        raise GatewayError(
            400, f"{where} allows {names} in mode {mode!r}; there are {list(known)}, and auto and required", param=where
        )
    return [tool for name, tool in known.items() if name in names], mode


def check_prefill(where: str, message: dict[str, Any]) -> None:
    """Raises GatewayError(400) for a beginning of an answer that none can go on from as it stands."""
    content = message.get("content")
    what = None
    if message.get("tool_calls") or message.get("function_call"):
        what = "calls tools; an answer goes on from text"
    elif message.get("reasoning_content") or message.get("reasoning"):
        what = "holds reasoning; an answer goes on from text"
    elif not isinstance(content, str) or not content:
        what = "holds no text to go on from"
    elif content != content.rstrip():
        what = "ends with white space, which the next token would repeat; leave it out"
    if what is not None:
        raise GatewayError(400, f"{where}: the assistant's message, which is to be continued, {what}", param=where)


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
        f"{name}={str(value)[:200]!r} is not supported here{f' ({WHY[name]})' if name in WHY else ''}; leave it out",
        param=name,
        kind="unsupported_parameter",
    )


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
