"""The limits where no dialect is spoken: those of the control plane's requests.

Invariant: no client can make the server hold more of a request than its limits say, whatever it calls itself.
"""

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning_rl_proxy.http.limits import RequestLimits, announced_bytes, head_bytes


class Bounded:
    """An ASGI application whose requests keep to the limits; what is refused is an HTTPException in `app`."""

    def __init__(self, app: ASGIApp, limits: RequestLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced, long_head = announced_bytes(dict(scope["headers"])), head_bytes(scope) > self._limits.header_bytes
        size = 0

        async def bounded() -> Message:
            nonlocal size
            self._check_body(announced)
            message = await receive()
            size += len(message.get("body", b""))
            self._check_body(size)
            return message

        if long_head:
            status, headers, body = head_refused(self._limits.header_bytes)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            return await send({"type": "http.response.body", "body": body})
        return await self._app(scope, bounded, send)

    def _check_body(self, size: int) -> None:
        if size > (limit := self._limits.control_body_bytes):
            raise HTTPException(413, f"the request body is over {limit} bytes", {"x-should-retry": "false"})


def head_refused(limit: int) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of the answer to a head of more bytes."""
    error: dict[str, Any] = {"type": "headers_too_large", "message": f"the request's head is over {limit} bytes"}
    body = msgspec.json.encode({"error": error})
    length = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"x-should-retry", b"false")]
    return 431, headers, body
