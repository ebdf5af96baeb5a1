"""What is read from the tables inside a transaction, as records.

Invariant: nothing here writes. Many ids are read in a few statements, not one each.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from lightning_rl.store import contents, schema
from lightning_rl.store.contract import NOT_COUNTED, ErrorInfo, Reward, Rollout, WorkerAttempt, WorkerInfo
from lightning_rl.store.errors import Conflict, Invalid, NotFound
from lightning_rl.store.life_cycle import ENDED, ROLLOUT_TRANSITIONS
from lightning_rl.store.records import attempt_of, ending_of, returned_of, rollout_of
from lightning_rl_adapters.span import unpacked

_CHUNK = 500  # ids per IN (...): every statement has one of few lengths, below SQLite's limit

# What a `Rollout` is made of, which stores of every readable version have.
ROLLOUTS: sa.Select[Any] = sa.select(
    *(column for column in schema.rollouts.c if column.name != "claimable_at"),
    schema.attempts.c.reward,
    schema.attempts.c.rewards,
    schema.attempts.c.error,
).outerjoin(schema.attempts, schema.attempts.c.attempt_id == schema.rollouts.c.attempt_id)
_ROLLOUT = ROLLOUTS.where(schema.rollouts.c.rollout_id == sa.bindparam("rollout_id"))
_THESE = schema.rollouts.c.rollout_id.in_(sa.bindparam("ids", expanding=True))
_ROLLOUTS_OF = ROLLOUTS.where(_THESE)
_STATUSES = sa.select(schema.rollouts.c.rollout_id, schema.rollouts.c.status).where(_THESE)
_REQUESTS = sa.select(schema.rollouts.c.rollout_id, schema.rollouts.c.request).where(_THESE)
_ATTEMPT = sa.select(schema.attempts).where(schema.attempts.c.attempt_id == sa.bindparam("attempt_id"))
# Queued, and no pause before a retry is under way at `now`.
_CLAIMABLE = sa.and_(
    schema.rollouts.c.status == "queued",
    sa.func.coalesce(schema.rollouts.c.claimable_at, 0) <= sa.bindparam("now", type_=sa.Float),
)
# The oldest `limit` claimable rollouts, held; those that somebody else holds are somebody else's.
QUEUED = (
    ROLLOUTS.where(_CLAIMABLE)
    .order_by(schema.rollouts.c.position)
    .limit(sa.bindparam("limit", type_=sa.Integer))
    .with_for_update(of=schema.rollouts, skip_locked=True)
)
_ATTEMPTS_OF = sa.select(schema.attempts).where(schema.attempts.c.attempt_id.in_(sa.bindparam("ids", expanding=True)))
_REWARDS_OF = (
    sa.select(schema.rewards)
    .where(schema.rewards.c.rollout_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(schema.rewards.c.position)
)
# A status at a time, so that each is a part of the index.
_COUNT = sa.select(sa.func.count()).where(
    schema.rollouts.c.status == sa.bindparam("status"),
    schema.rollouts.c.position >= sa.bindparam("first"),
    schema.rollouts.c.position < sa.bindparam("end"),
)
_BEHIND_ALL = 2**62
_OLDEST = sa.select(sa.func.min(schema.rollouts.c.position)).where(schema.rollouts.c.status == sa.bindparam("status"))
_NEWEST = sa.select(sa.func.max(schema.rollouts.c.position))
# All that a gateway asks about attempts that it does not know: in one statement, since it is one for every attempt.
_OPENINGS = (
    ROLLOUTS.add_columns(
        schema.attempts.c.status.label("attempt_status"),
        schema.placements.c.gateway_id,
        sa.exists()
        .where(
            schema.spans.c.rollout_id == schema.rollouts.c.rollout_id,
            schema.spans.c.attempt_id == schema.rollouts.c.attempt_id,
        )
        .label("recorded"),
    )
    .outerjoin(schema.placements, schema.placements.c.attempt_id == schema.rollouts.c.attempt_id)
    .where(schema.rollouts.c.rollout_id.in_(sa.bindparam("ids", expanding=True)))
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


class PackedAttemptTrace(msgspec.Struct, frozen=True, kw_only=True):
    """An `AttemptTrace` whose spans are still bytes."""

    attempt: Any
    spans: list[msgspec.Raw]
    rewards: list[Reward]
    returned: dict[str, float] | None


class PackedRolloutTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A `RolloutTrace` of packed attempts."""

    rollout: Rollout
    attempts: list[PackedAttemptTrace]


class AttemptOpening(msgspec.Struct, frozen=True, kw_only=True):
    """A running attempt's rollout, its resources, the gateway that has it, if any, and whether anything was recorded
    of it."""

    rollout: Rollout
    resources: dict[str, dict[str, Any]]
    gateway_id: str | None
    recorded: bool


def openings(connection: sa.Connection, places: Sequence[tuple[str, str]]) -> list[sa.Row[Any]]:
    """The rows of those of the attempts, by rollout and attempt id, that run: of their rollouts, with `gateway_id` and
    whether anything is `recorded`."""
    place_set = set(places)
    return [
        row
        for ids in _chunks([rollout_id for rollout_id, _ in places])
        for row in connection.execute(_OPENINGS, {"ids": ids})
        if row.attempt_status == "running" and (row.rollout_id, row.attempt_id) in place_set
    ]


def rollout(connection: sa.Connection, rollout_id: str) -> Rollout:
    """The rollout. Raises NotFound."""
    row = connection.execute(_ROLLOUT, {"rollout_id": rollout_id}).one_or_none()
    if row is None:
        raise NotFound(f"there is no rollout {rollout_id}")
    return rollout_of(row)


def rollouts(connection: sa.Connection, rollout_ids: Sequence[str]) -> list[Rollout]:
    """The rollouts of these ids, in that order, without those that are not there."""
    by_id = {
        row.rollout_id: rollout_of(row)
        for ids in _chunks(rollout_ids)
        for row in connection.execute(_ROLLOUTS_OF, {"ids": ids})
    }
    return [by_id[rollout_id] for rollout_id in rollout_ids if rollout_id in by_id]


def ended(connection: sa.Connection, rollout_ids: Sequence[str]) -> list[Rollout]:
    """Those of the rollouts that have ended."""
    # By a condition on the status, SQLite would read the index of all that have ever ended.
    over = [
        rollout_id
        for ids in _chunks(rollout_ids)
        for rollout_id, status in connection.execute(_STATUSES, {"ids": ids})
        if status in ENDED
    ]
    return rollouts(connection, over)


def attempts_at(gateway_id: str | None) -> sa.ColumnElement[bool]:
    """Which attempts' calls go to that gateway; None: all."""
    if gateway_id is None:
        return sa.true()
    placements = schema.placements.c
    there = sa.select(placements.attempt_id).where(placements.gateway_id == gateway_id)
    return schema.attempts.c.attempt_id.in_(there)


def ended_attempts(connection: sa.Connection, attempt_ids: Sequence[str]) -> set[str]:
    """The ids of those of the attempts that have ended."""
    table = schema.attempts.c
    return {
        attempt_id
        for ids in _chunks(attempt_ids)
        for attempt_id in connection.execute(
            sa.select(table.attempt_id).where(table.attempt_id.in_(ids), table.status != "running")
        ).scalars()
    }


def of_run(rollout_id: sa.Column[Any], run_id: str) -> sa.ColumnElement[bool]:
    """Whether a rollout of this id is of that run."""
    return rollout_id.endswith(f".{run_id}", autoescape=True)


def shelved(connection: sa.Connection, rollout_ids: Sequence[str], until: float) -> list[str]:
    """The ids of those of the rollouts that are queued, and may be claimed at `until` and not before."""
    table = schema.rollouts.c
    return [
        rollout_id
        for ids in _chunks(rollout_ids)
        for rollout_id in connection.execute(
            sa.select(table.rollout_id).where(table.rollout_id.in_(ids), table.claimable_at == until)
        ).scalars()
    ]


def requests(connection: sa.Connection, rollout_ids: Sequence[str]) -> dict[str, bytes]:
    """The requests that made these rollouts, as they were stored, by id."""
    return {
        row.rollout_id: row.request
        for ids in _chunks(rollout_ids)
        for row in connection.execute(_REQUESTS, {"ids": ids})
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
    check_running(row)
    return row


def check_running(row: sa.Row[Any]) -> None:
    """Raises Conflict when the attempt of this row has ended."""
    if row.status != "running":
        ended = ending_of(attempt_of(row))
        raise Conflict(f"attempt {row.attempt_id} of rollout {row.rollout_id} is no longer yours: {ended}")


def existing_attempt_rows(connection: sa.Connection, places: Sequence[tuple[str, str]]) -> list[sa.Row[Any]]:
    """The rows of those of the attempts, by rollout and attempt id, that are there; in any order."""
    place_set = set(places)
    return [
        row
        for ids in _chunks([attempt_id for _, attempt_id in places])
        for row in connection.execute(_ATTEMPTS_OF, {"ids": ids})
        if (row.rollout_id, row.attempt_id) in place_set
    ]


def attempt_rows(connection: sa.Connection, places: Sequence[tuple[str, str]]) -> list[sa.Row[Any]]:
    """The rows of the attempts, in that order.

    Raises:
        NotFound: one of them is not there.
        Invalid: one is named twice.
    """
    by_place = {(row.rollout_id, row.attempt_id): row for row in existing_attempt_rows(connection, places)}
    for (rollout_id, attempt_id), times in Counter(places).items():
        if (rollout_id, attempt_id) not in by_place:
            raise NotFound(f"there is no attempt {attempt_id} of rollout {rollout_id}")
        if times > 1:
            raise Invalid(f"attempt {attempt_id} of rollout {rollout_id} is there {times} times: name it once")
    return [by_place[place] for place in places]


def workers(connection: sa.Connection) -> list[WorkerInfo]:
    """The workers that run attempts, by id, each with its attempts from the oldest on."""
    attempts: dict[str, list[WorkerAttempt]] = defaultdict(list)
    for row in connection.execute(sa.select(schema.attempts).where(RUNNING).order_by(schema.attempts.c.started_at)):
        attempts[row.worker_id].append(
            WorkerAttempt(
                rollout_id=row.rollout_id,
                attempt_id=row.attempt_id,
                started_at=row.started_at,
                lease_expires_at=row.lease_expires_at,
            )
        )
    return [WorkerInfo(worker_id=worker_id, attempts=attempts[worker_id]) for worker_id in sorted(attempts)]


def counted_attempts(connection: sa.Connection, rollout_id: str) -> int:
    """How often the rollout was tried, without the attempts that were stopped from outside."""
    errors = connection.execute(_ERRORS, {"rollout_id": rollout_id}).scalars()
    return sum(not _stopped(error) for error in errors)


def claimable(connection: sa.Connection, now: float, *, since: float | None = None) -> bool:
    """Whether a rollout may be claimed; with `since`, one whose pause before a retry has ended after that."""
    query = sa.select(schema.rollouts.c.position).where(_CLAIMABLE).limit(1)
    if since is not None:
        query = query.where(schema.rollouts.c.claimable_at > since)
    return connection.execute(query, {"now": now}).first() is not None


def counts(connection: sa.Connection, first: int = 0, end: int = _BEHIND_ALL) -> dict[str, int]:
    """How many rollouts there are, by status; of the positions from `first` to before `end`."""
    by_status = {
        status: connection.execute(_COUNT, {"status": status, "first": first, "end": end}).scalar_one()
        for status in ROLLOUT_TRANSITIONS
    }
    return {status: count for status, count in by_status.items() if count}


def first_open(connection: sa.Connection) -> int:
    """The position before which every rollout has ended."""
    oldest = [
        connection.execute(_OLDEST, {"status": status}).scalar_one() for status in ROLLOUT_TRANSITIONS.keys() - ENDED
    ]
    newest: int = connection.execute(_NEWEST).scalar_one() or 0
    return min((position for position in oldest if position is not None), default=newest + 1)


def attempt_rewards(connection: sa.Connection, attempt_id: str) -> list[Reward]:
    """The rewards emitted in one attempt, in the order they came."""
    return [_reward_of(row) for row in connection.execute(_ATTEMPT_REWARDS, {"attempt_id": attempt_id})]


def rewards(connection: sa.Connection, rollout_ids: Sequence[str]) -> dict[str, list[Reward]]:
    """The emitted rewards by attempt, in the order they came; [] where there are none."""
    by_attempt: dict[str, list[Reward]] = defaultdict(list)
    for ids in _chunks(rollout_ids):
        for row in connection.execute(_REWARDS_OF, {"ids": ids}):
            by_attempt[row.attempt_id].append(_reward_of(row))
    return by_attempt


def traces(connection: sa.Connection, rollout_ids: Sequence[str]) -> dict[str, PackedRolloutTrace]:
    """The traces of these rollouts, spans by arrival number, attempts oldest first."""
    rewards_of = rewards(connection, rollout_ids)
    spans_of: dict[str, list[msgspec.Raw]] = defaultdict(list)
    attempts_of: dict[str, list[PackedAttemptTrace]] = defaultdict(list)
    for ids in _chunks(rollout_ids):
        in_order = sa.select(schema.spans.c.attempt_id, schema.spans.c.record).where(schema.spans.c.rollout_id.in_(ids))
        for spans in connection.execute(in_order.order_by(schema.spans.c.number)).partitions(_CHUNK):
            for span, record in zip(spans, contents.whole(connection, [span.record for span in spans]), strict=True):
                spans_of[span.attempt_id].append(msgspec.Raw(unpacked(record)))
        oldest_first = sa.select(schema.attempts).where(schema.attempts.c.rollout_id.in_(ids))
        for row in connection.execute(oldest_first.order_by(schema.attempts.c.sequence)):
            attempts_of[row.rollout_id].append(
                PackedAttemptTrace(
                    attempt=attempt_of(row),
                    spans=spans_of[row.attempt_id],
                    rewards=rewards_of[row.attempt_id],
                    returned=returned_of(row),
                )
            )
    return {
        each.rollout_id: PackedRolloutTrace(rollout=each, attempts=attempts_of[each.rollout_id])
        for each in rollouts(connection, rollout_ids)
    }


def _stopped(error: bytes | None) -> bool:
    if error is None:
        return False
    info = msgspec.json.decode(error, type=ErrorInfo)
    return info.infrastructure and info.type in NOT_COUNTED


def _reward_of(row: sa.Row[Any]) -> Reward:
    return Reward(value=row.value, name=row.name, call_id=row.call_id, reward_id=row.reward_id)


def _chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Each id once: of one that stood in two statements, everything would be found twice."""
    each = list(dict.fromkeys(ids))
    for start in range(0, len(each), _CHUNK):
        yield each[start : start + _CHUNK]
