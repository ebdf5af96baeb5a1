"""Spans by OTLP over HTTP: `POST /v1/traces`, protobuf or JSON, as OpenTelemetry's exporters send them.

Invariants: nothing is done before a key was checked; spans are kept of open attempts alone, those of an attempt's key
of that attempt alone; no span is a reward, whoever sent it. Errors have OTLP's own form, and only what may be sent
again has a status that exporters send again.
"""

import asyncio
import zlib
from collections.abc import Callable, Mapping

from fastapi import APIRouter, Request, Response
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code
from google.rpc.status_pb2 import Status
from starlette.exceptions import HTTPException

from lightning_rl.control_plane.routes.route import ApiRoute
from lightning_rl.control_plane.routes.services import Server, Services
from lightning_rl.store.errors import StoreUnwritable
from lightning_rl.store.life_cycle import AttemptStatus
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters import otel
from lightning_rl_adapters.otel import NotOtlp, Rejected, SpanPlace
from lightning_rl_adapters.span import Span
from lightning_rl_proxy.http.keys import KeyRefused, verify_attempt_key

PATH = "/v1/traces"
_PROTOBUF, _JSON = "application/x-protobuf", "application/json"
_CODES = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    404: Code.NOT_FOUND,
    409: Code.FAILED_PRECONDITION,
    405: Code.INVALID_ARGUMENT,
    413: Code.INVALID_ARGUMENT,
    415: Code.INVALID_ARGUMENT,
    503: Code.UNAVAILABLE,
}
_GZIP = 31  # zlib's word for it
_DESCRIBED = {
    "requestBody": {"required": True, "content": {_PROTOBUF: {}, _JSON: {}}},
    "security": [{"admin_key": []}, {"runner_key": []}, {"bearer": []}],  # `bearer` is an attempt's
}
router = APIRouter(tags=["traces"], route_class=ApiRoute)


class _OtlpRefused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@router.api_route(PATH, methods=["GET", "POST"], openapi_extra=_DESCRIBED)
async def receive_spans(server: Server, request: Request) -> Response:
    """Keep the spans of open attempts. GET is refused here, so that without a key it is told no more than POST."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        rejected = await _take(server, request, kind)
    except _OtlpRefused as error:
        return _refusal(kind, error.status, str(error))
    except HTTPException as error:  # the body is over the limit
        return _refusal(kind, error.status_code, error.detail, error.headers)
    except StoreUnwritable as error:
        return _refusal(kind, 503, str(error), {"retry-after": "1"})
    return _answer(kind, 200, otel.response(rejected))


async def _take(server: Services, request: Request, kind: str) -> list[Rejected]:
    own = _own(server, request.headers.get("authorization", ""))
    if request.method != "POST":
        raise _OtlpRefused(405, "send spans by POST")
    if kind not in (_PROTOBUF, _JSON):
        raise _OtlpRefused(415, f"the content type is {kind!r}; send {_PROTOBUF} or {_JSON}")
    limits = server.limits
    unpack = _unpacker(request, limits.control_body_bytes if own is None else limits.body_bytes)
    body = await request.body()

    def read() -> tuple[list[Span], list[Rejected]]:
        decoded = otel.from_protobuf(unpack(body)) if kind == _PROTOBUF else otel.from_json(unpack(body))
        return otel.spans_of(decoded, emitted=own is None, own=own)

    try:
        spans, rejected = await asyncio.to_thread(read)
    except NotOtlp as error:
        raise _OtlpRefused(400, str(error)) from error
    return rejected + await server.sql.run(_keep, server.store, spans, own)


def _own(server: Services, authorization: str) -> SpanPlace | None:
    """The attempt whose key was sent; None for an admin's or a runner's. Raises _OtlpRefused."""
    if server.keys.role(authorization) is not None:
        return None
    scheme, _, key = authorization.partition(" ")
    try:
        opened = verify_attempt_key(server.store.secret, key.strip() if scheme.lower() == "bearer" else "")
    except KeyRefused as error:
        message = f"send an admin, a runner or an attempt's key as Authorization: Bearer ({error})"
        raise _OtlpRefused(401, message) from error
    return SpanPlace(opened.rollout_id, opened.attempt_id)


def _unpacker(request: Request, limit: int) -> Callable[[bytes], bytes]:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise _OtlpRefused(415, f"the content encoding is {encoding!r}; send gzip, or the body as it is")
    return lambda body: _within(body, limit) if encoding == "identity" else _unzipped(body, limit)


def _keep(store: SqlStore, spans: list[Span], own: SpanPlace | None) -> list[Rejected]:
    """In one piece in the store's thread: an attempt cannot end between the question and the answer."""
    places = {SpanPlace(span.rollout_id, span.attempt_id) for span in spans} | ({own} if own else set())
    statuses = store.statuses(sorted(places))
    closed = {place: _closed(place, statuses.get(place)) for place in places if statuses.get(place) != "running"}
    if own in closed:
        raise _OtlpRefused(*closed[own])
    why = {place: reason for place, (_, reason) in closed.items()}
    store.add_spans([span for span in spans if (span.rollout_id, span.attempt_id) not in why])
    return [
        Rejected(span.name, f"is of no open attempt: {why[place]}")
        for span in spans
        if (place := SpanPlace(span.rollout_id, span.attempt_id)) in why
    ]


def _closed(place: SpanPlace, status: AttemptStatus | None) -> tuple[int, str]:
    """The HTTP status and the words for an attempt that takes no more spans."""
    if status is None:
        return 404, f"there is no attempt {place.attempt_id} of rollout {place.rollout_id}"
    return 409, f"attempt {place.attempt_id} is closed: its rollout has ended or was retried"


def _within(body: bytes, limit: int) -> bytes:
    if len(body) > limit:
        raise _OtlpRefused(413, f"the request body is over {limit} bytes")
    return body


def _unzipped(body: bytes, limit: int) -> bytes:
    """The content of a gzip body, of which no more than the limit is ever unpacked."""
    packed = zlib.decompressobj(_GZIP)
    try:
        content = packed.decompress(body, limit + 1)
    except zlib.error as error:
        raise _OtlpRefused(400, f"the body is no gzip: {error}") from error
    if len(content) > limit:
        raise _OtlpRefused(413, f"the request body is over {limit} bytes when it is unpacked")
    if not packed.eof or packed.unused_data:
        raise _OtlpRefused(400, "the body's gzip is cut short, or something comes after it")
    return content


def _refusal(kind: str, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    answer = _answer(kind, status, Status(code=_CODES.get(status, Code.UNKNOWN), message=f"{PATH}: {message}"))
    answer.headers.update(headers or {})
    return answer


def _answer(kind: str, status: int, message: Message) -> Response:
    """In the form that was asked in."""
    if kind == _PROTOBUF:
        return Response(message.SerializeToString(), status, media_type=_PROTOBUF)
    return Response(json_format.MessageToJson(message, indent=None), status, media_type=_JSON)
