"""What a server says of itself at its root: whether it lives and can work, what it counts, which routes it has."""

import functools
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from lightning_rl.control_plane import metrics, otlp, readiness
from lightning_rl.control_plane.api import ROUTES, document, page
from lightning_rl.control_plane.routes.route import ApiRoute, encoded, error_response
from lightning_rl.control_plane.routes.services import Server, address_of

PATHS = ("/healthz", "/readyz", "/metrics", "/openapi.json", "/docs")
router = APIRouter(tags=["operations"], route_class=ApiRoute)


class Health(msgspec.Struct, frozen=True):
    """That the server answers."""

    status: str


@router.get("/healthz")
async def get_health() -> Health:
    """200 while the process answers."""
    return Health("ok")


@router.get("/readyz")
async def get_readiness(server: Server, request: Request) -> Response:
    """200 while all parts can work, else 503; `checks` names each part."""
    recording, engines = await server.gateway.check()
    checks = readiness.checks(
        started=server.started.is_set(),
        store_writable=not server.sql.unwritable,
        recording=recording,
        engines=engines,
    )
    ready = readiness.is_ready(checks)
    return encoded(request, 200 if ready else 503, {"status": "ready" if ready else "not ready", "checks": checks})


@router.get("/metrics", response_class=PlainTextResponse, openapi_extra={"security": [{"admin_key": []}]})
async def get_metrics(server: Server, request: Request) -> Response:
    """What the server counts, as Prometheus reads it."""
    if server.keys.role(request.headers.get("authorization", "")) != "admin":
        server.refused_keys.add("GET /metrics", address_of(request))
        return error_response(401, "unauthorized", "send the admin key as Authorization: Bearer")
    state = server.gateway.state() | {"claims_held_back": server.signals.held_back}
    counts = await server.sql.run(server.store.counts)
    text = metrics.page(state, counts, [*server.gateway.timings, server.refused_keys.counter, *server.collectors])
    return Response(text, media_type=metrics.CONTENT_TYPE)


@router.get("/openapi.json", include_in_schema=False)
async def get_document() -> dict[str, Any]:
    """The document of every route and of the gateway's doors."""
    return _document()


@router.get("/docs", include_in_schema=False)
async def get_docs_page() -> Response:
    """The document's routes as a page, which loads nothing."""
    return Response(page(_document()), media_type="text/html")


@functools.cache
def _document() -> dict[str, Any]:
    return document([*router.routes, *otlp.router.routes, *ROUTES])
