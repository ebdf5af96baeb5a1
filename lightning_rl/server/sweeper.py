"""Ends what nobody ends: attempts whose worker is gone or whose deadline is over.

Invariant: an attempt is sealed before it ends, so that its records are whole and its late calls are refused. Time in
which the gateway was paused counts against no deadline; time in which the store could not be written, against no
deadline and no lease.
"""

import asyncio
import logging
from collections.abc import Sequence

from sqlalchemy.exc import SQLAlchemyError

from lightning_rl.server.gateway import GatewayDoor, Pauses
from lightning_rl.server.signals import Signals
from lightning_rl.server.sql_thread import SqlThread
from lightning_rl.store.contract import Overdue, Rollout
from lightning_rl.store.errors import StoreUnwritable
from lightning_rl.store.life_cycle import ENDED
from lightning_rl.store.sql import SqlStore

_WHY = {
    "lease": "lease ran out",
    "deadline": "deadline has passed",
    "worker": "worker's process died",
    "session": "session ended",
}
_log = logging.getLogger(__name__)


class Sweeper:
    """Sweeps one store every `seconds`."""

    def __init__(
        self,
        store: SqlStore,
        sql: SqlThread,
        gateway: GatewayDoor,
        pauses: Pauses,
        signals: Signals,
        *,
        seconds: float,
    ) -> None:
        self._store = store
        self._sql = sql
        self._gateway = gateway
        self._pauses = pauses
        self._signals = signals
        self._seconds = seconds

    async def run(self) -> None:
        """Sweep until cancelled."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(self._seconds)
            now = loop.time()
            try:
                await self.sweep(now - before)
            except StoreUnwritable:
                continue  # it was told; all the time until it can be written again is made up for
            except SQLAlchemyError:
                _log.exception("the store could not be swept; trying again in %g s", self._seconds)
            before = now

    async def sweep(self, elapsed: float) -> None:
        """End what is overdue; `elapsed` seconds have passed since the last time."""
        if self._sql.unwritable:
            await self._sql.run(self._store.make_up, elapsed)
            self._sql.writable_again()
        elif self._pauses.any_paused():
            await self._sql.run(self._store.postpone, elapsed)
        await self.end(await self._sql.run(self._store.overdue))

    async def end(self, overdue: Sequence[Overdue]) -> list[Rollout]:
        """Seal these attempts and end those that still run; the rollouts that this moved."""
        if not overdue:
            return []
        for late in overdue:
            _log.warning("attempt %s of rollout %s is over: its %s", late.attempt_id, late.rollout_id, _WHY[late.why])
            await self._gateway.seal(late.rollout_id, late.attempt_id)
        moved = await self._sql.run(self._store.expire, overdue)
        self._signals.ended(rollout.rollout_id for rollout in moved if rollout.status in ENDED)
        if any(rollout.status == "queued" for rollout in moved):
            self._signals.queued()
        return moved
