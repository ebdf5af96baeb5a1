"""What was said in a finished rollout, call by call, as messages: read from the spans of its counting attempt. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.span import Span
from lightning_rl_adapters.tool_schemas import tools_of


class SpokenCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call in messages, in the form of Chat Completions.

    `messages` are those that it adds to the call that it goes on from (`parent_id`); without one, all of its prompt.
    `answer` is None where the client wrote the prompt itself, or was gone before the answer ended.
    """

    call_id: str
    parent_id: str | None
    agent: str | None
    messages: list[dict[str, Any]]
    answer: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


def spoken_calls(spans: Sequence[Span], calls: Sequence[Call]) -> dict[str, SpokenCall]:
    """The calls by their id, in order of arrival; those whose spans have no messages are left out."""
    attributes_by_id: Mapping[str, Mapping[str, Any]] = {span.span_id: span.attributes for span in spans}
    tools = tools_of(spans)
    spoken = {}
    for call in sorted(calls, key=lambda call: call.number):
        attributes = attributes_by_id.get(call.call_id, {})
        if not (messages := attributes.get(semconv.INPUT_MESSAGES)):
            continue
        answers = attributes.get(semconv.OUTPUT_MESSAGES) or [None]
        spoken[call.call_id] = SpokenCall(
            call_id=call.call_id,
            parent_id=call.parent_id,
            agent=call.agent,
            messages=list(messages),
            answer=answers[0],
            tools=tools.get(attributes.get(semconv.TOOLS) or ""),
        )
    return spoken


def transcript(calls: Sequence[SpokenCall]) -> str:
    """Messages and answers as lines, `role: text`, calls of tools as `assistant calls NAME ARGUMENTS`; no reasoning."""
    lines = []
    for call in calls:
        for message in [*call.messages, *([call.answer] if call.answer else [])]:
            if text := text_of(message):
                lines.append(f"{message['role']}: {text}")
            for one in message.get("tool_calls") or ():
                lines.append(f"{message['role']} calls {one['function']['name']} {one['function']['arguments']}")
    return "\n".join(lines)


def text_of(message: Mapping[str, Any]) -> str:
    """What a message says: no images, no reasoning, no tool calls."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if part.get("type") == "text")
