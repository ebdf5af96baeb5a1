"""An attempt's trace as people and other programs read it: spans, triplets, rows, what it printed."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from lightning_rl.store.contract import Attempt, AttemptTrace, Log, Rollout, RolloutTrace
from lightning_rl.store.rewards import added_up, rewards_by_call
from lightning_rl_adapters import conventions, credit, forest, rows, semconv, triplet
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.call_names import names_of
from lightning_rl_adapters.forest import Forest
from lightning_rl_adapters.span import Span, to_json


def spans_of(trace: AttemptTrace) -> list[dict[str, Any]]:
    """The spans, with token ids and logprobs as lists of numbers."""
    return [to_json(span) for span in trace.spans]


def triplets_of(trace: AttemptTrace) -> Iterator[triplet.Triplet]:
    """One triplet per call, in order of arrival."""
    grown = forest.build(calls_of(trace.spans))
    by_call = rewards_by_call(trace.rewards, names_of(trace.spans))
    of_calls = {call_id: added_up(rewards) for call_id, rewards in by_call.items()}
    return triplet.iter_triplets(grown, _rewards(grown, trace.attempt), of_calls)


def triplets_of_otel(trace: AttemptTrace) -> dict[str, Any]:
    """The triplets of the calls that the agent's own spans tell of, with the final reward, and what is missing of those
    that have no token ids."""
    from_spans = conventions.told_of(trace.spans)
    calls = [*from_spans.calls, *(each.call for each in from_spans.messages)]
    rewards = _rewards(forest.build(calls), trace.attempt)
    return {"triplets": conventions.triplets_of_otel(from_spans, rewards), "diagnoses": from_spans.diagnoses}


def rows_of(rollout: Rollout, trace: AttemptTrace) -> list[rows.Row]:
    """One row per leaf; those that would not be trained say why."""
    grown = forest.build(calls_of(trace.spans))
    cut = rows.cut(grown, _rewards(grown, trace.attempt))
    reason = why_excluded(rollout, trace.attempt)
    for row in cut:
        row.excluded = row.excluded or reason
    return cut


def log_span(rollout_id: str, attempt_id: str, log: Log) -> Span:
    """What an attempt printed as its span; there is one of an attempt."""
    now = time.time_ns()
    return Span(
        span_id=f"{attempt_id}-log",
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        name=semconv.LOG_SPAN,
        number=now,
        start_ns=now,
        end_ns=now,
        attributes={
            semconv.LOG_STDOUT: log.stdout,
            semconv.LOG_STDERR: log.stderr,
            semconv.LOG_TRACEBACK: log.traceback,
        },
    )


def log_of(trace: AttemptTrace) -> Log:
    """What the attempt printed, and its traceback; empty where it did not."""
    error = trace.attempt.error
    raised = "" if error is None else error.traceback
    for span in trace.spans:
        if span.name == semconv.LOG_SPAN:
            names = (semconv.LOG_STDOUT, semconv.LOG_STDERR, semconv.LOG_TRACEBACK)
            stdout, stderr, where = (span.attributes[name] for name in names)
            return Log(stdout=stdout, stderr=stderr, traceback=raised or where)
    return Log(traceback=raised)


def why_excluded(rollout: Rollout, attempt: Attempt) -> str | None:
    """Why nothing of this attempt is trained, or None."""
    if attempt.status == "running":
        return "open"
    if rollout.counting_attempt_id is None and rollout.attempt_id == attempt.attempt_id:
        return "cancelled" if attempt.status == "cancelled" else "infrastructure"
    if rollout.counting_attempt_id != attempt.attempt_id:
        return "superseded"
    return None if rollout.mode == "train" else "validation"


def _rewards(grown: Forest, attempt: Attempt) -> dict[str, float]:
    return credit.final_values(grown, attempt.reward)


def unpacked_traces(packed: bytes) -> dict[str, Any]:
    """Traces of many rollouts from MessagePack, as JSON-able values."""
    traces = msgspec.msgpack.decode(packed, type=dict[str, RolloutTrace])
    return {
        rollout_id: {
            "rollout": trace.rollout,
            "attempts": [
                {"attempt": each.attempt, "spans": spans_of(each), "rewards": each.rewards} for each in trace.attempts
            ],
        }
        for rollout_id, trace in traces.items()
    }
