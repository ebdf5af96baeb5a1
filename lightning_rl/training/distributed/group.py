"""A group of workers that Ray places, and the way to ask them: all are asked at once, and one of them answers.

Invariant: after a failure nothing more is asked. Workers compute together, so when one is gone or has failed the others
wait for it, and none of them can go on.
"""

import time
from collections.abc import Callable
from typing import Any

from lightning_rl.errors import Explained, WorkerDied
from lightning_rl.training.distributed.process_group import ProcessGroup
from lightning_rl.training.distributed.worker import TrainingWorker

_PLACING_SECONDS = 60.0
_LAST_WORDS_SECONDS = 5.0  # within which Ray says that a worker is gone, after another one has missed it


class NoPlace(Explained, RuntimeError):
    """The cluster has no room for the workers."""


class WorkerGroup:
    """`nodes` x `per_node` workers, those of a node next to each other.

    Args:
        name: what they train, for messages.
        device: cpu, or cuda: each has a GPU of its own.
        build: makes the models of a worker; it is sent to all of them.

    `pids` are the workers' processes, each on its machine.
    Whoever makes one calls `close`. Raises NoPlace where the cluster has no room.
    """

    def __init__(self, name: str, nodes: int, per_node: int, device: str, build: Callable[[ProcessGroup], Any]) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.name, self.size = name, nodes * per_node
        self._ray = ray
        self._failed = False
        gpus = int(device == "cuda")
        bundle = {"CPU": per_node} | ({"GPU": per_node} if gpus else {})
        self._room = placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
        self._workers: list[Any] = []
        self.pids: list[int] = []
        try:
            if not self._room.wait(_PLACING_SECONDS):
                raise NoPlace(
                    f"the workers of {name} find no room: trainer.nnodes={nodes} machines with {bundle} each are asked "
                    "for; look at `ray status` for what there is, or lower trainer.n_gpus_per_node"
                )
            for rank in range(self.size):
                place = PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=rank // per_node)
                made = ray.remote(TrainingWorker).options(num_cpus=1, num_gpus=gpus, scheduling_strategy=place)
                self._workers.append(made.remote(rank, self.size, device))
            host, port = self._answers([self._workers[0].listen.remote()])[0]
            self.pids = self._answers([worker.join.remote(host, port, build) for worker in self._workers])
        except BaseException:
            self.close()
            raise

    def ask(self, part: str | None, method: str, *args: Any, **options: Any) -> Any:
        """Have every worker call `method` of a part of its models (None: of the models); the first one's answer.

        Raises WorkerDied where one is gone, and else what a worker raises.
        """
        if self._failed:
            raise WorkerDied(f"the workers of {self.name} have failed before: resume the run")
        given = self._ray.put((args, options))
        return self._answers([worker.ask.remote(part, method, given) for worker in self._workers])[0]

    def close(self) -> None:
        """End the workers, and give back their room."""
        from ray.util.placement_group import remove_placement_group

        self._failed = True
        for worker in self._workers:
            self._ray.kill(worker)
        remove_placement_group(self._room)

    def _answers(self, asked: list[Any]) -> list[Any]:
        """Wait for all; the first failure ends the waiting."""
        waiting = list(asked)
        while waiting:
            [done], waiting = self._ray.wait(waiting, num_returns=1)
            if failure := self._failure(done):
                self._failed = True
                raise self._died(asked, failure) or failure
        return list(self._ray.get(asked))

    def _failure(self, asked: Any) -> Exception | None:
        try:
            self._ray.get(asked)
        except self._ray.exceptions.RayTaskError as error:
            cause: Exception = error.cause
            cause.add_note(f"Where it was raised, in a worker of {self.name}:\n{error}")
            return cause
        except self._ray.exceptions.RayError as error:
            gone: Exception = error
            return gone
        return None

    def _died(self, asked: list[Any], failure: Exception) -> WorkerDied | None:
        """The error of a worker that is gone, where one is. The others fail of its silence, and may be faster."""
        until = time.monotonic() + _LAST_WORDS_SECONDS
        for rank, one in enumerate(asked):
            ready, _ = self._ray.wait([one], timeout=max(0.0, until - time.monotonic()))
            found = self._failure(one) if ready else None
            if isinstance(found, self._ray.exceptions.RayError):
                process = f" (process {self.pids[rank]})" if self.pids else ""
                died = WorkerDied(
                    f"worker {rank} of {self.size} that trains {self.name} is gone{process}: {_first_line(found)}; the "
                    "run goes on from its last checkpoint when it is resumed (trainer.max_restarts does so by itself)"
                )
                died.__cause__ = found
                return died
        return None


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split()) or type(error).__name__
