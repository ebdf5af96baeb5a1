"""Call -> span -> journal -> ledger.

`record` packs the span as the store keeps it, appends that to the gateway's local journal and returns: no wait on disk
sync or network. A background task moves the records on to the ledger in batches. `stored` waits until everything
recorded before it is durable there. A journal left by a killed gateway is replayed at the next start; the ledger
ignores spans that it already has. A damaged record in it costs that record alone: what follows is found by its
checksum, the file is kept beside the new one, and `damaged` says that open attempts may lack a call.

A journal that cannot be written fails no request: it is cut back to its last whole record, and what it lacks stays in
memory on its way to the ledger, and is tried again with the next record.

What waits in memory for the ledger is bounded. An attempt that records beyond the bound is given up: its records are
dropped, those that wait and those that still come, and it is for its owner to fail it. Others go on.
"""

import asyncio
import contextlib
import logging
import os
import re
import struct
import zlib
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import from_span
from lightning_rl_adapters.span import Packed, Span, pack, packed, storable, unpack
from lightning_rl_proxy.recording.alerts import ALARMS, Alert
from lightning_rl_proxy.recording.ledger import Ledger

_HEADER = struct.Struct("<II")  # length, crc32
_RECORD_BEGINS = re.compile(rb"[\x80-\x9f]")  # a short array or map of MessagePack, as every record is
_SHORT_TEXT, _TEXT, _LONG_TEXT = 0xA0, 0xD9, 0xDA  # how texts of up to 31, 255 and 65,535 bytes begin
_EMPTIED_ABOVE = 16 * 2**20  # bytes, where nothing waits
_REWRITTEN_ABOVE = 64 * 2**20  # bytes, where something always does
_LINGER_SECONDS = 0.02
_BUSY = 16  # records that came in this time: where so many come, a batch of more costs each of them less
_BUSY_LINGER_SECONDS = 0.25
_FAILURES_TOLD = 3  # in a row, until whoever waits is told that the ledger fails
_LAST_SECONDS = 5.0  # for handing over what is left when the gateway stops
_MAX_WAITING = 65536  # records
_MAX_WAITING_BYTES = 256 * 2**20
_log = logging.getLogger(__name__)

_Name = tuple[str, str]  # of an attempt: rollout and attempt id


class _Waiting(msgspec.Struct, frozen=True, gc=False):
    """A record on its way to the ledger; `number` counts all records, `size` is that in the journal."""

    number: int
    attempt: _Name
    span: Packed
    size: int


class Recorder:
    """Owns one journal file; one recorder per gateway.

    `max_waiting` records, or `max_waiting_bytes` of them, may wait for the ledger. `counters` counts `journal_errors`,
    and by `recording_lost` the records that were given up; `tokens_lost`, by attempt and model, the tokens sampled for
    these.
    """

    def __init__(
        self,
        journal: Path,
        ledger: Ledger,
        *,
        max_batch: int = 1024,
        max_waiting: int = _MAX_WAITING,
        max_waiting_bytes: int = _MAX_WAITING_BYTES,
        counters: Counter[str] | None = None,
    ) -> None:
        self._path, self._new = journal, journal.with_name(f"{journal.name}.new")
        self._ledger = ledger
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._pending: deque[_Waiting] = deque()
        self._handed: list[_Waiting] = []  # those that the ledger is taking now; all are older than the pending ones
        self._waiting_bytes = 0
        self._recorded = 0
        self.tokens_lost: dict[_Name, Counter[str]] = {}
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._progress = asyncio.Condition()
        self._fd = -1
        self._size = 0  # of the journal's whole records
        self._torn = False  # whether more than that may be in the file
        self._unwritten: deque[tuple[_Name, bytes]] = deque()  # what the journal lacks
        self._counters = Counter[str]() if counters is None else counters
        self._trouble = Alert(f"the journal {journal}")
        self._growth = Alert(f"the size of the journal {journal}")
        self._behind = Alert("the recording of calls")
        self._failures = 0  # of the ledger, in a row
        self._failure: Exception | None = None
        self.damaged = False  # whether the journal that an earlier gateway left lacks a record that it once held
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the journal, hand over what an earlier gateway left in it, and begin."""
        spans, self.damaged = replay(self._path) if self._path.exists() else Replayed([], False)
        if spans:
            await self._ledger.add_spans(spans)
        if self.damaged:
            damaged_path = self._path.with_name(f"{self._path.name}.damaged")
            os.replace(self._path, damaged_path)
            ALARMS.error(
                "the journal %s holds damaged records: %d whole ones were read, attempts that were open are retried; "
                "the file is kept as %s: check the disk",
                self._path,
                len(spans),
                damaged_path,
            )
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        self._new.unlink(missing_ok=True)  # of a gateway that was killed as it wrote it
        self._task = asyncio.create_task(self._move())

    async def stop(self) -> None:
        """Hand over everything and close the journal; what the ledger does not take in time waits in the journal."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                await self._until_stored(self._recorded)
        if self._task is not None:
            self._task.cancel()
        if self._waiting():
            self._append()
            lost = f", {len(self._unwritten)} could not be written there and are lost" if self._unwritten else ""
            _log.error("%d records wait in %s for the next start%s", self._waiting(), self._path, lost)
        os.close(self._fd)
        self._fd = -1

    def record(self, span: Span) -> None:
        """Append one record to the journal; the ledger gets it soon."""
        attempt = span.rollout_id, span.attempt_id
        if attempt in self.tokens_lost:
            self._drop(span)
            return
        try:
            packed_span = pack(span)
        except (OverflowError, UnicodeEncodeError):  # a message may hold any number, and half a surrogate pair
            span.attributes = storable(span.attributes)
            packed_span = pack(span)
        record = packed_span.record
        size = _HEADER.size + len(record)
        if self._waiting() >= self._max_waiting or self._waiting_bytes + size > self._max_waiting_bytes:
            self._give_up(attempt)
            self._drop(span)
            return
        self._unwritten.append((attempt, _journalled(record)))
        self._append()
        self._recorded += 1
        self._waiting_bytes += size
        self._pending.append(_Waiting(self._recorded, attempt, packed_span, size))
        self._wake.set()

    def state(self) -> dict[str, int]:
        """How much waits for the ledger, and how much the journal holds."""
        return {"records_waiting": self._waiting(), "journal_bytes": self._size}

    def trouble(self) -> str | None:
        """What is wrong with recording now, or None."""
        if self._unwritten:
            return f"{self._path} cannot be written; {len(self._unwritten)} records are in memory alone"
        return None if self._failure is None else f"the store takes no records: {self._failure}"

    def is_lost(self, rollout_id: str, attempt_id: str) -> bool:
        """Whether records of this attempt were given up: it cannot be trained, and has to fail as infrastructure."""
        return (rollout_id, attempt_id) in self.tokens_lost

    async def stored(self) -> None:
        """Wait until every record made so far is durable in the ledger, but for those that were given up.

        Raises the ledger's error when it keeps failing.
        """
        target = self._recorded
        await self._until_stored(target, lambda: self._failures >= _FAILURES_TOLD)
        if self._oldest() <= target and self._failure is not None:
            raise self._failure

    async def _until_stored(self, target: int, give_up: Callable[[], bool] = lambda: False) -> None:
        if self._oldest() > target:
            return
        self._urgent.set()
        async with self._progress:
            await self._progress.wait_for(lambda: self._oldest() > target or give_up())

    def _oldest(self) -> int:
        """The number of the oldest record that waits; of the next one where none does."""
        first = self._handed or self._pending
        return first[0].number if first else self._recorded + 1

    def _waiting(self) -> int:
        return len(self._handed) + len(self._pending)

    def _give_up(self, attempt: _Name) -> None:
        """Drop what waits of an attempt, but for what the ledger is taking now, and remember the attempt."""
        self.tokens_lost[attempt] = Counter()
        self._behind.begin(
            f"{self._waiting()} calls wait for the store; attempts that call before it takes them are retried"
        )
        for waiting in (one for one in self._pending if one.attempt == attempt):
            self._waiting_bytes -= waiting.size
            self._drop(unpack(waiting.span.record))
        self._pending = deque(one for one in self._pending if one.attempt != attempt)
        self._unwritten = deque(one for one in self._unwritten if one[0] != attempt)

    def _drop(self, span: Span) -> None:
        self._counters["recording_lost"] += 1
        if span.name == semconv.CALL_SPAN and (call := from_span(span)).trainable:
            self.tokens_lost[span.rollout_id, span.attempt_id][call.model] += call.sampled_tokens

    def _append(self) -> None:
        """Write what the journal lacks, as far as the disk lets us."""
        try:
            if self._torn:
                self._cut()
            while self._unwritten:
                self._write(self._unwritten[0][1])
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
        _write_all(self._fd, record)
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
            self._hand_over()
            try:
                await self._ledger.add_spans([one.span for one in self._handed])
            except Exception as error:  # noqa: BLE001 - any ledger fault: the journal holds the records, we try again
                _log.error(
                    "the ledger refused %d records; trying again in %.2f s: %s",
                    len(self._handed),
                    backoff,
                    error,
                    exc_info=not self._failures,  # once, where it goes on for minutes
                )
                await self._failed(error)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, 5.0)
                continue
            backoff = 0.05
            self._failures, self._failure = 0, None
            self._taken()
            async with self._progress:
                self._progress.notify_all()

    def _hand_over(self) -> None:
        """Choose what the ledger takes next; what it refused goes first."""
        while self._pending and len(self._handed) < self._max_batch:
            self._handed.append(self._pending.popleft())

    def _taken(self) -> None:
        """The ledger has what was handed to it."""
        records, self._handed = self._handed, []
        for one in records:
            self._waiting_bytes -= one.size
        if self._pending:
            if self._size > max(_REWRITTEN_ABOVE, 4 * self._waiting_bytes):
                self._rewrite()
            return
        self._behind.end()
        self._wake.clear()
        self._urgent.clear()
        # The ledger has them all; a disk that is full gets its space back at once.
        if self._size > _EMPTIED_ABOVE or self._unwritten or self._torn:
            self._unwritten.clear()
            self._size, self._torn = 0, True
            with contextlib.suppress(OSError):
                self._cut()

    def _rewrite(self) -> None:
        """Put a journal with what waits in the place of the one that is full of what the ledger has: where records
        never stop coming, there is no moment in which it could be emptied."""
        waiting = b"".join(_journalled(one.span.record) for one in self._pending)
        fd = -1
        try:
            fd = os.open(self._new, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
            _write_all(fd, waiting)
            os.replace(self._new, self._path)
        except OSError as error:  # the one that is there is whole; it is tried again with the next batch
            self._growth.begin(f"it cannot be written anew without what the store has, and grows: {error}")
            if fd >= 0:
                os.close(fd)
                self._new.unlink(missing_ok=True)
            return
        self._growth.end()
        os.close(self._fd)
        self._fd, self._size, self._torn = fd, len(waiting), False
        self._unwritten.clear()

    async def _failed(self, error: Exception) -> None:
        async with self._progress:
            self._failures += 1
            self._failure = error
            self._progress.notify_all()

    async def _linger(self) -> None:
        """Let more records gather, unless there are many or somebody waits: a batch costs the ledger one commit, and
        its thread and the event loop wait for each other's use of Python's lock."""
        with contextlib.suppress(TimeoutError):
            if self._waiting() < self._max_batch:
                await asyncio.wait_for(self._urgent.wait(), _LINGER_SECONDS)
        if _BUSY <= self._waiting() < self._max_batch:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), _BUSY_LINGER_SECONDS)


def _journalled(record: bytes) -> bytes:
    """A record as the journal has it."""
    return _HEADER.pack(len(record), zlib.crc32(record)) + record


def _write_all(fd: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]


class Replayed(NamedTuple):
    """The whole records of a journal, in order; `damaged`: it held others once, which cannot be read."""

    records: list[Packed]
    damaged: bool


def replay(path: Path) -> Replayed:
    """Read a journal. Behind a damaged record it goes on with the next one that has its checksum.

    A last record that was cut short is no damage: its writer was killed, and no answer had left.
    """
    data = path.read_bytes()
    records: list[Packed] = []
    damaged = False
    position = 0
    while position < len(data):
        record = _record_at(data, position)
        if record is not None:
            records.append(packed(record))
            position += _HEADER.size + len(record)
            continue
        following = _next_record(data, position + 1)
        if following is None and _is_cut(data, position):
            _log.warning("journal %s is cut at byte %d of %d; what is before it is kept", path, position, len(data))
            break
        damaged = True
        _log.error("journal %s is damaged at byte %d of %d; it goes on at %s", path, position, len(data), following)
        if following is None:
            break
        position = following
    return Replayed(records, damaged)


def _record_at(data: bytes, position: int) -> bytes | None:
    """The record that begins there; None where none does, or it is not as it was written."""
    start = position + _HEADER.size
    if start > len(data):
        return None
    length, checksum = _HEADER.unpack_from(data, position)
    # Zeros, with which some file systems fill what a crash left unwritten, have the checksum of nothing.
    if not length or start + length > len(data):
        return None
    record = data[start : start + length]
    return record if zlib.crc32(record) == checksum else None


def _next_record(data: bytes, position: int) -> int | None:
    """Where the next whole record begins."""
    for begin in _RECORD_BEGINS.finditer(data, position + _HEADER.size):
        # A checksum over all that may be a record would take minutes where images are among them.
        if _begins_with_texts(data, begin.start() + 1) and _record_at(data, begin.start() - _HEADER.size) is not None:
            return begin.start() - _HEADER.size
    return None


def _begins_with_texts(data: bytes, at: int) -> bool:
    """Whether three short texts of MessagePack stand there: the ids of a span, or the names of fields between them."""
    for _ in range(3):
        if at + 1 >= len(data):
            return False
        first = data[at]
        if first & 0xE0 == _SHORT_TEXT:
            at += 1 + (first & 0x1F)
        elif first == _TEXT:
            at += 2 + data[at + 1]
        elif first == _LONG_TEXT:
            at += 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        else:
            return False
    return True


def _is_cut(data: bytes, position: int) -> bool:
    """Whether what is left is the beginning of a record, or nothing but zeros."""
    start = position + _HEADER.size
    if start > len(data) or not any(memoryview(data)[position:]):
        return True
    length, checksum = _HEADER.unpack_from(data, position)
    # A record that is whole but for the length in its header was written to its end.
    return bool(start + length > len(data) and zlib.crc32(memoryview(data)[start:]) != checksum)
