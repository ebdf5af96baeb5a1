"""Machines of a Ray cluster, played on one: each is a raylet with its workers, and can be killed as a whole."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import psutil
from ray.cluster_utils import Cluster

_OBJECTS_BYTES = 100_000_000  # of the object store; agents and keys need little


class Hosts:
    """A cluster whose head runs no agents; its machines have names, which their processes know as PLACE."""

    def __init__(self) -> None:
        small = {"object_store_memory": _OBJECTS_BYTES, "include_dashboard": False}
        # A machine that is gone is missed within seconds, one that is busy is not.
        missed = {"health_check_period_ms": 1000, "health_check_failure_threshold": 5}
        # At exit: by handlers of signals, which only a main thread may set, and machines join from others.
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "_system_config": missed, **small},
            shutdown_at_exit=False,
        )
        self._nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, name: str, **given: Any) -> None:
        """A machine of one core joins."""
        node = self._cluster.add_node(
            wait=False,
            **{"num_cpus": 1, "object_store_memory": _OBJECTS_BYTES, "env_vars": {"PLACE": name}, **given},
        )
        self._nodes[name] = node

    def processes(self, name: str) -> list[psutil.Process]:
        """All that run on it."""
        [raylet] = self._nodes[name].all_processes["raylet"]
        mother = psutil.Process(raylet.process.pid)
        return [mother, *mother.children(recursive=True)]

    def kill(self, name: str) -> None:
        """It is gone at once: no process of it says goodbye."""
        processes = self.processes(name)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def shutdown(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def hosts() -> Iterator[Hosts]:
    """A cluster, of which nothing is left behind."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Hosts()
    try:
        yield made
    finally:
        made.shutdown()
