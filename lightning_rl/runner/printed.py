"""What an attempt prints: kept with it, and written to the runner's log as ever.

Invariant: what is printed belongs to the attempt in whose OpenTelemetry context it is printed, as what is emitted does,
or to none; never to another. So nothing is buffered between `print` and here.
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
_KEY = context.create_key("lightning_rl.printed")


class Kept:
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
    """What one attempt has printed so far."""

    def __init__(self) -> None:
        self.stdout = Kept()
        self.stderr = Kept()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """What is printed inside the block, and in what it starts, is kept here."""
        token = context.attach(context.set_value(_KEY, self))
        try:
            yield
        finally:
            context.detach(token)


class _Routed(io.RawIOBase):
    """Writes to a file descriptor, and to what the attempt that writes keeps of this stream."""

    def __init__(self, fd: int, name: Literal["stdout", "stderr"]) -> None:
        self._fd = fd
        self._name = name

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        written = bytes(data)
        printed = context.get_value(_KEY)
        if isinstance(printed, Printed):
            getattr(printed, self._name).add(written)
        write_all(self._fd, written)
        return len(written)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def route() -> None:
    """From now on what this process prints is kept by attempt. Both streams go on to the log, which is its stderr."""
    for name in ("stdout", "stderr"):
        routed = io.TextIOWrapper(_Routed(2, name), encoding="utf-8", errors="backslashreplace", write_through=True)  # type: ignore[type-var]
        setattr(sys, name, routed)
