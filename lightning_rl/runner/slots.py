"""How many more rollouts a process may begin.

Invariant: a slot is free, taken, or freed for good: a process that retires takes no more rollouts, and tells its
parent of each that it will not use again, so that the next process may. It retires by itself once as many rollouts
have ended in it as may.
"""

import threading
import time
from collections.abc import Callable

_GATHER_SECONDS = 0.005  # rollouts end nearly together: engines sample them in one batch


class Slots:
    """The slots of one process; safe to share between threads.

    `most`: rollouts that are to end here in all; None: no end of them. `ended` is called with how many have ended.
    `freed` is called with the number of all slots that were freed so far, each time after one was; `empty` when a
    process that retired has freed all.
    """

    def __init__(
        self,
        number: int,
        *,
        freed: Callable[[int], None],
        empty: Callable[[], None],
        most: int | None = None,
        ended: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._changed = threading.Condition()
        self._free = self._all = number
        self._freed = self._begun = self._ended = 0
        self._most = most
        self._retired = self._closed = False
        self._tell_freed = freed
        self._tell_empty = empty
        self._tell_ended = ended

    @property
    def open(self) -> bool:
        """Whether more rollouts may begin, now or later."""
        with self._changed:
            return not (self._retired or self._closed)

    def take(self, most: int = 1) -> int:
        """Wait for free ones, and take `most` of them at most, to begin rollouts; how many, 0 when there will be none.

        Of many free ones half are taken at once, so that other processes get their share of the rollouts. While others
        are in use some more may be free in a moment, and are taken together.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._may_take() or self._retired or self._closed)
            until = time.monotonic() + _GATHER_SECONDS
            while (
                self._free < self._all
                and not (self._retired or self._closed)
                and self._changed.wait(until - time.monotonic())
            ):
                pass
            if self._retired or self._closed:
                return 0
            remaining = self._free if self._most is None else self._most - self._begun
            share = self._free if self._free <= self._all // 4 else (self._free + 1) // 2
            number = min(most, share, remaining)
            self._free -= number
            self._begun += number
            return number

    def put_back(self, number: int = 1) -> None:
        """There was no rollout for so many that were taken."""
        if number:
            with self._changed:
                self._begun -= number
                self._return(number)

    def give_back(self, *, ended: bool = True) -> None:
        """The rollout of one has `ended`, or is tried again, here or elsewhere."""
        with self._changed:
            if ended:
                self._ended += 1
                self._tell_ended(self._ended)
            else:
                self._begun -= 1
            last = ended and self._ended == self._most
            self._return(1)
        if last:
            self.retire()

    def add(self, number: int) -> None:
        """There are more."""
        with self._changed:
            self._all += number
            self._return(number)

    def retire(self) -> bool:
        """Let nobody take any more; False when that was so already."""
        with self._changed:
            if self._retired or self._closed:
                return False
            self._retired = True
            free, self._free = self._free, 0
            self._return(free)
            return True

    def close(self) -> None:
        """The process ends: wake who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _may_take(self) -> bool:
        return self._free > 0 and (self._most is None or self._begun < self._most)

    def _return(self, number: int) -> None:
        self._changed.notify_all()
        if not self._retired:
            self._free += number
            return
        self._freed += number
        self._tell_freed(self._freed)
        if self._freed == self._all:
            self._tell_empty()
