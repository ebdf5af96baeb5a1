"""What a run of the agent came to, as data: it crosses from the process of a rollout to its runner.

Invariant: whatever the agent does becomes exactly one `Outcome`; what it raises is data.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from opentelemetry.sdk.trace import ReadableSpan

from lightning_rl.agents.agent import rewards_of
from lightning_rl.agents.emitted import Emitted
from lightning_rl.runner.error_classification import error_info
from lightning_rl.store.contract import Claim, Finish, Reward
from lightning_rl_adapters.credit import FINAL

MOST_SPANS = 512  # of a request


class SpanBatch(msgspec.Struct, frozen=True):
    """Spans as OTLP's protobuf (`ExportTraceServiceRequest`), and how many they are."""

    number: int
    otlp: bytes


SpansOf = tuple[str, SpanBatch]  # a rollout's id, and spans that its agent emitted


class Outcome(msgspec.Struct, frozen=True):
    """How the attempt ends: the rewards to post, those of calls and those of an agent that gave no final one, the
    finish, and the spans that were emitted."""

    rewards: list[Reward]
    finish: Finish
    spans: list[SpanBatch]


def of_return(claim: Claim, emitted: Emitted, returned: Any) -> Outcome:
    """What an agent came to that returned (what it returned was awaited)."""
    try:
        rewards = rewards_of(returned, emitted, claim.rollout.rollout_id)
    except Exception as error:  # noqa: BLE001 - what an agent returned may be an object that raises anything
        return of_error(claim, emitted, error)
    return of_rewards(claim, emitted, rewards)


def of_rewards(claim: Claim, emitted: Emitted, rewards: dict[str, float] | None) -> Outcome:
    """What an agent came to that is done, with these rewards by name."""
    call_rewards, finish = emitted.call_rewards, Finish(status="succeeded", reward=rewards, error=emitted.trouble)
    if rewards is not None and FINAL not in rewards:
        call_rewards, finish = call_rewards + _named(claim, rewards), Finish(status="succeeded", error=emitted.trouble)
    return Outcome(call_rewards, finish, batches(emitted.spans))


def of_error(claim: Claim, emitted: Emitted, error: BaseException) -> Outcome:
    """What an agent came to that raised. Its calls keep what they were given: they are trained with it."""
    finish = Finish(status="failed", error=error_info(error, claim))
    return Outcome(emitted.call_rewards, finish, batches(emitted.spans))


def batches(spans: Sequence[ReadableSpan]) -> list[SpanBatch]:
    """The spans as they are sent."""
    if not spans:
        return []
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    parts = (spans[start : start + MOST_SPANS] for start in range(0, len(spans), MOST_SPANS))
    return [SpanBatch(len(part), encode_spans(part).SerializeToString()) for part in parts]


def _named(claim: Claim, rewards: dict[str, float]) -> list[Reward]:
    """Rewards of the attempt, under ids that are the same however often they are posted."""
    return [
        Reward(value=value, name=name, reward_id=f"{claim.attempt.attempt_id}-{number}")
        for number, (name, value) in enumerate(rewards.items())
    ]
