"""uvicorn's HTTP, as this server wants it: heads within the limit, answers in one write, word of clients that leave."""

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lightning_rl.server.limits import head_refused
from lightning_rl.server.one_write import OneWrite
from lightning_rl_proxy.gateway import GONE
from lightning_rl_proxy.limits import Limits


def protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """uvicorn's HTTP, with answers in one write, which tells the gateway of clients that leave, and closes a connection
    whose request's head does not end within the limit.

    A head that came whole is the application's to refuse, in words that its client knows: here it is given the size of
    one read more.
    """

    class Served(HttpToolsProtocol):
        _in_head = False
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(cast(asyncio.Transport, OneWrite(transport, self.loop)))
            self._gone = self.loop.create_future()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if not self._gone.done():  # whoever waited for it itself may have cancelled it
                self._gone.set_result(None)

        def on_message_begin(self) -> None:
            self._in_head, self._head_bytes = True, 0
            super().on_message_begin()
            self.scope["extensions"] = {GONE: self._gone}  # type: ignore[dict-item]

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            if not self.pipeline:  # a long body may have stopped the reading, by which a client is seen to leave
                self.flow.resume_reading()

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head_bytes += len(data)
            super().data_received(data)
            if self._in_head and self._head_bytes > limits.header_bytes and not self.transport.is_closing():
                status, headers, body = head_refused(limits.header_bytes)
                lines = [b"HTTP/1.1 %d Request Header Fields Too Large" % status]
                lines += [name + b": " + value for name, value in [*headers, (b"connection", b"close")]]
                self.transport.write(b"\r\n".join([*lines, b"", body]))
                self.transport.close()

    return Served
