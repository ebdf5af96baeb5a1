"""uvicorn's HTTP, as this server wants it: heads within the limit, word of clients that leave, no connection held by
who sends its request too slowly."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lightning_rl.control_plane.limits import head_refused
from lightning_rl_proxy.gateway import GONE
from lightning_rl_proxy.http.limits import RequestLimits

_LOOK_SECONDS = 0.5  # between two looks at the connections that send


class BoundedHttp(HttpToolsProtocol):
    """One connection: it tells the gateway when its client leaves, and closes where a request's head does not end
    within the limits of bytes and time, or a body stops coming.

    A head that came whole is the application's to refuse, in words that its client knows: here it is given the size of
    one read more.
    """

    # Of the server, set by `protocol`.
    limits: RequestLimits
    receiving: "set[BoundedHttp]"  # the connections whose request has begun, and is not whole

    _in_head = False
    _head_bytes = 0
    _since = 0.0  # the head began, or the last bytes of the body came

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._gone = self.loop.create_future()
        self._in_head = True
        self._begin_to_receive()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.receiving.discard(self)
        if not self._gone.done():  # whoever waited for it itself may have cancelled it
            self._gone.set_result(None)

    def on_message_begin(self) -> None:
        if not self._in_head:  # another request on the same connection
            self._begin_to_receive()
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()
        self.scope["extensions"] = {GONE: self._gone}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._in_head, self._since = False, self.loop.time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.receiving.discard(self)
        if not self.pipeline:  # a long body may have stopped the reading, by which a client is seen to leave
            self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._since = self.loop.time()
        super().data_received(data)
        if self._in_head and self._head_bytes > self.limits.header_bytes and not self.transport.is_closing():
            status, headers, body = head_refused(self.limits.header_bytes)
            lines = [b"HTTP/1.1 %d Request Header Fields Too Large" % status]
            lines += [name + b": " + value for name, value in [*headers, (b"connection", b"close")]]
            self.transport.write(b"\r\n".join([*lines, b"", body]))
            self.transport.close()

    def _begin_to_receive(self) -> None:
        self._since = self.loop.time()
        if not self.receiving:
            self.loop.call_later(_LOOK_SECONDS, _close_stalled, self.receiving)
        self.receiving.add(self)

    def close_if_stalled(self) -> None:
        """Close the connection where nothing more comes of a request that has begun."""
        waited = self.loop.time() - self._since
        late = waited > (self.limits.head_seconds if self._in_head else self.limits.body_seconds)
        if late and not self.flow.read_paused:
            self.receiving.discard(self)
            self.transport.close()


def protocol(limits: RequestLimits) -> type[BoundedHttp]:
    """The connections of one server."""
    return type("ServerHttp", (BoundedHttp,), {"limits": limits, "receiving": set()})


def _close_stalled(receiving: set[BoundedHttp]) -> None:
    """Close what came to a stand; again as long as there is anything that may."""
    for connection in list(receiving):
        connection.close_if_stalled()
    if receiving:
        next(iter(receiving)).loop.call_later(_LOOK_SECONDS, _close_stalled, receiving)
