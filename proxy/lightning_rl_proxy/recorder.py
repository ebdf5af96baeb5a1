"""Call -> span -> journal -> ledger.

`record` appends to the gateway's local journal and returns: no wait on disk sync or network. A background task
moves the records on to the ledger in batches. `stored` waits until everything recorded before it is durable there. A
journal left by a killed gateway is replayed at the next start; the ledger ignores spans that it already has.

A journal that cannot be written fails no request: it is cut back to its last whole record, and what it lacks stays in
memory on its way to the ledger, and is tried again with the next record.
"""

import asyncio
import contextlib
import logging
import os
import struct
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from lightning_rl_adapters.span import Span, storable
from lightning_rl_proxy.alarm import Trouble
from lightning_rl_proxy.ledger import Ledger

_HEADER = struct.Struct("<II")  # length, crc32
_EMPTIED_ABOVE = 16 * 2**20  # bytes
_LINGER_SECONDS = 0.02
_FAILURES_TOLD = 3  # in a row, until whoever waits is told that the ledger fails
_LAST_SECONDS = 5.0  # for handing over what is left when the gateway stops
_log = logging.getLogger(__name__)


class Recorder:
    """Owns one journal file; one recorder per gateway. `counters` counts `journal_errors`."""

    def __init__(
        self, journal: Path, ledger: Ledger, *, max_batch: int = 1024, counters: Counter[str] | None = None
    ) -> None:
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
        self._size = 0  # of the journal's whole records
        self._torn = False  # whether more than that may be in the file
        self._unwritten: deque[bytes] = deque()  # what the journal lacks
        self._counters = Counter[str]() if counters is None else counters
        self._trouble = Trouble(f"the journal {journal}")
        self._failures = 0  # of the ledger, in a row
        self._failure: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the journal, hand over what an earlier gateway left in it, and begin."""
        left = list(replay(self._path)) if self._path.exists() else []
        if left:
            await self._ledger.add_spans(left)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        self._task = asyncio.create_task(self._move())

    async def stop(self) -> None:
        """Hand over everything and close the journal; what the ledger does not take in time waits in the journal."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                await self._until_stored(self._recorded)
        if self._task is not None:
            self._task.cancel()
        if self._pending:
            self._append()
            lost = f", {len(self._unwritten)} could not be written there and are lost" if self._unwritten else ""
            _log.error("%d records wait in %s for the next start%s", len(self._pending), self._path, lost)
        os.close(self._fd)

    def record(self, span: Span) -> None:
        """Append one record to the journal; the ledger gets it soon."""
        try:
            payload = self._encoder.encode(span)
        except OverflowError:  # a client's message may hold any number
            span.attributes = storable(span.attributes)
            payload = self._encoder.encode(span)
        self._unwritten.append(_HEADER.pack(len(payload), zlib.crc32(payload)) + payload)
        self._append()
        self._pending.append(span)
        self._recorded += 1
        self._wake.set()

    async def stored(self) -> None:
        """Wait until every record made so far is durable in the ledger. Raises its error when it keeps failing."""
        target = self._recorded
        await self._until_stored(target, lambda: self._failures >= _FAILURES_TOLD)
        if self._stored < target and self._failure is not None:
            raise self._failure

    async def _until_stored(self, target: int, give_up: Callable[[], bool] = lambda: False) -> None:
        if self._stored >= target:
            return
        self._urgent.set()
        async with self._progress:
            await self._progress.wait_for(lambda: self._stored >= target or give_up())

    def _append(self) -> None:
        """Write what the journal lacks, as far as the disk lets us."""
        try:
            if self._torn:
                self._cut()
            while self._unwritten:
                self._write(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            self._counters["journal_errors"] += 1
            self._trouble.begin(f"{error}; free space: until then its records are in memory alone")
            with contextlib.suppress(OSError):  # then the next record's turn begins with it
                self._cut()
        else:
            self._trouble.end()

    def _write(self, record: bytes) -> None:
        self._torn = True
        left = memoryview(record)
        while left:
            left = left[os.write(self._fd, left) :]
        self._torn = False
        self._size += len(record)

    def _cut(self) -> None:
        os.ftruncate(self._fd, self._size)
        self._torn = False

    async def _move(self) -> None:
        backoff = 0.05
        while True:
            await self._wake.wait()
            await self._linger()
            batch = self._pending[: self._max_batch]
            try:
                await self._ledger.add_spans(batch)
            except Exception as error:  # noqa: BLE001 - any ledger fault: the journal holds the records, we try again
                _log.exception("the ledger refused %d records; trying again in %.2f s", len(batch), backoff)
                await self._failed(error)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, 5.0)
                continue
            backoff = 0.05
            self._failures, self._failure = 0, None
            del self._pending[: len(batch)]
            if not self._pending:
                self._wake.clear()
                self._urgent.clear()
                # The ledger has them all; a disk that is full gets its space back at once.
                if self._size > _EMPTIED_ABOVE or self._unwritten or self._torn:
                    self._unwritten.clear()
                    self._size, self._torn = 0, True
                    with contextlib.suppress(OSError):
                        self._cut()
            async with self._progress:
                self._stored += len(batch)
                self._progress.notify_all()

    async def _failed(self, error: Exception) -> None:
        async with self._progress:
            self._failures += 1
            self._failure = error
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
