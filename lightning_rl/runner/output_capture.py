"""What an attempt prints: kept with it, and written to the runner's log, where each line begins with its rollout.

Invariant: what is printed belongs to the attempt in whose OpenTelemetry context it is printed, as what is emitted does,
or to none; never to another. So nothing is buffered between `print` and what is kept.
"""

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from opentelemetry import context

_ENDS = 32 * 1024  # bytes that are kept of the beginning, and of the end
_LONG_LINE = 8 * 1024  # bytes
_MOST = 2**20  # bytes of a rollout that go to the log: a program that prints without end fills no disk
_KEY = context.create_key("lightning_rl.printed")
_NAME = context.create_key("lightning_rl.rollout")


class CapturedOutput:
    """The beginning and the end of a stream of bytes; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first, self._last = bytearray(), bytearray()
        self._left_out = 0

    def add(self, data: bytes) -> None:
        """More of the stream."""
        with self._lock:
            room = _ENDS - len(self._first)
            self._first += data[:room]
            self._last += data[room:]
            if len(self._last) > 2 * _ENDS:
                self._cut()

    def text(self) -> str:
        """What is kept as text; it says how much was left out in the middle."""
        with self._lock:
            if len(self._last) > _ENDS:
                self._cut()
            gap = b"\n[... %d bytes left out ...]\n" % self._left_out if self._left_out else b""
            return bytes(self._first + gap + self._last).decode(errors="replace")

    def _cut(self) -> None:
        over = len(self._last) - _ENDS
        self._left_out += over
        del self._last[:over]


class Printed:
    """What one attempt of the rollout `name` has printed so far."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.stdout = CapturedOutput()
        self.stderr = CapturedOutput()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """What is printed inside the block, and in what it starts, is kept here."""
        token = context.attach(context.set_value(_KEY, self, context.set_value(_NAME, self.name)))
        try:
            yield
        finally:
            context.detach(token)
            LOG.end(self.name)


@contextmanager
def named(rollout_id: str) -> Iterator[None]:
    """Lines of the log that are written inside the block begin with this rollout; nothing is kept of them."""
    token = context.attach(context.set_value(_NAME, rollout_id))
    try:
        yield
    finally:
        context.detach(token)


class RunnerLog:
    """The runner's log, a file descriptor that many rollouts write to at once; safe to share between threads.

    Each line begins with the rollout that wrote it, and is written when it is whole; one that is very long in pieces.
    Of a rollout that prints more than 1 MiB the rest is left out.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.Lock()
        self._begun: dict[str, bytes] = {}  # lines that are not whole yet, by rollout
        self._room: dict[str, int] = {}  # bytes that a rollout may yet write

    def write(self, data: bytes, name: str) -> None:
        """What this rollout ("": none, which waits for nothing) has printed."""
        with self._lock:
            if not name:
                write_all(self.fd, data)
                return
            room = self._room.get(name, _MOST)
            if room < 0:
                return
            self._room[name] = room - len(data)
            if len(data) > room:
                data = data[:room] + b"\n[it printed more than 1 MiB: the rest is not in this log]\n"
            whole, newline, rest = (self._begun.pop(name, b"") + data).rpartition(b"\n")
            if len(rest) > _LONG_LINE:
                whole, newline, rest = whole + newline + rest, b"\n", b""
            if rest:
                self._begun[name] = rest
            if newline:
                self._write_lines(whole, name)

    def end(self, name: str) -> None:
        """The rollout prints no more: write what it has begun."""
        with self._lock:
            self._room.pop(name, None)
            if rest := self._begun.pop(name, b""):
                self._write_lines(rest, name)

    def _write_lines(self, lines: bytes, name: str) -> None:
        write_all(self.fd, b"".join(b"%s | %s\n" % (name.encode(), line) for line in lines.split(b"\n")))


class _Routed(io.RawIOBase):
    """Writes to the log, and to what the attempt that writes keeps of this stream."""

    def __init__(self, log: RunnerLog, name: Literal["stdout", "stderr"]) -> None:
        self._log = log
        self._name = name

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._log.fd

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        written = bytes(data)
        printed = context.get_value(_KEY)
        if isinstance(printed, Printed):
            getattr(printed, self._name).add(written)
        self._log.write(written, str(context.get_value(_NAME) or ""))
        return len(written)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]


LOG = RunnerLog(2)  # a runner's stderr


def route() -> None:
    """From now on what this process prints is kept by attempt. Both streams go on to the log, which is its stderr."""
    for name in ("stdout", "stderr"):
        routed = io.TextIOWrapper(_Routed(LOG, name), encoding="utf-8", errors="backslashreplace", write_through=True)  # type: ignore[type-var]
        setattr(sys, name, routed)
