"""Answers that a client sends back with words of its own, read as the answers that they are, where that is certain.

Two kinds. Behind an answer that was cut (by a stop text, or by its length) stand more words: what was sampled stays as
it is, and the words are text behind it. And calls are written as text, with their ids, names and arguments: the ids are
ours, so they are the calls. A request is read so only where that finds a place which it has not as it stands. What the
model reads is what the client wrote, but for calls, which are in the format's own form.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from lightning_rl_adapters.call import Call
from lightning_rl_proxy.forest.message_fingerprint import value_of
from lightning_rl_proxy.rendering.base import Renderer

BEHIND = "behind_answer"  # marks a message whose words stand behind the answer before it, in the same turn

_OUR_ID = re.compile(r"call_[0-9a-f]{32}_\d+")


def restated(messages: Sequence[dict[str, Any]], cut: Collection[str]) -> list[dict[str, Any]] | None:
    """The messages with such answers in them read as what they are; None where there are none.

    `cut` are the texts of the answers that were cut. The last message stays: an assistant's there is to be continued.
    """
    result: list[dict[str, Any]] = []
    for message in messages[:-1]:
        text = message.get("content") if message.get("role") == "assistant" and not message.get("tool_calls") else None
        if isinstance(text, str) and text:
            result += _called(message, text) or _behind(message, text, cut) or [message]
        else:
            result.append(message)
    result += messages[-1:]
    return None if all(one is other for one, other in zip(result, messages, strict=False)) else result


def is_cut(call: Call, renderer: Renderer | None) -> bool:
    """Whether more may stand behind an answer, in the same turn: the end of its turn was not sampled."""
    ids = call.response_ids
    return renderer is not None and call.exact and bool(ids) and ids[-1] not in renderer.stop_token_ids


def words_behind(renderer: Renderer, response_ids: list[int], message: dict[str, Any], text: str) -> str:
    """The words of a message that stand behind an answer, without the stop text, which was sampled."""
    words: str = message["content"]
    sampled = renderer.tokenizer.decode(response_ids)
    stop = sampled[sampled.rfind(text) + len(text) :].strip() if text else ""
    behind = words.lstrip()
    return behind[len(stop) :] if stop and behind.startswith(stop) else words


def _behind(message: dict[str, Any], text: str, cut: Collection[str]) -> list[dict[str, Any]] | None:
    """An answer that was cut, and the words behind it: of several that fit the longest."""
    stripped = text.lstrip()
    answer = max(
        (one for one in cut if one and len(one) < len(stripped) and stripped.startswith(one)), key=len, default=""
    )
    if not answer or not stripped[len(answer) :].strip():
        return None
    return [message | {"content": answer}, {"role": "assistant", "content": stripped[len(answer) :], BEHIND: True}]


def _called(message: dict[str, Any], text: str) -> list[dict[str, Any]] | None:
    """An answer with the calls that its text ends with, behind a line that announces them; all ids are ours."""
    words, _, listed = f"\n{text.rstrip()}".rpartition("\n[")
    if not listed.endswith("]") or _OUR_ID.search(listed) is None:
        return None
    try:
        calls = value_of(f"[{listed}", "[")
    except (ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        return None
    written = [call | {"function": call["function"] | {"arguments": _as_json(call)}} for call in calls]
    return [message | {"content": words.rpartition("\n")[0], "tool_calls": written}]


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(call.get("id"), str)
        and _OUR_ID.fullmatch(call["id"]) is not None
    )


def _as_json(call: dict[str, Any]) -> str:
    arguments = call["function"].get("arguments")
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
