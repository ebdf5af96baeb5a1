"""Messages <-> token ids.

A continuation is append-only or it is refused: `extend` adds ids behind exactly the ids already sampled, or gives None,
and then the caller renders anew and records a fork. No text of a sampled answer is ever tokenised again on the way.
"""

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec
import renderers
from renderers.base import MODEL_RENDERER_MAP, ToolCallParseStatus
from renderers.configs import config_from_name
from tokenizers import Tokenizer

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.images import Vision, vision_of
from lightning_rl_proxy.rendering.long_texts import LongTexts
from lightning_rl_proxy.rendering.special_tokens import Controls

if TYPE_CHECKING:
    from lightning_rl_proxy.rendering.chat_templates import TemplateRenderer


_SHORT = 32  # characters; chat formats write the same few of such texts between messages
_SHORT_TEXTS = 1024
# Where an assistant's message holds its answer, and the marks in there that are the format's.
_ANSWERED = ("content", "reasoning_content", "reasoning", "thinking")
_SPARED = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
_VARIANTS = 16
_TAIL = 64  # tokens; so near its end a prompt says whether an answer begins inside of its reasoning


class TokenLogprob(NamedTuple):
    """One sampled token's text and natural-log probability."""

    text: str
    logprob: float


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

    def token_logprobs(self) -> list[TokenLogprob] | None:
        """Text and logprob of each token, or None where there are no logprobs."""
        if self.logprobs is None:
            return None
        texts = (self.decode([token]) for token in self.token_ids)
        return [TokenLogprob(text, logprob) for text, logprob in zip(texts, self.logprobs, strict=True)]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What some sampled tokens add to an answer: text, reasoning, or one whole tool call (`text` is empty then).

    `tool_index` is the call's place among the answer's tool calls. `logprobs` are those of the tokens since the delta
    before, where they are asked for.
    """

    kind: Literal["content", "reasoning", "tool_call"]
    text: str = ""
    tool_call: dict[str, Any] | None = None
    tool_index: int = 0
    logprobs: list[TokenLogprob] | None = None


class Markup(NamedTuple):
    """What of a chat format can be followed while an answer comes: reasoning first, then text, then tool calls.

    `reasoning` and `calls` are the marks that open and close those; `tokens` are the marks that are tokens of their
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
        return (*(self.reasoning or ()), *(self.calls or ()))

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

    def told(self, kwargs: Mapping[str, Any]) -> "Renderer":
        """The same format, told these beside its own `chat_template_kwargs`. Raises ValueError where it cannot."""
        ...

    def knows(self, kwargs: Mapping[str, Any]) -> bool:
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


SpecialTokens = Literal["text", "control"]


class FastTokenizer:
    """A `tokenizer.json` with the few methods that `renderers` asks of a tokenizer; loads no transformers.

    `special_tokens`: what such a token is where a message spells it, its letters or the token itself.
    """

    def __init__(self, path: Path, special_tokens: SpecialTokens = "control") -> None:
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        config_file = path / "tokenizer_config.json"
        self.config: dict[str, Any] = json.loads(config_file.read_text()) if config_file.exists() else {}
        self.name_or_path = str(path)
        self.renderer: str | None = self.config.get("renderer")
        self.unk_token_id = self._special(self.config.get("unk_token"))
        self.eos_token_id = self._special(self.config.get("eos_token"))
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._controls = Controls(self._tokenizer) if special_tokens == "text" else None
        self.long_texts = LongTexts(self._tokenizer)
        self._encode_short = lru_cache(_SHORT_TEXTS)(self._encode)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Token ids of `text`, without added special tokens."""
        return self._encode_short(text).copy() if len(text) <= _SHORT else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if self._controls is not None and self._controls.guards(text):
            return self._controls.encode(text, self.long_texts)
        return self.encode_own(text)

    def encode_own(self, text: str) -> list[int]:
        """Token ids of a text whose author writes special tokens as such."""
        return self.long_texts.encode(self._tokenizer, text)

    def guarded(self, value: Any) -> Any:
        """A JSON value of which every text is encoded as its letters, whatever it spells."""
        return value if self._controls is None else self._controls.guarded(value)

    def guarded_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages of which every text is encoded so; in an assistant's the marks stay that formats look for."""
        if self._controls is None:
            return list(messages)
        return [
            self._controls.guarded(message)
            | {name: self._controls.guarded(message[name], _SPARED) for name in _ANSWERED if name in message}
            if message.get("role") == "assistant"
            else self._controls.guarded(message)
            for message in messages
        ]

    def encode_whole(self, text: str) -> list[int]:
        """Token ids of a whole prompt, with what the tokenizer puts before every text (a BOS token, for instance)."""
        return self.long_texts.encode(self._tokenizer, text, add_special_tokens=True)

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """The text of `token_ids`, special tokens included unless `skip_special_tokens`."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=kwargs.get("skip_special_tokens", False))
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or the ids of a list of them; `unk_token_id` for what the vocabulary lacks."""
        if isinstance(tokens, str):
            found = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def token_id(self, token: str) -> int | None:
        """The id of a token, or None for what the vocabulary lacks."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def _special(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return None if text is None else self._tokenizer.token_to_id(text)


class Variants:
    """One chat format told other things, each made when it is first asked for; those asked for last are kept."""

    def __init__(self, make: "Callable[[Mapping[str, Any]], Renderer]") -> None:
        self._make = make
        self._made: dict[str, Renderer] = {}
        self._lock = Lock()  # not held while one is made, which takes long

    def knows(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether the format that is told these is made."""
        return written(kwargs) in self._made

    def told(self, kwargs: Mapping[str, Any]) -> "Renderer":
        """The format told these, for any thread. Raises ValueError for what it cannot be told."""
        key = written(kwargs)
        told = self._made.get(key) or self._make(kwargs)
        with self._lock:
            self._made.pop(key, None)
            self._made[key] = told
            if len(self._made) > _VARIANTS:
                del self._made[next(iter(self._made))]
        return told


def written(kwargs: Mapping[str, Any]) -> str:
    """What is told a chat format, as a text that is the same for the same."""
    return json.dumps(dict(kwargs), sort_keys=True)


class LibraryRenderer:
    """A renderer of the `renderers` library, held to the append-only contract."""

    append_only: Mapping[str, bool] | None = None
    vision: Vision | None = None

    def __init__(self, renderer: Any, tokenizer: FastTokenizer) -> None:
        self._renderer = renderer
        self.tokenizer = tokenizer
        config = renderer.config
        self.chat_template_kwargs: Mapping[str, Any] = {
            name: getattr(config, name) for name in config.template_field_names()
        }
        self.stop_token_ids: list[int] = list(renderer.get_stop_token_ids())
        self.markup = _library_markup(renderer.config.name, tokenizer, self.stop_token_ids)
        self._forcing: Forcing | None = None
        self._lead: str | None = None
        variants = Variants(self._told)
        self.told, self.knows = variants.told, variants.knows
        self._opens_reasoning = lru_cache(_SHORT_TEXTS)(self._opens)
        # Of a format all of whose marks are tokens of their own; an answer that holds none of them is its text.
        marks = () if self.markup is None or self.markup.bare_calls else self.markup.marks()
        self._marks = marks if self.markup is not None and len(self.markup.tokens) == len(marks) else ()

    def _told(self, kwargs: Mapping[str, Any]) -> "LibraryRenderer":
        config = self._renderer.config
        check_kwargs(kwargs, config.template_field_names(), f"renderer {config.name!r}")
        told = type(config).model_validate(config.model_dump() | dict(kwargs))
        return LibraryRenderer(renderers.create_renderer(self.tokenizer, told), self.tokenizer)

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """See `Renderer`."""
        return self._render(messages, tools, generation=True)

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, *, generation: bool
    ) -> list[int]:
        try:
            ids: list[int] = self._renderer.render_ids(
                self.tokenizer.guarded_messages(arguments_parsed(messages)),
                tools=None if tools is None else self.tokenizer.guarded(list(tools)),
                add_generation_prompt=generation,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GatewayError(
                400, f"the chat format cannot render these messages: {error!r}", param="messages"
            ) from error
        return ids

    def extend(
        self,
        prompt_ids: list[int],
        response_ids: list[int],
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
    ) -> list[int] | None:
        """See `Renderer`. The library looks no further back than the last turn, so that it gets no more to copy."""
        start = 0
        if not renderers.is_multimodal(self._renderer):  # those may count the images of the whole prompt
            ends = (at for at in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[at] in self.stop_token_ids)
            next(ends, None)  # of the turn before the prompt's last message, or of that message
            start = next(ends, 0)
        last_turn = prompt_ids[start:]
        added = self.tokenizer.guarded_messages(messages)
        bridged = self._renderer.bridge_to_next_turn(last_turn, response_ids, added, tools=tools)
        if bridged is None:
            return None
        ids: list[int] = bridged.token_ids
        context = last_turn + response_ids
        return ids[len(context) :] if ids[: len(context)] == context else None

    def parse(
        self,
        call_id: str,
        prompt_ids: list[int],
        response_ids: list[int],
        logprobs: list[float] | None,
        finish_reason: str,
        tools: Sequence[dict[str, Any]] | None,
    ) -> ParsedAnswer:
        """See `Renderer`. A malformed tool call stays visible as text.

        Of formats that are followed token by token, text and reasoning are stripped whatever comes behind them.
        """
        if (text := self._plain_text(prompt_ids, response_ids)) is not None:
            return self._answer(text, None, [], finish_reason, response_ids, logprobs)
        if not tools and (said := self._uncalled(prompt_ids, response_ids)) is not None:
            return self._answer(said[1], said[0], [], finish_reason, response_ids, logprobs)
        parsed = self._renderer.parse_response(response_ids, tools=tools, prompt_ids=prompt_ids)
        reasoning, content = parsed.reasoning_content, parsed.content
        if self.markup is not None:
            reasoning, content = None if reasoning is None else reasoning.strip(), content.strip()
        calls: list[dict[str, Any]] = []
        for call in parsed.tool_calls:
            well_formed = isinstance(call.name, str) and isinstance(call.arguments, dict | str)
            if call.status == ToolCallParseStatus.OK and well_formed:
                calls.append(tool_call(tool_call_id(call_id, len(calls)), call.name, call.arguments))
            else:
                content += f"<tool_call>{call.raw}</tool_call>"
        return self._answer(content, reasoning, calls, finish_reason, response_ids, logprobs)

    def _answer(
        self,
        content: str,
        reasoning: str | None,
        tool_calls: list[dict[str, Any]],
        finish_reason: str,
        response_ids: list[int],
        logprobs: list[float] | None,
    ) -> ParsedAnswer:
        return ParsedAnswer(
            content=content,
            reasoning=reasoning,
            tool_calls=tool_calls,
            finish_reason=finish_reason,
            token_ids=response_ids,
            logprobs=logprobs,
            decode=self.tokenizer.decode,
            output_tokens=len(response_ids),
        )

    def _uncalled(self, prompt_ids: list[int], response_ids: list[int]) -> tuple[str | None, str] | None:
        """Reasoning and content of an answer that can call nothing, but holds the markup of a call; None for others."""
        ends = (at for at, token in enumerate(response_ids) if token in self.stop_token_ids)
        ids = response_ids[: next(ends, len(response_ids))]
        if self.markup is None:
            return self._uncalled_of_library(prompt_ids, ids)
        text = self.tokenizer.decode(ids)
        if not self.markup.bare_calls and not any(mark in text for mark in self.markup.calls or ()):
            return None
        opens, closes = self.markup.reasoning or ("", "")
        if not opens or not (self._opens(tuple(prompt_ids)) or text.lstrip().startswith(opens)):
            return None, text.strip()
        reasoning, _, content = text.partition(closes)
        return reasoning.strip().removeprefix(opens).strip() or None, content.strip()

    def _uncalled_of_library(self, prompt_ids: list[int], ids: list[int]) -> tuple[str | None, str] | None:
        """The same of a format that only the library knows."""
        calls = self._renderer.parse_response(ids, tools=None, prompt_ids=prompt_ids).tool_calls
        if not calls:
            return None
        starts = [call.token_span[0] for call in calls if call.token_span is not None]
        start = min(starts) if len(starts) == len(calls) else 0  # else it cannot be told apart from what stands before
        before = self._renderer.parse_response(ids[:start], tools=None, prompt_ids=prompt_ids)
        text = self.tokenizer.decode(ids[:start])
        space = text[len(text.rstrip()) :] if before.content else ""
        return before.reasoning_content, f"{before.content.rstrip()}{space}{self.tokenizer.decode(ids[start:])}"

    def _plain_text(self, prompt_ids: list[int], response_ids: list[int]) -> str | None:
        """What an answer says that holds no mark of the format, and so means its text; None where the library is to
        read it."""
        if not self._marks:
            return None
        last = len(response_ids)
        if last and response_ids[-1] in self.stop_token_ids:
            last -= 1
        ids = response_ids[:last]
        if not self.tokenizer.added_ids.isdisjoint(ids):
            return None
        ends, begin = self.stop_token_ids, len(prompt_ids)
        furthest = max(0, begin - _TAIL)
        while begin > furthest and prompt_ids[begin - 1] not in ends:
            begin -= 1
        if (begin == furthest and begin > 0) or self._opens_reasoning(tuple(prompt_ids[begin:])):
            return None
        text = self.tokenizer.decode(ids)
        return None if any(mark in text for mark in self._marks) else text.strip()

    def _opens(self, prompt_end: tuple[int, ...]) -> bool:
        """Whether the answer to a prompt that ends so begins inside of its reasoning."""
        x = self.tokenizer.encode("x")
        return self._renderer.parse_response(x, prompt_ids=list(prompt_end)).reasoning_content is not None

    def forced(self, prompt_ids: list[int], tools: Sequence[dict[str, Any]], name: str | None) -> list[int] | None:
        """See `Renderer`."""
        if self._forcing is None:
            self._forcing = probe_forcing(self, self._written)
        return self._forcing.ids(self, prompt_ids, tools, name)

    def begun(self, prompt_ids: list[int], text: str) -> list[int] | None:
        """See `Renderer`."""
        if self._lead is None:
            self._lead = probe_lead(self, self._written)
        return begun(self, prompt_ids, self._lead, text)

    def _written(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
        return self.tokenizer.decode(self._render(messages, tools, generation=False))

    def encode_behind(self, text: str) -> list[int]:
        """See `Renderer`."""
        return self.tokenizer.encode(text)


# Formats of the library that are followed token by token: the marks around reasoning and around calls. Of a format that
# puts its calls into a section, the section opens them, and each call closes one.
_THINK = ("<think>", "</think>")
_TAGGED = Markup(reasoning=_THINK, calls=("<tool_call>", "</tool_call>"))
_DEEPSEEK = Markup(reasoning=_THINK, calls=("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁call▁end\uff5c>"))
_FOLLOWED = {
    "qwen3": _TAGGED,
    "qwen3-vl": _TAGGED,
    "qwen3.5": _TAGGED,
    "qwen3.6": _TAGGED,
    "qwen3.8": _TAGGED,
    "prime-qwen3": _TAGGED,
    "glm-4.5": _TAGGED,
    "glm-5": _TAGGED,
    "glm-5.1": _TAGGED,
    "glm-5.3": _TAGGED,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "llama-3": Markup(bare_calls=True),
}


def _library_markup(name: str, tokenizer: FastTokenizer, stop_token_ids: Sequence[int]) -> Markup | None:
    markup = _FOLLOWED.get(name)
    if markup is None:
        return None
    tokens, ends = tokens_of(markup.marks(), tokenizer), frozenset(stop_token_ids)
    return markup._replace(tokens=tokens, ends=ends, foreign=tokenizer.added_ids - ends - tokens.keys())


def tokens_of(marks: Sequence[str], tokenizer: FastTokenizer) -> dict[int, str]:
    """The marks that are tokens of their own."""
    ids = ((tokenizer.token_id(mark), mark) for mark in marks)
    return {token: mark for token, mark in ids if token is not None}


_TOOL, _ARGUMENT, _VALUE = "name0placeholder0", "argument0placeholder0", "value0placeholder0"
OPENING = re.compile(r"<think>\s*(</think>\s*)?\Z")  # of reasoning, at the end of a prompt
_EMPTY_THOUGHT = re.compile(r"\A\s*<think>\s*</think>\s*")


class Forcing(NamedTuple):
    """How a format's turn begins that is a call: its empty thinking, and its text up to the name, or the arguments.

    `to_arguments` holds the placeholder of the name. Each text is None where it is not proven.
    """

    thought: str
    to_name: str | None
    to_arguments: str | None

    def ids(
        self, renderer: Renderer, prompt_ids: list[int], tools: Sequence[dict[str, Any]], name: str | None
    ) -> list[int] | None:
        """The ids behind this prompt; see `Renderer.forced`. The only tool there is has its name forced too."""
        if name is None and len(tools) == 1:
            name = tools[0]["function"]["name"]
        head = self.to_name if name is None else self.to_arguments
        if head is None:
            return None
        opened = OPENING.search(renderer.tokenizer.decode(prompt_ids[-16:]))
        name = renderer.tokenizer.guarded(name or "")
        text = self.thought_behind("" if opened is None else opened[0]) + head.replace(_TOOL, name)
        return renderer.encode_behind(text)

    def thought_behind(self, opening: str) -> str:
        """The empty thinking, as far as the prompt has not written it."""
        if "</think>" in opening:
            return ""
        if not opening:
            return self.thought
        written = self.thought.lstrip()
        return written[len(opening) :] if written.startswith(opening) else "\n</think>\n\n"


def probe_forcing(
    renderer: Renderer, written: Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]] | None], str]
) -> Forcing:
    """Read from what a format writes for a call how a call begins; `written` gives a conversation's text."""
    ask = {"role": "user", "content": "a question"}
    parameters = {"type": "object", "properties": {_ARGUMENT: {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": _TOOL, "description": "a tool", "parameters": parameters}}]
    said: list[str] = []
    try:
        prompt_ids = renderer.render([ask], tools)
        bare = OPENING.sub("", renderer.tokenizer.decode(prompt_ids))
        for arguments in ({_ARGUMENT: _VALUE}, {}):
            calls = [tool_call("call00000", _TOOL, arguments)]
            text = written([ask, {"role": "assistant", "content": "", "tool_calls": calls}], tools)
            if not text.startswith(bare) or _TOOL not in text[len(bare) :]:
                return Forcing("", None, None)
            said.append(text[len(bare) :])
    except GatewayError:
        return Forcing("", None, None)
    match = _EMPTY_THOUGHT.match(said[0])
    thought = match[0] if match else ""
    own, without = (text.removeprefix(thought) for text in said)
    # Where texts with and without arguments part, the arguments have begun: but for the brace or bracket of either.
    shared = _shared(own, without).removesuffix("{").removesuffix("<")
    heads = own[: own.index(_TOOL)], shared if _TOOL in shared else None
    to_name, to_arguments = (_proven(renderer, prompt_ids, tools, thought, head, own) for head in heads)
    return Forcing(thought, to_name, to_arguments)


_UNKNOWN = "?"  # of what stands before an answer


def probe_lead(
    renderer: Renderer, written: Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]] | None], str]
) -> str:
    """What a format writes between a prompt and an answer's text: nothing, or an empty thinking; else `_UNKNOWN`."""
    ask = {"role": "user", "content": "a question"}
    try:
        bare = OPENING.sub("", renderer.tokenizer.decode(renderer.render([ask], None)))
        text = written([ask, {"role": "assistant", "content": _VALUE}], None)
    except GatewayError:
        return _UNKNOWN
    lead, found, _ = text.removeprefix(bare).partition(_VALUE)
    proven = found and text.startswith(bare) and (not lead or _EMPTY_THOUGHT.fullmatch(lead))
    return lead if proven else _UNKNOWN


def begun(renderer: Renderer, prompt_ids: list[int], lead: str, text: str) -> list[int] | None:
    """The ids of an answer's beginning behind a prompt, `lead` being what a format writes before it."""
    if lead == _UNKNOWN:
        return None
    opened = OPENING.search(renderer.tokenizer.decode(prompt_ids[-16:]))
    thought = Forcing(lead, None, None).thought_behind("" if opened is None else opened[0])
    said = renderer.tokenizer.guarded_messages([{"role": "assistant", "content": text}])[0]["content"]
    return renderer.encode_behind(thought + said)


def _proven(
    renderer: Renderer, prompt_ids: list[int], tools: Sequence[dict[str, Any]], thought: str, head: str | None, own: str
) -> str | None:
    """`head`, if an answer that goes on from it as the format does is that very call."""
    if head is None:
        return None
    # A placeholder in the head stands for itself here.
    forced = Forcing(thought, head, head).ids(renderer, prompt_ids, tools, _TOOL) or []
    response = forced + renderer.encode_behind(own[len(head) :])
    answer = renderer.parse("probe", prompt_ids, response, None, "stop", tools)
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.tool_calls]
    return head if calls == [(_TOOL, {_ARGUMENT: _VALUE})] and not answer.content.strip() else None


def _shared(one: str, other: str) -> str:
    """The longest common beginning."""
    return one[: next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))]


def load_renderer(
    tokenizer_path: Path,
    name: str,
    model: str,
    *,
    history: Literal["keep", "template"] = "keep",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    special_tokens_in_text: SpecialTokens = "text",
) -> "LibraryRenderer | TemplateRenderer":
    """The renderer `name` over `tokenizer_path`/tokenizer.json.

    `auto`: the one made for `model`, else the one that tokenizer_config.json names as `renderer`, else `template`: the
    folder's own chat template. Only that one shows images, so a model that sees has it in any case. `history`: the
    reasoning of earlier turns is kept, or dropped where the format does.
    `chat_template_kwargs`: what the format is told besides the messages, `{"enable_thinking": False}`; every prompt is
    rendered with them, and continuations are proven with them. `special_tokens_in_text`: what a special token is where
    a message spells it, its letters or the token itself.

    Raises ValueError naming the renderers that there are, the kwargs that the format takes, or what is wrong with the
    template, and FileNotFoundError for a folder without tokenizer.json.
    """
    if not (tokenizer_path / "tokenizer.json").exists():
        raise FileNotFoundError(f"{tokenizer_path} holds no tokenizer.json")
    tokenizer = FastTokenizer(tokenizer_path, special_tokens_in_text)
    vision = vision_of(tokenizer_path)
    known = MODEL_RENDERER_MAP.get(model) or tokenizer.renderer
    resolved = (known if known and vision is None else "template") if name == "auto" else name
    kwargs = dict(chat_template_kwargs or {})
    if resolved == "template":
        return _template_renderer(tokenizer_path, tokenizer, model, history, kwargs, vision)
    try:
        config = config_from_name(resolved)
    except ValueError as error:
        near = difflib.get_close_matches(resolved, {*MODEL_RENDERER_MAP.values(), "template"}, n=1, cutoff=0.0)[0]
        raise ValueError(f"renderer {resolved!r} is unknown; did you mean {near!r}? {error}") from error
    check_kwargs(kwargs, config.template_field_names(), f"renderer {resolved!r}")
    # Only with all thinking kept is a new user turn a pure continuation.
    retention = {"thinking_retention": "all"} if history == "keep" else {}
    try:
        config = type(config).model_validate(kwargs | retention)
    except ValueError as error:
        told = " ".join(str(error).split())
        raise ValueError(
            f"chat_template_kwargs={kwargs}, history={history!r}: renderer {resolved!r}: {told}"
        ) from error
    return LibraryRenderer(renderers.create_renderer(tokenizer, config), tokenizer)


def check_kwargs(kwargs: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Raises ValueError naming a kwarg that is not `known` to `what`, and those that are."""
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            takes = ", ".join(sorted(known)) or "none"
            raise ValueError(f"chat_template_kwargs has {name!r}, and {what} takes {takes}{hint}")


def _template_renderer(
    folder: Path,
    tokenizer: FastTokenizer,
    model: str,
    history: Literal["keep", "template"],
    chat_template_kwargs: Mapping[str, Any],
    vision: Vision | None,
) -> "TemplateRenderer":
    from lightning_rl_proxy.rendering import chat_templates  # which builds on this module

    texts = chat_templates.read_template(folder, tokenizer.config)
    if texts is None:
        raise ValueError(
            f"no renderer is known for model {model!r}; name one that fits its chat format, with "
            "actor_rollout_ref.rollout.renderer or `serve --renderer` (qwen3, llama-3, ...): "
            f"{folder} has no chat template"
        )
    return chat_templates.TemplateRenderer(
        folder,
        tokenizer,
        texts,
        model=model,
        history=history,
        chat_template_kwargs=chat_template_kwargs,
        vision=vision,
    )


def tool_call_id(call_id: str, index: int) -> str:
    """The id of an answer's tool call: `index` counts the calls that are well-formed."""
    return f"call_{call_id}_{index}"


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's form."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def arguments_parsed(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool-call arguments as objects, since templates print an object and a string differently."""
    return [m | {"tool_calls": [_parsed(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages]


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    try:
        return call | {"function": function | {"arguments": json.loads(function["arguments"])}}
    except (KeyError, TypeError, json.JSONDecodeError):
        return call
