"""A Ray of our own, started on this machine: it listens on the loopback alone and reports its use to nobody."""

import os
from typing import Any

# Ray's names. The second holds on Linux as well; Ray reads it when it is imported.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
_ON_THE_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
OPTIONS: dict[str, Any] = {"address": "local", "include_dashboard": False}  # of `ray.init`


def prepare(*, own: bool) -> None:
    """Set what Ray reads, before it is imported. `own`: it will be started, not joined where others did so."""
    for name, value in (_QUIET | (_ON_THE_LOOPBACK if own else {})).items():
        os.environ.setdefault(name, value)
