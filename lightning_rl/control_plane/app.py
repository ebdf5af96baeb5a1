"""Control plane and gateway as one ASGI application.

Invariant: what is under /api/v1, /v1/traces, /healthz, /readyz, /metrics, /openapi.json and /docs is the control
plane's, everything else the gateway's.
Both are open exactly while the application's lifespan runs; when it is over, the store holds every record.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from lightning_rl.control_plane import operations, otlp
from lightning_rl.control_plane.api import ROUTES
from lightning_rl.control_plane.gateways.cluster_rpc import Alone, Peers
from lightning_rl.control_plane.gateways.engines import EngineRequest, Engines
from lightning_rl.control_plane.gateways.gateway_control import GatewayDoor, Pauses, Receive, Scope, Send
from lightning_rl.control_plane.gateways.membership import Membership
from lightning_rl.control_plane.gateways.notifications import Notifications
from lightning_rl.control_plane.gateways.runs import Runs
from lightning_rl.control_plane.gateways.runs_elsewhere import RunsElsewhere
from lightning_rl.control_plane.gateways.server_info import ServerInfo
from lightning_rl.control_plane.limits import Bounded
from lightning_rl.control_plane.routes.auth import Keys
from lightning_rl.control_plane.routes.claims import Claims
from lightning_rl.control_plane.routes.route import error_response
from lightning_rl.control_plane.routes.services import Services
from lightning_rl.control_plane.sweeper import Sweeper
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_proxy.http.limits import RequestLimits

_KINDS = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 429: "rate_limited"}
# No spans and metrics of FastAPI's own, whatever OpenTelemetry is set to in this process; older versions have none,
# and ignore this.
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
_OURS = ("/api/v1/", otlp.PATH, *operations.PATHS)


class App:
    """The ASGI application of one server, and its engines.

    `release` lets its long polls answer at once, for a quick stop.
    """

    def __init__(self, control_plane: FastAPI, server: Services, life: "_Life") -> None:
        self._control_plane = control_plane
        self._gateway = server.gateway
        self._life = life
        self.engines = server.engines
        self.release = server.signals.close

    @property
    def start_error(self) -> Exception | None:
        """Why the lifespan did not begin."""
        return self._life.start_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] == "http" and not scope["path"].startswith(_OURS):
            await self._gateway(scope, receive, send)
        else:
            await self._control_plane(scope, receive, send)


def create_app(
    store: SqlStore,
    gateway: GatewayDoor,
    *,
    sql: SqlThread,
    keys: Keys,
    gateway_url: str,
    attach_engine: Callable[[EngineRequest], Awaitable[str]],
    info: ServerInfo,
    sweep_seconds: float = 1.0,
    limits: RequestLimits | None = None,
    collectors: Sequence[Collector] = (),
    fleet: Membership | None = None,
) -> App:
    """The application.

    Args:
        sql: the thread that all work on `store` runs in; the gateway's ledger shares it.
        gateway_url: where agents reach the gateway.
        attach_engine: makes the gateway use an engine; the name by which it knows it.
        info: what the server says of itself.
        collectors: what else counts itself, for /metrics.
        fleet: this gateway's part in a store that several servers share.
    """
    limits = limits or RequestLimits()
    engines = Engines(attach_engine, gateway)
    signals, pauses = Notifications(), Pauses(gateway, engines)
    together = Alone(gateway, pauses, engines)
    sweeper = Sweeper(store, sql, gateway, pauses, signals, seconds=sweep_seconds, fleet=fleet)
    elsewhere = None
    if fleet is not None:
        together = peers = Peers(gateway, pauses, engines, fleet, store.secret)
        elsewhere = RunsElsewhere(store, sql, pauses, peers, fleet, end=sweeper.end)
    server = Services(
        store=store,
        sql=sql,
        keys=keys,
        signals=signals,
        claims=Claims(
            store,
            sql,
            gateway,
            signals,
            gateway_url=gateway_url,
            placed_as=together.placed_as,
            open_attempts=limits.open_attempts,
        ),
        gateway=gateway,
        pauses=pauses,
        engines=engines,
        together=together,
        runs=Runs(store, sql, gateway, pauses, together, model=info.model, end=sweeper.end),
        info=info,
        end=sweeper.end,
        limits=limits,
        collectors=collectors,
        started=asyncio.Event(),
    )
    life = _Life(server, sweeper, fleet, elsewhere)
    control_plane = FastAPI(
        routes=[*otlp.router.routes, *ROUTES, *operations.router.routes],
        middleware=[Middleware(Bounded, limits=limits)],
        lifespan=life.lifespan,
        exception_handlers={HTTPException: _http_error, Exception: _unexpected},
        openapi_url=None,  # `operations` has the document, with what msgspec knows
        telemetry=_NO_TELEMETRY,
    )
    control_plane.state.services = server
    return App(control_plane, server, life)


class _Life:
    """How a server starts and stops."""

    def __init__(
        self, server: Services, sweeper: Sweeper, fleet: Membership | None, elsewhere: RunsElsewhere | None
    ) -> None:
        self._server = server
        self._elsewhere = elsewhere
        self._sweeper = sweeper
        self._fleet = fleet
        self._tasks: list[asyncio.Task[None]] = []
        self.start_error: Exception | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """From the start to the stop."""
        try:
            await self._start()
        except Exception as error:
            self.start_error = error
            raise
        self._tasks.append(asyncio.create_task(self._sweeper.run()))
        self._tasks.append(asyncio.create_task(self._server.runs.watch()))
        if self._elsewhere is not None:
            self._tasks.append(asyncio.create_task(self._elsewhere.watch()))
        self._server.started.set()
        try:
            yield
        finally:
            await self._stop()

    async def _start(self) -> None:
        store, sql, gateway, fleet = self._server.store, self._server.sql, self._server.gateway, self._fleet
        gateway_id = None if fleet is None else fleet.gateway_id
        await sql.run(store.renew_leases, gateway_id=gateway_id)
        await self._server.runs.restore()
        if fleet is not None:
            await fleet.join()
            self._tasks.append(asyncio.create_task(fleet.run(self._load)))
        await gateway.start()
        if gateway.journal_damaged:
            await self._sweeper.end(await sql.run(store.running, why="journal", gateway_id=gateway_id))
        else:
            for open_then in await sql.run(store.running, why="server", gateway_id=gateway_id):
                gateway.interrupted(open_then.rollout_id, open_then.attempt_id, "the server was started anew meanwhile")
        before = await sql.run(store.recorded_calls)
        gateway.restore(before.tokens, before.newest_ns)
        await self._server.together.adopt()

    async def _stop(self) -> None:
        gateway = self._server.gateway
        self._server.started.clear()
        for task in self._tasks:
            task.cancel()
        self._server.pauses.close()
        await gateway.stop()
        await self._server.together.close()
        if self._fleet is not None:
            # Whoever went on with an attempt would not know that records of it were given up here.
            whole = not any(gateway.is_lost(*name) for name in gateway.held())
            await self._fleet.leave(stored=whole and not gateway.state()["records_waiting"])

    def _load(self) -> tuple[int, int]:
        now = self._server.gateway.state()
        return now["open_attempts"], sum(model["in_flight"] for model in now["models"].values())


async def _http_error(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = error_response(error.status_code, _KINDS.get(error.status_code, "refused"), message)
    answer.headers.update(error.headers or {})
    return answer


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, so that the server's log has it whole.
    return error_response(500, "internal", f"{request.method} {request.url.path} failed: {error!r}; see server.log")
