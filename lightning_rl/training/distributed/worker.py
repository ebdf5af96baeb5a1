"""One of several processes that train: it finds the others, builds its part of the models, and does as it is told.

Invariant: all workers are told the same, in the same order; what they answer is the same too, so one answer will do.
"""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from lightning_rl.training.distributed.process_group import ProcessGroup

_JOINING = timedelta(minutes=10)  # models are read from disk before the last worker is there


class TrainingWorker:
    """A Ray actor; `rank` 0 of `size` is the one that answers."""

    def __init__(self, rank: int, size: int, device: str) -> None:
        self._rank, self._size, self._device = rank, size, device
        self._models: Any = None
        self._door: socket.socket | None = None

    def listen(self) -> tuple[str, int]:
        """Open the port at which the others find the first worker, before anybody is told; its address."""
        import ray

        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._door = socket.create_server((host, 0))
        return host, self._door.getsockname()[1]

    def join(self, host: str, port: int, build: Callable[[ProcessGroup], Any]) -> int:
        """Meet the others, and build the models of this process; its id."""
        if host == "127.0.0.1":  # then they are all on this machine, and listen to nobody else
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
        door = None if self._door is None else self._door.detach()  # the store closes it
        store = TCPStore(host, port, self._size, is_master=door is not None, timeout=_JOINING, master_listen_fd=door)
        self._models = build(ProcessGroup(store, self._rank, self._size, self._device))
        return os.getpid()

    def ask(self, part: str | None, method: str, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """What `method` of a part of the models answers (None: of the models); None but for the first worker."""
        target = self._models if part is None else getattr(self._models, part)
        answer = getattr(target, method)(*arguments[0], **arguments[1])
        return answer if self._rank == 0 else None


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
