"""Ray, joined where it runs already, else started on this machine for this run; imported only where workers train.

Invariant: what was found running is left running.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_rl.processes import own_ray

_MEGABYTE = 2**20


def runs_already() -> bool:
    """Whether `join` would join a cluster, rather than start a Ray of our own."""
    ray = sys.modules.get("ray")
    return bool(os.environ.get("RAY_ADDRESS")) or (ray is not None and ray.is_initialized())


def join(workers: int, object_bytes: int, gpus: Sequence[str] = ()) -> bool:
    """Connect to Ray: to the one that this process uses already, to the cluster at RAY_ADDRESS, or to one of our own,
    which listens on the loopback alone. Whether it is our own: who gets True calls `leave`.

    Args:
        workers: processes that there must be room for; a Ray of our own takes more of them than there are cores.
        object_bytes: what is given from worker to worker at once, at most.
        gpus: of a Ray of our own, those that it hands out, by their names in CUDA_VISIBLE_DEVICES.
    """
    address = os.environ.get("RAY_ADDRESS")
    own_ray.prepare(own=not address)
    import ray

    if ray.is_initialized():
        return False
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if address:
        # Workers of other machines read no environment of ours.
        paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
        ray.init(address=address, runtime_env=paths, **common)
    else:
        with _environment("CUDA_VISIBLE_DEVICES", ",".join(gpus) if gpus else None):
            ray.init(
                num_cpus=max(workers, os.cpu_count() or 1),
                num_gpus=len(gpus),
                object_store_memory=100 * _MEGABYTE + object_bytes,
                **own_ray.OPTIONS,
                **common,
            )
    return True


def gpus() -> int:
    """How many GPUs the cluster has that was joined."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]


def leave() -> None:
    """Disconnect; a Ray of our own ends."""
    import ray

    ray.shutdown()


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """With another value of a variable, which processes that are started meanwhile inherit; None: with its own."""
    former = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if value is not None:
            if former is None:
                del os.environ[name]
            else:
                os.environ[name] = former
