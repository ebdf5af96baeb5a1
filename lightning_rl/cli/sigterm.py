"""SIGTERM, by which schedulers and containers end a job, ends a command as Ctrl-C does: it closes what it opened."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside the block SIGTERM raises SystemExit, with the status that a shell gives to who is ended by it. Signals
    come to the main thread alone: in another one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _end(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
