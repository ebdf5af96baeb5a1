"""Agents that hang, agents that kill their process: the run goes on, what happened is said, and it has an end."""

import logging
import os
import sys
import time

import cloudpickle
import pytest

from lightning_rl.agents.agent import as_agent
from lightning_rl.processes.child import ChildDied
from lightning_rl.runner.launch import launch
from lightning_rl.runner.leases import ActiveClaims
from lightning_rl.store.contract import Claim, RolloutConfig, RolloutRequest
from lightning_rl.store.sql import SqlStore

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # children cannot import a test


def run(server, tmp_path, agent, tasks, n_runners=2, **config):
    """The rollouts once all have ended, in the order of their tasks."""
    requests = [
        task if isinstance(task, RolloutRequest) else RolloutRequest(task=task, config=RolloutConfig(**config))
        for task in tasks
    ]
    ids = [r.rollout_id for r in server.store.enqueue(requests)]
    waiting, found = set(ids), {}
    end = time.monotonic() + 60
    with launch(n_runners, as_agent(agent), server.url, server.runner_key, log_dir=tmp_path) as working:
        try:
            while waiting and time.monotonic() < end:
                working.check()
                ended = server.store.wait(sorted(waiting), 0.5)
                found |= {rollout.rollout_id: rollout for rollout in ended}
                waiting.difference_update(found)
        finally:
            for rollout_id in waiting:
                server.store.cancel(rollout_id)
    assert not waiting, "some never ended"
    return [found[rollout_id] for rollout_id in ids]


def check_for_long(working) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        working.check()
        time.sleep(0.01)


# Agents that hang


@pytest.mark.long
def test_agents_that_sleep_for_ever_do_not_use_up_the_workers(server, tmp_path) -> None:
    def agent(task, llm):
        import time

        if task == "hang":
            time.sleep(1e6)
        return 1.0

    # The heartbeats of the lease alone would tell of the loss after longer than this test waits.
    tasks = ["hang"] * 3 + ["work", "hang", "work"]
    rollouts = run(server, tmp_path, agent, tasks, timeout_seconds=1, unresponsive_seconds=3600)
    assert [r.error.type if r.error else r.reward for r in rollouts] == [
        *["DeadlineExceeded"] * 3, 1.0, "DeadlineExceeded", 1.0,
    ]  # fmt: skip


def test_a_hanging_async_agent_is_cancelled(server, tmp_path, monkeypatch) -> None:
    async def agent(task, llm):
        import asyncio

        if isinstance(task, list):
            while not all(os.path.exists(note) for note in task):
                await asyncio.sleep(0.01)
            return 1.0
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            with open(task, "w") as file:
                file.write("cancelled")
            raise

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one process
    notes = [str(tmp_path / "one"), str(tmp_path / "two")]
    rollouts = run(server, tmp_path, agent, [*notes, RolloutRequest(task=notes)], timeout_seconds=1)
    assert [r.status for r in rollouts] == ["failed", "failed", "succeeded"]


def test_an_async_agent_that_blocks_its_event_loop_does_not_stop_the_others(server, tmp_path) -> None:
    async def agent(task, llm):
        import time

        if task:
            time.sleep(1e6)
        return 1.0

    blocked, free = run(server, tmp_path, agent, [True, False], n_runners=1, timeout_seconds=1)
    assert (blocked.error.type, free.reward) == ("DeadlineExceeded", 1.0)


class Refusing:
    """A store whose attempts are all over."""

    def heartbeats(self, places):
        return {}


def claimed() -> Claim:
    store = SqlStore("sqlite://")
    store.enqueue([RolloutRequest(task=1)])
    (claim,) = store.claim("w")
    store.close()
    return claim


def test_a_lost_claim_is_told_of_once_and_not_when_its_agent_was_done() -> None:
    active, lost = ActiveClaims(), []
    claim = claimed()
    active.add(claim, lost=lambda: lost.append("lost"))
    active._beat(Refusing(), [claim])
    active._beat(Refusing(), [claim])
    assert lost == ["lost"]
    assert not active.finishing(claim)
    active.add(claim, lost=lambda: lost.append("never"))
    assert active.finishing(claim)
    active._beat(Refusing(), [claim])
    assert "never" not in lost


# Agents that take their process along


def test_an_agent_without_memory_or_whose_library_panics_has_failed_by_itself(server, tmp_path) -> None:
    def agent(task, llm):
        import resource

        if task == "panics":
            raise type("PanicException", (BaseException,), {})("as a library in Rust")
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, before[1]))
        try:
            bytearray(2**30)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    for rollout, why in zip(
        run(server, tmp_path, agent, [0, "panics"]), ("MemoryError", "PanicException"), strict=True
    ):
        assert (rollout.status, rollout.error.type, rollout.attempt_count) == ("failed", why, 1)
        assert not rollout.error.infrastructure


def test_a_killed_process_is_started_anew_and_its_rollout_retried_at_once(server, tmp_path, caplog) -> None:
    def agent(task, llm):
        import os
        import signal

        if not os.path.exists(task):
            open(task, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    # The lease alone would keep the rollout for longer than this test waits.
    (rollout,) = run(server, tmp_path, agent, [str(tmp_path / "seen")], n_runners=1, unresponsive_seconds=3600)
    assert (rollout.status, rollout.attempt_count) == ("succeeded", 2)
    first = server.store.rollout(rollout.rollout_id).attempts[0]
    assert (first.status, first.error.type) == ("lost", "RunnerDied")
    (told,) = [r.getMessage() for r in caplog.records if "started anew" in r.getMessage()]
    assert "lower n_runners" in told
    assert "killed by SIGKILL, most often since the system's memory ran out" in told
    assert str(tmp_path / "runner-0.log") in told


@pytest.mark.long
def test_a_process_that_dies_again_and_again_ends_the_run(server, tmp_path, caplog) -> None:
    def agent(task, llm):
        import os

        os.abort()

    with pytest.raises(ChildDied, match=r"died 4 times and no rollout ended meanwhile: .*killed by SIGABRT; .*log"):
        run(server, tmp_path, agent, [0], n_runners=1, max_attempts=9)
    assert sum("started anew" in record.getMessage() for record in caplog.records) == 3


def test_deaths_with_finished_rollouts_in_between_do_not_end_the_run(server, tmp_path) -> None:
    def agent(task, llm):
        import os

        if task == "die":
            os.abort()
        return 1.0

    rollouts = run(server, tmp_path, agent, ["work", "die"] * 5, n_runners=1, max_attempts=1)
    assert [r.reward for r in rollouts[::2]] == [1.0] * 5
    assert {r.error.type for r in rollouts[1::2]} == {"RunnerDied"}


def test_an_agent_that_cannot_be_loaded_ends_the_run_at_once(server, tmp_path, caplog) -> None:
    class Agent:
        def __reduce__(self):
            return __import__, ("no_such_module_of_an_agent",)

    with (
        pytest.raises(ChildDied, match="no_such_module_of_an_agent"),
        launch(1, Agent(), server.url, server.runner_key, log_dir=tmp_path) as working,
    ):
        check_for_long(working)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
