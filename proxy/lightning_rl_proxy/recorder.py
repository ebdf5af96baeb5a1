"""Call -> span -> journal -> ledger.

`record` appends to the gateway's local journal and returns: no wait on disk sync or network. A background task
moves the records on to the ledger in batches. `stored` waits until everything recorded before it is durable there. A
journal left by a killed gateway is replayed at the next start; the ledger ignores spans that it already has.
"""

import asyncio
import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lightning_rl_adapters.span import Span
from lightning_rl_proxy.ledger import Ledger

_HEADER = struct.Struct("<II")  # length, crc32
_EMPTIED_ABOVE = 16 * 2**20  # bytes
_LINGER_SECONDS = 0.02
_log = logging.getLogger(__name__)


class Recorder:
    """Owns one journal file; one recorder per gateway."""

    def __init__(self, journal: Path, ledger: Ledger, *, max_batch: int = 1024) -> None:
        self._path = journal
        self._ledger = ledger
        self._max_batch = max_batch
        self._encoder = msgspec.msgpack.Encoder()
        self._pending: list[Span] = []
        self._recorded = 0
        self._stored = 0
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._progress = asyncio.Condition()
        self._fd = -1
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the journal, hand over what an earlier gateway left in it, and begin."""
        left = list(replay(self._path)) if self._path.exists() else []
        if left:
            await self._ledger.add_spans(left)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        self._task = asyncio.create_task(self._move())

    async def stop(self) -> None:
        """Hand over everything and close the journal."""
        await self.stored()
        if self._task is not None:
            self._task.cancel()
        os.close(self._fd)

    def record(self, span: Span) -> None:
        """Append one record to the journal; the ledger gets it soon."""
        payload = self._encoder.encode(span)
        os.write(self._fd, _HEADER.pack(len(payload), zlib.crc32(payload)) + payload)
        self._pending.append(span)
        self._recorded += 1
        self._wake.set()

    async def stored(self) -> None:
        """Wait until every record made so far is durable in the ledger."""
        target = self._recorded
        if self._stored >= target:
            return
        self._urgent.set()
        async with self._progress:
            await self._progress.wait_for(lambda: self._stored >= target)

    async def _move(self) -> None:
        backoff = 0.05
        while True:
            await self._wake.wait()
            await self._linger()
            batch = self._pending[: self._max_batch]
            try:
                await self._ledger.add_spans(batch)
            except Exception:  # noqa: BLE001 - any ledger fault: the journal holds the records, and we try again
                _log.exception("the ledger refused %d records; trying again in %.2f s", len(batch), backoff)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, 5.0)
                continue
            backoff = 0.05
            del self._pending[: len(batch)]
            if not self._pending:
                self._wake.clear()
                self._urgent.clear()
                if os.fstat(self._fd).st_size > _EMPTIED_ABOVE:
                    os.ftruncate(self._fd, 0)
            async with self._progress:
                self._stored += len(batch)
                self._progress.notify_all()

    async def _linger(self) -> None:
        """Let more records gather, unless there are many or somebody waits: a batch costs the ledger one commit."""
        if len(self._pending) < self._max_batch:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_SECONDS):
                    await self._urgent.wait()


def replay(path: Path) -> Iterator[Span]:
    """The whole records of a journal, up to the first that was cut or damaged."""
    data = path.read_bytes()
    decoder = msgspec.msgpack.Decoder(Span)
    position = 0
    while position + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, position)
        start = position + _HEADER.size
        payload = data[start : start + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            _log.warning("journal %s is cut at byte %d of %d; what is before it is kept", path, position, len(data))
            return
        yield decoder.decode(payload)
        position = start + length
