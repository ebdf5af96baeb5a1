"""How a trajectory ended, as its loop emits it and as training reads it: one object among what an agent emits."""

import json
from collections.abc import Iterable
from typing import Any

from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span

_LOOP = "agent_loop"
_ENDED_BY = "ended_by"


def ending(loop: str, ended_by: str, **counts: Any) -> dict[str, Any]:
    """What a loop emits when its trajectory ends: by what it ended, and what it counted."""
    return {_LOOP: loop, _ENDED_BY: ended_by, **counts}


def ended_by(spans: Iterable[Span]) -> str | None:
    """By what an attempt's trajectory ended; None where no loop tells of it, and of several the last."""
    found = None
    for span in spans:
        if span.name == semconv.OBJECT_SPAN:
            told = json.loads(span.attributes.get(semconv.OBJECT) or "null")
            if isinstance(told, dict) and _LOOP in told and isinstance(told.get(_ENDED_BY), str):
                found = told[_ENDED_BY]
    return found
