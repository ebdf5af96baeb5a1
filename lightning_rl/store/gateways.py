"""The gateways that share a store, and which running attempt is whose.

Invariants: a running attempt that was placed has one owner, and changes it only when the owner has left: it has
stopped, and all calls that it answered are in the store. What an owner had whose lease ended otherwise is tried again
as another attempt. Times are of the servers' clocks, which may differ by `APART_SECONDS`.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from lightning_rl.store import queries, schema
from lightning_rl.store.contract import GatewayInfo, Overdue, Owner
from lightning_rl.store.databases import Database

APART_SECONDS = 2.0
_PLACING = "lightning_rl.placing"
_GATEWAYS, _PLACEMENTS = schema.gateways.c, schema.placements.c
# A gateway that is not in its table any more is gone, and nobody knows how.
_LEASE = sa.func.coalesce(_GATEWAYS.lease_expires_at, 0.0)
_LEFT = sa.func.coalesce(_GATEWAYS.has_left, sa.false())
_OWNED = sa.select(
    schema.placements,
    sa.func.coalesce(_GATEWAYS.url, "").label("url"),
    _LEFT.label("has_left"),
    _LEASE.label("lease_expires_at"),
).outerjoin(schema.gateways, _GATEWAYS.gateway_id == _PLACEMENTS.gateway_id)
_HAS = sa.select(sa.func.count()).where(_PLACEMENTS.gateway_id == _GATEWAYS.gateway_id).scalar_subquery()
_LEAVE = sa.delete(schema.placements).where(_PLACEMENTS.attempt_id == sa.bindparam("left"))


class Gateways:
    """The gateways of the store in `database`. Safe to share between threads."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def announce(self, info: GatewayInfo, lease_seconds: float) -> list[GatewayInfo]:
        """Begin or renew a gateway's lease; the others that live. Who is gone and has nothing is forgotten."""

        def work(connection: sa.Connection) -> list[GatewayInfo]:
            now = self._clock()
            values = {
                "url": info.url,
                "open_attempts": info.open_attempts,
                "calls_in_flight": info.calls_in_flight,
                "has_left": False,
                "lease_expires_at": now + lease_seconds,
            }
            renewed = sa.update(schema.gateways).where(_GATEWAYS.gateway_id == info.gateway_id).values(values)
            if not connection.execute(renewed).rowcount:
                connection.execute(sa.insert(schema.gateways).values(gateway_id=info.gateway_id, **values))
            expired = sa.and_(_GATEWAYS.lease_expires_at + APART_SECONDS < now, _HAS == 0)
            connection.execute(sa.delete(schema.gateways).where(expired))
            return [other for other in _live(connection, now) if other.gateway_id != info.gateway_id]

        return self._database.write(work)

    def live(self) -> list[GatewayInfo]:
        """The gateways whose lease holds."""
        return self._database.read(lambda connection: _live(connection, self._clock()))

    def leave(self, gateway_id: str) -> None:
        """A gateway stops, and the store lacks none of its calls: its attempts are anybody's at once."""
        over = {"lease_expires_at": self._clock() - 2 * APART_SECONDS, "has_left": True}
        leaving = sa.update(schema.gateways).where(_GATEWAYS.gateway_id == gateway_id).values(over)
        self._database.write(lambda connection: connection.execute(leaving))

    def owner(self, attempt_id: str) -> Owner | None:
        """Who has a running attempt; None where nobody does, or it has ended."""
        return self._database.read(lambda connection: _owner(connection, attempt_id, self._clock()))

    def take(self, rollout_id: str, attempt_id: str, gateway_id: str) -> Owner | None:
        """The owner of a running attempt: this gateway, where nobody has it, or whoever had it has left. None where the
        attempt does not run."""

        def work(connection: sa.Connection) -> Owner | None:
            self._database.hold(connection, [rollout_id])
            if queries.attempt_row(connection, rollout_id, attempt_id).status != "running":
                return None
            owner = _owner(connection, attempt_id, self._clock())
            if owner is None:
                placed = {"attempt_id": attempt_id, "rollout_id": rollout_id, "gateway_id": gateway_id}
                self._database.insert_new(connection, schema.placements, [placed])
            elif owner.left and owner.gateway_id != gateway_id:
                change = sa.update(schema.placements).where(_PLACEMENTS.attempt_id == attempt_id)
                connection.execute(change.values(gateway_id=gateway_id))
            return _owner(connection, attempt_id, self._clock())

        return self._database.write(work)

    def lost(self, gateway_id: str, attempt_ids: Sequence[str]) -> set[str]:
        """Those of the attempts that are not this gateway's: they have ended, or another has taken them."""
        own = sa.select(_PLACEMENTS.attempt_id).where(
            _PLACEMENTS.attempt_id.in_(attempt_ids), _PLACEMENTS.gateway_id == gateway_id
        )
        return set(attempt_ids) - self._database.read(lambda connection: set(connection.execute(own).scalars()))

    def abandoned(self) -> list[Overdue]:
        """The running attempts whose owner is gone and has not left, so that the store may lack calls of them."""
        expired = self._clock() > _LEASE + APART_SECONDS
        rows = self._database.read(lambda connection: connection.execute(_OWNED.where(expired, sa.not_(_LEFT))).all())
        return [Overdue(rollout_id=row.rollout_id, attempt_id=row.attempt_id, why="server") for row in rows]

    def may_end(self, gateway_id: str, attempt_ids: Sequence[str], *, of_gone: bool = True) -> set[str]:
        """Those of the attempts that this gateway has, and with `of_gone` those whose owner is gone: the store has all
        records of these, or soon will."""
        owner_condition = _PLACEMENTS.gateway_id == gateway_id
        if of_gone:
            owner_condition |= self._clock() > _LEASE + APART_SECONDS
        condition = sa.and_(_PLACEMENTS.attempt_id.in_(attempt_ids), owner_condition)
        rows = self._database.read(lambda connection: connection.execute(_OWNED.where(condition)).all())
        return {row.attempt_id for row in rows}


def lives(connection: sa.Connection, gateway_id: str, now: float) -> bool:
    """Whether the lease of a gateway may hold, by some server's clock."""
    expires_at = connection.scalar(sa.select(_GATEWAYS.lease_expires_at).where(_GATEWAYS.gateway_id == gateway_id))
    return expires_at is not None and now <= expires_at + APART_SECONDS


def place(
    database: Database, connection: sa.Connection, attempts: Sequence[tuple[str, str]], now: float
) -> dict[str, str]:
    """Give attempts (rollout and attempt id) that were opened just now to the live gateways with the fewest; the URL of
    each. Empty where no gateway has announced itself. Where there is a choice, whoever places waits for the others."""
    has = sa.select(schema.gateways, _HAS.label("has")).where(_GATEWAYS.lease_expires_at >= now)
    rows = connection.execute(has).all()
    if not rows:
        return {}
    if len(rows) > 1:
        database.hold_name(connection, _PLACING)
        rows = connection.execute(has).all() or rows  # as whoever placed before left them
    live = {row.gateway_id: row for row in rows}
    queue = [(row.has, row.calls_in_flight, gateway_id) for gateway_id, row in live.items()]
    heapq.heapify(queue)
    placed, urls = [], {}
    for rollout_id, attempt_id in attempts:
        count, calls, gateway_id = queue[0]
        heapq.heapreplace(queue, (count + 1, calls, gateway_id))
        placed.append({"attempt_id": attempt_id, "rollout_id": rollout_id, "gateway_id": gateway_id})
        urls[attempt_id] = live[gateway_id].url
    connection.execute(sa.insert(schema.placements), placed)
    return urls


def urls(connection: sa.Connection, attempt_ids: Sequence[str]) -> dict[str, str]:
    """The URLs of the attempts' owners; those of which none is known are left out."""
    rows = connection.execute(_OWNED.where(_PLACEMENTS.attempt_id.in_(attempt_ids)))
    return {row.attempt_id: row.url for row in rows if row.url}


def leave(connection: sa.Connection, attempt_id: str) -> None:
    """The attempt has ended: nobody has it any more."""
    connection.execute(_LEAVE, {"left": attempt_id})


def _live(connection: sa.Connection, now: float) -> list[GatewayInfo]:
    columns = [_GATEWAYS[name] for name in GatewayInfo.__struct_fields__]
    rows = connection.execute(
        sa.select(*columns).where(_GATEWAYS.lease_expires_at >= now).order_by(_GATEWAYS.gateway_id)
    )
    return [GatewayInfo(**row._mapping) for row in rows]


def _owner(connection: sa.Connection, attempt_id: str, now: float) -> Owner | None:
    row: sa.Row[Any] | None = connection.execute(_OWNED.where(_PLACEMENTS.attempt_id == attempt_id)).one_or_none()
    if row is None:
        return None
    return Owner(
        gateway_id=row.gateway_id,
        url=row.url,
        live=row.lease_expires_at >= now,
        gone=row.lease_expires_at + APART_SECONDS < now,
        left=row.has_left,
    )
