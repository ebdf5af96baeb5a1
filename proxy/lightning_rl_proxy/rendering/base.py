"""What every renderer is, and what it makes: prompts as token ids, answers as text, reasoning and tool calls.

A continuation is append-only or it is refused: `extend` adds ids behind exactly the ids already sampled, or gives None,
and then the caller renders anew and records a fork. No text of a sampled answer is ever tokenised again on the way.
"""

import difflib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from lightning_rl_adapters.text import encodable, encodable_values
from lightning_rl_proxy.rendering.images import Vision
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer

_VARIANTS = 16


class SampledToken(NamedTuple):
    """One sampled token: its id, its text, and its natural-log probability where the engine gave one."""

    id: int
    text: str
    logprob: float | None


class ParsedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, parsed: text, reasoning, tool calls in OpenAI's form, and the tokens that it came from.

    `finish_reason` is `stop`, `length`, or what a service said; `stop_match` is the stop string that ended it, which
    `content` does not hold. `output_tokens` counts what was sampled, also where a service told no ids.
    """

    content: str
    reasoning: str | None
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float] | None
    decode: Callable[[list[int]], str]
    output_tokens: int
    stop_match: str | None = None

    def message(self) -> dict[str, Any]:
        """The answer as the assistant message that a client would send back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def tokens(self) -> list[SampledToken]:
        """What was sampled, token by token."""
        logprobs: Sequence[float | None] = self.logprobs or [None] * len(self.token_ids)
        return [
            SampledToken(token, self.decode([token]), logprob)
            for token, logprob in zip(self.token_ids, logprobs, strict=True)
        ]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What some sampled tokens add to an answer: text, reasoning, or one whole tool call (`text` is empty then).

    `tool_index` is the call's place among the answer's tool calls. `tokens` are those since the delta before, where
    they are asked for.
    """

    kind: Literal["content", "reasoning", "tool_call"]
    text: str = ""
    tool_call: dict[str, Any] | None = None
    tool_index: int = 0
    tokens: list[SampledToken] | None = None


class Markup(NamedTuple):
    """What of a chat format can be followed while an answer comes: reasoning first, then text, then tool calls.

    `reasoning` and `calls` are the marks that open and close those (a call without a closing mark, "", ends with the
    answer); `tokens` are the marks that are tokens of their
    own, the others are text. The answer ends with one of `ends`; `unseen` tokens are no text; after a `foreign` one
    nothing is known. `bare_calls`: an answer that begins with a brace may be a call as a whole. `keeps_space`: white
    space stays where an answer begins with it.
    """

    reasoning: tuple[str, str] | None = None
    calls: tuple[str, str] | None = None
    tokens: Mapping[int, str] = {}
    ends: frozenset[int] = frozenset()
    unseen: frozenset[int] = frozenset()
    foreign: frozenset[int] = frozenset()
    bare_calls: bool = False
    keeps_space: bool = False

    def marks(self) -> tuple[str, ...]:
        """All marks."""
        return tuple(mark for mark in (*(self.reasoning or ()), *(self.calls or ())) if mark)

    def without_calls(self) -> "Markup":
        """The same for an answer that can call nothing: marks of calls are text."""
        calls = self.calls or ()
        tokens = {token: mark for token, mark in self.tokens.items() if mark not in calls}
        return self._replace(calls=None, tokens=tokens, bare_calls=False)


class Renderer(Protocol):
    """What the gateway needs of a chat format."""

    stop_token_ids: list[int]
    tokenizer: "FastTokenizer"
    chat_template_kwargs: Mapping[str, Any]  # every prompt is rendered with these, as far as they are known

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> "Renderer":
        """The same format, told these beside its own `chat_template_kwargs`. Raises ValueError where it cannot."""
        ...

    def is_made(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether it was told these before, so that telling it again takes no time."""
        ...

    @property
    def vision(self) -> Vision | None:
        """How prompts hold images, each of which is rendered as one placeholder; None where they hold text alone."""
        ...

    @property
    def markup(self) -> Markup | None:
        """What can be followed while an answer comes; None where it can only be parsed as a whole."""
        ...

    @property
    def append_only(self) -> Mapping[str, bool] | None:
        """In which situations a continuation is proven; None where the format decides each time."""
        ...

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """The whole prompt, ending where the assistant begins to speak."""
        ...

    def whole(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """The conversation as it stands, its last answer included; nobody is asked to speak behind it."""
        ...

    def extend(
        self,
        prompt_ids: list[int],
        response_ids: list[int],
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
    ) -> list[int] | None:
        """The ids that `messages` add behind prompt + response, or None where that cannot be done append-only."""
        ...

    def parse(
        self,
        call_id: str,
        prompt_ids: list[int],
        response_ids: list[int],
        logprobs: list[float] | None,
        finish_reason: str,
        tools: Sequence[dict[str, Any]] | None,
    ) -> ParsedAnswer:
        """The answer that the sampled ids mean. Without tools there is nothing to call: markup of calls is content."""
        ...

    def forced(self, prompt_ids: list[int], tools: Sequence[dict[str, Any]], name: str | None) -> list[int] | None:
        """Ids that go behind the prompt so that the answer is a call: of tool `name`, or of any tool (None).

        None where the chat format has no way to do so that is proven.
        """
        ...

    def begun(self, prompt_ids: list[int], text: str) -> list[int] | None:
        """Ids that go behind the prompt so that the answer begins with `text`: behind the reasoning, if it is opened.

        None where the chat format has no place for it that is proven.
        """
        ...

    def encode_behind(self, text: str) -> list[int]:
        """The ids of `text` in the middle of a conversation."""
        ...


class Variants:
    """One chat format told other things, each made when it is first asked for; those asked for last are kept."""

    def __init__(self, make: "Callable[[Mapping[str, Any]], Renderer]") -> None:
        self._make = make
        self._made: dict[str, Renderer] = {}
        self._lock = Lock()  # not held while one is made, which takes long

    def is_made(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether the format that is told these is made."""
        return written(kwargs) in self._made

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> "Renderer":
        """The format told these, for any thread. Raises ValueError for what it cannot be told."""
        key = written(kwargs)
        variant = self._made.get(key) or self._make(kwargs)
        with self._lock:
            self._made.pop(key, None)
            self._made[key] = variant
            if len(self._made) > _VARIANTS:
                del self._made[next(iter(self._made))]
        return variant


def written(kwargs: Mapping[str, Any]) -> str:
    """What is told a chat format, as a text that is the same for the same."""
    return json.dumps(dict(kwargs), sort_keys=True)


def tokens_of(marks: Sequence[str], tokenizer: FastTokenizer) -> dict[int, str]:
    """The marks that are tokens of their own."""
    ids = ((tokenizer.token_id(mark), mark) for mark in marks)
    return {token: mark for token, mark in ids if token is not None}


def check_kwargs(kwargs: Mapping[str, Any], valid_names: Collection[str], reader: str) -> None:
    """Raises ValueError naming a kwarg that is not one of `valid_names`, which `reader` takes."""
    for name in kwargs:
        if name not in valid_names:
            near = difflib.get_close_matches(name, valid_names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            takes = ", ".join(sorted(valid_names)) or "none"
            raise ValueError(f"chat_template_kwargs has {name!r}, and {reader} takes {takes}{hint}")


def tool_call_id(call_id: str, index: int) -> str:
    """The id of an answer's tool call: `index` counts the calls that are well-formed."""
    return f"call_{call_id}_{index}"


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's form; half a surrogate pair, which a model's JSON may have, is an escape again.

    Raises ValueError for a number of the arguments that is none in JSON: NaN, and what is too large for a double.
    """
    whole = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text = encodable(whole)
    return {"id": call_id, "type": "function", "function": {"name": encodable(name), "arguments": text}}


def with_ids(message: dict[str, Any], renamed: Callable[[str], str]) -> dict[str, Any]:
    """A message whose ids of tool calls are others."""
    if isinstance(message.get("tool_call_id"), str):
        message = message | {"tool_call_id": renamed(message["tool_call_id"])}
    if message.get("tool_calls"):
        calls = [call | {"id": renamed(str(call.get("id") or ""))} for call in message["tool_calls"]]
        message = message | {"tool_calls": calls}
    return message


def with_sampled_ids(messages: Sequence[dict[str, Any]], own: Sequence[str | None]) -> list[dict[str, Any]]:
    """Results of tools under the ids that the model itself gave the calls of its answer, in their order."""
    known = {str(index): own_id for index, own_id in enumerate(own) if own_id}
    return [with_ids(message, lambda told: known.get(told.rpartition("_")[2], told)) for message in messages]


def arguments_parsed(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool-call arguments as objects, since templates print an object and a string differently; a blank text is none,
    as services and clients write a call without arguments."""
    return [m | {"tool_calls": [_parsed(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages]


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    try:
        arguments = json.loads(function["arguments"].strip() or "{}")
    except (
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        RecursionError,
    ):  # no JSON that Python reads: the text itself
        return call
    # No tokenizer reads half a surrogate pair, which an escape may be.
    values = encodable_values(arguments) if "\\u" in function["arguments"] else arguments
    return call | {"function": function | {"arguments": values}}
