"""How queued rollouts are handed to workers: when there is one, when the engines bear one more, each once."""

import asyncio
import math
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException

from lightning_rl.control_plane.gateways.admission import Admission
from lightning_rl.control_plane.gateways.gateway_control import GatewayDoor
from lightning_rl.control_plane.gateways.notifications import Notifications
from lightning_rl.control_plane.gateways.resolve import resolve
from lightning_rl.control_plane.gateways.store_ledger import claimed_info
from lightning_rl.control_plane.routes.requests import ClaimBody
from lightning_rl.store.contract import Claim
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread

_CLAIMS_REMEMBERED = 1024


class Claims:
    """The claims of one server.

    Args:
        gateway_url: where agents reach the gateway.
        placed_as: the URL that claims name for attempts of this gateway, among several.
        open_attempts: at which nothing more is handed out.
    """

    def __init__(
        self,
        store: SqlStore,
        sql: SqlThread,
        gateway: GatewayDoor,
        signals: Notifications,
        *,
        gateway_url: str,
        placed_as: str | None,
        open_attempts: int,
    ) -> None:
        self._store = store
        self._sql = sql
        self._gateway = gateway
        self._signals = signals
        self._admission = Admission(gateway, signals)
        self._gateway_url = gateway_url.rstrip("/")
        self._placed_as = placed_as
        self._open_attempts = open_attempts
        self._answered: dict[str, None] = {}  # the latest claims, by id
        self.waiting = 0

    def check_open_attempts(self) -> None:
        """Raises HTTPException(429) where the server holds as many attempts as it may.

        A claim of several may go over the limit, by what it asks for.
        """
        there = self._gateway.load().open_attempts
        if there >= self._open_attempts:
            message = f"{there} attempts are open here, and no more may be: wait until some have ended"
            raise HTTPException(429, message, {"retry-after": "1", "x-should-retry": "true"})

    def hand_out(self, claim: Claim) -> Claim:
        """The claim as its worker gets it; the gateway hears of the attempt before the agent can call."""
        if claim.attempt.status == "running" and claim.gateway_url == self._placed_as:
            self._gateway.open(claimed_info(claim))
        return resolve(claim, self._gateway_url, self._store.secret)

    async def claim(self, body: ClaimBody, has_left: Callable[[], Awaitable[bool]]) -> list[Claim]:
        """What there is to claim, as soon as there is something and room for it, or the time is up.

        `has_left` says whether the worker has left meanwhile.
        """
        self.waiting += 1
        try:
            return await self._claim(body, has_left)
        finally:
            self.waiting -= 1

    async def _claim(self, body: ClaimBody, has_left: Callable[[], Awaitable[bool]]) -> list[Claim]:
        loop = asyncio.get_running_loop()
        end = loop.time() + body.wait_seconds
        while True:
            self.check_open_attempts()
            queued = self._signals.next_queued()
            # What was handed out already is asked for again where its answer was lost.
            room = math.inf if body.claim_id in self._answered else self._admission.room()
            claims = await self._take(body, room) if room else []
            remaining = end - loop.time()
            if claims or remaining <= 0 or self._signals.closing:
                return claims
            if room:
                await asyncio.wait([queued], timeout=remaining)
            else:
                with self._signals.next_room(body.limit) as turn:
                    await asyncio.wait([turn], timeout=remaining)
            # A worker that left while it waited must not be given a rollout.
            if await has_left():
                self._admission.capacity_freed()  # its turn is another's
                return []

    async def _take(self, body: ClaimBody, room: float) -> list[Claim]:
        """Queued rollouts, if there are any, handed out: as many as there is room for."""
        with self._admission.handing_out(int(min(body.limit, room))):
            claims = await self._sql.run(
                self._store.claim,
                body.worker_id,
                agents=body.agents,
                limit=body.limit,
                claim_id=body.claim_id,
                room=room,
            )
            if claims and body.claim_id is not None:
                self._answered[body.claim_id] = None
                if len(self._answered) > _CLAIMS_REMEMBERED:
                    del self._answered[next(iter(self._answered))]
            return [self.hand_out(claim) for claim in claims]
