"""The store in a database: every operation is one transaction, durable when it returns.

Invariants: a rollout has at most one running attempt and ends once; an answered operation repeated
with the same id and body gives the same answer, with another body `Conflict`. What changes a rollout, or anything of
it, holds the rollout first. Safe to share between threads; the clock is a parameter, so that time can be told in tests.
"""

import functools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import msgspec
import sqlalchemy as sa

from lightning_rl.store import gateways, queries, schema
from lightning_rl.store.contract import (
    NOT_COUNTED,
    SESSION_ENDED,
    Attempt,
    AttemptTrace,
    Claim,
    Ending,
    ErrorInfo,
    Finish,
    Overdue,
    Resources,
    ResourcesRequest,
    Reward,
    Rollout,
    RolloutDetail,
    RolloutRequest,
    RolloutTrace,
)
from lightning_rl.store.errors import Conflict, Invalid, NotFound
from lightning_rl.store.gateways import Gateways
from lightning_rl.store.idempotency import body_of, same_body
from lightning_rl.store.life_cycle import (
    ENDED,
    AttemptStatus,
    RolloutStatus,
    next_attempt_status,
    next_rollout_status,
)
from lightning_rl.store.records import attempt_of, detailed, ending_of, outcome_of, rollout_of
from lightning_rl.store.rewards import check_finite, returned_rewards, rewards_by_name, with_late
from lightning_rl.store.upgrades import open_database
from lightning_rl_adapters.credit import FINAL
from lightning_rl_adapters.ids import new_id
from lightning_rl_adapters.span import Packed, Span, pack

P = ParamSpec("P")
T = TypeVar("T")

_END_ATTEMPT = (
    sa.update(schema.attempts)
    .where(schema.attempts.c.attempt_id == sa.bindparam("ended_attempt"))
    .values({name: sa.bindparam(name) for name in ("status", "ended_at", "reward", "rewards", "error", "finish_body")})
)
_RENEW_LEASE = (
    sa.update(schema.attempts)
    .where(schema.attempts.c.attempt_id == sa.bindparam("renewed"))
    .values(lease_expires_at=sa.bindparam("lease_expires_at"))
)
_CHANGE_REWARDS = (
    sa.update(schema.attempts)
    .where(schema.attempts.c.attempt_id == sa.bindparam("rewarded"))
    .values({name: sa.bindparam(name) for name in ("reward", "rewards")})
)
_MOVE_ROLLOUT = (
    sa.update(schema.rollouts)
    .where(schema.rollouts.c.rollout_id == sa.bindparam("moved"))
    .values({name: sa.bindparam(name) for name in ("status", "ended_at", "claimable_at")})
)
_TAKE_UP = (
    sa.update(schema.rollouts)
    .where(schema.rollouts.c.rollout_id == sa.bindparam("taken_up"), schema.rollouts.c.status == "queued")
    .values(claimable_at=None)
)
_OPEN_ATTEMPT = (
    sa.update(schema.rollouts)
    .where(schema.rollouts.c.rollout_id == sa.bindparam("opened"))
    .values({name: sa.bindparam(name) for name in ("status", "attempt_id", "attempt_count")})
)

_OPENED = (
    "attempt_id",
    "rollout_id",
    "sequence",
    "status",
    "worker_id",
    "lease_expires_at",
    "started_at",
    "deadline_at",
)

_UNTIL_ASKED_FOR = float("inf")  # `claimable_at` of what a session that is over has left queued
_SHELVE = sa.update(schema.rollouts).where(schema.rollouts.c.status == "queued").values(claimable_at=_UNTIL_ASKED_FOR)

_LONGEST_POSITION = 18  # digits, so that any database holds it
_FIRST_PAUSE_SECONDS = 1.0  # before a retry
_LONGEST_PAUSE_SECONDS = 60.0

LATEST = "latest"  # the name of the newest resources


Operation = Callable[Concatenate["SqlStore", P], T]
Work = Callable[Concatenate["SqlStore", sa.Connection, P], T]


def _write(work: Work[P, T]) -> Operation[P, T]:
    """An operation of the store from its work in a transaction, whose connection its caller does not give."""

    @functools.wraps(work)
    def operation(self: "SqlStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._database.write(lambda connection: work(self, connection, *args, **kwargs))

    return operation


def _read(work: Work[P, T]) -> Operation[P, T]:
    """`_write` of work that changes nothing."""

    @functools.wraps(work)
    def operation(self: "SqlStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._database.read(lambda connection: work(self, connection, *args, **kwargs))

    return operation


class SqlStore:
    """The store in the database at `url`: `sqlite:///path`, `sqlite://` in memory, or `postgresql+psycopg://...`.

    `shared`: other processes may change it beside this one; `gateways` are those of its servers then.

    Raises:
        ValueError: for another kind of database, one that cannot be opened, or another schema version.
        StoreUnwritable: here and in every operation, the database cannot be written or not be reached; nothing of the
            operation is kept, unless the message says that this is not known.
    """

    def __init__(self, url: str, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or steady_clock()
        self._database = open_database(url)
        self.shared = self._database.shared
        self.gateways = Gateways(self._database, self._clock)
        self._published: dict[str, Resources] = {}  # published resources never change
        self._ended: Counter[str] = Counter()  # rollouts by status, of the positions before `_counted`
        self._counted = 0
        self.secret: bytes = self._database.write(self._read_secret)

    def close(self) -> None:
        """Close the database; the store cannot be used after."""
        self._database.close()

    # Rollouts

    @_write
    def enqueue(self, connection: sa.Connection, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """The rollouts asked for, in that order; those whose id is there already stay as they are, but that they may
        be claimed where a session that is over had left them queued.

        Raises:
            Conflict: an id is there with another body.
            Invalid: a task is not JSON-able, or resources are named that are not published.
        """
        return self._enqueue(connection, requests)

    @_write
    def start(self, connection: sa.Connection, request: RolloutRequest, worker_id: str) -> Claim:
        """Enqueue one rollout and claim it at once; a repeat with its id gives the same claim.

        Raises:
            Conflict: the id is there with another body, or somebody else has claimed it.
        """
        rollout_id = self._enqueue(connection, [request])[0].rollout_id
        self._database.hold(connection, [rollout_id])
        claim_id = f"start:{rollout_id}"  # no claim id of a caller holds a colon
        body = body_of([worker_id])
        made = self._claimed(connection, claim_id, body)
        if made:
            return made[0]
        rows = connection.execute(queries.ROLLOUTS.where(schema.rollouts.c.rollout_id == rollout_id)).all()
        rollout = rollout_of(rows[0])
        if rollout.status != "queued" or rollout.attempt_count:
            raise Conflict(
                f"rollout {rollout_id} was claimed before and is {rollout.status}: start it under another id"
            )
        return self._open_attempts(connection, rows, worker_id, claim_id, body)[0]

    @_read
    def rollout(self, connection: sa.Connection, rollout_id: str) -> RolloutDetail:
        """The rollout with its attempts.

        Raises:
            NotFound: there is no such rollout.
        """
        rollout = queries.rollout(connection, rollout_id)
        rows = connection.execute(
            sa.select(schema.attempts)
            .where(schema.attempts.c.rollout_id == rollout_id)
            .order_by(schema.attempts.c.sequence)
        )
        return detailed(rollout, [attempt_of(row) for row in rows], queries.rewards(connection, [rollout_id]))

    @_read
    def rollouts(self, connection: sa.Connection, rollout_ids: Sequence[str]) -> list[Rollout]:
        """The rollouts of these ids, in that order; unknown ids are left out."""
        return queries.rollouts(connection, rollout_ids)

    @_read
    def ended(self, connection: sa.Connection, rollout_ids: Sequence[str]) -> list[Rollout]:
        """Those of the rollouts that have ended."""
        return queries.ended(connection, rollout_ids)

    @_read
    def page(
        self,
        connection: sa.Connection,
        *,
        status: str | None = None,
        mode: str | None = None,
        group_id: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> tuple[list[Rollout], str | None]:
        """A page of rollouts in the order they were enqueued, and the cursor of the next page.

        Raises:
            Invalid: the cursor is not one of ours.
        """
        query = queries.ROLLOUTS.order_by(schema.rollouts.c.position).limit(limit + 1)
        for column, wanted in (
            (schema.rollouts.c.status, status),
            (schema.rollouts.c.mode, mode),
            (schema.rollouts.c.group_id, group_id),
        ):
            if wanted is not None:
                query = query.where(column == wanted)
        if cursor is not None:
            if not cursor.isdecimal() or len(cursor) > _LONGEST_POSITION:
                raise Invalid(f"cursor {cursor!r} is none that a list of rollouts has given")
            query = query.where(schema.rollouts.c.position > int(cursor))
        rows = connection.execute(query).all()
        following = str(rows[limit - 1].position) if len(rows) > limit else None
        return [rollout_of(row) for row in rows[:limit]], following

    @_read
    def counts(self, connection: sa.Connection) -> dict[str, int]:
        """How many rollouts there are, by status."""
        if self.shared:
            return queries.counts(connection)
        # What has ended stays so: all before the first open one are counted once.
        first_open = queries.first_open(connection)
        self._ended.update(queries.counts(connection, self._counted, first_open))
        self._counted = first_open
        return dict(self._ended + Counter(queries.counts(connection, first_open)))

    @_write
    def cancel(self, connection: sa.Connection, rollout_id: str) -> Rollout:
        """End the rollout as cancelled, with its running attempt; one that has ended stays so.

        Raises:
            NotFound: there is no such rollout.
        """
        self._database.hold(connection, [rollout_id])
        rollout = queries.rollout(connection, rollout_id)
        if rollout.status == "running":
            attempt = queries.attempt_row(connection, rollout_id, str(rollout.attempt_id))
            self._end(connection, rollout, attempt, "cancelled")
        elif rollout.status == "queued":
            self._move(connection, rollout, "cancelled")
        return queries.rollout(connection, rollout_id)

    # Claims

    @_write
    def claim(
        self,
        connection: sa.Connection,
        worker_id: str,
        *,
        agents: Sequence[str] | None = None,
        limit: int = 1,
        claim_id: str | None = None,
    ) -> list[Claim]:
        """Up to `limit` queued rollouts, oldest first, each with an attempt opened under a lease; none that pauses
        before a retry.

        `agents` narrows it to rollouts of these agents and to those that name none. The same
        `claim_id` again gives the same claims.

        Raises:
            Conflict: the claim id was used for another request.
        """
        body = body_of([worker_id, agents, limit])
        query = queries.QUEUED
        if agents is not None:
            agent = schema.rollouts.c.agent
            query = query.where(agent.in_(agents) | agent.is_(None))
        if claim_id is not None:
            self._database.hold_name(connection, claim_id)
            if made := self._claimed(connection, claim_id, body):
                return made
        rows = connection.execute(query, {"limit": limit, "now": self._clock()}).all()
        return self._open_attempts(connection, rows, worker_id, claim_id, body) if rows else []

    @_read
    def claimable(self, connection: sa.Connection, *, newly_seconds: float | None = None) -> bool:
        """Whether a rollout may be claimed; with `newly_seconds`, one whose pause before a retry ended within these."""
        now = self._clock()
        return queries.claimable(connection, now, since=None if newly_seconds is None else now - newly_seconds)

    @_write
    def heartbeat(self, connection: sa.Connection, rollout_id: str, attempt_id: str) -> Attempt:
        """The attempt with its lease renewed.

        Raises:
            NotFound: there is no such attempt.
            Conflict: it has ended, so it is no longer the caller's.
        """
        row = queries.running_row(connection, rollout_id, attempt_id)
        lease = self._clock() + row.unresponsive_seconds
        connection.execute(_RENEW_LEASE, {"renewed": attempt_id, "lease_expires_at": lease})
        return msgspec.structs.replace(attempt_of(row), lease_expires_at=lease)

    @_write
    def heartbeats(self, connection: sa.Connection, places: Sequence[tuple[str, str]]) -> dict[str, float]:
        """`heartbeat` of many attempts, by rollout and attempt id: the renewed leases by attempt id. Those that do not
        run any more, and unknown ones, are left out."""
        now = self._clock()
        rows = queries.found_attempts(connection, places)
        leases = {row.attempt_id: now + row.unresponsive_seconds for row in rows if row.status == "running"}
        if leases:
            renewed = [{"renewed": attempt_id, "lease_expires_at": lease} for attempt_id, lease in leases.items()]
            connection.execute(_RENEW_LEASE, renewed)
        return leases

    @_write
    def extend_leases(self, connection: sa.Connection, leases: Mapping[str, float]) -> None:
        """Let the leases of these running attempts, by id, last for so many seconds from now on."""
        now = self._clock()
        extended = [{"renewed": attempt_id, "lease_expires_at": now + left} for attempt_id, left in leases.items()]
        connection.execute(_RENEW_LEASE, extended)

    @_read
    def attempt(self, connection: sa.Connection, rollout_id: str, attempt_id: str) -> tuple[Rollout, Attempt]:
        """The attempt and its rollout.

        Raises:
            NotFound: there is no such attempt.
        """
        attempt = attempt_of(queries.attempt_row(connection, rollout_id, attempt_id))
        return queries.rollout(connection, rollout_id), attempt

    @_read
    def opening(self, connection: sa.Connection, rollout_id: str, attempt_id: str) -> queries.AttemptOpening | None:
        """What a gateway needs to know of a running attempt; None where it has ended.

        Raises:
            NotFound: there is no such attempt.
        """
        return queries.opening(connection, rollout_id, attempt_id)

    @_read
    def statuses(
        self, connection: sa.Connection, places: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], AttemptStatus]:
        """The attempts' statuses, by rollout and attempt id; unknown ones are left out."""
        return {(row.rollout_id, row.attempt_id): row.status for row in queries.found_attempts(connection, places)}

    @_read
    def closed(self, connection: sa.Connection, places: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of the attempts, by rollout and attempt id, that do not run any more."""
        ended = queries.ended_attempts(connection, [attempt_id for _, attempt_id in places])
        return [place for place in places if place[1] in ended]

    # Rewards, and the end

    @_write
    def add_rewards(
        self,
        connection: sa.Connection,
        rollout_id: str,
        attempt_id: str,
        rewards: Sequence[Reward],
        *,
        late: bool = False,
    ) -> list[Reward]:
        """Keep rewards of a running attempt; the answer has their ids.

        With `late` the attempt may also have ended, if it is the one that counts: these rewards then come after all
        that it was given before, returned ones too.

        Raises:
            NotFound: there is no such attempt.
            Conflict: it has ended (with `late`: and does not count), or a reward id is there with another body.
            Invalid: a reward is no finite number.
        """
        self._database.hold(connection, [rollout_id])
        known = queries.attempt_rewards(connection, attempt_id)
        named, new = _new_rewards(rollout_id, known, rewards)
        if new:
            if late:
                self._take_late(connection, rollout_id, attempt_id, new)
            else:
                queries.running_row(connection, rollout_id, attempt_id)
            connection.execute(sa.insert(schema.rewards), _reward_rows(rollout_id, attempt_id, new))
        return named

    @_write
    def finish(
        self,
        connection: sa.Connection,
        rollout_id: str,
        attempt_id: str,
        finish: Finish,
        lack: ErrorInfo | None = None,
    ) -> tuple[Rollout, Attempt]:
        """End the attempt as its worker says, or as failed where `lack` says why that cannot be; the rollout ends, or
        is queued for a retry.

        Raises:
            NotFound: there is no such attempt.
            Conflict: it has ended otherwise.
            Invalid: naming the rollout, for a bad reward.
        """
        self._database.hold(connection, [rollout_id])
        row = queries.attempt_row(connection, rollout_id, attempt_id)
        rollout = queries.rollout(connection, rollout_id)
        emitted = queries.attempt_rewards(connection, attempt_id) if row.status == "running" else []
        return self._finish(connection, rollout, row, emitted, finish, lack)

    @_write
    def finish_many(
        self,
        connection: sa.Connection,
        endings: Sequence[Ending],
        lacks: Sequence[ErrorInfo | None] | None = None,
    ) -> list[tuple[Rollout, Attempt]]:
        """`add_rewards` and `finish` of many attempts, all of them or none; `lacks` has the `lack` of each.

        Raises:
            NotFound, Conflict, Invalid: as these, for the first that is refused; the error names its rollout.
        """
        ids = [ending.rollout_id for ending in endings]
        self._database.hold(connection, ids)
        rows = queries.attempt_rows(connection, [(ending.rollout_id, ending.attempt_id) for ending in endings])
        rollouts = {rollout.rollout_id: rollout for rollout in queries.rollouts(connection, ids)}
        emitted = queries.rewards(connection, ids)
        outcomes, given = [], []
        for ending, row, lack in zip(endings, rows, lacks or [None] * len(rows), strict=True):
            _, new = _new_rewards(ending.rollout_id, emitted[row.attempt_id], ending.rewards)
            if new:
                queries.check_running(row)
                emitted[row.attempt_id] += new
                given += _reward_rows(ending.rollout_id, row.attempt_id, new)
            rollout, rewards = rollouts[ending.rollout_id], emitted[row.attempt_id]
            outcomes.append(self._finish(connection, rollout, row, rewards, ending.finish, lack))
        if given:
            connection.execute(sa.insert(schema.rewards), given)
        return outcomes

    def _finish(
        self,
        connection: sa.Connection,
        rollout: Rollout,
        row: sa.Row[Any],
        emitted: Iterable[Reward],
        finish: Finish,
        lack: ErrorInfo | None,
    ) -> tuple[Rollout, Attempt]:
        returned = returned_rewards(rollout.rollout_id, finish)
        body = body_of(finish)
        if row.status == "running":
            if lack is not None:
                return self._end(connection, rollout, row, "failed", lack, rewards_by_name(emitted, {}), body)
            named = rewards_by_name(emitted, returned)
            return self._end(connection, rollout, row, finish.status, finish.error, named, body)
        if row.finish_body is None or not same_body(row.finish_body, body):
            raise Conflict(
                f"attempt {row.attempt_id} of rollout {rollout.rollout_id} has already ended, "
                f"{ending_of(attempt_of(row))}: drop this result"
            )
        return rollout, attempt_of(row)

    @_write
    def shelve(self, connection: sa.Connection) -> None:
        """Nobody claims what is queued now until it is asked for again: a session is over that has asked for it."""
        connection.execute(_SHELVE)

    @_read
    def overdue(self, connection: sa.Connection, *, since_seconds: float = 0) -> list[Overdue]:
        """The running attempts whose lease or deadline is over, for `since_seconds` or longer."""
        now = self._clock() - since_seconds
        attempts = schema.attempts.c
        late = (attempts.lease_expires_at < now) | (attempts.deadline_at < now)
        rows = connection.execute(sa.select(schema.attempts).where(queries.RUNNING, late)).all()
        return [
            Overdue(
                rollout_id=row.rollout_id,
                attempt_id=row.attempt_id,
                why="lease" if row.lease_expires_at < now else "deadline",
                lease_seconds=row.unresponsive_seconds,
            )
            for row in rows
        ]

    @_read
    def running(
        self,
        connection: sa.Connection,
        worker_ids: Sequence[str] | None = None,
        *,
        why: Literal["worker", "session", "server", "journal"],
        gateway_id: str | None = None,
    ) -> list[Overdue]:
        """The running attempts, to be ended for that reason; those of these workers, or that gateway, where named."""
        of = sa.true() if worker_ids is None else schema.attempts.c.worker_id.in_(worker_ids)
        at = sa.true() if gateway_id is None else schema.attempts.c.attempt_id.in_(queries.placed_at(gateway_id))
        rows = connection.execute(sa.select(schema.attempts).where(queries.RUNNING, of, at)).all()
        return [Overdue(rollout_id=row.rollout_id, attempt_id=row.attempt_id, why=why) for row in rows]

    @_write
    def expire(self, connection: sa.Connection, overdue: Sequence[Overdue]) -> list[Rollout]:
        """End those of the overdue attempts that still run: a lost one is retried, one past its
        deadline has failed by its agent, but for a failure of the gateway. The rollouts that this moved."""
        self._database.hold(connection, [late.rollout_id for late in overdue])
        moved = []
        for late in overdue:
            row = queries.attempt_row(connection, late.rollout_id, late.attempt_id)
            if row.status != "running":
                continue
            rollout = queries.rollout(connection, late.rollout_id)
            ours = late.why != "deadline" or late.failure is not None
            status: AttemptStatus = "lost" if ours else "failed"
            named = rewards_by_name(queries.attempt_rewards(connection, late.attempt_id), {})
            self._end(connection, rollout, row, status, _why(late, rollout, row), named)
            moved.append(late.rollout_id)
        return queries.rollouts(connection, moved)

    def sweep(self) -> list[Rollout]:
        """`expire` what is `overdue`; the rollouts that this moved."""
        return self.expire(self.overdue())

    @_write
    def postpone(
        self, connection: sa.Connection, seconds: float, *, lease_seconds: float = 0, gateway_id: str | None = None
    ) -> None:
        """Move the deadlines of the running attempts (with `gateway_id`: of that gateway's): time in which they were
        parked; and their leases by `lease_seconds`, in which no heartbeat was taken."""
        _postpone(connection, seconds, lease_seconds, gateway_id)

    @_write
    def renew_leases(self, connection: sa.Connection) -> None:
        """Begin the leases of the running attempts anew: nobody could renew them while no server
        was there."""
        self._renew_leases(connection)

    @_write
    def make_up(self, connection: sa.Connection, seconds: float) -> None:
        """The store could not be written for `seconds`: leases begin anew, deadlines move by as much.

        Raises:
            StoreUnwritable: it still cannot; this always writes something.
        """
        connection.execute(self._database.replace(schema.meta, "written_at", str(self._clock())))
        _postpone(connection, seconds)
        self._renew_leases(connection)

    # Spans

    def add_spans(self, spans: Sequence[Span]) -> None:
        """Keep spans; one whose id is there already is left as it is."""
        self.add_packed([pack(span) for span in spans])

    def add_packed(self, spans: Sequence[Packed]) -> None:
        """Keep spans as `add_spans` does."""
        rows = [msgspec.structs.asdict(span) for span in spans]
        if rows:
            self._database.write(lambda connection: self._database.insert_new(connection, schema.spans, rows))

    def spans(self, rollout_id: str, attempt_id: str) -> list[Span]:
        """The attempt's spans by arrival number.

        Raises:
            NotFound: there is no such attempt.
        """
        return self.trace(rollout_id, attempt_id).spans

    def trace(self, rollout_id: str, attempt_id: str) -> AttemptTrace:
        """Everything recorded in one attempt.

        Raises:
            NotFound: there is no such attempt.
        """
        found = self.traces([rollout_id]).get(rollout_id)
        for trace in found.attempts if found else ():
            if trace.attempt.attempt_id == attempt_id:
                return trace
        raise NotFound(f"there is no attempt {attempt_id} of rollout {rollout_id}")

    def traces(self, rollout_ids: Sequence[str]) -> dict[str, RolloutTrace]:
        """Everything recorded in these rollouts, all attempts; unknown ids are left out."""
        packed = self.packed_traces(rollout_ids)
        return msgspec.msgpack.decode(packed, type=dict[str, RolloutTrace])

    @_read
    def recorded_calls(self, connection: sa.Connection) -> queries.RecordedCalls:
        """What engines sampled in all recorded calls, and when the last one ended."""
        return queries.recorded_calls(connection)

    @_read
    def packed_traces(self, connection: sa.Connection, rollout_ids: Sequence[str]) -> bytes:
        """`traces` as MessagePack, without unpacking a span."""
        return msgspec.msgpack.encode(queries.traces(connection, rollout_ids))

    # Resources

    @_write
    def publish(self, connection: sa.Connection, request: ResourcesRequest) -> Resources:
        """Keep resources under their id (one is made where they name none).

        Raises:
            Conflict: the id is there with other resources.
            Invalid: the id is `latest`, or a resource is not JSON-able.
        """
        resources_id = request.resources_id or new_id("s")
        if resources_id == LATEST:
            raise Invalid(f"resources cannot be named {LATEST!r}: that is the newest ones' name")
        body = body_of(request.resources)
        table = schema.resources
        known = self._resources(connection, resources_id)
        if known is not None:
            if not same_body(body_of(known.resources), body):
                raise Conflict(f"resources {resources_id} are there already with another body")
            return known
        newest = connection.execute(sa.select(sa.func.max(table.c.version))).scalar_one_or_none()
        # Not into `_published`: it is published when the transaction has ended well.
        made = Resources(
            resources_id=resources_id,
            version=(newest or 0) + 1,
            created_at=self._clock(),
            resources=msgspec.json.decode(body),
        )
        connection.execute(sa.insert(table), msgspec.structs.asdict(made) | {"resources": body})
        return made

    @_read
    def resources(self, connection: sa.Connection, resources_id: str) -> Resources:
        """The resources of this id, or the newest ones for `latest`.

        Raises:
            NotFound: there are none.
        """
        found: str | None = resources_id
        if resources_id == LATEST:
            found = self._latest_resources_id(connection)
        resources = self._resources(connection, found) if found is not None else None
        if resources is None:
            raise NotFound(f"there are no resources {resources_id!r}; publish some first")
        return resources

    # Inside a transaction

    def _renew_leases(self, connection: sa.Connection) -> None:
        connection.execute(
            sa.update(schema.attempts)
            .where(queries.RUNNING)
            .values(lease_expires_at=self._clock() + schema.attempts.c.unresponsive_seconds)
        )

    def _read_secret(self, connection: sa.Connection) -> bytes:
        """The secret that signs attempt keys; made on the first call, the same ever after."""
        made = {"key": "secret", "value": secrets.token_hex(32)}
        self._database.insert_new(connection, schema.meta, [made])
        kept = sa.select(schema.meta.c.value).where(schema.meta.c.key == "secret")
        return bytes.fromhex(connection.execute(kept).scalar_one())

    def _enqueue(self, connection: sa.Connection, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        latest = self._latest_resources_id(connection)
        named = [request.rollout_id for request in requests if request.rollout_id is not None]
        bodies = queries.requests(connection, named)
        rows, ids = [], []
        for request in requests:
            body = body_of(request)
            rollout_id = request.rollout_id or new_id("r")
            ids.append(rollout_id)
            if rollout_id in bodies:
                if not same_body(bodies[rollout_id], body):
                    raise Conflict(f"rollout {rollout_id} is there already with another body")
                continue
            bodies[rollout_id] = body
            rows.append(self._new_row(connection, rollout_id, request, body, latest))
        if rows:
            connection.execute(sa.insert(schema.rollouts), rows)
        if len(rows) < len(requests):
            self._take_up(connection, ids)
        return queries.rollouts(connection, ids)

    def _take_up(self, connection: sa.Connection, ids: Sequence[str]) -> None:
        """Let those of the rollouts that were shelved be claimed."""
        shelved = queries.shelved(connection, ids, _UNTIL_ASKED_FOR)
        if shelved:
            connection.execute(_TAKE_UP, [{"taken_up": rollout_id} for rollout_id in shelved])

    def _new_row(
        self,
        connection: sa.Connection,
        rollout_id: str,
        request: RolloutRequest,
        body: bytes,
        latest: str | None,
    ) -> dict[str, Any]:
        wanted = request.resources_id
        if wanted is not None and self._resources(connection, wanted) is None:
            raise Invalid(f"rollout {rollout_id}: there are no resources {wanted}; publish them")
        return {
            "rollout_id": rollout_id,
            "status": "queued",
            "mode": request.mode,
            "group_id": request.group_id,
            "agent": request.agent,
            "resources_id": wanted or latest,
            "request": body,
            "attempt_count": 0,
            "created_at": self._clock(),
        }

    def _open_attempts(
        self,
        connection: sa.Connection,
        rows: Sequence[sa.Row[Any]],
        worker_id: str,
        claim_id: str | None,
        claim_body: bytes,
    ) -> list[Claim]:
        now = self._clock()
        opened, moved, claims = [], [], []
        for row in rows:
            rollout = rollout_of(row)
            config = rollout.config
            attempt = Attempt(
                attempt_id=new_id("a"),
                rollout_id=rollout.rollout_id,
                sequence=rollout.attempt_count + 1,
                status="running",
                worker_id=worker_id,
                lease_expires_at=now + config.unresponsive_seconds,
                started_at=now,
                deadline_at=None if config.timeout_seconds is None else now + config.timeout_seconds,
            )
            opened.append(
                {
                    **{name: getattr(attempt, name) for name in _OPENED},
                    "claim_id": claim_id,
                    "claim_body": claim_body if claim_id is not None else None,
                    "unresponsive_seconds": config.unresponsive_seconds,
                }
            )
            change = {
                "status": next_rollout_status(rollout.status, "running"),
                "attempt_id": attempt.attempt_id,
                "attempt_count": attempt.sequence,
            }
            moved.append({"opened": rollout.rollout_id, **change})
            rollout = msgspec.structs.replace(rollout, **change)
            claims.append(self._claim(connection, rollout, attempt))
        connection.execute(sa.insert(schema.attempts), opened)
        connection.execute(_OPEN_ATTEMPT, moved)
        return self._placed(connection, claims, now)

    def _placed(self, connection: sa.Connection, claims: list[Claim], now: float) -> list[Claim]:
        """New claims, each with the gateway that has the fewest attempts, where several servers share the store."""
        if not self.shared:
            return claims
        opened = [(claim.rollout.rollout_id, claim.attempt.attempt_id) for claim in claims]
        urls = gateways.place(self._database, connection, opened, now)
        return [msgspec.structs.replace(each, gateway_url=urls.get(each.attempt.attempt_id)) for each in claims]

    def _claimed(self, connection: sa.Connection, claim_id: str, body: bytes) -> list[Claim]:
        rows = connection.execute(queries.CLAIMED, {"claim_id": claim_id}).all()
        if any(not same_body(row.claim_body, body) for row in rows):
            raise Conflict(f"claim id {claim_id} was used for another request")
        attempts = {row.rollout_id: attempt_of(row) for row in rows}
        urls = gateways.urls(connection, [each.attempt_id for each in attempts.values()]) if self.shared else {}
        claims = [
            self._claim(connection, rollout, attempts[rollout.rollout_id])
            for rollout in queries.rollouts(connection, list(attempts))
        ]
        return [msgspec.structs.replace(each, gateway_url=urls.get(each.attempt.attempt_id)) for each in claims]

    def _claim(self, connection: sa.Connection, rollout: Rollout, attempt: Attempt) -> Claim:
        published = None
        if rollout.resources_id is not None:
            published = self._resources(connection, rollout.resources_id)
        resources = published.resources if published else {}
        return Claim(rollout=rollout, attempt=attempt, resources=resources)

    def _end(
        self,
        connection: sa.Connection,
        rollout: Rollout,
        attempt: sa.Row[Any],
        status: AttemptStatus,
        error: ErrorInfo | None = None,
        named: dict[str, float] | None = None,
        finish_body: bytes | None = None,
    ) -> tuple[Rollout, Attempt]:
        named = named or {}
        ended = msgspec.structs.replace(
            attempt_of(attempt),
            status=next_attempt_status(attempt.status, status),
            ended_at=self._clock(),
            reward=named.get(FINAL),
            rewards=named,
            error=error,
        )
        connection.execute(
            _END_ATTEMPT,
            {
                "ended_attempt": ended.attempt_id,
                "status": ended.status,
                "ended_at": ended.ended_at,
                "reward": ended.reward,
                "rewards": body_of(named) if named else None,
                "error": body_of(error) if error is not None else None,
                "finish_body": finish_body,
            },
        )
        if self.shared:
            gateways.leave(connection, ended.attempt_id)
        following = _following(connection, rollout, status, error)
        pause = _pause(connection, rollout, error) if following == "queued" else 0.0
        moved = self._move(connection, rollout, following, pause)
        return outcome_of(moved, ended), ended

    def _take_late(self, connection: sa.Connection, rollout_id: str, attempt_id: str, new: Iterable[Reward]) -> None:
        """Change the outcome of an attempt that counts by late rewards; one that still runs takes them as any other.

        Raises:
            NotFound: there is no such attempt.
            Conflict: it has ended and does not count.
        """
        attempt = attempt_of(queries.attempt_row(connection, rollout_id, attempt_id))
        if attempt.status == "running":
            return
        rollout = queries.rollout(connection, rollout_id)
        if rollout.counting_attempt_id != attempt_id:
            raise Conflict(
                f"attempt {attempt_id} of rollout {rollout_id} is {attempt.status} and does not count: the rollout is "
                f"{rollout.status}, {_who_counts(rollout)}"
            )
        named = with_late(attempt.rewards, new)
        if named != attempt.rewards:
            change = {"rewarded": attempt_id, "reward": named.get(FINAL), "rewards": body_of(named)}
            connection.execute(_CHANGE_REWARDS, change)

    def _move(self, connection: sa.Connection, rollout: Rollout, status: RolloutStatus, pause: float = 0.0) -> Rollout:
        moved = msgspec.structs.replace(
            rollout,
            status=next_rollout_status(rollout.status, status),
            ended_at=self._clock() if status in ENDED else None,
        )
        claimable_at = self._clock() + pause if pause else None
        change = {
            "moved": moved.rollout_id, "status": moved.status, "ended_at": moved.ended_at, "claimable_at": claimable_at,
        }  # fmt: skip
        connection.execute(_MOVE_ROLLOUT, change)
        return moved

    def _resources(self, connection: sa.Connection, resources_id: str) -> Resources | None:
        if resources_id not in self._published:
            table = schema.resources
            query = sa.select(table).where(table.c.resources_id == resources_id)
            row = connection.execute(query).one_or_none()
            if row is None:
                return None
            self._published[resources_id] = Resources(
                resources_id=resources_id,
                version=row.version,
                created_at=row.created_at,
                resources=msgspec.json.decode(row.resources),
            )
        return self._published[resources_id]

    def _latest_resources_id(self, connection: sa.Connection) -> str | None:
        table = schema.resources
        query = sa.select(table.c.resources_id).order_by(table.c.version.desc()).limit(1)
        return connection.execute(query).scalar_one_or_none()


def steady_clock() -> Callable[[], float]:
    """Tells seconds since the epoch: by the machine's clock as it stands now, counted on steadily from there. Whoever
    sets that clock moves no lease and no deadline."""
    epoch = time.time() - time.monotonic()
    return lambda: epoch + time.monotonic()


def _new_rewards(
    rollout_id: str, known: Iterable[Reward], rewards: Sequence[Reward]
) -> tuple[list[Reward], list[Reward]]:
    """The rewards with ids, and those of them that are not known.

    Raises Conflict where an id is known with another body, Invalid for a reward that is no finite number.
    """
    for reward in rewards:
        check_finite(rollout_id, reward.name, reward.value)
    there = {reward.reward_id: reward for reward in known}
    named = [msgspec.structs.replace(reward, reward_id=reward.reward_id or new_id("w")) for reward in rewards]
    new: dict[str | None, Reward] = {}
    for reward in named:
        first = there.get(reward.reward_id) or new.setdefault(reward.reward_id, reward)
        if first != reward:
            raise Conflict(f"rollout {rollout_id}: reward {reward.reward_id} is there already as {first}")
    return named, list(new.values())


def _reward_rows(rollout_id: str, attempt_id: str, rewards: Iterable[Reward]) -> list[dict[str, Any]]:
    place = {"rollout_id": rollout_id, "attempt_id": attempt_id}
    return [place | msgspec.structs.asdict(reward) for reward in rewards]


def _postpone(
    connection: sa.Connection, seconds: float, lease_seconds: float = 0, gateway_id: str | None = None
) -> None:
    attempts = schema.attempts.c
    whose = sa.true() if gateway_id is None else attempts.attempt_id.in_(queries.placed_at(gateway_id))
    moved = {
        "deadline_at": attempts.deadline_at + seconds,
        "lease_expires_at": attempts.lease_expires_at + lease_seconds,
    }
    connection.execute(sa.update(schema.attempts).where(queries.RUNNING, whose).values(moved))


def _following(
    connection: sa.Connection, rollout: Rollout, ended: AttemptStatus, error: ErrorInfo | None
) -> RolloutStatus:
    """Where a rollout goes when its running attempt has ended so: infrastructure is retried."""
    if ended in ("succeeded", "cancelled"):
        return ended
    infrastructure = ended == "lost" or (error is not None and error.infrastructure)
    if infrastructure and queries.counted_attempts(connection, rollout.rollout_id) < rollout.config.max_attempts:
        return "queued"
    return "failed"


def _pause(connection: sa.Connection, rollout: Rollout, error: ErrorInfo | None) -> float:
    """Seconds until a rollout whose attempt has ended so may be claimed again: twice as long after each failure of
    infrastructure; none where the attempt was stopped with its runner or its session."""
    if error is not None and error.type in NOT_COUNTED:
        return 0.0
    failures = queries.counted_attempts(connection, rollout.rollout_id)
    return min(_FIRST_PAUSE_SECONDS * 2.0 ** (failures - 1), _LONGEST_PAUSE_SECONDS)


def _who_counts(rollout: Rollout) -> str:
    if rollout.counting_attempt_id is None:
        return "and none of its attempts takes late rewards"
    return f"so reward attempt {rollout.counting_attempt_id}"


def _why(late: Overdue, rollout: Rollout, attempt: sa.Row[Any]) -> ErrorInfo:
    if late.why == "lease":
        return ErrorInfo(
            type="LeaseExpired",
            message=f"neither a heartbeat of worker {attempt.worker_id} nor a call came within "
            f"{attempt.unresponsive_seconds:g} s; the rollout's config.unresponsive_seconds says how long to wait",
            infrastructure=True,
        )
    if late.why == "worker":
        return ErrorInfo(
            type="RunnerDied", message=f"the process of worker {attempt.worker_id} died", infrastructure=True
        )
    if late.why == "server":
        return ErrorInfo(
            type="ServerGone",
            message="the server that has the attempt's records is gone: it did not end it in time",
            infrastructure=True,
        )
    if late.why == "journal":
        return ErrorInfo(
            type="RecordingLost",
            message="the gateway's journal was damaged: the store may lack calls of the attempt",
            infrastructure=True,
        )
    if late.why == "session":
        return ErrorInfo(
            type=SESSION_ENDED,
            message=f"the session of worker {attempt.worker_id} ended in the middle of the attempt",
            infrastructure=True,
        )
    message = f"the attempt ran longer than {rollout.config.timeout_seconds:g} s"
    if late.failure is not None:
        message += f" (the gateway had failed with a call of it: {late.failure})"
    return ErrorInfo(type="DeadlineExceeded", message=message, infrastructure=late.failure is not None)
