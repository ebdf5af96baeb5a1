"""Starting runner processes from another one.

The agent travels by cloudpickle through a pipe, so one that is defined in a script or a notebook works as it is, and
the script is never run again. Keys travel the same way, never in the environment.

A process that dies (memory ran out, a crash in a C extension) is started anew, and its attempts are lost at once.
"""

import logging
import os
import pickle
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import cloudpickle

from lightning_rl.agent import Agent
from lightning_rl.runner.process import LENGTH, Payload, worker_ids
from lightning_rl.server.child import Child, ChildDied
from lightning_rl.store.client import HttpStore
from lightning_rl.store.errors import StoreError

_RESTARTS = 3  # of one process, without a rollout that ended in between
_log = logging.getLogger(__name__)


class Working:
    """Running runner processes."""

    def __init__(self, runners: "list[_Runner]") -> None:
        self._runners = runners

    @property
    def pids(self) -> list[int]:
        """Of the processes as they are now."""
        return [runner.child.process.pid for runner in self._runners]

    def check(self) -> None:
        """Start anew what has died, with a warning. Raises ChildDied, with the end of its log, when that is of no use:
        the process could not start, or dies again and again."""
        for runner in self._runners:
            runner.check()


class _Runner:
    """One runner process after another. Not yet started when made."""

    def __init__(self, number: int, payload: Payload, log_dir: Path, store: HttpStore) -> None:
        self._number = number
        self._payload = payload
        self._log = log_dir / f"runner-{number}.log"
        self._store = store
        self._in_vain = 0
        self.child = self._next()

    def _next(self) -> Child:
        # Each process has worker ids of its own, so that the claims of a dead one are told from everybody else's.
        self._worker_id = f"runner-{self._number}-{secrets.token_hex(4)}"
        frame = pickle.dumps(self._payload | {"worker_id": self._worker_id})
        return Child(
            "lightning_rl.runner.process",
            name=f"runner {self._number}",
            log=self._log,
            first=LENGTH.pack(len(frame)) + frame,
        )

    def start(self) -> None:
        """Start the process."""
        self.child.start()
        self.child.listen()

    def ask_to_stop(self) -> None:
        """See `Child`."""
        self.child.ask_to_stop()

    def stop(self) -> None:
        """See `Child`."""
        self.child.stop()

    def check(self) -> None:
        """Start it anew when it has died. Raises ChildDied."""
        if self.child.process.poll() is None:
            return
        died = self.child.died()
        if "started" not in self.child.told:
            raise died
        self._in_vain = 0 if "finished" in self.child.told else self._in_vain + 1
        how = _how_it_died(self.child.process.returncode)
        if self._in_vain > _RESTARTS:
            raise ChildDied(f"{self.child.name} died {self._in_vain} times and no rollout ended meanwhile{how}\n{died}")
        _log.warning("%s died%s; it is started anew, and its rollouts are retried.\n%s", self.child.name, how, died)
        self._lose_claims()
        self.child = self._next()
        self.start()

    def _lose_claims(self) -> None:
        try:
            self._store.workers_died(worker_ids(self._worker_id, self._payload["workers"]))
        except StoreError as error:
            _log.warning("the rollouts of %s are retried only when their leases are over: %s", self.child.name, error)


def _how_it_died(status: int) -> str:
    if status >= 0:
        return f" (status {status})"
    hint = ""
    if -status == signal.SIGKILL:
        hint = ": most often the system's memory ran out; lower n_runners or what the agent holds"
    return f", killed by signal {-status}{hint}"


@contextmanager
def launch(n_runners: int, agent: Agent, url: str, key: str, *, log_dir: Path) -> Iterator[Working]:
    """`n_runners` concurrent rollouts in at most as many processes as there are cores, while the block runs.

    `key` is a runner key of the server at `url`. Each process logs to `log_dir`/runner-<number>.log.
    """
    pickled = cloudpickle.dumps(agent)
    with ExitStack() as parts:
        store = HttpStore(url, key, connections=1, patience_seconds=0)
        parts.callback(store.close)
        runners = [
            _Runner(
                number,
                Payload(sys_path=sys.path, url=url, key=key, worker_id="", workers=workers, agent=pickled),
                log_dir,
                store,
            )
            for number, workers in enumerate(shares(n_runners, len(os.sched_getaffinity(0))))
        ]
        # All are asked first, then each is waited for, whatever becomes of the others; none of them runs yet.
        for runner in runners:
            parts.callback(runner.stop)
        for runner in runners:
            parts.callback(runner.ask_to_stop)
        for runner in runners:
            runner.start()
        yield Working(runners)


def shares(n_runners: int, cores: int) -> list[int]:
    """How many rollouts each process runs at a time: as even as can be, none without any."""
    processes = min(n_runners, cores)
    return [n_runners // processes + (number < n_runners % processes) for number in range(processes)]
