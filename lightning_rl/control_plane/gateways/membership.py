"""This server's gateway among those of its store: its lease there, its notes of calls, and which attempts are its own.

Invariants: while others live, the store hears that it may lack a call of an attempt before that call's answer ends, so
whoever takes an attempt over has all of it; and a gateway whose lease may be over answers nothing, since others may
have its attempts. A gateway that is alone notes nothing, so nobody goes on with its attempts: no answer of it waits for
the store, or is refused because of it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence

from lightning_rl.store.contract import GatewayInfo, Overdue, Owner
from lightning_rl.store.errors import StoreUnwritable
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_proxy.errors import fenced

LEASE_SECONDS = 15.0
_EVERY_SECONDS = 1.0  # a lease is renewed
_GATHER_SECONDS = 0.2  # in which word of stored calls waits for more of it
_AGAIN_SECONDS = 0.1  # after which a store that failed is asked again
_log = logging.getLogger(__name__)

Name = tuple[str, str]  # of an attempt: rollout and attempt id


class Membership:
    """One gateway, `gateway_id`, that others reach at `url`. It is the gateway's `Notes`."""

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
        self._noting = False
        self._first: list[asyncio.Future[None]] = []  # the notes of what was open when others came
        self._noted: set[Name] = set()
        self._to_note: dict[Name, asyncio.Future[None]] = {}  # also what the store is being told now
        self._to_clear: set[Name] = set()
        self._word = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    # The lease

    async def join(self) -> None:
        """Begin the lease. What an earlier session of this gateway had is this one's."""
        await self._renew(0, 0)
        self._writing = asyncio.create_task(self._write())

    async def ready(self) -> None:
        """The journal of an earlier session is in the store, so that lacks none of its calls."""
        await self._sql.run(self._gateways.stored_all, self.gateway_id)

    async def run(
        self,
        load: Callable[[], tuple[int, int]],
        held: Callable[[], Sequence[Name]],
        settle: Callable[[Iterable[Name]], None],
    ) -> None:
        """Renew the lease until cancelled. `load` are open attempts and calls in flight, `held` the open attempts;
        `settle` looks which of some attempts the store has all calls of."""
        while True:
            with contextlib.suppress(StoreUnwritable):  # it was told; without the store the lease ends
                before = self.others
                await self._renew(*load())
                if self.others and not self._noting:
                    self._noting = True
                    self._first = [self._note(name) for name in held()]
                elif not self.others and not before and not self.lapsed:  # so the store was told that nothing is noted
                    self._noting = False
            settle(list(self._noted))
            await asyncio.sleep(self._every_seconds)

    async def leave(self, *, stored: bool) -> None:
        """The gateway has stopped. With all its calls `stored`, others go on with its attempts at once."""
        if self._writing is not None:
            self._writing.cancel()
        if stored:
            with contextlib.suppress(StoreUnwritable):
                await self._sql.run(self._gateways.leave, self.gateway_id)
        self._sql.close()

    async def _renew(self, open_attempts: int, calls_in_flight: int) -> None:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        # True once the notes cover every attempt that was open when other gateways joined. False again one round
        # before notes are no longer written.
        notes = self._noting and bool(self.others) and all(known.done() for known in self._first)
        info = GatewayInfo(
            gateway_id=self.gateway_id,
            url=self.url,
            open_attempts=open_attempts,
            calls_in_flight=calls_in_flight,
            notes_calls=notes,
        )
        self.others = await self._sql.run(self._gateways.announce, info, self._lease_seconds)
        self._sql.writable_again()
        if self._until and asked > self._until:
            self.lapsed = True
            what = "other gateways may have its attempts" if self._noting else "its attempts may have been ended"
            _log.warning("the lease was over for %.1f s: %s", asked - self._until, what)
        self._until = asked + self._lease_seconds

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

    async def may_end(self, overdue: Sequence[Overdue]) -> set[str]:
        """The ids of those of the attempts that this gateway may end."""
        ids = [late.attempt_id for late in overdue]
        return await self._sql.run(self._gateways.may_end, self.gateway_id, ids) if ids else set()

    async def abandoned(self) -> list[Overdue]:
        """The attempts whose gateway is gone, perhaps with some of their calls."""
        return await self._sql.run(self._gateways.abandoned)

    async def live(self) -> list[GatewayInfo]:
        """All gateways that live."""
        return await self._sql.run(self._gateways.live)

    # Notes, for the gateway

    @property
    def sure(self) -> bool:
        """Whether what this gateway holds is its own."""
        return not self.lapsed and asyncio.get_running_loop().time() <= self._until

    def check(self) -> None:
        """Raises GatewayError(503) while others may have what this gateway holds: not where it notes nothing."""
        if self._noting and not self.sure:
            raise fenced()

    async def begin(self, rollout_id: str, attempt_id: str) -> None:
        """See `Notes`. It waits for no longer than the lease, whether the store refuses or says nothing."""
        if not self._noting:
            return
        known = self._note((rollout_id, attempt_id))
        while not known.done():
            left = self._until - asyncio.get_running_loop().time()
            if left < 0:
                raise fenced()
            await asyncio.wait([known], timeout=left)
        known.result()

    def settle(self, attempts: Iterable[Name]) -> None:
        """See `Notes`."""
        known = self._noted.intersection(attempts)
        if known:
            self._noted -= known
            self._to_clear |= known
            self._word.set()

    def _note(self, name: Name) -> "asyncio.Future[None]":
        """Done when the store knows that it may lack calls of the attempt."""
        if name in self._to_note:
            return self._to_note[name]
        known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if name in self._noted or name in self._to_clear:
            self._to_clear.discard(name)
            self._noted.add(name)
            known.set_result(None)
        else:
            known.add_done_callback(_seen)
            self._to_note[name] = known
            self._word.set()
        return known

    async def _write(self) -> None:
        """Tell the store, until cancelled; as much at once as came while it was told the last time."""
        while True:
            await self._word.wait()
            if not self._to_note:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GATHER_SECONDS):
                        await self._until_a_note()
            self._word.clear()
            noted = list(self._to_note)
            cleared, self._to_clear = self._to_clear, set()
            try:
                own = await self._sql.run(
                    self._gateways.note, self.gateway_id, {name[1] for name in noted}, {name[1] for name in cleared}
                )
            except StoreUnwritable:
                self._to_clear |= cleared - set(self._to_note)
                self._word.set()
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            for name in noted:
                self._answer(name, well=name[1] in own)

    async def _until_a_note(self) -> None:
        while not self._to_note:
            self._word.clear()
            await self._word.wait()

    def _answer(self, name: Name, *, well: bool) -> None:
        known = self._to_note.pop(name)
        if well:
            self._noted.add(name)
            known.set_result(None)
        else:
            known.set_exception(fenced())


def _seen(known: "asyncio.Future[None]") -> None:
    known.exception()  # who waits for it hears of it too; of some nobody waits
