"""The lines of a server's log: time, level, logger, what happened, and then its facts as `name=value`.

Facts are what tells one rollout, attempt or call from another; a fact with a blank in it is quoted as JSON is.
"""

import json
import logging
import os
import time

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
