"""Rollouts of one agent at a real server, as the tests here run them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_rl.agents.agent import as_agent
from lightning_rl.runner.launch import Working, launch
from lightning_rl.store.contract import RolloutConfig, RolloutDetail, RolloutRequest

WAIT_SECONDS = 120  # for what a busy machine does in some


class Asked:
    """Rollouts that were asked for, in the order of their tasks, and the processes that run them."""

    def __init__(self, server: Any, working: Working, ids: list[str]) -> None:
        self.server = server
        self.working = working
        self.ids = ids

    def until(self, true: Callable[[], Any]) -> None:
        """Wait until it is true, looking after the processes."""
        end = time.monotonic() + WAIT_SECONDS
        while not true():
            assert time.monotonic() < end, "it did not come"
            self.working.check()
            time.sleep(0.05)

    def ended(self) -> list[RolloutDetail]:
        """The rollouts, once all have ended."""
        self.until(lambda: all(self.server.store.rollout(each).ended_at is not None for each in self.ids))
        return [self.server.store.rollout(each) for each in self.ids]

    def logs(self) -> list[Any]:
        """What the last attempt of each printed."""
        rollouts = [self.server.store.rollout(each) for each in self.ids]
        return [self.server.store.log(each.rollout_id, each.attempts[-1].attempt_id) for each in rollouts]


@contextmanager
def asked(
    server: Any, log_dir: Any, agent: Any, tasks: Sequence[Any], n: int = 2, isolation: Any = "thread", **config: Any
) -> Iterator[Asked]:
    """Rollouts on these tasks, at most `n` at once, while the block runs; those left at its end are cancelled."""
    requests = [
        task if isinstance(task, RolloutRequest) else RolloutRequest(task=task, config=RolloutConfig(**config))
        for task in tasks
    ]
    ids = [rollout.rollout_id for rollout in server.store.enqueue(requests)]
    with launch(n, as_agent(agent), server.url, server.runner_key, log_dir=log_dir, isolation=isolation) as working:
        try:
            yield Asked(server, working, ids)
        finally:
            for rollout_id in ids:
                server.store.cancel(rollout_id)
