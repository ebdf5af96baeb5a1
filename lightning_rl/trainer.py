"""The Trainer: opens the parts of a run, lets the algorithm work, and closes them again.

A run is this process (algorithm and engine), one server child (store, control plane, gateway), and runner children.
They live in one run folder: the store, the journal, the logs, the metrics and the checkpoints.
"""

import itertools
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rl.agent import as_agent
from lightning_rl.algorithms.base import Algorithm
from lightning_rl.errors import Explained
from lightning_rl.files import owned
from lightning_rl.runner import launch as runners
from lightning_rl.server import launch as server
from lightning_rl.store.client import HttpStore
from lightning_rl.store.errors import Unreachable

if TYPE_CHECKING:
    from lightning_rl.algorithms.dev import Dev


class RunFolderUsed(Explained, FileExistsError):
    """The run folder holds a run, and nobody said to resume it."""


class Trainer:
    """Trains one agent.

    Args:
        agent: a function (decorated with `@rollout` or not), an `Agent`, or an `Agent` class.
        n_runners: rollouts that run at the same time, packed into at most as many processes as there are cores; by
            default what the algorithm says (8).
        run_dir: the run folder, made when missing; by default what the algorithm says (`runs/<date and time>`).
        port: where the server listens on the loopback; 0 takes a free one.
    """

    def __init__(
        self, agent: Any, *, n_runners: int | None = None, run_dir: str | Path | None = None, port: int = 0
    ) -> None:
        if n_runners is not None and n_runners < 1:
            raise ValueError(f"n_runners is {n_runners}; it takes at least one to run an agent")
        self.agent = as_agent(agent)
        self.n_runners = n_runners
        self.run_dir = None if run_dir is None else Path(run_dir).resolve()
        self._fixed_run_dir = run_dir is not None
        self.port = port

    def fit(
        self,
        algorithm: Algorithm,
        train_dataset: Sequence[Any] | None = None,
        val_dataset: Sequence[Any] | None = None,
    ) -> Algorithm:
        """Run `algorithm` on the datasets; returns it when it is done. `run_dir` then says where the run is.

        Raises what the algorithm raises; RuntimeError when a child process died; RunFolderUsed for a run folder that
        holds a run, unless the algorithm resumes it. All processes are stopped first.
        """
        if not isinstance(algorithm, Algorithm):
            raise TypeError(f"fit takes an algorithm first, as in fit(lrl.PPO(config), tasks), got {algorithm!r:.80}")
        tasks, held_out = algorithm.prepare(train_dataset, val_dataset)
        if self.run_dir is None or not self._fixed_run_dir:
            self.run_dir = _unused(algorithm.default_run_dir().resolve())
        run_dir = self.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as parts:
            parts.enter_context(owned(run_dir))
            if (run_dir / "store.db").exists() and not algorithm.resume:
                raise RunFolderUsed(
                    f"{run_dir} holds a run already: resume it (trainer.resume_mode=auto, or `lightning-rl train "
                    "--resume`), or choose another run_dir"
                )
            parts.callback(algorithm.close)
            endpoint = algorithm.open(run_dir)
            admin_key, runner_key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
            _write_private(run_dir / "admin.key", admin_key)
            serving = parts.enter_context(
                server.launch(run_dir, endpoint, admin_key=admin_key, runner_key=runner_key, port=self.port)
            )
            algorithm.store = HttpStore(serving.url, admin_key)
            parts.callback(algorithm.store.close)
            n_runners = self.n_runners or algorithm.n_runners
            working = parts.enter_context(
                runners.launch(n_runners, self.agent, serving.url, runner_key, log_dir=run_dir)
            )

            def check() -> None:
                serving.check()
                working.check()
                algorithm.watch()

            algorithm.check = check
            try:
                algorithm.run(tasks, held_out)
            except Unreachable:
                check()  # a dead server is the cause rather than its silence, and its log says why
                raise
            except KeyboardInterrupt as error:
                error.add_note(f"what was recorded is in {run_dir}; trainer.resume_mode=auto goes on with it")
                raise
        return algorithm

    def dev(
        self,
        dataset: Sequence[Any],
        *,
        n_tasks: int = 3,
        model: str | Path | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        renderer: str = "auto",
    ) -> "Dev":
        """Run the agent on the first tasks, train nothing, and print calls, triplets and rows.

        Args:
            dataset: the tasks.
            n_tasks: how many of them.
            model: a folder or an id of the hub, run by the embedded engine; with `base_url`, the name of a model
                there. By default the tutorial's small model, which knows little but SQL words.
            base_url: an OpenAI-compatible service (`https://.../v1`).
            api_key: its key; by default OPENAI_API_KEY.
            renderer: the chat format of an embedded model.

        Returns the algorithm that did it: `trajectories` has what was printed.
        """
        from lightning_rl.algorithms.dev import Dev

        dev = Dev(model, base_url=base_url, api_key=api_key, renderer=renderer, n_tasks=n_tasks)
        Trainer(self.agent, n_runners=self.n_runners, port=self.port).fit(dev, dataset)
        return dev


def _unused(folder: Path) -> Path:
    """`folder`, or where there is one already the same with a number."""
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
