"""Calls that a program makes for itself: titles, commit messages, summaries. They are no part of the task, so they are
tagged, by what they ask for.

A rule is a text that a program writes in such a request and nowhere else: in a system message, or in the message that
is to be answered, unless that is the result of a tool, which may show any text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_rl_adapters.call import HOUSEKEEPING

RULES: dict[str, list[str]] = {
    "aider": [
        "generates concise, one-line Git commit messages",
        "*Briefly* summarize this partial conversation about programming.",
    ],
    "claude-code": [
        "Generate a concise, sentence-case title",
        "Your task is to create a detailed summary of the conversation so far",
        "Your task is to create a detailed summary of the RECENT portion of the conversation",
        "Your task is to create a detailed summary of this conversation.",
        "[SUGGESTION MODE: Suggest what the user might naturally type next",
        "The user stepped away and is coming back. Recap",
    ],
    "opencode": [
        "You are a title generator. You output ONLY a thread title.",
        "summarization agent. You are given a conversation between a user and an agent.",
    ],
}


class Housekeeping:
    """The rules of all programs. `more` come beside the known ones, or in place of those of the same program."""

    def __init__(self, more: Mapping[str, Sequence[str]]) -> None:
        self._texts = [text for texts in {**RULES, **more}.values() for text in texts if text]

    def tagged(self, agent: str | None, messages: Sequence[dict[str, Any]]) -> str | None:
        """The agent's tag, which says so where the request with these new messages is housekeeping."""
        last = [message for message in messages[-1:] if message.get("role") != "tool"]
        candidates = [message for message in messages if message.get("role") == "system"] + last
        texts = [text for message in candidates for text in _texts(message.get("content"))]
        if not any(rule in text for text in texts for rule in self._texts):
            return agent
        return HOUSEKEEPING if agent is None else f"{agent}.{HOUSEKEEPING}"


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else ()
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
