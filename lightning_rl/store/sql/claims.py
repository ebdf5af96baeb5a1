"""Claims: a rollout is handed out to one worker under a lease, which its heartbeats renew."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from lightning_rl.store import gateways, queries, schema
from lightning_rl.store.contract import Attempt, Claim, Overdue, Rollout, RolloutRequest, WorkerInfo, body_of, same_body
from lightning_rl.store.errors import Conflict
from lightning_rl.store.life_cycle import (
    AttemptStatus,
    next_rollout_status,
)
from lightning_rl.store.records import attempt_of, rollout_of
from lightning_rl.store.sql.rollouts import RolloutOperations
from lightning_rl.store.sql.transactions import reads, writes
from lightning_rl_adapters.ids import new_id

_RENEW_LEASE = (
    sa.update(schema.attempts)
    .where(schema.attempts.c.attempt_id == sa.bindparam("renewed"))
    .values(lease_expires_at=sa.bindparam("lease_expires_at"))
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


class ClaimOperations(RolloutOperations):
    """Opening attempts, and keeping them open."""

    @writes
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

    @writes
    def claim(
        self,
        connection: sa.Connection,
        worker_id: str,
        *,
        agents: Sequence[str] | None = None,
        limit: int = 1,
        claim_id: str | None = None,
        room: float = math.inf,
    ) -> list[Claim]:
        """Up to `limit` queued rollouts, oldest first, each with an attempt opened under a lease; none that pauses
        before a retry. Fewer where there is `room` for fewer (at least 1).

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
        rows = connection.execute(query, {"limit": int(min(limit, room)), "now": self._clock()}).all()
        return self._open_attempts(connection, rows, worker_id, claim_id, body) if rows else []

    @reads
    def claimable(self, connection: sa.Connection, *, newly_seconds: float | None = None) -> bool:
        """Whether a rollout may be claimed; with `newly_seconds`, one whose pause before a retry ended within these."""
        now = self._clock()
        return queries.claimable(connection, now, since=None if newly_seconds is None else now - newly_seconds)

    @writes
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

    @writes
    def heartbeats(self, connection: sa.Connection, places: Sequence[tuple[str, str]]) -> dict[str, float]:
        """`heartbeat` of many attempts, by rollout and attempt id: the renewed leases by attempt id. Those that do not
        run any more, and unknown ones, are left out."""
        now = self._clock()
        rows = queries.existing_attempt_rows(connection, places)
        leases = {row.attempt_id: now + row.unresponsive_seconds for row in rows if row.status == "running"}
        if leases:
            renewed = [{"renewed": attempt_id, "lease_expires_at": lease} for attempt_id, lease in leases.items()]
            connection.execute(_RENEW_LEASE, renewed)
        return leases

    @writes
    def extend_leases(self, connection: sa.Connection, leases: Mapping[str, float]) -> None:
        """Let the leases of these running attempts, by id, last for so many seconds from now on."""
        now = self._clock()
        extended = [
            {"renewed": attempt_id, "lease_expires_at": now + seconds} for attempt_id, seconds in leases.items()
        ]
        connection.execute(_RENEW_LEASE, extended)

    @reads
    def attempt(self, connection: sa.Connection, rollout_id: str, attempt_id: str) -> tuple[Rollout, Attempt]:
        """The attempt and its rollout.

        Raises:
            NotFound: there is no such attempt.
        """
        attempt = attempt_of(queries.attempt_row(connection, rollout_id, attempt_id))
        return queries.rollout(connection, rollout_id), attempt

    @reads
    def openings(
        self, connection: sa.Connection, places: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], queries.AttemptOpening]:
        """What a gateway needs to know of attempts, by rollout and attempt id; those that do not run are left out."""
        by_place = {}
        for row in queries.openings(connection, places):
            rollout = rollout_of(row)
            by_place[row.rollout_id, row.attempt_id] = queries.AttemptOpening(
                rollout=rollout,
                resources=self._resources_of(connection, rollout),
                gateway_id=row.gateway_id,
                recorded=row.recorded,
            )
        return by_place

    @reads
    def statuses(
        self, connection: sa.Connection, places: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], AttemptStatus]:
        """The attempts' statuses, by rollout and attempt id; unknown ones are left out."""
        rows = queries.existing_attempt_rows(connection, places)
        return {(row.rollout_id, row.attempt_id): row.status for row in rows}

    @reads
    def closed(self, connection: sa.Connection, places: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of the attempts, by rollout and attempt id, that do not run any more."""
        ended = queries.ended_attempts(connection, [attempt_id for _, attempt_id in places])
        return [place for place in places if place[1] in ended]

    @reads
    def workers(self, connection: sa.Connection) -> list[WorkerInfo]:
        """The workers that run attempts, by id."""
        return queries.workers(connection)

    @reads
    def running(
        self,
        connection: sa.Connection,
        worker_ids: Sequence[str] | None = None,
        *,
        why: Literal["worker", "session", "server", "journal"],
        gateway_id: str | None = None,
        run_id: str | None = None,
    ) -> list[Overdue]:
        """The running attempts, to be ended for that reason; those of these workers, that gateway, or that run, where
        named."""
        of = sa.true() if worker_ids is None else schema.attempts.c.worker_id.in_(worker_ids)
        run = sa.true() if run_id is None else queries.of_run(schema.attempts.c.rollout_id, run_id)
        return _running(connection, sa.and_(of, queries.attempts_at(gateway_id), run), why)

    @writes
    def abandon_run(self, connection: sa.Connection, gateway_id: str, run_id: str) -> list[Overdue] | None:
        """A run whose gateway is gone is attached nowhere any more, and nobody claims what of it is queued until it is
        asked for again; its attempts that run. None, and nothing is done, where the run is attached to another gateway,
        or this one lives."""
        self._hold_run(connection, run_id)
        if not self._is_attached_at(connection, gateway_id, run_id) or gateways.lives(
            connection, gateway_id, self._clock()
        ):
            return None
        self._shelve(connection, run_id)
        self._forget_run(connection, gateway_id, run_id)
        return _running(connection, queries.of_run(schema.attempts.c.rollout_id, run_id), "session")

    @writes
    def renew_leases(self, connection: sa.Connection, *, gateway_id: str | None = None) -> None:
        """Begin the leases of the running attempts anew (with `gateway_id`: of that gateway's): nobody could renew them
        while no server was there."""
        self._renew_leases(connection, gateway_id)

    def _renew_leases(self, connection: sa.Connection, gateway_id: str | None = None) -> None:
        connection.execute(
            sa.update(schema.attempts)
            .where(queries.RUNNING, queries.attempts_at(gateway_id))
            .values(lease_expires_at=self._clock() + schema.attempts.c.unresponsive_seconds)
        )

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
        return Claim(rollout=rollout, attempt=attempt, resources=self._resources_of(connection, rollout))

    def _resources_of(self, connection: sa.Connection, rollout: Rollout) -> dict[str, dict[str, Any]]:
        resources = None if rollout.resources_id is None else self._resources(connection, rollout.resources_id)
        return {} if resources is None else resources.resources


def _running(
    connection: sa.Connection, condition: Any, why: Literal["worker", "session", "server", "journal"]
) -> list[Overdue]:
    rows = connection.execute(sa.select(schema.attempts).where(queries.RUNNING, condition)).all()
    return [Overdue(rollout_id=row.rollout_id, attempt_id=row.attempt_id, why=why) for row in rows]
