"""What the routes work with: the parts of one server."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from prometheus_client.registry import Collector

from lightning_rl.control_plane.gateways.cluster_rpc import Alone
from lightning_rl.control_plane.gateways.engines import Engines
from lightning_rl.control_plane.gateways.gateway_control import GatewayDoor, Pauses
from lightning_rl.control_plane.gateways.notifications import Notifications
from lightning_rl.control_plane.gateways.runs import Runs
from lightning_rl.control_plane.gateways.server_info import ServerInfo
from lightning_rl.control_plane.routes.auth import Keys, RefusedKeys
from lightning_rl.control_plane.routes.claims import Claims
from lightning_rl.store.contract import Overdue, Rollout
from lightning_rl.store.life_cycle import ENDED
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_proxy.http.limits import RequestLimits


@dataclass(frozen=True, kw_only=True)
class Services:
    """The parts of one server.

    `end` seals running attempts and ends them; `collectors`: what else counts itself, for /metrics.
    """

    store: SqlStore
    sql: SqlThread
    keys: Keys
    signals: Notifications
    claims: Claims
    gateway: GatewayDoor
    pauses: Pauses
    engines: Engines
    together: Alone
    runs: Runs
    info: ServerInfo
    end: Callable[[Sequence[Overdue]], Awaitable[list[Rollout]]]
    limits: RequestLimits
    collectors: Sequence[Collector]
    started: asyncio.Event
    refused_keys: RefusedKeys = field(default_factory=RefusedKeys)

    def notify(self, moved: Iterable[Rollout]) -> None:
        """Wake those who wait for what these rollouts became."""
        by_status = {rollout.rollout_id: rollout.status for rollout in moved}
        self.signals.ended(rollout_id for rollout_id, status in by_status.items() if status in ENDED)
        if "queued" in by_status.values():
            self.signals.queued()


async def services(request: Request) -> Services:
    """The parts of the server that was asked."""
    parts: Services = request.app.state.services
    return parts


def address_of(request: Request) -> str:
    """Where a request came from."""
    return request.client.host if request.client else "an unknown address"


Server = Annotated[Services, Depends(services)]
