"""The worker threads of a process.

Invariant: as many workers as were started are free to work at any time. A thread cannot be ended from outside, so one
whose claim was lost while its agent runs is left behind for a new one, and ends by itself if its agent ever returns.
"""

import threading
from collections.abc import Callable

from lightning_rl_proxy.alarm import Trouble

_MANY = 64


class Crew:
    """`start_thread(name, work)` runs `work` in a thread; one that replaces another calls `before` first."""

    def __init__(
        self, start_thread: Callable[[str, Callable[[], None]], None], before: Callable[[], None] = lambda: None
    ) -> None:
        self._start_thread = start_thread
        self._before = before
        self._lock = threading.Lock()
        self._left_behind = 0
        self._trouble = Trouble("agents that hang")

    def start(self, name: str, work: Callable[[], bool]) -> None:
        """Begin with a worker; `work` returns whether its thread was left behind."""
        self._start_thread(name, lambda: self._returned(work()))

    def replace(self, name: str, work: Callable[[], bool]) -> None:
        """The worker's thread hangs in an agent whose claim was lost: go on with another."""
        self._count(1)

        def go_on() -> None:
            self._before()
            self._returned(work())

        self._start_thread(name, go_on)

    def _returned(self, was_left_behind: bool) -> None:
        if was_left_behind:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self._left_behind += more
            if self._left_behind > _MANY:
                self._trouble.begin(
                    f"more than {_MANY} threads of one process wait in agents whose time is over, and keep what they "
                    "hold; give the agent's own requests and tools a time-out"
                )
            else:
                self._trouble.end()
