"""The head and the body of an answer leave together.

uvicorn writes them one after the other, and uvloop sends at once what it is given: two system calls, and the client
wakes up twice for one answer. Here what is written in one turn of the event loop is sent at its end.
"""

import asyncio
from typing import Any


class OneWrite:
    """A transport that sends at the end of each turn of the event loop; all else is the `transport`'s own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._written: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send `data` soon, behind what was written before."""
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(data)

    def close(self) -> None:
        """Close the connection when all is sent."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        written, self._written = self._written, []
        if written and not self._transport.is_closing():
            self._transport.write(b"".join(written))
