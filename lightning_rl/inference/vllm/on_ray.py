"""A vLLM server on a machine of a Ray cluster: an actor there starts it on its GPUs, and it listens where the other
machines reach it.

Invariant: the server lives no longer than its actor, and the actor no longer than the run.
"""

import contextlib
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lightning_rl.inference.vllm.command import Options
from lightning_rl.inference.vllm.server import VllmNotStarted, VllmServer

_STOP_SECONDS = 20.0


class RayServer:
    """As `VllmServer`.

    Args:
        options, run_dir, index: as of `VllmServer`; the folder is seen under the same path there.
        scheduling: where Ray starts the actor.
        gpus: those that the server is told of; None: those that Ray gives the actor.
    """

    def __init__(
        self, options: Options, run_dir: Path, index: int, scheduling: Any, gpus: tuple[str, ...] | None
    ) -> None:
        import ray

        self._ray = ray
        own = options.tensor_parallel if gpus is None else 0
        # Threads of its own: it is asked to stop while somebody waits for its start.
        host: Any = ray.remote(_Host)
        made = host.options(num_cpus=1, num_gpus=own, max_concurrency=4, scheduling_strategy=scheduling)
        self._actor: Any = made.remote(options, str(run_dir.resolve()), index, gpus)
        self.url: str = ray.get(self._actor.url.remote())

    def start(self) -> None:
        """As of `VllmServer`."""
        self._ask("start")

    def wait(self) -> None:
        """As of `VllmServer`."""
        self._ask("wait")

    @property
    def runs(self) -> bool:
        """As of `VllmServer`; a machine that is gone has no server."""
        try:
            return bool(self._ask("runs"))
        except VllmNotStarted:
            return False

    def why(self) -> str:
        """As of `VllmServer`."""
        try:
            return str(self._ask("why"))
        except VllmNotStarted as error:
            return str(error)

    def ask_to_stop(self) -> None:
        """As of `VllmServer`."""
        self._actor.ask_to_stop.remote()

    def stop(self) -> None:
        """As of `VllmServer`."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.stop.remote(), timeout=_STOP_SECONDS)

    def _ask(self, method: str) -> Any:
        try:
            return self._ray.get(getattr(self._actor, method).remote())
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            message = " ".join(str(error).split())
            raise VllmNotStarted(f"vLLM at {self.url}: its machine or its Ray actor is gone: {message}") from error


class _Host:
    """The actor."""

    def __init__(self, options: Options, run_dir: str, index: int, gpus: tuple[str, ...] | None) -> None:
        import ray

        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        devices = tuple(map(str, ray.get_gpu_ids())) if gpus is None else gpus
        self._server = VllmServer(replace(options, host=host), Path(run_dir), index, devices)

    def url(self) -> str:
        return self._server.url

    def start(self) -> None:
        self._server.start()

    def wait(self) -> None:
        self._server.wait()

    def runs(self) -> bool:
        return self._server.runs

    def why(self) -> str:
        return self._server.why()

    def ask_to_stop(self) -> None:
        self._server.ask_to_stop()

    def stop(self) -> None:
        self._server.stop()
