"""Renderers of the `renderers` library, each made for a family of models, held to the append-only contract."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import renderers
from renderers.base import ParsedToolCall, ToolCallParseStatus

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import (
    Markup,
    ParsedAnswer,
    Variants,
    arguments_parsed,
    check_kwargs,
    tokens_of,
    tool_call,
    tool_call_id,
    with_ids,
    with_sampled_ids,
)
from lightning_rl_proxy.rendering.forcing import Forcing, begun, probe_forcing, probe_lead
from lightning_rl_proxy.rendering.images import Vision
from lightning_rl_proxy.rendering.rendered_prompts import RenderedPrompts
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer

_CACHED_TEXTS = 1024
_NAMED_IDS = frozenset({"kimi-k2", "kimi-k2.5"})  # formats that write of a call `functions.NAME:NUMBER`, and no name
_TAIL = 64  # tokens; so near its end a prompt says whether an answer begins inside of its reasoning


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
        self._names_by_ids = config.name in _NAMED_IDS
        self._forcing: Forcing | None = None
        self._lead: str | None = None
        variants = Variants(self._with_kwargs)
        self.with_kwargs, self.is_made = variants.with_kwargs, variants.is_made
        self._prompts = RenderedPrompts(partial(self._render, generation=True), tokenizer.long_texts)
        self._opens_reasoning = lru_cache(_CACHED_TEXTS)(self._opens)
        # Of a format all of whose marks are tokens of their own; an answer that holds none of them is its text.
        marks = () if self.markup is None or self.markup.bare_calls else self.markup.marks()
        self._marks = marks if self.markup is not None and len(self.markup.tokens) == len(marks) else ()

    def _with_kwargs(self, kwargs: Mapping[str, Any]) -> "LibraryRenderer":
        config = self._renderer.config
        check_kwargs(kwargs, config.template_field_names(), f"renderer {config.name!r}")
        variant_config = type(config).model_validate(config.model_dump() | dict(kwargs))
        return LibraryRenderer(renderers.create_renderer(self.tokenizer, variant_config), self.tokenizer)

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """See `Renderer`."""
        return self._prompts.ids(messages, tools)

    def whole(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """See `Renderer`."""
        return self._render(messages, tools, generation=False)

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, *, generation: bool
    ) -> list[int]:
        messages = arguments_parsed(messages)
        try:
            ids: list[int] = self._renderer.render_ids(
                self.tokenizer.guarded_messages(_with_named_ids(messages) if self._names_by_ids else messages),
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
        if self._names_by_ids:
            messages = with_sampled_ids(messages, self._own_ids(prompt_ids, response_ids, tools))
        added = self.tokenizer.guarded_messages(messages)
        bridged = self._renderer.bridge_to_next_turn(last_turn, response_ids, added, tools=tools)
        if bridged is None:
            return None
        ids: list[int] = bridged.token_ids
        context = last_turn + response_ids
        return ids[len(context) :] if ids[: len(context)] == context else None

    def _own_ids(
        self, prompt_ids: list[int], response_ids: list[int], tools: Sequence[dict[str, Any]] | None
    ) -> list[str | None]:
        """The ids that the model itself gave the calls of an answer."""
        try:
            parsed = self._renderer.parse_response(response_ids, tools=tools, prompt_ids=prompt_ids)
        except (ValueError, RecursionError):  # as in `parse`
            return []
        return [call.id for call in parsed.tool_calls if _made("", call) is not None]

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
        try:
            content, reasoning, tool_calls = self._parsed(call_id, prompt_ids, response_ids, tools)
        except (ValueError, RecursionError):  # JSON that is nested too deep for Python, or a number of too many digits
            content, reasoning, tool_calls = self.tokenizer.decode(self._without_end(response_ids)).strip(), None, []
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

    def _parsed(
        self, call_id: str, prompt_ids: list[int], response_ids: list[int], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[str, str | None, list[dict[str, Any]]]:
        """Content, reasoning and tool calls of an answer."""
        if (text := self._plain_text(prompt_ids, response_ids)) is not None:
            return text, None, []
        if not tools and (parts := self._uncalled(prompt_ids, response_ids)) is not None:
            return parts[1], parts[0], []
        parsed = self._renderer.parse_response(response_ids, tools=tools, prompt_ids=prompt_ids)
        reasoning, content = parsed.reasoning_content, parsed.content
        if self.markup is not None:
            reasoning, content = None if reasoning is None else reasoning.strip(), content.strip()
        # Without marks, what is called says whether an answer is a call.
        bare = self.markup is not None and self.markup.bare_calls
        names = {tool["function"]["name"] for tool in tools or ()} if bare else None
        ids = self._without_end(response_ids)
        calls: list[dict[str, Any]] = []
        for call in parsed.tool_calls:
            made = _made(tool_call_id(call_id, len(calls)), call) if names is None or call.name in names else None
            if made is not None:
                calls.append(made)
            elif call.token_span is not None:
                content += self.tokenizer.decode(ids[slice(*call.token_span)])
            else:
                content += f"<tool_call>{call.raw}</tool_call>"
        return content, reasoning, calls

    def _uncalled(self, prompt_ids: list[int], response_ids: list[int]) -> tuple[str | None, str] | None:
        """Reasoning and content of an answer that can call nothing, but holds the markup of a call; None for others."""
        ids = self._without_end(response_ids)
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

    def _without_end(self, response_ids: list[int]) -> list[int]:
        """The answer without its end."""
        ends = (at for at, token in enumerate(response_ids) if token in self.stop_token_ids)
        return response_ids[: next(ends, len(response_ids))]

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


def _made(call_id: str, call: ParsedToolCall) -> dict[str, Any] | None:
    """The call; None where it is malformed, name or arguments are none, or hold a number that JSON has not."""
    well_formed = isinstance(call.name, str) and isinstance(call.arguments, dict | str)
    if call.status != ToolCallParseStatus.OK or not well_formed:
        return None
    with suppress(ValueError):
        return tool_call(call_id, str(call.name), call.arguments)
    return None


def _with_named_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls have ids as Kimi K2 writes them: `functions.NAME:NUMBER`, counted in a conversation."""
    named: dict[str, str] = {}  # by the ids that the client has for the latest calls
    numbers = itertools.count()
    renamed: list[dict[str, Any]] = []
    for message in messages:
        calls: list[dict[str, Any]] = []
        for call in message.get("tool_calls") or ():
            number = next(numbers)
            own, name = str(call.get("id") or ""), (call.get("function") or {}).get("name")
            named[own] = own if own.startswith("functions.") else f"functions.{name}:{number}"
            calls.append(call | {"id": named[own]})
        renamed.append(with_ids(message, lambda told: named.get(told, told)) | ({"tool_calls": calls} if calls else {}))
    return renamed


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
