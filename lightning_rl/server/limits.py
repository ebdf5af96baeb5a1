"""The limits where no dialect is spoken: a request's head while it still comes in, and the control plane's bodies.

Invariant: no client can make the server hold more of a request than its limits say, whatever it calls itself.
"""

import asyncio
from typing import Any, cast

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lightning_rl.server.one_write import OneWrite
from lightning_rl_proxy.limits import Limits, announced_bytes, head_bytes


def try_later(message: str) -> HTTPException:
    """429: the server is full now, and the same request may be answered in a moment."""
    return HTTPException(429, message, {"retry-after": "1", "x-should-retry": "true"})


class Bounded:
    """An ASGI application whose requests keep to the limits; what is refused is an HTTPException in `app`."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
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
            status, headers, body = _head_refused(self._limits.header_bytes)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            return await send({"type": "http.response.body", "body": body})
        return await self._app(scope, bounded, send)

    def _check_body(self, size: int) -> None:
        if size > (limit := self._limits.control_body_bytes):
            raise HTTPException(413, f"the request body is over {limit} bytes", {"x-should-retry": "false"})


def protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """uvicorn's HTTP, with answers in one write, which closes a connection whose request's head does not end within the
    limit.

    A head that came whole is the application's to refuse, in words that its client knows: here it is given the size of
    one read more.
    """

    class BoundedHead(HttpToolsProtocol):
        _in_head = False
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(cast(asyncio.Transport, OneWrite(transport, self.loop)))

        def on_message_begin(self) -> None:
            self._in_head, self._head_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head_bytes += len(data)
            super().data_received(data)
            if self._in_head and self._head_bytes > limits.header_bytes and not self.transport.is_closing():
                status, headers, body = _head_refused(limits.header_bytes)
                lines = [b"HTTP/1.1 %d Request Header Fields Too Large" % status]
                lines += [name + b": " + value for name, value in [*headers, (b"connection", b"close")]]
                self.transport.write(b"\r\n".join([*lines, b"", body]))
                self.transport.close()

    return BoundedHead


def _head_refused(limit: int) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    told: dict[str, Any] = {"type": "headers_too_large", "message": f"the request's head is over {limit} bytes"}
    body = msgspec.json.encode({"error": told})
    length = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"x-should-retry", b"false")]
    return 431, headers, body
