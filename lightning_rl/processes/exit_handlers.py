"""What libraries registered with `atexit` runs at the end of a process that ends by `os._exit`, for a bounded time.

Tracers send their last spans there, and tools stop what they have started.
"""

import atexit
import logging
import threading

_SECONDS = 5.0
_log = logging.getLogger(__name__)


def run_exit_handlers() -> None:
    """Run them, last registered first; those that take longer than 5 s in all are left. A handler that raises is
    printed by Python, and the next one runs. Threads that still run are not waited for."""
    handlers = threading.Thread(target=atexit._run_exitfuncs, name="atexit", daemon=True)
    handlers.start()
    handlers.join(_SECONDS)
    if handlers.is_alive():
        _log.warning("what is registered with atexit took more than %g s, and was left", _SECONDS)


def forget_exit_handlers() -> None:
    """In a process that was forked: what is registered is the parent's to run."""
    atexit._clear()
