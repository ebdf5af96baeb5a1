"""The end of a process that does not wait for its threads, after what libraries registered with `atexit`.

Tracers send their last spans there, and tools stop what they have started.
"""

import atexit
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_log = logging.getLogger(__name__)


def leave(code: int, *, seconds: float, last: Callable[[], None] = lambda: None) -> NoReturn:
    """Run the exit handlers in this thread, the last registered first, then `last`, and end the process.

    Handlers that take longer than `seconds` in all are left. One that raises is printed by Python, and the next one
    runs. Processes that multiprocessing started are killed before: its own handler would wait for them. `last` may run
    in another thread.
    """

    def end() -> NoReturn:
        try:
            last()
        finally:
            os._exit(code)

    def give_up() -> None:
        _log.warning("what is registered with atexit takes more than %g s, and is left", seconds)
        end()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        for child in multiprocessing.active_children():
            if vars(child)["_parent_pid"] == os.getpid():  # a process that was forked knows those of its parent, too
                child.kill()
        atexit._run_exitfuncs()
    finally:
        end()


def forget_exit_handlers() -> None:
    """In a process that was forked: what is registered is the parent's to run."""
    atexit._clear()


def flush_spans(seconds: float) -> None:
    """Send what the agent's tracer has not sent yet, whose exit handler may be the parent's."""
    if (trace := sys.modules.get("opentelemetry.trace")) is not None:
        flush = getattr(trace.get_tracer_provider(), "force_flush", None)  # one of the API alone has none
        if flush is not None:
            flush(int(1000 * seconds))
