"""Which span of an attempt stands below which: the loop above its calls, a call above the tools that it asked for.

Pure. Invariant: what an agent said of its own spans is kept. Only what has no parent is placed, by time: a call below
the innermost span of the agent's that was open from before it until after it; an operation below the call that was
answered last before it began, unless it has calls inside it or below it; anything else below the attempt.
"""

from collections.abc import Mapping, Sequence

from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span


def parents(spans: Sequence[Span]) -> dict[str, str | None]:
    """The id of the span above each of an attempt's spans, by span id; None: the attempt itself."""
    calls = [span for span in spans if span.name == semconv.CALL_SPAN]
    agent_spans = {span.span_id: span for span in spans if span.name != semconv.CALL_SPAN}
    above = {span_id: _parent_of(span, agent_spans) for span_id, span in agent_spans.items()}
    placed: dict[str, str | None] = {call.span_id: _around(call, agent_spans, above) for call in calls}
    holding = {span_id for at in placed.values() if at is not None for span_id in _chain(at, above)}
    return placed | {
        span_id: _caller_of(agent_spans[span_id], calls) if parent is None and span_id not in holding else parent
        for span_id, parent in above.items()
    }


def _parent_of(span: Span, agent_spans: Mapping[str, Span]) -> str | None:
    """The parent that the agent gave it, where that came too."""
    parent = span.attributes.get(semconv.PARENT_SPAN)
    return parent if parent in agent_spans else None


def _around(call: Span, agent_spans: Mapping[str, Span], above: Mapping[str, str | None]) -> str | None:
    """The innermost span that was open during the call; None also where several were that do not lie in each other."""
    around = [span for span in agent_spans.values() if span.name != semconv.LOG_SPAN and _during(call, span)]
    chains = {span.span_id: _chain(span.span_id, above) for span in around}
    return next((span_id for span_id, chain in chains.items() if chain >= chains.keys()), None)


def _chain(span_id: str, above: Mapping[str, str | None]) -> set[str]:
    """A span and all above it."""
    chain: set[str] = set()
    at: str | None = span_id
    while at is not None and at not in chain:
        chain.add(at)
        at = above[at]
    return chain


def _caller_of(span: Span, calls: Sequence[Span]) -> str | None:
    if span.name != semconv.OPERATION_SPAN or any(_during(call, span) for call in calls):
        return None
    answered = [call for call in calls if call.end_ns <= span.start_ns]
    return max(answered, key=lambda call: (call.end_ns, call.number)).span_id if answered else None


def _during(inner: Span, outer: Span) -> bool:
    return outer.start_ns <= inner.start_ns and inner.end_ns <= outer.end_ns
