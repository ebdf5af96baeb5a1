"""Operations on a database: each is one transaction, durable when it returns."""

import functools
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import msgspec
import sqlalchemy as sa

from lightning_rl.store import schema
from lightning_rl.store.contract import (
    Resources,
    Rollout,
)
from lightning_rl.store.gateways import Gateways
from lightning_rl.store.life_cycle import (
    ENDED,
    RolloutStatus,
    next_rollout_status,
)
from lightning_rl.store.upgrades import open_database

P = ParamSpec("P")
T = TypeVar("T")
_MOVE_ROLLOUT = (
    sa.update(schema.rollouts)
    .where(schema.rollouts.c.rollout_id == sa.bindparam("moved"))
    .values({name: sa.bindparam(name) for name in ("status", "ended_at", "claimable_at")})
)


S = TypeVar("S", bound="Transactions")


def writes(work: Callable[Concatenate[S, sa.Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """An operation of the store from its work in a transaction, whose connection its caller does not give."""

    @functools.wraps(work)
    def operation(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._database.write(lambda connection: work(self, connection, *args, **kwargs))

    return operation


def reads(work: Callable[Concatenate[S, sa.Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """`writes` for work that changes nothing."""

    @functools.wraps(work)
    def operation(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._database.read(lambda connection: work(self, connection, *args, **kwargs))

    return operation


class Transactions:
    """A database with its clock, and what every kind of operation needs of it."""

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

    def _read_secret(self, connection: sa.Connection) -> bytes:
        """The secret that signs attempt keys; made on the first call, the same ever after."""
        made = {"key": "secret", "value": secrets.token_hex(32)}
        self._database.insert_new(connection, schema.meta, [made])
        query = sa.select(schema.meta.c.value).where(schema.meta.c.key == "secret")
        return bytes.fromhex(connection.execute(query).scalar_one())

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


def steady_clock() -> Callable[[], float]:
    """Tells seconds since the epoch: by the machine's clock as it stands now, counted on steadily from there. Whoever
    sets that clock moves no lease and no deadline."""
    epoch = time.time() - time.monotonic()
    return lambda: epoch + time.monotonic()
