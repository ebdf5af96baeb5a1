"""One thread in which all of a server's store work runs.

Invariant: the event loop never waits on the disk, and store operations happen in the order they were asked for.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SqlThread:
    """Runs functions one after another in its own thread."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sql")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work(*args, **kwargs)` returns or raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """Finish what was asked for, then end the thread."""
        self._executor.shutdown(wait=True)
