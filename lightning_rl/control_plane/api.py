"""The table of routes under /api/v1, and the document of everything that a server answers, in OpenAPI.

The gateway's doors are described by the gateway; FastAPI describes the rest, and msgspec what goes in and out of it.
"""

import copy
from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec
from fastapi import Response
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from lightning_rl.control_plane.routes import attempts, engines, gateways, resources, rollouts, runs, traces, workers
from lightning_rl.control_plane.routes.route import ApiRoute, ErrorAnswer, JsonBody, UrlQuery
from lightning_rl_proxy.http import openapi

# Where no route has the method, the first one of the path says which there are.
ROUTES: Sequence[ApiRoute] = [
    route
    for noun in (attempts, workers, traces, rollouts, resources, engines, runs, gateways)
    for route in noun.router.routes
    if isinstance(route, ApiRoute)
]
_SCHEMAS = "#/components/schemas/{name}"


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """The OpenAPI document of these routes and of the gateway's doors."""
    described = [_described(each) for each in routes if isinstance(each, ApiRoute) and each.include_in_schema]
    api = get_openapi(title="lightning_rl server", version="1", routes=described)
    shapes = list(dict.fromkeys(shape for route in described for shape in _shapes(route)))
    schemas, components = msgspec.json.schema_components([*shapes, ErrorAnswer], ref_template=_SCHEMAS)
    schema_of = dict(zip([*shapes, ErrorAnswer], schemas, strict=True))
    for route in described:
        [method] = route.methods
        _tell_shapes(api["paths"][route.path][method.lower()], route, schema_of, components)
    doors = openapi.document()
    for operation in (each for path in doors["paths"].values() for each in path.values()):
        operation.setdefault("security", doors["security"])
    api["paths"] |= doors["paths"]
    assert not components.keys() & doors["components"]["schemas"].keys(), "two types of one name"
    parts = api.setdefault("components", {})
    parts["schemas"] = components | doors["components"]["schemas"]
    parts.setdefault("securitySchemes", {}).update(doors["components"]["securitySchemes"])
    return api


def _described(route: ApiRoute) -> ApiRoute:
    """The route with the one method that it is for; HEAD is GET without a body, and OTLP's GET is refused."""
    twin = copy.copy(route)
    twin.methods = {"POST"} if "POST" in route.methods else route.methods - {"HEAD"}
    return twin


def _shapes(route: ApiRoute) -> list[Any]:
    shapes = [each.shape for kind in (JsonBody, UrlQuery) for each in route.dependencies_of(kind)]
    return shapes if route.answer is Response else [*shapes, route.answer]


def _tell_shapes(operation: dict[str, Any], route: ApiRoute, schema_of: dict[Any, Any], components: Any) -> None:
    """Add what msgspec knows to FastAPI's description of an operation."""
    for body in route.dependencies_of(JsonBody):
        operation["requestBody"] = {"required": True, "content": _json(schema_of[body.shape])}
    for query in route.dependencies_of(UrlQuery):
        for name, schema in components[query.shape.__name__]["properties"].items():
            operation.setdefault("parameters", []).append({"name": name, "in": "query", "schema": schema})
    responses = operation["responses"]
    responses.pop("422", None)  # what FastAPI would answer to a wrong parameter
    if route.answer is not Response:
        responses[str(route.status_code or 200)]["content"] = _json(schema_of[route.answer])
        responses["default"] = {"description": "An error", "content": _json(schema_of[ErrorAnswer])}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def page(api: dict[str, Any]) -> str:
    """The document's operations as a page, which loads nothing else."""
    rows = "".join(
        f"<tr><td>{method.upper()}</td><td><code>{escape(path)}</code></td><td>{escape(_about(operation))}</td></tr>"
        for path, operations in api["paths"].items()
        for method, operation in operations.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(api["info"]["title"])}</title>'
        f'<h1>{escape(api["info"]["title"])}</h1><p>All of it, with bodies and answers: <a href="/openapi.json">'
        f"/openapi.json</a></p><table>{rows}</table></html>"
    )


def _about(operation: dict[str, Any]) -> str:
    return str(operation.get("description") or operation.get("summary", ""))
