"""A connection to an MCP server, with an event loop of its own.

Invariant: a server has one connection per process, opened at its first use and kept, whichever event loops its tools
are called from; it is closed in the task that opened it, when its tools are gone or the process ends, and so is the
server's process where we started it. A connection that broke is opened anew by the next call, not by the one that
broke: nobody knows whether that one was done.
"""

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_rl.tools.errors import ToolError
from lightning_rl.tools.threads import in_thread

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

CONNECT_SECONDS = 60.0
_CLOSE_SECONDS = 15.0
_log = logging.getLogger(__name__)
T = TypeVar("T")


class McpServer:
    """A server of an `mcpServers` file.

    Args:
        name: its name there.
        spec: `command`, `args`, `env`, `cwd` of a server that is started and spoken with through stdin and stdout; or
            `url`, `headers`, `auth_token` of one that speaks streamable HTTP.
        rate_limit: calls per second, at most; None: no limit.
    """

    def __init__(self, name: str, spec: Mapping[str, Any], rate_limit: float | None = None) -> None:
        self.name = name
        self.spec = dict(spec)
        self.rate_limit = rate_limit
        self._opening = threading.Lock()
        self._connection: _McpConnection | None = None
        self._at_exit: weakref.finalize[[], McpServer] | None = None

    def __reduce__(self) -> tuple[Any, ...]:  # another process opens its own connection
        return McpServer, (self.name, self.spec, self.rate_limit)

    def tools(self) -> "list[Tool]":
        """The server's tools; waits for its answer.

        Raises:
            ToolError: the server cannot be started or reached, does not speak MCP, or has no tools.
        """
        from mcp import MCPError

        connection = self._opened()
        try:
            return connection.start(connection.list_tools()).result(CONNECT_SECONDS)
        except TimeoutError as error:
            raise ToolError(
                f"MCP server {self.name!r} does not list its tools in {CONNECT_SECONDS:g} seconds"
            ) from error
        except MCPError as error:
            raise ToolError(f"MCP server {self.name!r} lists no tools: {error}; leave it out") from error

    async def call(self, tool: str, arguments: dict[str, Any]) -> "CallToolResult":
        """The server's answer; cancelled, the server is told so.

        Raises:
            ToolError: the server cannot be started or reached.
            mcp.MCPError: what the server raises.
        """
        connection = self._connection
        if connection is None or not connection.usable:
            connection = await in_thread(self._opened)
        return await asyncio.wrap_future(connection.start(connection.call(tool, arguments)))

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        with self._opening:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _opened(self) -> "_McpConnection":
        with self._opening:
            if self._connection is not None and not self._connection.usable:
                self._connection.close()
                self._connection = None
            if self._connection is None:
                self._connection = _McpConnection(self.name, self.spec, self.rate_limit)
                if self._at_exit is not None:
                    self._at_exit.detach()  # of a connection that is closed
                self._at_exit = weakref.finalize(self, self._connection.close)  # also at the end of the process
            return self._connection


class _McpConnection:
    """An open client, in a thread with its event loop."""

    def __init__(self, name: str, spec: Mapping[str, Any], rate_limit: float | None) -> None:
        self.name = name
        self._broken = False
        self._pid = os.getpid()
        self._interval = 1 / rate_limit if rate_limit else 0.0
        self._next = 0.0
        self._opened: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, Client]] = Future()
        self._thread = threading.Thread(target=self._run, args=(dict(spec),), name=f"mcp {name}", daemon=True)
        self._thread.start()
        try:
            self._loop, self._stop, self._client = self._opened.result()
        except (Exception, asyncio.CancelledError) as error:
            reasons = "; ".join(_reasons(error))
            raise ToolError(f"MCP server {name!r} ({_where(spec)}) cannot be used: {reasons}") from error

    @property
    def usable(self) -> bool:
        """Whether it is open, and of this process: a forked one has its memory, and not its thread."""
        return not self._broken and self._pid == os.getpid()

    def start(self, work: "Coroutine[Any, Any, T]") -> "Future[T]":
        if self._loop.is_closed():
            work.close()
            raise ToolError(f"MCP server {self.name!r}: its connection is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def list_tools(self) -> "list[Tool]":
        tools, cursor = [], None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools

    async def call(self, tool: str, arguments: dict[str, Any]) -> "CallToolResult":
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        now = self._loop.time()
        self._next = max(now, self._next) + self._interval
        await asyncio.sleep(self._next - self._interval - now)
        try:
            return await self._client.call_tool(tool, arguments)
        except MCPError as error:
            self._broken = self._broken or error.code == CONNECTION_CLOSED
            raise

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is self._thread:  # the garbage collector runs wherever it likes
            return
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.warning("MCP server %r: its connection does not close", self.name)

    def _run(self, spec: dict[str, Any]) -> None:
        try:
            asyncio.run(self._keep(spec))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - told where the connection is opened
            if not self._opened.done():
                self._opened.set_exception(error)
            else:
                self._broken = True
                _log.warning("MCP server %r: its connection ended: %s", self.name, "; ".join(_reasons(error)))

    async def _keep(self, spec: dict[str, Any]) -> None:
        stop = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(CONNECT_SECONDS):
                client = await _client(spec, stack)
            self._opened.set_result((asyncio.get_running_loop(), stop, client))
            await stop.wait()


async def _client(spec: dict[str, Any], stack: contextlib.AsyncExitStack) -> "Client":
    import httpx2
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client

    if "command" in spec:
        return await stack.enter_async_context(Client(StdioServerParameters(**spec)))
    headers = dict(spec.get("headers") or {})
    if "auth_token" in spec:
        headers["Authorization"] = f"Bearer {spec['auth_token']}"
    timeout = httpx2.Timeout(30, read=300)  # as MCP's own client has it
    http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout))
    return await stack.enter_async_context(Client(streamable_http_client(spec["url"], http_client=http)))


def _where(spec: Mapping[str, Any]) -> str:
    return str(spec.get("url") or " ".join([spec.get("command", ""), *spec.get("args", [])]))


def _reasons(error: BaseException) -> list[str]:
    """What is in an error, and in all of a group of them."""
    if isinstance(error, BaseExceptionGroup):
        return [reason for one in error.exceptions for reason in _reasons(one)]
    return [f"{type(error).__name__}: {error}"]
