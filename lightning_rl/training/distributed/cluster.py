"""Ray, joined where it runs already, else started on this machine for this run; imported only where workers train.

Invariant: what was found running is left running.
"""

import os
import sys
from typing import Any

_MEGABYTE = 2**20
_ON_THE_LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray's name; it holds on Linux as well


def join(workers: int, object_bytes: int) -> bool:
    """Connect to Ray: to the one that this process uses already, to the cluster at RAY_ADDRESS, or to one of our own,
    which listens on the loopback alone. Whether it is our own: who gets True calls `leave`.

    Args:
        workers: processes that there must be room for; a Ray of our own takes more of them than there are cores.
        object_bytes: what is given from worker to worker at once, at most.
    """
    address = os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address:
        os.environ.setdefault(*_ON_THE_LOOPBACK)
    import ray  # not before: it reads these when it is imported

    if ray.is_initialized():
        return False
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if address:
        # Workers of other machines read no environment of ours.
        paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
        ray.init(address=address, runtime_env=paths, **common)
    else:
        ray.init(
            address="local",
            num_cpus=max(workers, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=100 * _MEGABYTE + object_bytes,
            **common,
        )
    return True


def leave() -> None:
    """Disconnect; a Ray of our own ends."""
    import ray

    ray.shutdown()
