"""What is read from the tables inside a transaction, as records.

Invariant: nothing here writes. Many ids are read in a few statements, not one each.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from lightning_rl.store import schema
from lightning_rl.store.contract import NOT_COUNTED, ErrorInfo, Reward, Rollout
from lightning_rl.store.errors import Conflict, NotFound
from lightning_rl.store.life_cycle import ENDED
from lightning_rl.store.records import attempt_of, rollout_of
from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import unpacked

_CHUNK = 500  # ids per IN (...): every statement has one of few lengths, below SQLite's limit

ROLLOUTS = sa.select(
    schema.rollouts, schema.attempts.c.reward, schema.attempts.c.rewards, schema.attempts.c.error
).outerjoin(schema.attempts, schema.attempts.c.attempt_id == schema.rollouts.c.attempt_id)
_ROLLOUT = ROLLOUTS.where(schema.rollouts.c.rollout_id == sa.bindparam("rollout_id"))
_ATTEMPT = sa.select(schema.attempts).where(schema.attempts.c.attempt_id == sa.bindparam("attempt_id"))
# The oldest `limit` queued rollouts.
QUEUED = (
    ROLLOUTS.where(schema.rollouts.c.status == "queued")
    .order_by(schema.rollouts.c.position)
    .limit(sa.bindparam("limit", type_=sa.Integer))
)
# What one claim opened.
CLAIMED = sa.select(schema.attempts).where(schema.attempts.c.claim_id == sa.bindparam("claim_id"))
_ATTEMPT_REWARDS = (
    sa.select(schema.rewards)
    .where(schema.rewards.c.attempt_id == sa.bindparam("attempt_id"))
    .order_by(schema.rewards.c.position)
)
# Literal, so that SQLite sees that the partial index of running attempts holds them all.
RUNNING = sa.text("attempts.status = 'running'")


_ERRORS = sa.select(schema.attempts.c.error).where(schema.attempts.c.rollout_id == sa.bindparam("rollout_id"))
_RECORDS = sa.text("SELECT rowid, record FROM spans WHERE rowid > :after ORDER BY rowid LIMIT 256")
_ID_BYTES = 4  # of a packed token id


class _SampledAttributes(msgspec.Struct):
    """Those attributes of a span that say what a token engine sampled; a frozen model's call is not trainable."""

    model: str | None = msgspec.field(name=semconv.RESPONSE_MODEL, default=None)
    response_ids: bytes | None = msgspec.field(name=semconv.RESPONSE_IDS, default=None)
    trainable: bool = msgspec.field(name=semconv.TRAINABLE, default=True)
    overshoot: int = msgspec.field(name=semconv.OVERSHOOT, default=0)


class _Sampled(msgspec.Struct):
    name: str
    attributes: _SampledAttributes


_SAMPLED = msgspec.msgpack.Decoder(_Sampled)


class PackedAttemptTrace(msgspec.Struct, frozen=True, kw_only=True):
    """An `AttemptTrace` whose spans are still bytes."""

    attempt: Any
    spans: list[msgspec.Raw]
    rewards: list[Reward]


class PackedRolloutTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A `RolloutTrace` of packed attempts."""

    rollout: Rollout
    attempts: list[PackedAttemptTrace]


def rollout(connection: sa.Connection, rollout_id: str) -> Rollout:
    """The rollout. Raises NotFound."""
    row = connection.execute(_ROLLOUT, {"rollout_id": rollout_id}).one_or_none()
    if row is None:
        raise NotFound(f"there is no rollout {rollout_id}")
    return rollout_of(row)


def rollouts(connection: sa.Connection, rollout_ids: Sequence[str]) -> list[Rollout]:
    """The rollouts of these ids, in that order, without those that are not there."""
    found = {
        row.rollout_id: rollout_of(row)
        for ids in _chunks(rollout_ids)
        for row in connection.execute(ROLLOUTS.where(schema.rollouts.c.rollout_id.in_(ids)))
    }
    return [found[rollout_id] for rollout_id in rollout_ids if rollout_id in found]


def ended(connection: sa.Connection, rollout_ids: Sequence[str]) -> list[Rollout]:
    """Those of the rollouts that have ended."""
    table = schema.rollouts.c
    return [
        rollout_of(row)
        for ids in _chunks(rollout_ids)
        for row in connection.execute(ROLLOUTS.where(table.rollout_id.in_(ids), table.status.in_(sorted(ENDED))))
    ]


def requests(connection: sa.Connection, rollout_ids: Sequence[str]) -> dict[str, bytes]:
    """The requests that made these rollouts, as they were stored, by id."""
    table = schema.rollouts.c
    return {
        row.rollout_id: row.request
        for ids in _chunks(rollout_ids)
        for row in connection.execute(sa.select(table.rollout_id, table.request).where(table.rollout_id.in_(ids)))
    }


def attempt_row(connection: sa.Connection, rollout_id: str, attempt_id: str) -> sa.Row[Any]:
    """The row of an attempt. Raises NotFound."""
    row = connection.execute(_ATTEMPT, {"attempt_id": attempt_id}).one_or_none()
    if row is None or row.rollout_id != rollout_id:
        raise NotFound(f"there is no attempt {attempt_id} of rollout {rollout_id}")
    return row


def running_row(connection: sa.Connection, rollout_id: str, attempt_id: str) -> sa.Row[Any]:
    """The row of an attempt that is running. Raises NotFound; Conflict when it has ended."""
    row = attempt_row(connection, rollout_id, attempt_id)
    if row.status != "running":
        raise Conflict(f"attempt {attempt_id} of rollout {rollout_id} is {row.status}: it is no longer yours")
    return row


def counted_attempts(connection: sa.Connection, rollout_id: str) -> int:
    """How often the rollout was tried, without the attempts that were stopped from outside."""
    errors = connection.execute(_ERRORS, {"rollout_id": rollout_id}).scalars()
    return sum(not _stopped(error) for error in errors)


def sampled_tokens(connection: sa.Connection) -> dict[str, int]:
    """Tokens that engines sampled, per model, over all spans; read a batch at a time."""
    found: Counter[str] = Counter()
    last = 0
    while rows := connection.execute(_RECORDS, {"after": last}).all():
        for row in rows:
            span = _SAMPLED.decode(unpacked(row.record))
            sampled = span.attributes
            if span.name == semconv.CALL_SPAN and sampled.trainable and sampled.response_ids:
                found[str(sampled.model)] += len(sampled.response_ids) // _ID_BYTES + sampled.overshoot
        last = rows[-1].rowid
    return dict(found)


def counts(connection: sa.Connection) -> dict[str, int]:
    """How many rollouts there are, by status."""
    status = schema.rollouts.c.status
    return {row[0]: row[1] for row in connection.execute(sa.select(status, sa.func.count()).group_by(status))}


def attempt_rewards(connection: sa.Connection, attempt_id: str) -> list[Reward]:
    """The rewards emitted in one attempt, in the order they came."""
    return [_reward_of(row) for row in connection.execute(_ATTEMPT_REWARDS, {"attempt_id": attempt_id})]


def rewards(connection: sa.Connection, rollout_ids: Sequence[str]) -> dict[str, list[Reward]]:
    """The emitted rewards by attempt, in the order they came; [] where there are none."""
    found: dict[str, list[Reward]] = defaultdict(list)
    for ids in _chunks(rollout_ids):
        query = sa.select(schema.rewards).where(schema.rewards.c.rollout_id.in_(ids))
        for row in connection.execute(query.order_by(schema.rewards.c.position)):
            found[row.attempt_id].append(_reward_of(row))
    return found


def traces(connection: sa.Connection, rollout_ids: Sequence[str]) -> dict[str, PackedRolloutTrace]:
    """The traces of these rollouts, spans by arrival number, attempts oldest first."""
    rewards_of = rewards(connection, rollout_ids)
    spans_of: dict[str, list[msgspec.Raw]] = defaultdict(list)
    attempts_of: dict[str, list[PackedAttemptTrace]] = defaultdict(list)
    for ids in _chunks(rollout_ids):
        in_order = sa.select(schema.spans.c.attempt_id, schema.spans.c.record).where(schema.spans.c.rollout_id.in_(ids))
        for attempt_id, record in connection.execute(in_order.order_by(schema.spans.c.number)):
            spans_of[attempt_id].append(msgspec.Raw(unpacked(record)))
        oldest_first = sa.select(schema.attempts).where(schema.attempts.c.rollout_id.in_(ids))
        for row in connection.execute(oldest_first.order_by(schema.attempts.c.sequence)):
            attempts_of[row.rollout_id].append(
                PackedAttemptTrace(
                    attempt=attempt_of(row),
                    spans=spans_of[row.attempt_id],
                    rewards=rewards_of[row.attempt_id],
                )
            )
    return {
        found.rollout_id: PackedRolloutTrace(rollout=found, attempts=attempts_of[found.rollout_id])
        for found in rollouts(connection, rollout_ids)
    }


def _stopped(error: bytes | None) -> bool:
    if error is None:
        return False
    info = msgspec.json.decode(error, type=ErrorInfo)
    return info.infrastructure and info.type in NOT_COUNTED


def _reward_of(row: sa.Row[Any]) -> Reward:
    return Reward(value=row.value, name=row.name, call_id=row.call_id, reward_id=row.reward_id)


def _chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _CHUNK):
        yield ids[start : start + _CHUNK]
