"""uvicorn's server for tests, which start thousands: it starts and ends at once, where uvicorn's own looks ten times a
second whether it shall end, and then waits a tenth of a second for its connections."""

import asyncio
import socket
import threading

import uvicorn


class StoppableServer(uvicorn.Server):
    """A server in a thread of its own. `started_up` is set when it answers; `stop` ends it, from any thread."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.started_up = threading.Event()
        self._stopped = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self.started_up.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # makes the `date` of its answers
        await self._stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for _ in range(3):  # until those that were idle are closed
            await asyncio.sleep(0)
        await self._wait_tasks_to_complete()
        await self.lifespan.shutdown()

    def stop(self) -> None:
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._stopped.set)
