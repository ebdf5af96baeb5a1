"""Parallel calls that a client sends back one by one, each with its result behind it, as the one answer that they were.

Our own ids prove it: a call's id names its answer and its place there.
"""

import re
from collections.abc import Sequence
from typing import Any

_OUR_ID = re.compile(r"call_([0-9a-f]{32})_\d+")


def joined(messages: Sequence[dict[str, Any]], known: int = 0) -> list[dict[str, Any]] | None:
    """The messages with such answers joined; None where there are none. The first `known` stay as they are."""
    result: list[dict[str, Any]] = list(messages[:known])
    answer, at = None, 0  # the latest answer of which only results came since, and its place
    for message in messages[known:]:
        if message.get("role") == "tool":
            result.append(message)
            continue
        calls = message.get("tool_calls")
        same = _answer_of(calls) if calls else None
        if same is not None and same == answer and not message.get("content") and not message.get("reasoning_content"):
            result[at] = result[at] | {"tool_calls": [*result[at]["tool_calls"], *message["tool_calls"]]}
            continue
        answer, at = same, len(result)
        result.append(message)
    return result if len(result) < len(messages) else None


def _answer_of(calls: Sequence[dict[str, Any]]) -> str | None:
    """The answer that all these calls are of."""
    matches = [_OUR_ID.fullmatch(str(call.get("id"))) for call in calls]
    answers = {match[1] if match else None for match in matches}
    return answers.pop() if len(answers) == 1 else None
