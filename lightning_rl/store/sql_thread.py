"""One thread in which all of a server's store work runs.

Invariants: the event loop never waits on the disk, and store operations happen in the order they were asked for. From
the first operation that could not write the store until `writable_again` the store is in trouble, which is told.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from lightning_rl.store.errors import StoreUnwritable
from lightning_rl_proxy.recording.alerts import Alert

P = ParamSpec("P")
T = TypeVar("T")


class SqlThread:
    """Runs functions one after another in its own thread."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sql")
        self._trouble = Alert("the store")
        self.unwritable = False

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work(*args, **kwargs)` returns or raises."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, lambda: work(*args, **kwargs))
        except StoreUnwritable as error:
            self.unwritable = True
            self._trouble.begin(str(error))
            raise

    def writable_again(self) -> None:
        """The store was written."""
        self.unwritable = False
        self._trouble.end()

    def close(self) -> None:
        """Finish what was asked for, then end the thread."""
        self._executor.shutdown(wait=True)
