"""Who waits for a rollout to be queued or to end, and how they are woken: events, never polling.

Invariant: a waiter listens before it looks into the store, so nothing that happens in between is missed.
Used from the event loop only.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class Signals:
    """The long polls of one server."""

    def __init__(self) -> None:
        self.closing = False
        self._queued: asyncio.Future[None] | None = None
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

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

    @contextmanager
    def next_ended(self, rollout_ids: Sequence[str]) -> "Iterator[asyncio.Future[None]]":
        """Done when any of the rollouts ends inside the block."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for rollout_id in rollout_ids:
            self._waiting.setdefault(rollout_id, set()).add(future)
        if self.closing:
            _wake(future)
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
                _wake(future)

    def close(self) -> None:
        """The server is about to stop: let every long poll answer now."""
        self.closing = True
        self.queued()
        self.ended(list(self._waiting))


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
