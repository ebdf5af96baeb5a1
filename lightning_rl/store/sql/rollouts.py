"""Rollouts: asked for, looked at, counted."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from lightning_rl.store import queries, schema
from lightning_rl.store.contract import Rollout, RolloutDetail, RolloutRequest, RunElsewhere, body_of_request, same_body
from lightning_rl.store.errors import Conflict, Invalid
from lightning_rl.store.records import attempt_of, detailed, rollout_of
from lightning_rl.store.sql.resources import ResourceOperations
from lightning_rl.store.sql.transactions import reads, writes
from lightning_rl_adapters.ids import new_id

_TAKE_UP = (
    sa.update(schema.rollouts)
    .where(schema.rollouts.c.rollout_id == sa.bindparam("taken_up"), schema.rollouts.c.status == "queued")
    .values(claimable_at=None)
)
_RUN = "run:"  # of `meta`, before a gateway's id, a colon and a run's id
_SESSION = "session:"  # of `meta`, before a run's id: the last session of its trainers
_UNTIL_ASKED_FOR = float("inf")  # `claimable_at` of what a run has left queued
_SHELVE = (
    sa.update(schema.rollouts)
    .where(schema.rollouts.c.status == "queued", schema.rollouts.c.claimable_at.is_distinct_from(_UNTIL_ASKED_FOR))
    .values(claimable_at=_UNTIL_ASKED_FOR)
)
_LONGEST_POSITION = 18  # digits, so that any database holds it


class RolloutOperations(ResourceOperations):
    """What is done with rollouts before and after somebody works on them."""

    @writes
    def enqueue(self, connection: sa.Connection, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """The rollouts asked for, in that order; those whose id is there already stay as they are, but that they may
        be claimed where their run had left them queued.

        Raises:
            Conflict: an id is there with another body.
            Invalid: a task is not JSON-able, or resources are named that are not published.
        """
        return self._enqueue(connection, requests)

    @reads
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

    @reads
    def rollouts(self, connection: sa.Connection, rollout_ids: Sequence[str]) -> list[Rollout]:
        """The rollouts of these ids, in that order; unknown ids are left out."""
        return queries.rollouts(connection, rollout_ids)

    @reads
    def ended(self, connection: sa.Connection, rollout_ids: Sequence[str]) -> list[Rollout]:
        """Those of the rollouts that have ended."""
        return queries.ended(connection, rollout_ids)

    @reads
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

    @reads
    def rewarded(self, connection: sa.Connection, after: int | None = None) -> tuple[list[str], int]:
        """The rollouts that were given rewards after this position of rewards, and the position now; with None no
        rollouts."""
        table = schema.rewards.c
        now: int = connection.execute(sa.select(sa.func.coalesce(sa.func.max(table.position), 0))).scalar_one()
        if after is None or after >= now:
            return [], now
        query = sa.select(table.rollout_id).where(table.position > after, table.position <= now).distinct()
        return sorted(connection.execute(query).scalars()), now

    @reads
    def counts(self, connection: sa.Connection) -> dict[str, int]:
        """How many rollouts there are, by status."""
        if self.shared:
            return queries.counts(connection)
        # What has ended stays so: all before the first open one are counted once.
        first_open = queries.first_open(connection)
        self._ended.update(queries.counts(connection, self._counted, first_open))
        self._counted = first_open
        return dict(self._ended + Counter(queries.counts(connection, first_open)))

    @writes
    def shelve(self, connection: sa.Connection, run_id: str, *, attached_at: str | None = None) -> bool:
        """Nobody claims what of a run is queued now until it is asked for again: its trainer is gone. With a gateway in
        `attached_at` only where the run is attached there, and at no other one since; whether that is so."""
        if attached_at is not None:
            self._hold_run(connection, run_id)
            if not self._is_attached_at(connection, attached_at, run_id):
                return False
        self._shelve(connection, run_id)
        return True

    @writes
    def shelve_abandoned(self, connection: sa.Connection, run_id: str) -> None:
        """`shelve` what has come to be queued again of a run that was abandoned, unless it is attached again."""
        self._hold_run(connection, run_id)
        if connection.scalar(sa.select(schema.meta.c.key).where(_is_of_run(run_id))) is None:
            self._shelve(connection, run_id)

    def _shelve(self, connection: sa.Connection, run_id: str) -> None:
        connection.execute(_SHELVE.where(queries.of_run(schema.rollouts.c.rollout_id, run_id)))

    @writes
    def enter_session(self, connection: sa.Connection, run_id: str, sessions: Sequence[str]) -> None:
        """A session of a run begins, the last of `sessions`, which are those that its folder knows of.

        Raises:
            Conflict: the session before is none of them, so the run has gone on from another copy of the folder.
        """
        key = f"{_SESSION}{run_id}"
        kept = connection.scalar(sa.select(schema.meta.c.value).where(schema.meta.c.key == key))
        if kept is not None and kept not in sessions:
            raise Conflict(
                f"run {run_id} has gone on at this server from another copy of its folder, or from a newer state of "
                "this one: the rollouts here are not those that this folder asked for. Resume that folder, or begin a "
                "new run from this one's weights (trainer.resume_mode=resume_path, trainer.resume_from_path)"
            )
        connection.execute(sa.delete(schema.meta).where(schema.meta.c.key == key))
        connection.execute(sa.insert(schema.meta), {"key": key, "value": sessions[-1]})

    @writes
    def remember_run(self, connection: sa.Connection, gateway_id: str, run_id: str, request: str) -> None:
        """Keep that a training run is attached at this gateway and at no other one, and the request with which it is.
        `gateway_id` is "" where a store has one server."""
        self._hold_run(connection, run_id)
        connection.execute(sa.delete(schema.meta).where(_is_of_run(run_id)))
        connection.execute(sa.insert(schema.meta), {"key": f"{_RUN}{gateway_id}:{run_id}", "value": request})

    @writes
    def forget_run(self, connection: sa.Connection, gateway_id: str, run_id: str) -> None:
        """The run is not attached at this gateway any more."""
        self._forget_run(connection, gateway_id, run_id)

    def _forget_run(self, connection: sa.Connection, gateway_id: str, run_id: str) -> None:
        connection.execute(sa.delete(schema.meta).where(schema.meta.c.key == f"{_RUN}{gateway_id}:{run_id}"))

    def _hold_run(self, connection: sa.Connection, run_id: str) -> None:
        """Where a run is attached is changed by nobody else until the transaction is over."""
        self._database.hold_name(connection, f"{_RUN}{run_id}")

    def _is_attached_at(self, connection: sa.Connection, gateway_id: str, run_id: str) -> bool:
        key = f"{_RUN}{gateway_id}:{run_id}"
        return connection.scalar(sa.select(schema.meta.c.key).where(schema.meta.c.key == key)) is not None

    @reads
    def remembered_runs(self, connection: sa.Connection, gateway_id: str) -> dict[str, str]:
        """The requests of the training runs that are attached at this gateway, or were when it ended, by id."""
        own = f"{_RUN}{gateway_id}:"
        rows = connection.execute(sa.select(schema.meta).where(schema.meta.c.key.startswith(own, autoescape=True)))
        return {row.key.removeprefix(own): row.value for row in rows}

    @reads
    def runs_elsewhere(self, connection: sa.Connection, gateway_id: str) -> list[RunElsewhere]:
        """The training runs that are attached at other gateways than this one."""
        leases = {row.gateway_id: row.lease_expires_at for row in connection.execute(sa.select(schema.gateways))}
        runs = []
        for row in connection.execute(sa.select(schema.meta).where(schema.meta.c.key.startswith(_RUN))):
            attached_at, _, run_id = row.key.removeprefix(_RUN).partition(":")
            if attached_at != gateway_id:
                left = leases.get(attached_at, 0.0) - self._clock()
                run = RunElsewhere(gateway_id=attached_at, run_id=run_id, request=row.value, lease_left=left)
                runs.append(run)
        return runs

    def _enqueue(self, connection: sa.Connection, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        latest = self._latest_resources_id(connection)
        named = [request.rollout_id for request in requests if request.rollout_id is not None]
        bodies = queries.requests(connection, named)
        rows, ids = [], []
        for request in requests:
            body = body_of_request(request)
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


def _is_of_run(run_id: str) -> sa.ColumnElement[bool]:
    """Of the entries of `meta` those that say at which gateway a run is attached."""
    key = schema.meta.c.key
    return key.startswith(_RUN) & key.endswith(f":{run_id}", autoescape=True)
