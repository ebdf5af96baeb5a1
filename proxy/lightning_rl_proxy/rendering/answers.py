"""An answer that another model gave, as the ids that this chat format would have sampled for it.

Invariant: behind the prompt that the format renders, these ids mean the answer: parsed, they give its text and its
tool calls. What cannot be written so is refused with a name, never changed.
"""

import json
from collections.abc import Sequence
from typing import Any

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import ParsedAnswer, Renderer


class NotWritten(ValueError):
    """The chat format cannot write this answer; the message is the reason in one word."""


def answer_ids(
    renderer: Renderer,
    messages: Sequence[dict[str, Any]],
    answer: dict[str, Any],
    tools: Sequence[dict[str, Any]] | None,
    *,
    ended: bool = True,
) -> list[int]:
    """The ids of `answer` to `messages`, up to and with the token that ends it; without that, where it was not `ended`.

    Raises NotWritten: `not_renderable` for what the format refuses, `no_continuation` where it writes a conversation
    with the answer in another way than the prompt, `no_end` where it does not close the answer, and `answer_changed`
    where its ids mean something else.
    """
    try:
        prompt = renderer.render(messages, tools)
        whole = renderer.whole([*messages, answer], tools)
    except GatewayError as error:
        raise NotWritten("not_renderable") from error
    if whole[: len(prompt)] != prompt:
        raise NotWritten("no_continuation")
    ids = whole[len(prompt) :]
    end = next((at for at, token in enumerate(ids) if token in renderer.stop_token_ids), None)
    if end is None:
        raise NotWritten("no_end")
    ids = ids[: end + 1 if ended else end]
    parsed = renderer.parse("", prompt, ids, None, "stop" if ended else "length", tools)
    same_text = _text(parsed.content) == _text(answer.get("content")) or _thinks_the_same(parsed, answer)
    if not same_text or _calls(parsed.tool_calls) != _calls(answer.get("tool_calls")):
        raise NotWritten("answer_changed")
    return ids


def _thinks_the_same(parsed: ParsedAnswer, answer: dict[str, Any]) -> bool:
    """Whether an answer that holds its reasoning in its text, between the format's marks, means the parsed one."""
    opening, closing = "<think>", "</think>"
    thought, mark, text = _text(answer.get("content")).removeprefix(opening).partition(closing)
    meaning = (parsed.reasoning or "").strip(), _text(parsed.content)
    return bool(mark) and parsed.reasoning is not None and meaning == (thought.strip(), text.strip())


def _text(content: Any) -> str:
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    return (content or "").strip()


def _calls(tool_calls: Sequence[dict[str, Any]] | None) -> list[tuple[str, Any]]:
    """Names and arguments; the ids of calls are of no account."""
    return [(call["function"]["name"], _arguments(call["function"]["arguments"])) for call in tool_calls or ()]


def _arguments(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
