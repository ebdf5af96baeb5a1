"""Control plane and gateway as one ASGI application.

Invariant: what is under /api/v1, /v1/traces, /healthz, /readyz and /metrics is the control plane's, everything else the
gateway's.
Both are open exactly while the application's lifespan runs; when it is over, the store holds every record.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_rl.control_plane import metrics, otlp, readiness
from lightning_rl.control_plane.api import ControlPlane, encoded, error_response
from lightning_rl.control_plane.auth import Keys
from lightning_rl.control_plane.gateways.admission import Admission
from lightning_rl.control_plane.gateways.cluster_rpc import Alone, Peers
from lightning_rl.control_plane.gateways.engines import EngineRequest, Engines
from lightning_rl.control_plane.gateways.gateway_control import GatewayDoor, Pauses, Receive, Scope, Send
from lightning_rl.control_plane.gateways.membership import Membership
from lightning_rl.control_plane.gateways.notifications import Notifications
from lightning_rl.control_plane.limits import Bounded
from lightning_rl.control_plane.sweeper import Sweeper
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_proxy.http.limits import RequestLimits

_KINDS = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 429: "rate_limited"}
_OURS = ("/api/v1/", otlp.PATH, "/healthz", "/readyz", "/metrics")


class App:
    """The ASGI application of one server, and its engines.

    `release` lets its long polls answer at once, for a quick stop.
    """

    def __init__(
        self, control_plane: Starlette, gateway: GatewayDoor, signals: Notifications, engines: Engines
    ) -> None:
        self._control_plane = control_plane
        self._gateway = gateway
        self.engines = engines
        self.release = signals.close
        self.start_error: Exception | None = None  # why the lifespan did not begin

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
    sweep_seconds: float = 1.0,
    session: bool = False,
    limits: RequestLimits | None = None,
    collectors: Sequence[Collector] = (),
    fleet: Membership | None = None,
) -> App:
    """The application.

    Args:
        sql: the thread that all work on `store` runs in; the gateway's ledger shares it.
        gateway_url: where agents reach the gateway.
        attach_engine: makes the gateway use an engine; the name by which it knows it.
        session: one process asks for all rollouts, and this server ends with it. What an earlier one left running is
            lost at once, whoever works on it; what it left queued is claimed when it is asked for again, and not
            before: other weights would sample it.
        collectors: what else counts itself, for /metrics.
        fleet: this gateway's part in a store that several servers share.
    """
    limits = limits or RequestLimits()
    signals, pauses = Notifications(), Pauses(gateway)
    known = Engines(attach_engine, gateway)
    together = Alone(gateway, pauses) if fleet is None else Peers(gateway, pauses, fleet, store.secret)
    sweeper = Sweeper(store, sql, gateway, pauses, signals, seconds=sweep_seconds, fleet=fleet)
    control_plane = ControlPlane(
        store=store,
        sql=sql,
        signals=signals,
        admission=Admission(gateway, signals),
        gateway=gateway,
        pauses=pauses,
        engines=known,
        sweeper=sweeper,
        keys=keys,
        gateway_url=gateway_url,
        together=together,
        limits=limits,
    )
    traces = otlp.Traces(store=store, sql=sql, keys=keys, limits=limits)
    ready = asyncio.Event()
    at_work: list[asyncio.Task[None]] = []

    async def start() -> None:
        if not session:
            await sql.run(store.renew_leases)
        if fleet is not None:
            await fleet.join()
            at_work.append(asyncio.create_task(fleet.run(load, gateway.held, gateway.settle)))
        await gateway.start()
        gateway_id = None if fleet is None else fleet.gateway_id
        if gateway.journal_damaged:
            await sweeper.end(await sql.run(store.running, why="journal", gateway_id=gateway_id))
        elif not session:
            for open_then in await sql.run(store.running, why="server", gateway_id=gateway_id):
                gateway.interrupted(open_then.rollout_id, open_then.attempt_id, "the server was started anew meanwhile")
        if fleet is not None:
            await fleet.ready()
        before = await sql.run(store.recorded_calls)
        gateway.restore(before.tokens, before.newest_ns)
        await together.adopt()
        if session:
            await sweeper.end(await sql.run(store.running, why="session"))
            await sql.run(store.shelve)

    def load() -> tuple[int, int]:
        now = gateway.state()
        return now["open_attempts"], sum(model["in_flight"] for model in now["models"].values())

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        try:
            await start()
        except Exception as error:
            application.start_error = error
            raise
        at_work.append(asyncio.create_task(sweeper.run()))
        ready.set()
        try:
            yield
        finally:
            ready.clear()
            for task in at_work:
                task.cancel()
            pauses.close()
            await gateway.stop()
            await together.close()
            if fleet is not None:
                await fleet.leave(stored=not gateway.state()["records_waiting"])

    async def healthz(request: Request) -> Response:
        return encoded(request, 200, {"status": "ok"})

    async def readyz(request: Request) -> Response:
        recording, engines_now = await gateway.check()
        found = readiness.checks(
            started=ready.is_set(), store_writable=not sql.unwritable, recording=recording, engines=engines_now
        )
        well = readiness.is_ready(found)
        return encoded(request, 200 if well else 503, {"status": "ready" if well else "not ready", "checks": found})

    async def metrics_page(request: Request) -> Response:
        if keys.role(request.headers.get("authorization", "")) != "admin":
            return error_response(401, "unauthorized", "send the admin key as Authorization: Bearer")
        now = gateway.state() | {"claims_held_back": signals.held_back}
        page = metrics.page(now, await sql.run(store.counts), [*gateway.timings, *collectors])
        return Response(page, media_type=metrics.CONTENT_TYPE)

    app = Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics_page),
            traces.route(),
            *control_plane.routes(),
        ],
        middleware=[Middleware(Bounded, limits=limits)],
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error, Exception: _unexpected},
    )
    application = App(app, gateway, signals, known)
    return application


async def _http_error(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = error_response(error.status_code, _KINDS.get(error.status_code, "refused"), message)
    answer.headers.update(error.headers or {})
    return answer


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, so that the server's log has it whole.
    return error_response(500, "internal", f"{request.method} {request.url.path} failed: {error!r}; see server.log")
