"""Rows of the tables <-> the records of the contract; pure.

Invariant: a rollout's outcome is read from the attempt that ended it, never kept a second time.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa

from lightning_rl.store.contract import (
    Attempt,
    AttemptDetail,
    ErrorInfo,
    Finish,
    Reward,
    Rollout,
    RolloutDetail,
    RolloutRequest,
)
from lightning_rl.store.rewards import returned_rewards

_REQUEST = msgspec.json.Decoder(RolloutRequest)
_REWARDS = msgspec.json.Decoder(dict[str, float])
_ERROR = msgspec.json.Decoder(ErrorInfo)
_FINISH = msgspec.json.Decoder(Finish)


def rollout_of(row: sa.Row[Any]) -> Rollout:
    """A rollout from a row of `rollouts` joined with its latest attempt."""
    request = _REQUEST.decode(row.request)
    rollout = Rollout(
        rollout_id=row.rollout_id,
        task=request.task,
        mode=request.mode,
        status=row.status,
        group_id=request.group_id,
        agent=request.agent,
        resources_id=row.resources_id,
        config=request.config,
        metadata=request.metadata,
        attempt_count=row.attempt_count,
        created_at=row.created_at,
        ended_at=row.ended_at,
        attempt_id=row.attempt_id,
    )
    if row.status not in ("succeeded", "failed"):
        return rollout
    return _with_outcome(rollout, row.attempt_id, row.reward, _rewards_of(row), _error_of(row))


def outcome_of(rollout: Rollout, attempt: Attempt) -> Rollout:
    """The rollout with what its latest attempt made of it, where that ended it."""
    if rollout.status not in ("succeeded", "failed"):
        return rollout
    return _with_outcome(rollout, attempt.attempt_id, attempt.reward, attempt.rewards, attempt.error)


def _with_outcome(
    rollout: Rollout, attempt_id: str, reward: float | None, rewards: dict[str, float], error: ErrorInfo | None
) -> Rollout:
    if rollout.status == "failed" and error is not None and error.infrastructure:
        return msgspec.structs.replace(rollout, error=error)
    return msgspec.structs.replace(rollout, counting_attempt_id=attempt_id, reward=reward, rewards=rewards, error=error)


def attempt_of(row: sa.Row[Any]) -> Attempt:
    """An attempt from a row of `attempts`."""
    return Attempt(
        attempt_id=row.attempt_id,
        rollout_id=row.rollout_id,
        sequence=row.sequence,
        status=row.status,
        worker_id=row.worker_id,
        lease_expires_at=row.lease_expires_at,
        started_at=row.started_at,
        deadline_at=row.deadline_at,
        ended_at=row.ended_at,
        reward=row.reward,
        rewards=_rewards_of(row),
        error=_error_of(row),
    )


def returned_of(row: sa.Row[Any]) -> dict[str, float] | None:
    """The rewards that the agent of an attempt returned; None of one that did not succeed, and where it is not kept."""
    if row.status != "succeeded" or row.finish_body is None:
        return None
    return returned_rewards(row.rollout_id, _FINISH.decode(row.finish_body))


def ending_of(attempt: Attempt) -> str:
    """How and when an attempt ended, for whoever still holds it."""
    when = "" if attempt.ended_at is None else f" at {datetime.fromtimestamp(attempt.ended_at, UTC):%Y-%m-%dT%H:%M:%SZ}"
    why = "" if attempt.error is None else f" ({attempt.error.type}: {attempt.error.message})"
    return f"it ended as {attempt.status}{when}{why}"


def _rewards_of(row: sa.Row[Any]) -> dict[str, float]:
    return _REWARDS.decode(row.rewards) if row.rewards is not None else {}


def _error_of(row: sa.Row[Any]) -> ErrorInfo | None:
    return _ERROR.decode(row.error) if row.error is not None else None


def detailed(rollout: Rollout, attempts: list[Attempt], rewards: Mapping[str, list[Reward]]) -> RolloutDetail:
    """A rollout together with its attempts, and the rewards that were emitted in each, by its id."""
    of_calls = {
        attempt_id: [reward for reward in of_attempt if reward.call_id is not None]
        for attempt_id, of_attempt in rewards.items()
    }
    return RolloutDetail(
        **msgspec.structs.asdict(rollout),
        attempts=[
            AttemptDetail(**msgspec.structs.asdict(attempt), call_rewards=of_calls.get(attempt.attempt_id, []))
            for attempt in attempts
        ],
    )
