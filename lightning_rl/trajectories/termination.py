"""How a trajectory ended, as its loop emits it and as training reads it: one object among what an agent emits."""

import json
from collections.abc import Iterable
from typing import Any, Final

from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span

# It came to its end by itself.
ANSWER: Final = "answer"  # the policy answered, and asked for nothing
USER_DONE: Final = "user_done"  # the user had nothing more to say
# A limit ended it.
ASSISTANT_TURNS: Final = "max_assistant_turns"
USER_TURNS: Final = "max_user_turns"
RESPONSE_LENGTH: Final = "response_length"
ROW_LENGTH: Final = "row_length"  # what of one row can be trained: data.max_prompt_length + data.max_response_length
ANSWER_LENGTH: Final = "answer_length"  # of a single call: data.max_response_length
CONTEXT: Final = "context"  # the engine's
# The loop raised.
ERROR: Final = "error"

_LOOP = "agent_loop"
_ENDED_BY = "ended_by"
_LENGTHS = {
    ROW_LENGTH: "data.max_prompt_length + data.max_response_length",
    CONTEXT: "the engine's context, actor_rollout_ref.rollout.max_model_len",
}


def ending(loop: str, ended_by: str, **counts: Any) -> dict[str, Any]:
    """What a loop emits when its trajectory ends: by what it ended, and what it counted."""
    return {_LOOP: loop, _ENDED_BY: ended_by, **counts}


def ended_by(spans: Iterable[Span]) -> str | None:
    """By what an attempt's trajectory ended; None where no loop tells of it, and of several the last."""
    reason = None
    for span in spans:
        if span.name == semconv.OBJECT_SPAN:
            value = json.loads(span.attributes.get(semconv.OBJECT) or "null")
            if isinstance(value, dict) and _LOOP in value and isinstance(value.get(_ENDED_BY), str):
                reason = value[_ENDED_BY]
    return reason


def refused_prompt(ended_by: str | None) -> str | None:
    """Of a trajectory without a call: what to do, where its first prompt was too long; None where it was not."""
    if ended_by not in _LENGTHS:
        return None
    return (
        f"the first prompt, with the tools, has no room in {_LENGTHS[ended_by]}: raise that, or shorten them "
        "(data.filter_overlong_prompts=true leaves out tasks with more than data.max_prompt_length)"
    )
