"""Calls as `lightning-rl export --what calls` writes them, of a teacher that has no tokens to tell."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECKPOINT = Path(__file__).parents[3] / "examples" / "sql_agent" / "checkpoint"


def record(rollout: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    """Call `number` of a rollout: a question and the teacher's answer to it."""
    return {
        "rollout_id": rollout,
        "call_id": f"{rollout}-{number}",
        "number": number,
        "mode": "train",
        "counts": True,
        "model": "teacher",
        "dialect": "chat_completions",
        "prompt_token_ids": [],
        "response_token_ids": [],
        "messages": [{"role": "user", "content": f"question {number}"}],
        "answer": [{"role": "assistant", "content": "select 1"}],
        "finish_reason": "stop",
        "reward": 1.0,
        "delivered": True,
        "exact": False,
        "group_id": rollout,
    } | changes


def conversation(rollout: str, answers: Sequence[str], **changes: Any) -> list[dict[str, Any]]:
    """Calls each of which goes on with the one before."""
    return [
        record(
            rollout,
            number,
            answer=[{"role": "assistant", "content": answer}],
            parent_call_id=f"{rollout}-{number - 1}" if number else None,
            **changes,
        )
        for number, answer in enumerate(answers)
    ]


def write(file: Path, records: Sequence[dict[str, Any]]) -> Path:
    """The records as an exported file."""
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    return file
