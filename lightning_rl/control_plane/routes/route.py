"""A FastAPI route whose bodies and answers are msgspec's: JSON in, JSON or MessagePack out.

Invariants: no request does anything before its key was checked and its body decoded by type; every error says what is
wrong with which thing.
"""

from collections.abc import Awaitable, Callable
from inspect import signature
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from lightning_rl.store.errors import Conflict, Invalid, NotFound, StoreError, StoreUnwritable

MSGPACK = "application/msgpack"
_STATUS: dict[type[StoreError], tuple[int, str]] = {
    Invalid: (400, "invalid_request"),
    NotFound: (404, "not_found"),
    Conflict: (409, "conflict"),
    StoreUnwritable: (507, "store_unwritable"),
}


class ErrorDetail(msgspec.Struct, frozen=True):
    """What is wrong."""

    type: str
    message: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every answer of 400 and above."""

    error: ErrorDetail


class Refused(Exception):
    """The request is answered with this status."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class JsonBody:
    """A dependency: the body, decoded as `shape`."""

    def __init__(self, shape: type) -> None:
        self.shape = shape

    async def __call__(self, request: Request) -> Any:
        """The body; none at all is an empty object."""
        return msgspec.json.decode(await request.body() or b"{}", type=self.shape)


class UrlQuery:
    """A dependency: the URL's query, converted to the struct `shape`."""

    def __init__(self, shape: type[msgspec.Struct]) -> None:
        self.shape = shape

    async def __call__(self, request: Request) -> Any:
        """The query; of a name that comes twice the last."""
        return msgspec.convert(dict(request.query_params), self.shape, strict=False)


class ApiRoute(APIRoute):
    """A route whose dependencies each take the request alone, and whose endpoint returns what msgspec encodes.

    FastAPI reads the signature for the document. It does not run the dependencies: its own handler solves their tree
    anew for each request and validates every value, which takes 60 to 140 us more than all else here.
    """

    methods: set[str]

    def __init__(self, path: str, endpoint: Callable[..., Awaitable[Any]], **options: Any) -> None:
        self.answer = signature(endpoint).return_annotation
        super().__init__(path, endpoint, **options | {"response_model": None, "operation_id": endpoint.__name__})
        if self.dependant.query_params or self.dependant.body_params:
            raise TypeError(f"{path}: an endpoint takes its query as UrlQuery and its body as JsonBody")
        if "GET" in self.methods:
            self.methods.add("HEAD")

    def dependencies_of(self, kind: type) -> list[Any]:
        """The dependencies of this class."""
        return [each.call for each in self.dependant.dependencies if isinstance(each.call, kind)]

    def get_route_handler(self) -> Callable[[Request], Any]:
        """The handler: checks the key, decodes, calls the endpoint, encodes; errors become answers."""
        endpoint, status = self.endpoint, self.status_code or 200
        dependencies = [(each.name, each.call) for each in self.dependant.dependencies]
        takes_request = self.dependant.request_param_name

        async def answered(request: Request) -> Any:
            values: dict[str, Any] = dict(request.path_params)
            for name, dependency in dependencies:
                value = await dependency(request)  # type: ignore[misc]
                if name is not None:
                    values[name] = value
            if takes_request is not None:
                values[takes_request] = request
            return await endpoint(**values)

        async def handle(request: Request) -> Response:
            try:
                answer = await answered(request)
            except Refused as error:
                return error_response(error.status, error.kind, str(error))
            except StoreError as error:
                return error_response(*_STATUS[type(error)], str(error))
            except msgspec.ValidationError as error:
                return error_response(400, "invalid_request", _where(request) + str(error))
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                return error_response(400, "invalid_request", f"{_where(request)}the body is no JSON: {error}")
            except ClientDisconnect:  # a runner that was killed, say; nobody reads the answer
                return error_response(400, "invalid_request", f"{_where(request)}its client left")
            return answer if isinstance(answer, Response) else encoded(request, status, answer)

        return handle


def error_response(status: int, kind: str, message: str) -> Response:
    """`{"error": {"type", "message"}}`."""
    body = msgspec.json.encode(ErrorAnswer(ErrorDetail(kind, message)))
    return Response(body, status, media_type="application/json")


def encoded(request: Request, status: int, answer: Any) -> Response:
    """The answer in the form that the client accepts."""
    if wants_msgpack(request):
        return Response(msgspec.msgpack.encode(answer), status, media_type=MSGPACK)
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def wants_msgpack(request: Request) -> bool:
    """Whether the client accepts MessagePack."""
    return request.headers.get("accept") == MSGPACK


def _where(request: Request) -> str:
    rollout_id = request.path_params.get("rollout_id")
    return f"rollout {rollout_id}: " if rollout_id else ""
