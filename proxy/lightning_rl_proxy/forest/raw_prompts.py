"""Prompts that clients write themselves, as text or as token ids: no chat format, text in and text out.

Such a prompt continues an earlier call where it begins with that call's prompt and everything that was sampled, letter
by letter and special tokens too: then the sampled tokens stay as they are, and only the rest is tokenised.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
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


@dataclass(eq=False, slots=True)
class _Known:
    """An answered prompt: what it `adds` behind its `parent` and that one's answer, `start` letters (or ids) from the
    beginning. `number` counts them in the order in which they were answered; `answer` is there once it was read."""

    number: int
    model: str
    adds: Prompt
    live: LiveCall
    parent: "_Known | None"
    start: int
    answer: Prompt | None = None
    children: "list[_Known]" = field(default_factory=list)

    @property
    def end(self) -> int:
        """Where its answer ends, which was read."""
        assert self.answer is not None
        return self.start + len(self.adds) + len(self.answer)

    def is_repeated_by(self, prompt: Prompt, reader: RawPromptReader) -> bool:
        """Whether a prompt that repeats the parent repeats this one and its answer, too."""
        if self.answer is None:
            ids = self.live.call.response_ids
            self.answer = reader.tokenizer.decode(ids) if isinstance(self.adds, str) else ids
        answered = self.start + len(self.adds)
        return _stands_at(prompt, self.adds, self.start) and _stands_at(prompt, self.answer, answered)

    def prompt(self) -> Prompt:
        """The whole prompt."""
        parts, before = [self.adds], self.parent
        while before is not None:
            parts += [before.answer or before.adds[:0], before.adds]
            before = before.parent
        whole: Prompt = reduce(add, reversed(parts))
        return whole


class Texts:
    """The answered prompts of one attempt: a tree, in which a prompt stands behind the call that it goes on from. So
    what many turns repeat is kept and compared once."""

    def __init__(self) -> None:
        self._begun: list[_Known] = []  # those that go on from none
        self._prompts_by_call: dict[str, _Known] = {}  # by call id

    def add(self, model: str, prompt: Prompt, live: LiveCall) -> None:
        """Make an answered call continuable."""
        parent = None if live.parent is None else self._prompts_by_call.get(live.parent.call.call_id)
        if parent is not None and parent.answer is None:  # of a call that was recorded before the attempt came here
            parent = None
        start = 0 if parent is None else parent.end
        entry = _Known(len(self._prompts_by_call), model, prompt[start:], live, parent, start)
        self._prompts_by_call[live.call.call_id] = entry
        (self._begun if parent is None else parent.children).append(entry)

    def place(self, turn: Place, model: str, prompt: Prompt, reader: RawPromptReader) -> Place:
        """Where a prompt goes, whose place by messages is `turn`: behind the call of which it repeats the most.

        Of equal ones it goes on with the last answered."""
        whole = message(prompt, reader)
        parent = self._longest(model, prompt, reader)
        if parent is None:
            place = replace(turn, parent=None, fork=self._fork(model, prompt, reader), new_messages=[whole])
            ids = reader.tokenizer.encode_whole(prompt) if isinstance(prompt, str) else prompt
            return place.with_prompt(ids, [whole])
        rest = prompt[parent.end :]
        added = reader.encode_behind(rest) if isinstance(rest, str) else rest
        context = parent.live.context()
        return replace(
            turn,
            parent=parent.live,
            added_ids=added,
            prompt_ids=context + added,
            new_messages=[message(rest, reader)],
            fork=None,
        )

    def _longest(self, model: str, prompt: Prompt, reader: RawPromptReader) -> _Known | None:
        """The call with the longest text (or ids) that `prompt` begins with."""
        longest: _Known | None = None
        looking = [one for one in self._begun if one.model == model and type(one.adds) is type(prompt)]
        while looking:
            one = looking.pop()
            if one.is_repeated_by(prompt, reader):
                if longest is None or (one.end, one.number) > (longest.end, longest.number):
                    longest = one
                looking += one.children
        return longest

    def _fork(self, model: str, prompt: Prompt, reader: RawPromptReader) -> Fork | None:
        """Why a prompt continues nothing: it goes on behind the visible text alone, or it is another prompt."""
        mine = [(one, one.prompt()) for one in self._prompts_by_call.values() if one.model == model]
        for one, previous in reversed(mine):
            if isinstance(previous, str) and isinstance(prompt, str):
                visible = previous + reader.parse("", [], one.live.call.response_ids, None, "stop", None).content
                if prompt.startswith(visible) and len(prompt) > len(visible) > len(previous):
                    ids = reader.tokenizer.encode_whole(prompt)
                    return Fork(ForkCause.NOT_APPEND_ONLY, token=first_difference(ids, one.live.context()))
        if not mine or any(previous == prompt for _, previous in mine):
            return None
        return Fork(ForkCause.NEW_CONVERSATION)


def _stands_at(whole: Prompt, part: Prompt, at: int) -> bool:
    if isinstance(whole, str):
        return isinstance(part, str) and whole.startswith(part, at)
    return whole[at : at + len(part)] == part


def message(prompt: Prompt, reader: RawPromptReader) -> dict[str, Any]:
    """The prompt as a message of the user."""
    return {"role": "user", "content": prompt if isinstance(prompt, str) else reader.tokenizer.decode(prompt)}
