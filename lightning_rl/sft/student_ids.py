"""The calls of a trace in the ids of the student: those that were sampled, or the messages in its own chat format.

Invariant: the prompt of every call is what the gateway would ask the student. A conversation that begins is rendered
whole; one that goes on keeps the ids before it where the format continues append-only, else it is rendered anew.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from lightning_rl.sft.traces import CallTrace, TracedCall
from lightning_rl_adapters.call import Call
from lightning_rl_proxy.dialects import chat_completions
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.answers import NotWritten, answer_ids
from lightning_rl_proxy.rendering.base import Renderer

_RAW = "completions"  # the dialect whose prompts are no messages


@dataclass
class Written:
    """A trace's calls as the student would have been asked them: a forest. `why_not` has the reason of every call that
    could not be written; `as_sampled` counts the calls whose ids are those that were recorded."""

    calls: list[Call] = field(default_factory=list)
    why_not: dict[str, str] = field(default_factory=dict)
    as_sampled: int = 0


@dataclass(frozen=True)
class _WrittenCall:
    """One call's conversation and, where it could be written, all of its ids."""

    messages: list[dict[str, Any]]  # with the answer
    tools: list[dict[str, Any]] | None
    prompt: list[int] | None = None
    answer: list[int] = field(default_factory=list)
    recorded: bool = False  # whether the ids are those that were sampled


class StudentFormat:
    """Writes traces for the student whose chats `renderer` writes."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._vocabulary = renderer.tokenizer.vocabulary_digest()

    def write(self, trace: CallTrace) -> Written:
        """The trace's calls in the student's ids."""
        written = Written()
        calls_by_id: dict[str, _WrittenCall] = {}
        for call in map(_as_read, trace.calls):
            parent = calls_by_id.get(call.parent_call_id or "")
            before = [] if parent is None else parent.messages
            tools = call.tools if parent is None else parent.tools
            messages = [*before, *call.messages]
            try:
                one = self._written_call(call, parent, messages, tools)
            except NotWritten as error:
                written.why_not[call.call_id] = str(error)
                one = _WrittenCall([*messages, *call.answer[:1]], tools)
            calls_by_id[call.call_id] = one
            if one.prompt is not None:
                written.calls.append(_call(call, one, parent))
                written.as_sampled += one.recorded
        return written

    def _written_call(
        self,
        call: TracedCall,
        parent: _WrittenCall | None,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> _WrittenCall:
        """Raises NotWritten with the reason."""
        if call.media or any(_shows_image(message) for message in messages):  # a service's calls have no media
            raise NotWritten("images")
        if not call.answer and not call.response_token_ids:
            raise NotWritten("no_answer")
        conversation = [*messages, *call.answer[:1]]
        if self._has_own_ids(call, parent, messages, tools):
            return _WrittenCall(conversation, tools, call.prompt_token_ids, call.response_token_ids, recorded=True)
        if call.dialect == _RAW:
            raise NotWritten("raw_prompt")
        if call.parent_call_id is not None and parent is None:
            raise NotWritten("unknown_conversation")
        if not call.answer:  # its client left, so only ids were recorded
            raise NotWritten("no_answer")
        ended = call.finish_reason != "length"
        answer = answer_ids(self._renderer, messages, call.answer[0], tools, ended=ended)
        return _WrittenCall(conversation, tools, self._prompt(call, parent, messages, tools), answer)

    def _has_own_ids(
        self,
        call: TracedCall,
        parent: _WrittenCall | None,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> bool:
        """Whether the recorded ids are the student's own: its vocabulary, and the very prompt that it is asked."""
        if not call.exact or not call.response_token_ids or call.vocabulary != self._vocabulary:
            return False
        if call.parent_call_id is not None:
            return parent is not None and parent.recorded
        return call.dialect == _RAW or self._rendered(messages, tools) == call.prompt_token_ids

    def _prompt(
        self,
        call: TracedCall,
        parent: _WrittenCall | None,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> list[int]:
        if parent is not None and parent.prompt is not None:
            added = self._renderer.extend(parent.prompt, parent.answer, call.messages, tools)
            if added is not None:
                return parent.prompt + parent.answer + added
        return self._rendered(messages, tools) or []

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int] | None:
        """The prompt that the gateway makes of the messages; None for those that the format refuses."""
        try:
            return self._renderer.render(messages, tools)
        except GatewayError:
            return None


def _as_read(call: TracedCall) -> TracedCall:
    """The call with its answer as the gateway reads one that an agent sends back: services name reasoning in two ways,
    and give text in parts. One that no agent could send back stays."""
    try:
        read = chat_completions.parse({"model": call.model, "messages": call.answer[:1]})
    except GatewayError:
        return call
    return msgspec.structs.replace(call, answer=read.messages)


def _call(call: TracedCall, written: _WrittenCall, parent: _WrittenCall | None) -> Call:
    """The call in a forest: behind its parent where its prompt begins with all of the parent's ids."""
    prompt = written.prompt or []
    context = [] if parent is None or parent.prompt is None else parent.prompt + parent.answer
    follows = bool(context) and prompt[: len(context)] == context
    return Call(
        call_id=call.call_id,
        rollout_id=call.rollout_id,
        attempt_id=call.rollout_id,
        number=call.number,
        model=call.model,
        agent=call.agent,
        parent_id=call.parent_call_id if follows else None,
        prompt_ids=prompt[len(context) :] if follows else prompt,
        response_ids=written.answer,
        logprobs=None,
        versions=[],
        temperature=1.0,
        finish_reason=call.finish_reason or "stop",
        delivered=call.delivered,
    )


def _shows_image(message: dict[str, Any]) -> bool:
    parts = message.get("content")
    return isinstance(parts, list) and any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)
