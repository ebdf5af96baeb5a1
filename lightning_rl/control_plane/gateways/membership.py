"""This server's gateway among those of its store: its lease there, and which attempts are its own.

Invariants: no answer of a gateway waits for the store or for another gateway, or is refused because of them. So another
one goes on with its attempts only when it has stopped and says that the store has all its calls; where it is gone
otherwise they are tried again. Who did not reach the store, or has just begun, calls nobody gone before all others had
time to renew their leases: they may not have reached it either.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from lightning_rl.store.contract import GatewayInfo, Overdue, Owner
from lightning_rl.store.errors import StoreUnwritable
from lightning_rl.store.gateways import APART_SECONDS
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread

LEASE_SECONDS = 15.0
_EVERY_SECONDS = 1.0  # a lease is renewed
_log = logging.getLogger(__name__)

Name = tuple[str, str]  # of an attempt: rollout and attempt id


class Membership:
    """One gateway, `gateway_id`, that others reach at `url`."""

    def __init__(
        self,
        store: SqlStore,
        *,
        gateway_id: str,
        url: str,
        lease_seconds: float = LEASE_SECONDS,
        every_seconds: float = _EVERY_SECONDS,
    ) -> None:
        self.gateway_id = gateway_id
        self.others: list[GatewayInfo] = []
        self.lapsed = False  # whether the lease was over for a while, until it is looked what that meant
        self._gateways = store.gateways
        self._sql = SqlThread()  # of its own: a lease does not wait for other work
        self.url = url.rstrip("/")
        self._lease_seconds, self._every_seconds = lease_seconds, every_seconds
        self._until = 0.0  # the end of the lease, by the loop's clock
        self._heard_since = 0.0  # since when it has held without a break, by the same

    # The lease

    async def join(self) -> None:
        """Begin the lease. What an earlier session of this gateway had is this one's."""
        await self._renew(0, 0)

    async def run(self, load: Callable[[], tuple[int, int]]) -> None:
        """Renew the lease until cancelled. `load` are open attempts and calls in flight."""
        while True:
            try:
                await self._renew(*load())
            except StoreUnwritable:
                pass  # it was told; without the store the lease ends
            except Exception:  # noqa: BLE001 - whatever it is: without a lease all attempts here are lost
                _log.exception("the gateway's lease could not be renewed; trying again in %g s", self._every_seconds)
            await asyncio.sleep(self._every_seconds)

    async def leave(self, *, stored: bool) -> None:
        """The gateway has stopped. With all its calls `stored`, others go on with its attempts at once."""
        if stored:
            with contextlib.suppress(StoreUnwritable):
                await self._sql.run(self._gateways.leave, self.gateway_id)
        self._sql.close()

    async def _renew(self, open_attempts: int, calls_in_flight: int) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        info = GatewayInfo(
            gateway_id=self.gateway_id, url=self.url, open_attempts=open_attempts, calls_in_flight=calls_in_flight
        )
        self.others = await self._sql.run(self._gateways.announce, info, self._lease_seconds)
        self._sql.writable_again()
        if start > self._until:
            self._heard_since = loop.time()
            if self._until:
                self.lapsed = True
                _log.warning("the lease was over for %.1f s: its attempts may have been ended", start - self._until)
        self._until = start + self._lease_seconds

    # Whose an attempt is

    async def owner(self, attempt_id: str) -> Owner | None:
        """Who has a running attempt; None where nobody does."""
        return await self._sql.run(self._gateways.owner, attempt_id)

    async def take(self, rollout_id: str, attempt_id: str) -> Owner | None:
        """The owner of a running attempt, which is this gateway where that may be. None: it has ended."""
        return await self._sql.run(self._gateways.take, rollout_id, attempt_id, self.gateway_id)

    async def lost(self, held: Sequence[Name]) -> list[Name]:
        """Those of the attempts that are no longer this gateway's."""
        lost = await self._sql.run(self._gateways.lost, self.gateway_id, [attempt_id for _, attempt_id in held])
        return [name for name in held if name[1] in lost]

    @property
    def knows_who_is_gone(self) -> bool:
        """Whether others that live have had time to say so."""
        now = asyncio.get_running_loop().time()
        return now <= self._until and now - self._heard_since > self._lease_seconds + APART_SECONDS

    def may_be_gone(self, lease_left: float) -> bool:
        """Whether a gateway with so much of its lease left has missed two renewals, so that it may be gone."""
        return lease_left < self._lease_seconds - 2 * self._every_seconds - APART_SECONDS

    async def may_end(self, overdue: Sequence[Overdue]) -> set[str]:
        """The ids of those of the attempts that this gateway may end."""
        ids, of_gone = [late.attempt_id for late in overdue], self.knows_who_is_gone
        return await self._sql.run(self._gateways.may_end, self.gateway_id, ids, of_gone=of_gone) if ids else set()

    async def abandoned(self) -> list[Overdue]:
        """The attempts whose gateway is gone, perhaps with some of their calls."""
        return await self._sql.run(self._gateways.abandoned) if self.knows_who_is_gone else []

    async def live(self) -> list[GatewayInfo]:
        """All gateways that live."""
        return await self._sql.run(self._gateways.live)

    @property
    def sure(self) -> bool:
        """Whether what this gateway holds is its own."""
        return not self.lapsed and asyncio.get_running_loop().time() <= self._until
