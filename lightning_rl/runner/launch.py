"""Starting runner processes from another one.

The agent travels by cloudpickle through a pipe, so one that is defined in a script or a notebook works as it is, and
the script is never run again. Keys travel the same way, never in the environment.
"""

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

from lightning_rl.agent import Agent
from lightning_rl.runner.process import LENGTH, Payload
from lightning_rl.server.child import Child


class Working:
    """Running runner processes."""

    def __init__(self, children: list[Child]) -> None:
        self.pids = [child.process.pid for child in children]
        self._children = children

    def check(self) -> None:
        """Raises ChildDied, with the end of its log, when a process has ended."""
        for child in self._children:
            child.check()


@contextmanager
def launch(n_runners: int, agent: Agent, url: str, key: str, *, log_dir: Path) -> Iterator[Working]:
    """`n_runners` concurrent rollouts in at most as many processes as there are cores, while the block runs.

    `key` is a runner key of the server at `url`. Each process logs to `log_dir`/runner-<number>.log.
    """
    pickled = cloudpickle.dumps(agent)
    children: list[Child] = []
    try:
        for number, workers in enumerate(shares(n_runners, len(os.sched_getaffinity(0)))):
            payload = Payload(
                sys_path=sys.path,
                url=url,
                key=key,
                worker_id=f"runner-{number}",
                workers=workers,
                agent=pickled,
            )
            children.append(_start(number, payload, log_dir))
        yield Working(children)
    finally:
        for child in children:
            child.ask_to_stop()
        for child in children:
            child.stop()


def shares(n_runners: int, cores: int) -> list[int]:
    """How many rollouts each process runs at a time: as even as can be, none without any."""
    processes = min(n_runners, cores)
    return [n_runners // processes + (number < n_runners % processes) for number in range(processes)]


def _start(number: int, payload: Payload, log_dir: Path) -> Child:
    frame = pickle.dumps(payload)
    return Child(
        "lightning_rl.runner.process",
        name=f"runner {number}",
        log=log_dir / f"runner-{number}.log",
        first=LENGTH.pack(len(frame)) + frame,
    )
