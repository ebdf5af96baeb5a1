"""Where async agents run: one event loop for all of a process, in a thread of its own.

Invariant: an agent that blocks the loop keeps it; the ones that start after it was found blocked get a new one.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

_ANSWER_SECONDS = 1.0  # in which a loop that nobody blocks answers
_log = logging.getLogger(__name__)


class AsyncAgents:
    """Runs awaitables; safe to share between threads. Its loop runs from the first one on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any] | None] = set()  # a loop itself keeps no task alive

    def submit(self, awaitable: Awaitable[Any]) -> "Future[Any]":
        """Its result in time; cancelling the future cancels the task."""
        with self._lock:
            self._loop = loop = self._loop or _running_loop()
        return asyncio.run_coroutine_threadsafe(self._wait(awaitable), loop)

    async def _wait(self, awaitable: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            return await awaitable
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop, and leave all that waits for it
            raise RuntimeError(f"{error!r} in an async function: raise an exception instead") from error
        finally:
            self._tasks.discard(task)

    def leave_blocked_loop(self) -> None:
        """Go on with a new loop when an agent blocks the present one."""
        loop, answered = self._loop, threading.Event()
        if loop is None:
            return
        loop.call_soon_threadsafe(answered.set)
        if answered.wait(_ANSWER_SECONDS):
            return
        with self._lock:
            if self._loop is loop:
                _log.warning("an async agent blocks the event loop; what runs there waits for it")
                self._loop = _running_loop()


def _running_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async agents", daemon=True).start()
    return loop
