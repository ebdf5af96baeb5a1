"""A group of workers that Ray places, and the way to ask them: all are asked at once, and one of them answers.

Invariant: after a failure nothing more is asked. Workers compute together, so when one is gone or has failed the others
wait for it, and none of them can go on.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_rl.errors import WorkerDied
from lightning_rl.training.distributed import rooms
from lightning_rl.training.distributed.process_group import ProcessGroup
from lightning_rl.training.distributed.worker import TrainingWorker

_LAST_WORDS_SECONDS = 5.0  # within which Ray says that a worker is gone, after another one has missed it


class WorkerGroup:
    """`nodes` x `per_node` workers, those of a node next to each other.

    Args:
        name: what they train, for messages.
        device: cpu, or cuda: each has a GPU of its own.
        build: makes the models of a worker; it is sent to all of them.
        room: theirs, where one is reserved already (`rooms.of_workers`), which whoever has reserved it gives back.

    `pids` are the workers' processes, each on its machine; who holds `alone` asks several things in a row.
    Whoever makes one calls `close`. Raises NoPlace where the cluster has no room.
    """

    def __init__(
        self,
        name: str,
        nodes: int,
        per_node: int,
        device: str,
        build: Callable[[ProcessGroup], Any],
        room: Any = None,
    ) -> None:
        import ray

        self.name, self.size = name, nodes * per_node
        self._ray = ray
        self._failed = False
        self.alone = threading.RLock()
        gpus = int(device == "cuda")
        self._ours = room is None
        self._room = room or rooms.of_workers(name, nodes, per_node, gpus)
        self._workers: list[Any] = []
        self.pids: list[int] = []
        try:
            for rank in range(self.size):
                place = rooms.scheduled(self._room, rank // per_node)
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
        with self.alone:  # in another order on one of them than on the others they would wait for ever
            if self._failed:
                raise WorkerDied(f"the workers of {self.name} have failed before: resume the run")
            arguments = self._ray.put((args, options))
            return self._answers([worker.ask.remote(part, method, arguments) for worker in self._workers])[0]

    def close(self) -> None:
        """End the workers, and give back their room."""
        self._failed = True
        for worker in self._workers:
            self._ray.kill(worker)
        if self._ours:
            rooms.give_back(self._room)

    def _answers(self, answers: list[Any]) -> list[Any]:
        """Wait for all; the first failure ends the waiting."""
        waiting = list(answers)
        while waiting:
            [done], waiting = self._ray.wait(waiting, num_returns=1)
            if failure := self._failure(done):
                self._failed = True
                raise self._died(answers, failure) or failure
        return list(self._ray.get(answers))

    def _failure(self, answer: Any) -> Exception | None:
        try:
            self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:
            cause: Exception = error.cause
            cause.add_note(f"Where it was raised, in a worker of {self.name}:\n{error}")
            return cause
        except self._ray.exceptions.RayError as error:
            failure: Exception = error
            return failure
        return None

    def _died(self, answers: list[Any], failure: Exception) -> WorkerDied | None:
        """The error of a worker that is gone, where one is. The others fail of its silence, and may be faster."""
        until = time.monotonic() + _LAST_WORDS_SECONDS
        for rank, one in enumerate(answers):
            ready, _ = self._ray.wait([one], timeout=max(0.0, until - time.monotonic()))
            error = self._failure(one) if ready else None
            if isinstance(error, self._ray.exceptions.RayError):
                process = f" (process {self.pids[rank]})" if self.pids else ""
                died = WorkerDied(
                    f"worker {rank} of {self.size} that trains {self.name} is gone{process}: {_first_line(error)}; the "
                    "run goes on from its last checkpoint when it is resumed (trainer.max_restarts does so by itself)"
                )
                died.__cause__ = error
                return died
        return None


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split()) or type(error).__name__
