"""The store in a SQLite file: every operation is one transaction, durable when it returns.

Invariants: a rollout has at most one running attempt and ends once; an answered operation repeated
with the same id and body gives the same answer, with another body `Conflict`. Safe to share between
threads; the clock is a parameter, so that time can be told in tests.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from lightning_rl.store import queries, schema
from lightning_rl.store.contract import (
    SESSION_ENDED,
    Attempt,
    AttemptTrace,
    Claim,
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
from lightning_rl.store.life_cycle import (
    ENDED,
    AttemptStatus,
    RolloutStatus,
    next_attempt_status,
    next_rollout_status,
)
from lightning_rl.store.records import attempt_of, body_of, detailed, outcome_of, rollout_of, same_body
from lightning_rl.store.rewards import check_finite, returned_rewards, rewards_by_name, with_late
from lightning_rl_adapters.credit import FINAL
from lightning_rl_adapters.span import Span, pack

_END_ATTEMPT = (
    sa.update(schema.attempts)
    .where(schema.attempts.c.attempt_id == sa.bindparam("ended_attempt"))
    .values({name: sa.bindparam(name) for name in ("status", "ended_at", "reward", "rewards", "error", "finish_body")})
)
_CHANGE_REWARDS = (
    sa.update(schema.attempts)
    .where(schema.attempts.c.attempt_id == sa.bindparam("rewarded"))
    .values({name: sa.bindparam(name) for name in ("reward", "rewards")})
)
_MOVE_ROLLOUT = (
    sa.update(schema.rollouts)
    .where(schema.rollouts.c.rollout_id == sa.bindparam("moved"))
    .values({name: sa.bindparam(name) for name in ("status", "ended_at")})
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

LATEST = "latest"  # the name of the newest resources


class SqlStore:
    """The store on the database at `url` (`sqlite:///path`, or `sqlite://` in memory).

    Raises:
        ValueError: for another kind of database, a file that is none, or another schema version.
        StoreUnwritable: here and in every operation, the file cannot be written; nothing of the operation is kept.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        self._url = url
        self._clock = clock
        self._lock = threading.Lock()
        self._engine = schema.open_database(url)
        self._connection = self._engine.connect()
        self._published: dict[str, Resources] = {}  # published resources never change
        with self._transaction() as connection:
            self.secret = schema.read_secret(connection)

    def close(self) -> None:
        """Close the database; the store cannot be used after."""
        with self._lock:
            self._connection.close()
            self._engine.dispose()

    # Rollouts

    def enqueue(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """The rollouts asked for, in that order; those whose id is there already stay as they are.

        Raises:
            Conflict: an id is there with another body.
            Invalid: a task is not JSON-able, or resources are named that are not published.
        """
        with self._transaction() as connection:
            return self._enqueue(connection, requests)

    def start(self, request: RolloutRequest, worker_id: str) -> Claim:
        """Enqueue one rollout and claim it at once; a repeat with its id gives the same claim.

        Raises:
            Conflict: the id is there with another body, or somebody else has claimed it.
        """
        with self._transaction() as connection:
            rollout = self._enqueue(connection, [request])[0]
            claim_id = f"start:{rollout.rollout_id}"  # no claim id of a caller holds a colon
            body = body_of([worker_id])
            made = self._claimed(connection, claim_id, body)
            if made:
                return made[0]
            if rollout.status != "queued" or rollout.attempt_count:
                raise Conflict(
                    f"rollout {rollout.rollout_id} was claimed before and is {rollout.status}: "
                    "start it under another id"
                )
            where = schema.rollouts.c.rollout_id == rollout.rollout_id
            rows = connection.execute(queries.ROLLOUTS.where(where)).all()
            return self._open_attempts(connection, rows, worker_id, claim_id, body)[0]

    def rollout(self, rollout_id: str) -> RolloutDetail:
        """The rollout with its attempts.

        Raises:
            NotFound: there is no such rollout.
        """
        with self._transaction() as connection:
            rollout = queries.rollout(connection, rollout_id)
            rows = connection.execute(
                sa.select(schema.attempts)
                .where(schema.attempts.c.rollout_id == rollout_id)
                .order_by(schema.attempts.c.sequence)
            )
            return detailed(rollout, [attempt_of(row) for row in rows])

    def rollouts(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """The rollouts of these ids, in that order; unknown ids are left out."""
        with self._transaction() as connection:
            return queries.rollouts(connection, rollout_ids)

    def ended(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """Those of the rollouts that have ended."""
        with self._transaction() as connection:
            return queries.ended(connection, rollout_ids)

    def page(
        self,
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
            if not cursor.isdecimal():
                raise Invalid(f"cursor {cursor!r} is none that a list of rollouts has given")
            query = query.where(schema.rollouts.c.position > int(cursor))
        with self._transaction() as connection:
            rows = connection.execute(query).all()
        following = str(rows[limit - 1].position) if len(rows) > limit else None
        return [rollout_of(row) for row in rows[:limit]], following

    def counts(self) -> dict[str, int]:
        """How many rollouts there are, by status."""
        with self._transaction() as connection:
            return queries.counts(connection)

    def cancel(self, rollout_id: str) -> Rollout:
        """End the rollout as cancelled, with its running attempt; one that has ended stays so.

        Raises:
            NotFound: there is no such rollout.
        """
        with self._transaction() as connection:
            rollout = queries.rollout(connection, rollout_id)
            if rollout.status == "running":
                attempt = queries.attempt_row(connection, rollout_id, str(rollout.attempt_id))
                self._end(connection, rollout, attempt, "cancelled")
            elif rollout.status == "queued":
                self._move(connection, rollout, "cancelled")
            return queries.rollout(connection, rollout_id)

    # Claims

    def claim(
        self,
        worker_id: str,
        *,
        agents: Sequence[str] | None = None,
        limit: int = 1,
        claim_id: str | None = None,
    ) -> list[Claim]:
        """Up to `limit` queued rollouts, oldest first, each with an attempt opened under a lease.

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
        with self._transaction() as connection:
            if claim_id is not None and (made := self._claimed(connection, claim_id, body)):
                return made
            rows = connection.execute(query, {"limit": limit}).all()
            return self._open_attempts(connection, rows, worker_id, claim_id, body) if rows else []

    def heartbeat(self, rollout_id: str, attempt_id: str) -> Attempt:
        """The attempt with its lease renewed.

        Raises:
            NotFound: there is no such attempt.
            Conflict: it has ended, so it is no longer the caller's.
        """
        with self._transaction() as connection:
            row = queries.running_row(connection, rollout_id, attempt_id)
            lease = self._clock() + row.unresponsive_seconds
            connection.execute(
                sa.update(schema.attempts)
                .where(schema.attempts.c.attempt_id == attempt_id)
                .values(lease_expires_at=lease)
            )
            return msgspec.structs.replace(attempt_of(row), lease_expires_at=lease)

    def attempt(self, rollout_id: str, attempt_id: str) -> tuple[Rollout, Attempt]:
        """The attempt and its rollout.

        Raises:
            NotFound: there is no such attempt.
        """
        with self._transaction() as connection:
            attempt = attempt_of(queries.attempt_row(connection, rollout_id, attempt_id))
            return queries.rollout(connection, rollout_id), attempt

    # Rewards, and the end

    def add_rewards(
        self, rollout_id: str, attempt_id: str, rewards: Sequence[Reward], *, late: bool = False
    ) -> list[Reward]:
        """Keep rewards of a running attempt; the answer has their ids.

        With `late` the attempt may also have ended, if it is the one that counts: these rewards then come after all
        that it was given before, returned ones too.

        Raises:
            NotFound: there is no such attempt.
            Conflict: it has ended (with `late`: and does not count), or a reward id is there with another body.
            Invalid: a reward is no finite number.
        """
        for reward in rewards:
            check_finite(rollout_id, reward.name, reward.value)
        with self._transaction() as connection:
            known = {reward.reward_id: reward for reward in queries.attempt_rewards(connection, attempt_id)}
            named = [msgspec.structs.replace(reward, reward_id=reward.reward_id or _new_id("w")) for reward in rewards]
            new: dict[str | None, Reward] = {}
            for reward in named:
                there = known.get(reward.reward_id) or new.setdefault(reward.reward_id, reward)
                if there != reward:
                    raise Conflict(f"rollout {rollout_id}: reward {reward.reward_id} is there already as {there}")
            if new:
                if late:
                    self._take_late(connection, rollout_id, attempt_id, new.values())
                else:
                    queries.running_row(connection, rollout_id, attempt_id)
                place = {"rollout_id": rollout_id, "attempt_id": attempt_id}
                rows = [place | msgspec.structs.asdict(reward) for reward in new.values()]
                connection.execute(sa.insert(schema.rewards), rows)
            return named

    def finish(self, rollout_id: str, attempt_id: str, finish: Finish) -> tuple[Rollout, Attempt]:
        """End the attempt as its worker says; the rollout ends, or is queued for a retry.

        Raises:
            NotFound: there is no such attempt.
            Conflict: it has ended otherwise.
            Invalid: naming the rollout, for a bad reward.
        """
        returned = returned_rewards(rollout_id, finish)
        body = body_of(finish)
        with self._transaction() as connection:
            row = queries.attempt_row(connection, rollout_id, attempt_id)
            rollout = queries.rollout(connection, rollout_id)
            if row.status == "running":
                named = rewards_by_name(queries.attempt_rewards(connection, attempt_id), returned)
                return self._end(connection, rollout, row, finish.status, finish.error, named, body)
            if row.finish_body is None or not same_body(row.finish_body, body):
                raise Conflict(
                    f"attempt {attempt_id} of rollout {rollout_id} has already ended as {row.status}: drop this result"
                )
            return rollout, attempt_of(row)

    def overdue(self) -> list[Overdue]:
        """The running attempts whose lease or deadline is over now."""
        now = self._clock()
        attempts = schema.attempts.c
        late = (attempts.lease_expires_at < now) | (attempts.deadline_at < now)
        with self._transaction() as connection:
            rows = connection.execute(sa.select(schema.attempts).where(queries.RUNNING, late)).all()
        return [
            Overdue(
                rollout_id=row.rollout_id,
                attempt_id=row.attempt_id,
                why="lease" if row.lease_expires_at < now else "deadline",
            )
            for row in rows
        ]

    def running(self, worker_ids: Sequence[str] | None = None) -> list[Overdue]:
        """The running attempts of these workers, whose process has died; without, all of a session that is over."""
        of = sa.true() if worker_ids is None else schema.attempts.c.worker_id.in_(worker_ids)
        with self._transaction() as connection:
            rows = connection.execute(sa.select(schema.attempts).where(queries.RUNNING, of)).all()
        why: Literal["worker", "session"] = "session" if worker_ids is None else "worker"
        return [Overdue(rollout_id=row.rollout_id, attempt_id=row.attempt_id, why=why) for row in rows]

    def expire(self, overdue: Sequence[Overdue]) -> list[Rollout]:
        """End those of the overdue attempts that still run: a lost one is retried, one past its
        deadline has failed by its agent. The rollouts that this moved."""
        moved = []
        with self._transaction() as connection:
            for late in overdue:
                row = queries.attempt_row(connection, late.rollout_id, late.attempt_id)
                if row.status != "running":
                    continue
                rollout = queries.rollout(connection, late.rollout_id)
                status: AttemptStatus = "failed" if late.why == "deadline" else "lost"
                named = rewards_by_name(queries.attempt_rewards(connection, late.attempt_id), {})
                self._end(connection, rollout, row, status, _why(late, rollout, row), named)
                moved.append(late.rollout_id)
            return queries.rollouts(connection, moved)

    def sweep(self) -> list[Rollout]:
        """`expire` what is `overdue`; the rollouts that this moved."""
        return self.expire(self.overdue())

    def postpone(self, seconds: float) -> None:
        """Move the deadlines of the running attempts: time in which they were parked."""
        with self._transaction() as connection:
            _postpone(connection, seconds)

    def renew_leases(self) -> None:
        """Begin the leases of the running attempts anew: nobody could renew them while no server
        was there."""
        with self._transaction() as connection:
            self._renew_leases(connection)

    def make_up(self, seconds: float) -> None:
        """The store could not be written for `seconds`: leases begin anew, deadlines move by as much.

        Raises:
            StoreUnwritable: it still cannot; this always writes something.
        """
        with self._transaction() as connection:
            schema.write_time(connection, self._clock())
            _postpone(connection, seconds)
            self._renew_leases(connection)

    # Spans

    def add_spans(self, spans: Sequence[Span]) -> None:
        """Keep spans; one whose id is there already is left as it is."""
        rows = [
            {
                "span_id": span.span_id,
                "rollout_id": span.rollout_id,
                "attempt_id": span.attempt_id,
                "number": span.number,
                "record": pack(span),
            }
            for span in spans
        ]
        if rows:
            with self._transaction() as connection:
                connection.execute(sa.insert(schema.spans).prefix_with("OR IGNORE"), rows)

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

    def sampled_tokens(self) -> dict[str, int]:
        """Per model, the tokens that engines sampled in all recorded calls."""
        with self._transaction() as connection:
            return queries.sampled_tokens(connection)

    def packed_traces(self, rollout_ids: Sequence[str]) -> bytes:
        """`traces` as MessagePack, without unpacking a span."""
        with self._transaction() as connection:
            return msgspec.msgpack.encode(queries.traces(connection, rollout_ids))

    # Resources

    def publish(self, request: ResourcesRequest) -> Resources:
        """Keep resources under their id (one is made where they name none).

        Raises:
            Conflict: the id is there with other resources.
            Invalid: the id is `latest`, or a resource is not JSON-able.
        """
        resources_id = request.resources_id or _new_id("s")
        if resources_id == LATEST:
            raise Invalid(f"resources cannot be named {LATEST!r}: that is the newest ones' name")
        body = body_of(request.resources)
        table = schema.resources
        with self._transaction() as connection:
            known = self._resources(connection, resources_id)
            if known is not None:
                if not same_body(body_of(known.resources), body):
                    raise Conflict(f"resources {resources_id} are there already with another body")
                return known
            row = {"resources_id": resources_id, "created_at": self._clock(), "resources": body}
            connection.execute(sa.insert(table), row)
            made = self._resources(connection, resources_id)
        if made is None:
            raise NotFound(f"resources {resources_id} were written and are not there")
        return made

    def resources(self, resources_id: str) -> Resources:
        """The resources of this id, or the newest ones for `latest`.

        Raises:
            NotFound: there are none.
        """
        with self._transaction() as connection:
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

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        with self._lock, schema.writing(self._url), self._connection.begin():
            yield self._connection

    def _enqueue(self, connection: sa.Connection, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        latest = self._latest_resources_id(connection)
        named = [request.rollout_id for request in requests if request.rollout_id is not None]
        bodies = queries.requests(connection, named)
        rows, ids = [], []
        for request in requests:
            body = body_of(request)
            rollout_id = request.rollout_id or _new_id("r")
            ids.append(rollout_id)
            if rollout_id in bodies:
                if not same_body(bodies[rollout_id], body):
                    raise Conflict(f"rollout {rollout_id} is there already with another body")
                continue
            bodies[rollout_id] = body
            rows.append(self._new_row(connection, rollout_id, request, body, latest))
        if rows:
            connection.execute(sa.insert(schema.rollouts), rows)
        return queries.rollouts(connection, ids)

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
                attempt_id=_new_id("a"),
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
        return claims

    def _claimed(self, connection: sa.Connection, claim_id: str, body: bytes) -> list[Claim]:
        rows = connection.execute(queries.CLAIMED, {"claim_id": claim_id}).all()
        if any(not same_body(row.claim_body, body) for row in rows):
            raise Conflict(f"claim id {claim_id} was used for another request")
        attempts = {row.rollout_id: attempt_of(row) for row in rows}
        return [
            self._claim(connection, rollout, attempts[rollout.rollout_id])
            for rollout in queries.rollouts(connection, list(attempts))
        ]

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
        moved = self._move(connection, rollout, _following(connection, rollout, status, error))
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

    def _move(self, connection: sa.Connection, rollout: Rollout, status: RolloutStatus) -> Rollout:
        moved = msgspec.structs.replace(
            rollout,
            status=next_rollout_status(rollout.status, status),
            ended_at=self._clock() if status in ENDED else None,
        )
        change = {"moved": moved.rollout_id, "status": moved.status, "ended_at": moved.ended_at}
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


def _postpone(connection: sa.Connection, seconds: float) -> None:
    deadline = schema.attempts.c.deadline_at
    connection.execute(sa.update(schema.attempts).where(queries.RUNNING).values(deadline_at=deadline + seconds))


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


def _who_counts(rollout: Rollout) -> str:
    if rollout.counting_attempt_id is None:
        return "and none of its attempts takes late rewards"
    return f"so reward attempt {rollout.counting_attempt_id}"


def _why(late: Overdue, rollout: Rollout, attempt: sa.Row[Any]) -> ErrorInfo:
    if late.why == "lease":
        return ErrorInfo(
            type="LeaseExpired",
            message=f"no heartbeat of worker {attempt.worker_id} within {attempt.unresponsive_seconds:g} s",
            infrastructure=True,
        )
    if late.why == "worker":
        return ErrorInfo(
            type="RunnerDied", message=f"the process of worker {attempt.worker_id} died", infrastructure=True
        )
    if late.why == "session":
        return ErrorInfo(
            type=SESSION_ENDED,
            message=f"the session of worker {attempt.worker_id} ended in the middle of the attempt",
            infrastructure=True,
        )
    return ErrorInfo(
        type="DeadlineExceeded",
        message=f"the attempt ran longer than {rollout.config.timeout_seconds:g} s",
    )


def _new_id(kind: str) -> str:
    return kind + secrets.token_hex(10)
