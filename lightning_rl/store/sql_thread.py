"""One thread in which all of a server's store work runs.

Invariants: the event loop never waits on the disk, and store operations happen in the order they were asked for. From
the first operation that could not write the store, or that took too long, until `writable_again` the store is in
trouble, which is told.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from lightning_rl.store.errors import StoreUnwritable
from lightning_rl_proxy.recording.alerts import Alert

_PATIENCE_SECONDS = 30.0  # for one operation, with those before it
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
        hanging = loop.call_later(_PATIENCE_SECONDS, self._hangs)
        try:
            return await loop.run_in_executor(self._executor, lambda: work(*args, **kwargs))
        except StoreUnwritable as error:
            self._in_trouble(str(error))
            raise
        finally:
            hanging.cancel()

    def _hangs(self) -> None:
        self._in_trouble(
            f"it has not answered for {_PATIENCE_SECONDS:g} s: see what holds the database or its disk up; requests "
            "wait until it answers, calls go on and wait in the journal"
        )

    def _in_trouble(self, why: str) -> None:
        self.unwritable = True
        self._trouble.begin(why)

    def writable_again(self) -> None:
        """The store was written."""
        self.unwritable = False
        self._trouble.end()

    def close(self) -> None:
        """Finish what was asked for, then end the thread."""
        self._executor.shutdown(wait=True)
