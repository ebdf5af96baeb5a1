"""Who waits for a rollout to be queued or to end, or for room to run one, and how they are woken: by events alone.

Invariant: a waiter listens before it looks into the store, so nothing that happens in between is missed. What other
servers on the same database do, the sweeper sees and tells.
Used from the event loop only.
"""

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

_Ended = asyncio.Future[set[str]]


class Notifications:
    """The long polls of one server."""

    def __init__(self) -> None:
        self.closing = False
        self._queued: asyncio.Future[None] | None = None
        self._waiting: dict[str, set[_Ended]] = {}
        self._line: dict[asyncio.Future[None], int] = {}

    def next_queued(self) -> "asyncio.Future[None]":
        """Done when rollouts are queued after this call. It is shared: wait for it, do not cancel it."""
        if self._queued is None:
            self._queued = asyncio.get_running_loop().create_future()
            if self.closing:
                self._queued.set_result(None)
        return self._queued

    def queued(self) -> None:
        """Rollouts were queued: wake every claim that waits."""
        if self._queued is not None:
            future, self._queued = self._queued, None
            _wake(future)

    @property
    def claims_wait(self) -> bool:
        """Whether anybody may wait for rollouts that are queued."""
        return self._queued is not None

    @property
    def waited_for(self) -> list[str]:
        """The rollouts whose end somebody waits for."""
        return list(self._waiting)

    @property
    def held_back(self) -> int:
        """How many rollouts those who wait for room would take."""
        return sum(self._line.values())

    @contextmanager
    def next_room(self, rollouts: int = 1) -> "Iterator[asyncio.Future[None]]":
        """A place in line, of one who would take so many: done when there is room for one of them or more. Whoever
        leaves then without using it has to tell of the room."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line[future] = rollouts
        if self.closing:
            _wake(future)
        try:
            yield future
        finally:
            self._line.pop(future, None)

    def room(self, places: float) -> None:
        """There is room for so many rollouts: wake those that wait the longest."""
        while self._line and places > 0:
            future = next(iter(self._line))
            places -= self._line.pop(future)
            _wake(future)

    @contextmanager
    def next_ended(self, rollout_ids: Sequence[str]) -> "Iterator[_Ended]":
        """Done when any of the rollouts ends inside the block; its result is those that have, also later ones."""
        future: _Ended = asyncio.get_running_loop().create_future()
        for rollout_id in rollout_ids:
            self._waiting.setdefault(rollout_id, set()).add(future)
        if self.closing:
            future.set_result(set())
        try:
            yield future
        finally:
            for rollout_id in set(rollout_ids):
                self._waiting[rollout_id].discard(future)
                if not self._waiting[rollout_id]:
                    del self._waiting[rollout_id]

    def ended(self, rollout_ids: Iterable[str]) -> None:
        """These rollouts ended: wake whoever waits for one of them."""
        for rollout_id in rollout_ids:
            for future in self._waiting.get(rollout_id, ()):
                if not future.done():
                    future.set_result(set())
                future.result().add(rollout_id)

    def close(self) -> None:
        """The server is about to stop: let every long poll answer now."""
        self.closing = True
        self.queued()
        self.room(math.inf)
        for future in set().union(*self._waiting.values()):
            if not future.done():
                future.set_result(set())


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
