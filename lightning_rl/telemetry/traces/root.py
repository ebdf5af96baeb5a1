"""The root of an attempt's trace: the attempt itself, as a span that no store keeps."""

from lightning_rl.store.contract import Attempt, Rollout
from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span


def root_span(rollout: Rollout, attempt: Attempt) -> Span:
    """What stands above all spans of an attempt that has ended: an agent that was invoked, and how it went."""
    ended_at = attempt.started_at if attempt.ended_at is None else attempt.ended_at
    attributes = {
        semconv.OPERATION: "invoke_agent",
        semconv.AGENT_NAME: rollout.agent,
        semconv.MODE: rollout.mode,
        semconv.GROUP_ID: rollout.group_id,
        semconv.STATUS: attempt.status,
        semconv.REWARD_VALUE: attempt.reward,
        semconv.STATUS_CODE: None if attempt.error is None else "ERROR",
        semconv.STATUS_DESCRIPTION: None if attempt.error is None else f"{attempt.error.type}: {attempt.error.message}",
    }
    rewards = {f"{semconv.REWARDS}.{name}": value for name, value in attempt.rewards.items()}
    return Span(
        span_id=attempt.attempt_id,
        rollout_id=rollout.rollout_id,
        attempt_id=attempt.attempt_id,
        name=semconv.ROLLOUT_SPAN,
        number=0,
        start_ns=int(attempt.started_at * 1e9),
        end_ns=int(ended_at * 1e9),
        attributes={name: value for name, value in attributes.items() if value is not None} | rewards,
    )
