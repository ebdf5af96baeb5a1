"""Prompts that clients write themselves, as text or as token ids: no chat format, text in and text out.

Such a prompt continues an earlier call where it begins with that call's prompt and everything that was sampled, letter
by letter and special tokens too: then the sampled tokens stay as they are, and only the rest is tokenised.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from lightning_rl_adapters.semconv import ForkCause
from lightning_rl_proxy.forest.fork_causes import Fork, first_difference
from lightning_rl_proxy.forest.nodes import LiveCall, Place
from lightning_rl_proxy.rendering.base import Markup, ParsedAnswer, Renderer

Prompt = str | list[int]


class RawPromptReader:
    """Reads sampled tokens as text, and nothing else; so far a `Renderer`."""

    def __init__(self, renderer: Renderer) -> None:
        self.tokenizer = renderer.tokenizer
        self.stop_token_ids = renderer.stop_token_ids
        self._unseen = renderer.tokenizer.special_ids.union(renderer.stop_token_ids)
        self.markup = Markup(ends=frozenset(renderer.stop_token_ids), unseen=self._unseen, keeps_space=True)

    def parse(
        self,
        call_id: str,
        prompt_ids: list[int],
        response_ids: list[int],
        logprobs: list[float] | None,
        finish_reason: str,
        tools: Sequence[dict[str, Any]] | None,
    ) -> ParsedAnswer:
        """See `Renderer`."""
        return ParsedAnswer(
            content=self.tokenizer.decode([token for token in response_ids if token not in self._unseen]),
            reasoning=None,
            tool_calls=[],
            finish_reason=finish_reason,
            token_ids=response_ids,
            logprobs=logprobs,
            decode=self.tokenizer.decode,
            output_tokens=len(response_ids),
        )

    def encode_behind(self, text: str) -> list[int]:
        """See `Renderer`."""
        return self.tokenizer.encode_own(text)


class Texts:
    """The answered prompts of one attempt."""

    def __init__(self) -> None:
        self._known: list[tuple[str, Prompt, LiveCall]] = []

    def add(self, model: str, prompt: Prompt, live: LiveCall) -> None:
        """Make an answered call continuable."""
        self._known.append((model, prompt, live))

    def place(self, turn: Place, model: str, prompt: Prompt, reader: RawPromptReader) -> Place:
        """Where a prompt goes, whose place by messages is `turn`: behind the call of which it repeats the most.

        Of equal ones it goes on with the last answered."""
        whole = message(prompt, reader)
        parent, known = self._longest(model, prompt, reader)
        if parent is None:
            place = replace(turn, parent=None, fork=self._fork(model, prompt, reader), new_messages=[whole])
            ids = reader.tokenizer.encode_whole(prompt) if isinstance(prompt, str) else prompt
            return place.with_prompt(ids, [whole])
        rest = prompt[known:]
        added = reader.encode_behind(rest) if isinstance(rest, str) else rest
        context = parent.context()
        return replace(
            turn,
            parent=parent,
            added_ids=added,
            prompt_ids=context + added,
            new_messages=[message(rest, reader)],
            fork=None,
        )

    def _longest(self, model: str, prompt: Prompt, reader: RawPromptReader) -> tuple[LiveCall | None, int]:
        """The call with the longest text (or ids) that `prompt` begins with, and how long that is."""
        found: tuple[LiveCall | None, int] = (None, 0)
        for asked_model, asked, live in self._known:
            if asked_model != model or type(asked) is not type(prompt):
                continue
            whole = _sum(asked, live, reader)
            if len(whole) >= found[1] and prompt[: len(whole)] == whole:
                found = (live, len(whole))
        return found

    def _fork(self, model: str, prompt: Prompt, reader: RawPromptReader) -> Fork | None:
        """Why a prompt continues nothing: it goes on behind the visible text alone, or it is another prompt."""
        mine = [(asked, live) for asked_model, asked, live in self._known if asked_model == model]
        for asked, live in reversed(mine):
            if isinstance(asked, str) and isinstance(prompt, str):
                visible = asked + reader.parse("", [], live.call.response_ids, None, "stop", None).content
                if prompt.startswith(visible) and len(prompt) > len(visible) > len(asked):
                    ids = reader.tokenizer.encode_whole(prompt)
                    return Fork(ForkCause.NOT_APPEND_ONLY, token=first_difference(ids, live.context()))
        if not mine or any(asked == prompt for asked, _ in mine):
            return None
        return Fork(ForkCause.NEW_CONVERSATION)


def _sum(asked: Prompt, live: LiveCall, reader: RawPromptReader) -> Prompt:
    """A prompt and what was sampled behind it, in its own form."""
    if isinstance(asked, str):
        return asked + reader.tokenizer.decode(live.call.response_ids)
    return asked + live.call.response_ids


def message(prompt: Prompt, reader: RawPromptReader) -> dict[str, Any]:
    """The prompt as a message of the user."""
    return {"role": "user", "content": prompt if isinstance(prompt, str) else reader.tokenizer.decode(prompt)}
