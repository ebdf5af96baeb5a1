"""The lines of a server's log: time, level, logger, what happened, and then its facts as `name=value`.

Facts are what tells one rollout, attempt or call from another; a fact with a blank in it is quoted as JSON is.
"""

import json
import logging
import os
import sys
import time
from contextlib import suppress

LEVEL_VARIABLE = "LIGHTNING_RL_LOG_LEVEL"  # DEBUG: a line for every call
_OURS = ("lightning_rl", "lightning_rl_proxy", "lightning_rl_adapters")


class Formatter(logging.Formatter):
    """Writes a record's `facts` (`extra={"facts": {...}}`) behind its message; times are UTC."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        parts = (f" {name}={_quoted(value)}" for name, value in facts.items() if value is not None)
        return super().formatMessage(record) + "".join(parts)


class LogFile(logging.FileHandler):
    """A log file. That it cannot be written, on a full disk say, is told once on stderr until it can be again, where
    `logging` prints a traceback for every line."""

    _error: OSError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        former, self._error = self._error, None
        super().emit(record)
        if self._error is not None and former is None:
            with suppress(OSError, ValueError):  # stderr may be on that disk, too
                print(f"{self.baseFilename} cannot be written: {self._error}", file=sys.stderr, flush=True)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._error = error
        else:
            super().handleError(record)


def begin(handler: logging.Handler) -> None:
    """Log to `handler` from now on, ours at the level that the environment says (INFO), all else from INFO on."""
    handler.setFormatter(Formatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    level = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ValueError(f"{LEVEL_VARIABLE} is {level!r}; it is one of {sorted(logging.getLevelNamesMapping())}")
    for name in _OURS:
        logging.getLogger(name).setLevel(level)


def _quoted(value: object) -> str:
    text = str(value)
    plain = text and text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if plain else json.dumps(text)
