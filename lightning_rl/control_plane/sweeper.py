"""Acts though nobody calls: ends attempts whose worker is gone or whose deadline is over, and wakes the claims that
wait for a rollout whose pause before a retry is over.

Invariant: an attempt is sealed before it ends, so that its records are whole and its late calls are refused. Time in
which the gateway was paused counts against no deadline; time in which the store could not be written, or this process
stood still, against no deadline and no lease.
"""

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from lightning_rl.control_plane.gateways.gateway_control import GatewayDoor, Pauses
from lightning_rl.control_plane.gateways.membership import Membership
from lightning_rl.control_plane.gateways.notifications import Notifications
from lightning_rl.store.contract import Overdue, Rollout
from lightning_rl.store.errors import StoreUnwritable
from lightning_rl.store.life_cycle import ENDED
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread

_WHY = {
    "lease": "lease ran out",
    "deadline": "deadline has passed",
    "worker": "worker's process died",
    "session": "session ended",
    "server": "server is gone",
    "journal": "gateway's journal was damaged",
}
_LATE_SECONDS = 1.0  # a process that wakes later than that has stood still: stopped, swapped out, or kept from its core
_ASKED = 5  # times at most, while the store is busy for longer than that
_ORPHANED_SECONDS = 60.0  # for which another server's attempt is left to it
_log = logging.getLogger(__name__)


class Sweeper:
    """Sweeps one store every `seconds`."""

    def __init__(
        self,
        store: SqlStore,
        sql: SqlThread,
        gateway: GatewayDoor,
        pauses: Pauses,
        signals: Notifications,
        *,
        seconds: float,
        fleet: Membership | None = None,
    ) -> None:
        self._store = store
        self._sql = sql
        self._gateway = gateway
        self._pauses = pauses
        self._signals = signals
        self._seconds = seconds
        self._fleet = fleet

    async def run(self) -> None:
        """Sweep until cancelled."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            asleep = loop.time()
            await asyncio.sleep(self._seconds)
            now = loop.time()
            late = now - asleep - self._seconds
            try:
                await self.sweep(now - before, stood_still=late if late > _LATE_SECONDS else 0)
            except StoreUnwritable:
                continue  # it was told; all the time until it can be written again is made up for
            except Exception:  # noqa: BLE001 - whatever it is: without sweeps nothing here ends by itself any more
                _log.exception("the store could not be swept; trying again in %g s", self._seconds)
            before = now

    async def sweep(self, elapsed: float, *, stood_still: float = 0) -> None:
        """End what is overdue; `elapsed` seconds have passed since the last time, in `stood_still` of which this
        process took no heartbeat and answered no call."""
        if self._sql.unwritable:
            await self._sql.run(self._store.make_up, elapsed, gateway_id=self._own)
            self._sql.writable_again()
        else:
            await self._make_up(elapsed, stood_still)
        overdue = await self._not_calling(await self._overdue())
        if self._store.shared:
            overdue = await self._left_to_us(overdue)
            await self._tell_of_others()
        await self.end(overdue)
        await self._sql.run(self._store.merge_counts)
        # Twice as far back as need be: what was told of before wakes nobody for nothing but once.
        if self._signals.claims_wait and await self._sql.run(
            self._store.claimable, newly_seconds=None if self._store.shared else 2 * elapsed
        ):
            self._signals.queued()

    async def _overdue(self) -> Sequence[Overdue]:
        """What is overdue. Heartbeats that came while the store was busy stand in line behind the question: it is asked
        again behind them."""
        loop = asyncio.get_running_loop()
        for _ in range(_ASKED):
            start = loop.time()
            overdue = await self._sql.run(self._store.overdue)
            if not overdue or loop.time() - start <= _LATE_SECONDS:
                break
        return overdue

    async def _make_up(self, elapsed: float, stood_still: float) -> None:
        """Time in which calls waited, or this process took no heartbeats, does not count against a lease. Of several
        servers of a store each makes up for its own attempts."""
        parked = elapsed - stood_still if self._pauses.any_paused() else 0
        if stood_still:
            await self._sql.run(self._store.postpone, stood_still, lease_seconds=stood_still, gateway_id=self._own)
        if parked:
            await self._sql.run(self._store.postpone, parked, gateway_id=self._own)

    @property
    def _own(self) -> str | None:
        """By what the attempts of this server are known; None where all are."""
        return None if self._fleet is None else self._fleet.gateway_id

    async def _not_calling(self, overdue: Sequence[Overdue]) -> list[Overdue]:
        """Those of the overdue attempts that no call keeps: one renews the lease as a heartbeat does."""
        leases: dict[str, float] = {}
        for late in (late for late in overdue if late.why == "lease"):
            idle = self._gateway.idle_seconds(late.rollout_id, late.attempt_id)
            if idle is not None and idle < late.lease_seconds:
                leases[late.attempt_id] = late.lease_seconds - idle
        if leases:
            await self._sql.run(self._store.extend_leases, leases)
        return [late for late in overdue if late.attempt_id not in leases]

    async def _left_to_us(self, overdue: Sequence[Overdue]) -> list[Overdue]:
        """Those whose calls came in here, and those of gateways that are gone. Another server ends its own, since only
        that has all their records; when it has not done so for a while it is gone, and they with it."""
        names = set(self._gateway.held())
        lost: list[Overdue] = []
        if self._fleet is not None:
            lost = await self._fleet.abandoned()
            own_ids = await self._fleet.may_end(overdue)
            lost_ids = {late.attempt_id for late in lost}
            names |= {(e.rollout_id, e.attempt_id) for e in overdue if e.attempt_id in own_ids}
            overdue = [late for late in overdue if late.attempt_id not in lost_ids]
        orphaned = await self._sql.run(self._store.overdue, since_seconds=_ORPHANED_SECONDS)
        names_and_lost = names | {(late.rollout_id, late.attempt_id) for late in lost}
        lost += [
            msgspec.structs.replace(late, why="server")
            for late in orphaned
            if (late.rollout_id, late.attempt_id) not in names_and_lost
        ]
        return [late for late in overdue if (late.rollout_id, late.attempt_id) in names] + lost

    async def _tell_of_others(self) -> None:
        """What another server on the same database has done: wake those who wait for it, shut the doors of what it has
        ended."""
        if held := self._gateway.held():
            for rollout_id, attempt_id in await self._sql.run(self._store.closed, held):
                await self._gateway.seal(rollout_id, attempt_id)
            await self._release()
        if waited_for := self._signals.waited_for:
            ended = await self._sql.run(self._store.ended, waited_for)
            self._signals.ended(rollout.rollout_id for rollout in ended)

    async def _release(self) -> None:
        """Close the doors of attempts that others have taken, while nobody heard of this gateway."""
        if self._fleet is not None and self._fleet.lapsed:
            for rollout_id, attempt_id in await self._fleet.lost(self._gateway.held()):
                await self._gateway.release(rollout_id, attempt_id)
            self._fleet.lapsed = False

    async def end(self, overdue: Sequence[Overdue]) -> list[Rollout]:
        """Seal these attempts and end those that still run; the rollouts that this moved."""
        if not overdue:
            return []
        for late in overdue:
            _log.warning("attempt %s of rollout %s is over: its %s", late.attempt_id, late.rollout_id, _WHY[late.why])
            await self._gateway.seal(late.rollout_id, late.attempt_id)
        blamed = [
            msgspec.structs.replace(late, failure=self._gateway.failure_of(late.rollout_id, late.attempt_id))
            for late in overdue
        ]
        moved = await self._sql.run(self._store.expire, blamed)
        self._signals.ended(rollout.rollout_id for rollout in moved if rollout.status in ENDED)
        if any(rollout.status == "queued" for rollout in moved):
            self._signals.queued()
        return moved
