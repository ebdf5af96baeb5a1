"""One request and its answer, between the work that makes the answer and the clients that wait for it.

The work may be followed by several clients, one after the other or at once, since retries join it: so what is written
is kept, and each follower reads it from the start. The last bytes of an answer are the result of the work's task: they
leave only after the calls are recorded.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_rl_adapters.call import Call
from lightning_rl_adapters.ids import new_call_id
from lightning_rl_proxy.forest.nodes import Answered, RecordedAnswer


class InflightRequest:
    """`stream` says whether the client asked for a stream.

    `calls` are what is to be recorded; `commits` what can be continued once it is delivered, and `responses` the
    conversations that a client may go on with by a response's id. `earlier`: of a retry, what was answered to the same
    body at another gateway, or here before a restart. `asks_engine` is to be called when an engine or a backend is
    asked.
    """

    def __init__(self, body_key: bytes, asks_engine: Callable[[], None]) -> None:
        self.body_key = body_key
        self.asks_engine = asks_engine
        self.request_id = f"req_{new_call_id()}"
        self.task: asyncio.Task[bytes] | None = None
        self.model = ""
        self.stream = False
        self._pieces: list[bytes] = []  # the bytes of a streamed answer so far
        self._packed: bytes | None = None  # the same, once nobody reads them
        self._readers = 0
        self.calls: list[tuple[Call, dict[str, Any]]] = []
        self.commits: list[Answered] = []
        self.responses: dict[str, list[dict[str, Any]]] = {}
        self.earlier: list[RecordedAnswer] = []
        self.followers = 0  # clients that wait for the answer
        self.grace: asyncio.Task[None] | None = None  # runs while nobody waits for it
        self.client_gone = False
        self.recorded = False
        self._followed: list[asyncio.Future[bool]] = []  # what its followers wait for

    def write(self, piece: bytes) -> None:
        """Add to the answer, and wake whoever follows it."""
        if piece:
            self._pieces.append(piece)
            self.wake()

    def pieces(self, behind: int = 0) -> list[bytes]:
        """What was written so far, without the first `behind` pieces, which this reader has."""
        if self._packed is not None:  # a retry reads it once more
            self._pieces, self._packed = [zlib.decompress(self._packed)], None
        return self._pieces[behind:]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A client reads what is written, within the block. Behind the last one, what was delivered is kept in little
        room: an attempt keeps all its answers, and the events of a stream take many times the room of its tokens."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            if self.recorded and not self._readers and self._pieces:
                self._packed, self._pieces = zlib.compress(b"".join(self._pieces), 1), []

    def wake(self, _ended: object = None) -> None:
        """Let whoever follows it look again."""
        for follower in self._followed:
            _settle(follower, True)
        self._followed.clear()

    async def changed(self, seconds: float) -> bool:
        """Wait for more of the answer, or until it is waked; False where the time passed first."""
        loop = asyncio.get_running_loop()
        follower: asyncio.Future[bool] = loop.create_future()
        self._followed.append(follower)
        timer = loop.call_later(seconds, _settle, follower, False)
        try:
            return await follower
        finally:
            timer.cancel()


def _settle(follower: "asyncio.Future[bool]", changed: bool) -> None:
    if not follower.done():
        follower.set_result(changed)
