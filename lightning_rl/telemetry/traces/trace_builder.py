"""A recorded attempt as a trace that a person reads: the attempt, its calls, and below them what the agent did.

Pure but for the tokenizer's file. Invariant: what is told of a call is what was recorded of it. Its token ids stay in
the store; here are their numbers, their log probabilities in short, and, where asked for, their text.
"""

import functools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lightning_rl.store.contract import AttemptTrace, Rollout, RolloutTrace
from lightning_rl.telemetry.traces.nesting import parents
from lightning_rl.telemetry.traces.root import root_span
from lightning_rl_adapters import forest, semconv
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.forest import Node
from lightning_rl_adapters.span import Span
from lightning_rl_adapters.triplet import prompt_ids
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer


class Story:
    """`tokenizer` is the folder of the policy's, where calls tell their tokens as text."""

    def __init__(self, tokenizer: Path | None) -> None:
        self._folder = tokenizer

    def of(self, trace: RolloutTrace) -> Iterator[list[Span]]:
        """The traces of a rollout's attempts, each with its root first.

        Raises ForestError where an attempt's records do not fit together.
        """
        for attempt in trace.attempts:
            yield self._attempt(trace.rollout, attempt)

    def _attempt(self, rollout: Rollout, traced: AttemptTrace) -> list[Span]:
        nodes = forest.build(calls_of(traced.spans)).nodes
        above = parents(traced.spans)
        spans = [
            _below(span, above[span.span_id], self._of_call(nodes[span.span_id]) if span.span_id in nodes else {})
            for span in traced.spans
        ]
        return [_root(rollout, traced), *spans]

    def _of_call(self, node: Node) -> dict[str, Any]:
        """What the call's tokens come to. A service that told none has none."""
        call = node.call
        attributes: dict[str, Any] = {semconv.POLICY_VERSIONS: sorted({version.version for version in call.versions})}
        if call.logprobs:
            attributes |= {
                semconv.LOGPROB_MEAN: statistics.fmean(call.logprobs),
                semconv.LOGPROB_MIN: min(call.logprobs),
                semconv.LOGPROB_SUM: sum(call.logprobs),
            }
        if not call.exact:
            return attributes
        prompt = prompt_ids(node)
        attributes |= {semconv.INPUT_TOKENS: len(prompt), semconv.OUTPUT_TOKENS: len(call.response_ids)}
        if self._folder is not None and call.trainable:  # another model's tokens are not this tokenizer's
            attributes[semconv.PROMPT_TEXT] = self._tokenizer.decode(prompt)
            attributes[semconv.RESPONSE_TEXT] = self._tokenizer.decode(call.response_ids)
        return attributes

    @functools.cached_property
    def _tokenizer(self) -> FastTokenizer:
        assert self._folder is not None
        return FastTokenizer(self._folder)


def _root(rollout: Rollout, traced: AttemptTrace) -> Span:
    root, attempt = root_span(rollout, traced.attempt), traced.attempt
    attributes: dict[str, Any] = {
        semconv.TASK: msgspec.json.encode(rollout.task).decode(),
        semconv.STEP: rollout.metadata.get("step"),
        semconv.COUNTS: rollout.counting_attempt_id == attempt.attempt_id,
    }
    if attempt.error is not None:
        exception = {
            "exception.type": attempt.error.type,
            "exception.message": attempt.error.message,
            "exception.stacktrace": attempt.error.traceback,
        }
        attributes[semconv.EVENTS] = [{"name": "exception", "time_ns": root.end_ns, "attributes": exception}]
    return msgspec.structs.replace(root, attributes=root.attributes | attributes)


def _below(span: Span, parent: str | None, more: dict[str, Any]) -> Span:
    """The span under its parent, with what more there is to say; an operation by its own name."""
    attributes = {name: value for name, value in span.attributes.items() if name != semconv.PARENT_SPAN} | more
    if parent is not None:
        attributes[semconv.PARENT_SPAN] = parent
    named = attributes.get(semconv.OPERATION_NAME) if span.name == semconv.OPERATION_SPAN else None
    return msgspec.structs.replace(span, name=named or span.name, attributes=attributes)
