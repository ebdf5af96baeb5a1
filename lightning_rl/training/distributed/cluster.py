"""Ray, joined where it runs already, else started on this machine for this run; imported only where workers train.

Invariant: what was found running is left running.
"""

import os
import sys
from typing import Any

_MEGABYTE = 2**20


def join(workers: int, object_bytes: int) -> bool:
    """Connect to Ray: to the one that this process uses already, to the cluster at RAY_ADDRESS, or to one of our own,
    which listens on the loopback alone. Whether it is our own: who gets True calls `leave`.

    Args:
        workers: processes that there must be room for; a Ray of our own takes more of them than there are cores.
        object_bytes: what is given from worker to worker at once, at most.
    """
    import ray

    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if address := os.environ.get("RAY_ADDRESS"):
        # Workers of other machines read no environment of ours.
        paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
        ray.init(address=address, runtime_env=paths, **common)
    else:
        ray.init(
            address="local",
            num_cpus=max(workers, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=100 * _MEGABYTE + object_bytes,
            _node_ip_address="127.0.0.1",
            **common,
        )
    return True


def leave() -> None:
    """Disconnect; a Ray of our own ends."""
    import ray

    ray.shutdown()
