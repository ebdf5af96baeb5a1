"""The tools that calls were shown, in the form of Chat Completions, kept once per content.

A call that begins a tree knows its tools by their digest, and the calls behind it have the same; an attempt has one
span for each digest, whose id is made of the attempt and that digest, so that recording it again changes nothing.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span


def tools_span(rollout_id: str, attempt_id: str, digest: str, tools: list[dict[str, Any]], *, at_ns: int) -> Span:
    """The span that holds tools as the model was shown them; `at_ns` since the epoch."""
    return Span(
        span_id=f"{attempt_id}-{digest}",
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        name=semconv.TOOLS_SPAN,
        number=at_ns,
        start_ns=at_ns,
        end_ns=at_ns,
        attributes={semconv.TOOLS: digest, semconv.TOOL_SCHEMAS: msgspec.json.encode(tools).decode()},
    )


def tools_of(spans: Iterable[Span]) -> dict[str, list[dict[str, Any]]]:
    """The tools of an attempt's calls by their digest; spans of earlier releases have none."""
    held = (span.attributes for span in spans if span.name == semconv.TOOLS_SPAN)
    return {attributes[semconv.TOOLS]: msgspec.json.decode(attributes[semconv.TOOL_SCHEMAS]) for attributes in held}
