"""HTTP/1.1 to one server, by the shortest way: every call of an agent takes it. With a general client in its place the
gateway gives more than a tenth of its calls per second away (`benchmarks/engine_client.py`, docs/performance.md).

httptools parses. A connection that has answered is kept for a while, and asked again. An answer that is left before its
end closes its connection, by which a server knows that nobody waits. No redirects, proxies or compression: engines have
none.
"""

import asyncio
import base64
import ssl
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import httptools

from lightning_rl_proxy.engines.base import EngineUnavailable

_CONNECT_SECONDS = 10.0
_AHEAD = 2**20  # bytes of a stream that may wait to be read
_MAX_LINE = 2**24  # bytes
_LONG = 2**16  # bytes; to copy a longer body behind its head costs more than to send it after it


class NoAnswer(EngineUnavailable):
    """The server was not reached, hung up before its answer was whole, or does not speak HTTP."""


class HttpResponse:
    """One answer: `status`, and the body whole by `read` or line by line by `lines`."""

    def __init__(self, url: str, connection: "_Connection") -> None:
        self.url = url
        self.status = 0  # until it has begun
        self.complete = False
        self._connection = connection
        self._chunks: list[bytes] = []
        self._size = 0  # of the chunks, bytes
        self._by_line = False
        self._failure: NoAnswer | None = None
        self._news: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """The whole body. Raises NoAnswer where the rest of it never comes."""
        while not self.complete:
            await self._more()
        return self._take()

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of the body as they come, without their ends. Raises NoAnswer where the rest never comes."""
        self._by_line = True
        begun: list[bytes] = []  # of a line whose end has not come
        size = 0
        while True:
            while not self._chunks and not self.complete:
                await self._more()
            chunk = self._take()
            first, *others = chunk.split(b"\n")
            begun.append(first)
            size += len(first)
            if others:
                yield b"".join(begun)
                for line in others[:-1]:
                    yield line
                begun, size = [others[-1]], len(others[-1])
            if size > _MAX_LINE:
                raise NoAnswer(f"engine {self.url} answers with a line of over {_MAX_LINE} bytes")
            if self.complete and not self._chunks:
                if size:
                    yield b"".join(begun)
                return

    def close(self) -> None:
        """Wait for no more of it."""
        if not self.complete:
            self._connection.close()

    async def begun(self) -> None:
        """Wait for the status. Raises NoAnswer where none comes."""
        while not self.status:
            await self._more()

    async def _more(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _take(self) -> bytes:
        chunks, self._chunks, self._size = self._chunks, [], 0
        self._connection.go_on()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    # What its connection tells.

    def begin(self, status: int) -> None:
        self.status = status
        self._tell()

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self._by_line:
            self._tell()
            if self._size > _AHEAD:
                self._connection.hold()

    def end(self, failure: NoAnswer | None = None) -> None:
        self._failure = failure
        self.complete = failure is None
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class HttpRequest:
    """An answer for as long as somebody waits for it."""

    def __init__(self, client: "Client", method: str, path: str, body: bytes) -> None:
        self._request = client, method, path, body
        self._response: HttpResponse | None = None

    async def __aenter__(self) -> HttpResponse:
        client, method, path, body = self._request
        url = client.url + path
        connection = await client.connection(url)
        response = self._response = connection.ask(url, client.head(method, path, len(body)), body)
        try:
            await response.begun()
        except BaseException:
            response.close()
            raise
        return response

    async def __aexit__(self, *_failure: object) -> None:
        if self._response is not None:
            self._response.close()


class Client:
    """The connections to the server at `url`, at most so many; one that is idle for `idle_seconds` is closed.

    A user and password in the URL go along with every request, and are left out of `url`, which errors name.
    """

    def __init__(self, url: str, *, connections: int = 1024, idle_seconds: float = 2.0) -> None:
        parts = urlsplit(url.rstrip("/"))
        place = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{place}{parts.path}"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path
        fields = [f"host: {place}", "content-type: application/json", "accept: */*"]
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            fields.append(f"authorization: Basic {base64.b64encode(pair.encode()).decode()}")
        self._fields = "\r\n".join(fields)
        self._connections = connections
        self._idle_seconds = idle_seconds
        self._open: set[_Connection] = set()  # also those that are being made
        self._idle: list[_Connection] = []  # the one used last is the last
        self._waiting: deque[asyncio.Future[None]] = deque()  # for a connection
        self._sweeping: asyncio.TimerHandle | None = None

    def get(self, path: str) -> HttpRequest:
        """Ask for what is at `path`: a context whose value is the `HttpResponse`. Entering it raises NoAnswer."""
        return HttpRequest(self, "GET", path, b"")

    def post(self, path: str, body: bytes) -> HttpRequest:
        """Send JSON, as `get` does."""
        return HttpRequest(self, "POST", path, body)

    async def close(self) -> None:
        """Close every connection."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)  # in which they are closed

    def head(self, method: str, path: str, length: int) -> bytes:
        """The lines before a body of so many bytes."""
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fields}\r\ncontent-length: {length}\r\n\r\n".encode()

    async def connection(self, url: str) -> "_Connection":
        """One that asks nothing now, to ask for `url`. Raises NoAnswer."""
        loop = asyncio.get_running_loop()
        while True:
            while self._idle:
                idle = self._idle.pop()
                if loop.time() - idle.idle_since < self._idle_seconds:
                    return idle
                idle.close()
            if len(self._open) < self._connections:
                return await self._connected(url, loop)
            turn = loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake_next()
                raise

    async def _connected(self, url: str, loop: asyncio.AbstractEventLoop) -> "_Connection":
        connection = _Connection(self, loop)
        self._open.add(connection)  # it has its place from here on
        made = False
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
            made = True
        except (OSError, TimeoutError) as error:
            raise NoAnswer(f"engine {url} is not reached: {error!r}") from error
        finally:
            if not made:
                connection.close()
        return connection

    def _wake_next(self) -> None:
        while self._waiting:
            if not (turn := self._waiting.popleft()).done():
                turn.set_result(None)
                return

    # What its connections tell.

    def wants(self, connection: "_Connection") -> bool:
        """Whether a connection that is made now is still to be used."""
        return connection in self._open

    def has_answered(self, connection: "_Connection") -> None:
        self._idle.append(connection)
        self._wake_next()
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(self._idle_seconds, self._sweep)

    def is_gone(self, connection: "_Connection") -> None:
        if connection in self._open:
            self._open.remove(connection)
            if connection in self._idle:
                self._idle.remove(connection)
            self._wake_next()

    def _sweep(self) -> None:
        """Close what was idle for long."""
        loop = asyncio.get_running_loop()
        late = loop.time() - self._idle_seconds
        for connection in [one for one in self._idle if one.idle_since <= late]:
            connection.close()
        self._sweeping = loop.call_later(self._idle_seconds, self._sweep) if self._open else None


class _Connection(asyncio.Protocol):
    """One connection, which asks one thing at a time."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self.idle_since = 0.0
        self._client = client
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._response: HttpResponse | None = None
        self._framed = False  # whether the answer says where it ends, other than by the end of the connection
        self._held = False

    def ask(self, url: str, head: bytes, body: bytes) -> HttpResponse:
        """Send a request; its answer is still to come."""
        response = self._response = HttpResponse(url, self)
        if self._transport is None:
            response.end(NoAnswer(f"engine {url} hung up"))
        else:
            together = len(body) < _LONG
            self._transport.write(head + body if together else head)
            if not together:
                self._transport.write(body)
        return response

    def hold(self) -> None:
        """Read no further."""
        if not self._held and self._transport is not None:
            self._held = True
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Read again."""
        if self._held and self._transport is not None:
            self._held = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Hang up at once."""
        self._end(NoAnswer("nobody waits for it"))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._client.wants(self):
            self.close()

    def data_received(self, data: bytes) -> None:
        if self._response is None:
            return self._end(NoAnswer("it speaks without being asked"))
        url = self._response.url
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(NoAnswer(f"engine {url} does not speak HTTP as expected: {error!r}"))

    def connection_lost(self, error: Exception | None) -> None:
        response, url = self._response, self._client.url
        if response is not None:
            url = response.url
            if response.status and not self._framed and error is None:
                self._response = None
                response.end()
        cause = "" if error is None else f": {error!r}"
        self._end(NoAnswer(f"engine {url} hung up before its answer was whole{cause}"))

    # httptools

    def on_message_begin(self) -> None:
        self._framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._response is not None:
            self._response.begin(status)

    def on_body(self, body: bytes) -> None:
        if self._response is not None:
            self._response.add(body)

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or response.status == 0:  # an interim answer, before the real one
            return
        self._response = None
        response.end()
        if self._parser.should_keep_alive():
            self.go_on()
            self.idle_since = self._loop.time()
            self._client.has_answered(self)
        else:
            self.close()

    def _end(self, failure: NoAnswer) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._client.is_gone(self)
        if (response := self._response) is not None:
            self._response = None
            response.end(failure)
