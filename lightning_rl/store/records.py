"""Rows of the tables <-> the records of the contract; pure.

Invariant: a rollout's outcome is read from the attempt that ended it, never kept a second time.
"""

from typing import Any

import msgspec
import sqlalchemy as sa

from lightning_rl.store.contract import Attempt, ErrorInfo, Rollout, RolloutDetail, RolloutRequest
from lightning_rl.store.errors import Invalid

_REQUEST = msgspec.json.Decoder(RolloutRequest)
_REWARDS = msgspec.json.Decoder(dict[str, float])
_ERROR = msgspec.json.Decoder(ErrorInfo)


def body_of(record: Any) -> bytes:
    """The JSON of a record.

    Raises:
        Invalid: when it holds something that JSON cannot.
    """
    try:
        return msgspec.json.encode(record)
    except TypeError as error:
        raise Invalid(f"{type(record).__name__} is not JSON-able: {error}") from error


def same_body(one: bytes, other: bytes) -> bool:
    """Whether two JSON texts say the same, whatever the order of their keys."""
    return one == other or bool(msgspec.json.decode(one) == msgspec.json.decode(other))


def rollout_of(row: sa.Row[Any]) -> Rollout:
    """A rollout from a row of `rollouts` joined with its latest attempt."""
    request = _REQUEST.decode(row.request)
    failed = row.status == "failed"
    error = _ERROR.decode(row.error) if failed and row.error is not None else None
    counts = row.status == "succeeded" or (failed and not (error and error.infrastructure))
    return Rollout(
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
        counting_attempt_id=row.attempt_id if counts else None,
        reward=row.reward if counts else None,
        rewards=_REWARDS.decode(row.rewards) if counts and row.rewards is not None else {},
        error=error,
    )


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
        rewards=_REWARDS.decode(row.rewards) if row.rewards is not None else {},
        error=_ERROR.decode(row.error) if row.error is not None else None,
    )


def detailed(rollout: Rollout, attempts: list[Attempt]) -> RolloutDetail:
    """A rollout together with its attempts."""
    fields = {name: getattr(rollout, name) for name in rollout.__struct_fields__}
    return RolloutDetail(**fields, attempts=attempts)
