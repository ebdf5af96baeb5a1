"""The Trainer: opens the parts of a run, lets the algorithm work, and closes them again.

A run is this process (algorithm and engine), one server child (store, control plane, gateway), and runner children.
They live in one run folder: the store, the journal, the logs, the metrics and the checkpoints.
"""

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_rl.agent import as_agent
from lightning_rl.algorithms.base import Algorithm
from lightning_rl.runner import launch as runners
from lightning_rl.server import launch as server
from lightning_rl.store.client import HttpStore
from lightning_rl.store.errors import Unreachable


class Trainer:
    """Trains one agent.

    Args:
        agent: a function (decorated with `@rollout` or not), an `Agent`, or an `Agent` class.
        n_runners: rollouts that run at the same time, packed into at most as many processes as there are cores.
        run_dir: the run folder, made when missing; by default `runs/<date and time>`.
    """

    def __init__(self, agent: Any, *, n_runners: int = 8, run_dir: str | Path | None = None) -> None:
        if n_runners < 1:
            raise ValueError(f"n_runners is {n_runners}; it takes at least one to run an agent")
        self.agent = as_agent(agent)
        self.n_runners = n_runners
        self.run_dir = Path(run_dir if run_dir is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")).resolve()

    def fit(
        self, algorithm: Algorithm, train_dataset: Sequence[Any], val_dataset: Sequence[Any] | None = None
    ) -> Algorithm:
        """Run `algorithm` on the datasets; returns it when it is done.

        Raises what the algorithm raises, and RuntimeError when a child process died; all processes are stopped first.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as parts:
            parts.callback(algorithm.close)
            endpoint = algorithm.open(self.run_dir)
            admin_key, runner_key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
            _write_private(self.run_dir / "admin.key", admin_key)
            serving = parts.enter_context(
                server.launch(self.run_dir, endpoint, admin_key=admin_key, runner_key=runner_key)
            )
            algorithm.store = HttpStore(serving.url, admin_key)
            parts.callback(algorithm.store.close)
            working = parts.enter_context(
                runners.launch(self.n_runners, self.agent, serving.url, runner_key, log_dir=self.run_dir)
            )

            def check() -> None:
                serving.check()
                working.check()

            algorithm.check = check
            try:
                algorithm.run(train_dataset, val_dataset)
            except Unreachable:
                check()  # a dead server is the cause rather than its silence, and its log says why
                raise
        return algorithm


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
