"""A call: one LLM request and one sampled answer, as the forest sees it.

`prompt_ids` holds only what the call adds to its parent's context (parent prompt + parent response); a call without a
parent holds its whole prompt. Every response token was sampled by the engine, in this order. A call whose tokens
nobody told (`exact` is false) holds none, only its place.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from lightning_rl_adapters import semconv
from lightning_rl_adapters.media import Placed
from lightning_rl_adapters.span import Span, pack_ids, pack_logprobs, unpack_ids, unpack_logprobs


class VersionRange(msgspec.Struct, frozen=True, array_like=True):
    """Response tokens [start, end) were sampled under policy `version`."""

    version: int
    start: int
    end: int


HOUSEKEEPING = "housekeeping"  # the tag, or the end of the tag, of calls that are no part of the task


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled answer.

    `logprobs` are natural logs, one per response token, or None where the engine gave none. `logprob_kind` is
    `sampled` (log softmax(logits / temperature) of the effective call), `greedy` (temperature 0: the logprobs of
    temperature 1) or `raw` (log softmax(logits), whatever the temperature). `number` is the order of arrival in the
    attempt, from 0. `exact`: the token ids are all there. `trainable`: false for a frozen model's call. `overshoot`
    counts the tokens that were sampled past a stop match, which are not in `response_ids`. `media` are the images among
    `prompt_ids`, in their order.
    """

    call_id: str
    rollout_id: str
    attempt_id: str
    number: int
    model: str
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float] | None
    versions: list[VersionRange]
    temperature: float
    finish_reason: str
    parent_id: str | None = None
    agent: str | None = None
    logprob_kind: str = "sampled"
    delivered: bool = True
    exact: bool = True
    trainable: bool = True
    overshoot: int = 0
    media: list[Placed] = []
    start_ns: int = 0
    end_ns: int = 0

    @property
    def is_housekeeping(self) -> bool:
        """Whether the program made it for itself: for a title, a commit message, a summary."""
        return self.agent is not None and self.agent.rpartition(".")[2] == HOUSEKEEPING

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.response_ids):
            raise ValueError(
                f"call {self.call_id}: {len(self.response_ids)} response tokens but "
                f"{len(self.logprobs)} logprobs; the engine must give one each, or none"
            )
        shown = 0
        for image in self.media:
            if image.start < shown or image.length < 1:
                raise ValueError(f"call {self.call_id}: its images {self.media} overlap")
            shown = image.start + image.length
        if shown > len(self.prompt_ids):
            raise ValueError(f"call {self.call_id}: an image ends at token {shown} of {len(self.prompt_ids)}")
        covered = 0
        for span in self.versions:
            if span.start != covered or span.end < span.start:
                raise ValueError(f"call {self.call_id}: version ranges {self.versions} have gaps")
            covered = span.end
        if self.versions and covered != len(self.response_ids):
            raise ValueError(
                f"call {self.call_id}: version ranges cover {covered} of {len(self.response_ids)} response tokens"
            )

    @property
    def sampled_tokens(self) -> int:
        """All tokens that the engine handed over for this call."""
        return len(self.response_ids) + self.overshoot

    def policy_versions(self) -> list[int | None]:
        """One policy version per response token; None where the engine told none."""
        if not self.versions:
            return [None] * len(self.response_ids)
        return [r.version for r in self.versions for _ in range(r.start, r.end)]


def to_span(call: Call, **more: Any) -> Span:
    """The span of a call; `more` are further attributes (messages, sampling, ...)."""
    attributes: dict[str, Any] = {
        semconv.OPERATION: "chat",
        semconv.RESPONSE_MODEL: call.model,
        semconv.FINISH_REASONS: [call.finish_reason],
        semconv.AGENT: call.agent,
        semconv.PARENT: call.parent_id,
        semconv.PROMPT_IDS: pack_ids(call.prompt_ids),
        semconv.RESPONSE_IDS: pack_ids(call.response_ids),
        semconv.LOGPROBS: None if call.logprobs is None else pack_logprobs(call.logprobs),
        semconv.LOGPROB_KIND: call.logprob_kind,
        semconv.POLICY_VERSIONS: [[r.version, r.start, r.end] for r in call.versions],
        semconv.SAMPLING_EFFECTIVE: {"temperature": call.temperature},
        semconv.DELIVERED: call.delivered,
        semconv.EXACT: call.exact,
        semconv.TRAINABLE: call.trainable,
    }
    if call.overshoot:
        attributes[semconv.OVERSHOOT] = call.overshoot
    if call.media:
        attributes[semconv.MEDIA] = [[m.start, m.length, m.sha256] for m in call.media]
    attributes.update(more)
    return Span(
        span_id=call.call_id,
        rollout_id=call.rollout_id,
        attempt_id=call.attempt_id,
        name=semconv.CALL_SPAN,
        number=call.number,
        start_ns=call.start_ns,
        end_ns=call.end_ns,
        attributes=attributes,
    )


def from_span(span: Span) -> Call:
    """The call that a span records. Raises ValueError for a span of another kind."""
    if span.name != semconv.CALL_SPAN:
        raise ValueError(f"span {span.span_id} is a {span.name!r}, not a {semconv.CALL_SPAN!r}")
    attributes = span.attributes
    logprobs = attributes[semconv.LOGPROBS]
    return Call(
        call_id=span.span_id,
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        number=span.number,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        model=attributes[semconv.RESPONSE_MODEL],
        agent=attributes[semconv.AGENT],
        parent_id=attributes[semconv.PARENT],
        prompt_ids=unpack_ids(attributes[semconv.PROMPT_IDS]),
        response_ids=unpack_ids(attributes[semconv.RESPONSE_IDS]),
        logprobs=None if logprobs is None else unpack_logprobs(logprobs),
        logprob_kind=attributes[semconv.LOGPROB_KIND],
        versions=[VersionRange(*r) for r in attributes[semconv.POLICY_VERSIONS]],
        temperature=float(attributes[semconv.SAMPLING_EFFECTIVE]["temperature"]),
        finish_reason=attributes[semconv.FINISH_REASONS][0],
        delivered=attributes[semconv.DELIVERED],
        # Spans of earlier releases have neither: they were all of token engines.
        exact=attributes.get(semconv.EXACT, True),
        trainable=attributes.get(semconv.TRAINABLE, True),
        overshoot=attributes.get(semconv.OVERSHOOT, 0),
        media=[Placed(*m) for m in attributes.get(semconv.MEDIA, ())],
    )


def calls_of(spans: Iterable[Span]) -> list[Call]:
    """The calls among an attempt's spans, in order of arrival."""
    calls = [from_span(span) for span in spans if span.name == semconv.CALL_SPAN]
    return sorted(calls, key=lambda call: call.number)
