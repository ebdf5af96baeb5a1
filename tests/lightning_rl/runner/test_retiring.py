"""A process in which an agent hangs is replaced: its siblings end as they would have, and capacity is not lost."""

import os
import sys

import cloudpickle
import pytest

from lightning_rl.runner.slots import Slots
from lightning_rl.store.contract import RolloutConfig, RolloutRequest
from tests.lightning_rl.runner.runs import asked
from tests.lightning_rl.runner.test_runner import gone

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # children cannot import a test


def request(task, seconds=None) -> RolloutRequest:
    return RolloutRequest(task=task, config=RolloutConfig(timeout_seconds=seconds, max_attempts=1))


def agent(task, llm):
    import ctypes
    import os
    import time

    print("begun", task, flush=True)
    if task == "sleep":
        time.sleep(1e6)
    if task == "in C":
        ctypes.CDLL(None).pause()
    while isinstance(task, list) and not os.path.exists(task[0]):
        time.sleep(0.02)
    return float(os.getpid())


@pytest.mark.parametrize("hang", ["sleep", pytest.param("in C", marks=pytest.mark.long)])
def test_its_process_is_replaced_when_its_siblings_have_ended(server, tmp_path, monkeypatch, hang, caplog) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one process
    go = tmp_path / "go"
    with asked(server, tmp_path, agent, [request(hang, 1), request([str(go)])]) as rollouts:
        [old] = rollouts.working.pids
        rollouts.until(lambda: rollouts.working.retiring_pids == [old])
        [new] = rollouts.working.pids
        [later] = server.store.enqueue([request("later")])
        rollouts.until(lambda: server.store.rollout(later.rollout_id).ended_at)
        assert not gone(old), "the sibling was cut off"
        go.touch()
        hung, sibling = rollouts.ended()
        rollouts.until(lambda: gone(old) and not rollouts.working.retiring_pids)
        assert rollouts.working.pids == [new]
        assert (hung.status, hung.error.type, len(hung.attempts)) == ("failed", "DeadlineExceeded", 1)
        assert (sibling.reward, len(sibling.attempts)) == (old, 1)
        assert server.store.rollout(later.rollout_id).reward in (old, new)  # a claim under way may still be the old's
        [last] = server.store.enqueue([request("last")])
        rollouts.until(lambda: server.store.rollout(last.rollout_id).ended_at)
        assert server.store.rollout(last.rollout_id).reward == new
        log, _ = rollouts.logs()
        assert log.stdout == f"begun {hang}\n"
        assert "in agent" in log.traceback
        assert ("time.sleep(1e6)" if hang == "sleep" else "pause()") in log.traceback
    told = [
        record.getMessage() for record in caplog.records if "goes on although its time is over" in record.getMessage()
    ]
    assert len(told) == 1


@pytest.mark.long
def test_never_more_run_at_once_than_were_asked_for(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    go = tmp_path / "go"
    tasks = [request("sleep", 1), *[request([str(go)])] * 2, *[request([str(go)])] * 3]
    with asked(server, tmp_path, agent, tasks, n=3) as rollouts:
        rollouts.until(lambda: rollouts.working.retiring_pids)
        running = lambda: [server.store.rollout(each).status for each in rollouts.ids[1:]].count("running")  # noqa: E731
        rollouts.until(lambda: running() == 3)  # two in the old process, one in the new
        go.touch()
        _, *others = rollouts.ended()
        assert [len(each.attempts) for each in others] == [1] * 5
        rollouts.until(lambda: not rollouts.working.retiring_pids)


@pytest.mark.long
def test_an_agent_that_ends_soon_after_its_time_costs_its_process_nothing(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})

    def late(task, llm):
        import time

        time.sleep(task)
        return 1.0

    with asked(server, tmp_path, late, [request(2.5, 1)]) as rollouts:
        before = rollouts.working.pids
        [rollout] = rollouts.ended()
        assert rollout.error.type == "DeadlineExceeded"
        [later] = server.store.enqueue([request(7.0)])
        rollouts.until(lambda: server.store.rollout(later.rollout_id).ended_at)
        assert (rollouts.working.pids, rollouts.working.retiring_pids) == (before, [])


def test_slots_are_freed_one_by_one_and_the_last_one_ends_the_process() -> None:
    freed: list[int] = []
    empty: list[bool] = []
    slots = Slots(3, freed=freed.append, empty=lambda: empty.append(True))
    assert slots.take()
    assert slots.take()
    assert slots.retire()
    assert not slots.retire()
    assert freed == [1]
    assert not slots.take()
    slots.give_back()
    slots.add(1)  # which its parent gave it meanwhile
    assert (freed, empty) == ([1, 2, 3], [])
    slots.give_back()
    assert (freed, empty) == ([1, 2, 3, 4], [True])
