"""How many rollouts a process runs in all, where it is told."""

import sys
import threading

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.agents.agent import as_agent
from lightning_rl.errors import InfrastructureError
from lightning_rl.runner import slots as slots_module
from lightning_rl.runner.launch import launch
from lightning_rl.runner.slots import Slots
from lightning_rl.store.contract import RolloutConfig, RolloutRequest
from tests.lightning_rl.runner.runs import Asked

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # children cannot import a test


@given(st.integers(1, 4), st.integers(1, 6), st.lists(st.sampled_from([True, False, None]), max_size=30))
def test_as_many_end_as_may_and_never_more(number: int, most: int, claims: list[bool | None]) -> None:
    """`claims`: whether there was a rollout for a slot that was taken; None: one that is tried again."""
    ended: list[int] = []
    freed: list[int] = []
    empty: list[bool] = []
    slots = Slots(number, freed=freed.append, empty=lambda: empty.append(True), most=most, ended=ended.append)
    begun = 0
    for claim in claims:
        if begun == most:
            break
        assert slots.take()
        if claim is None:
            slots.give_back(ended=False)
        elif claim:
            begun += 1
            slots.give_back()
        else:
            slots.put_back()
    assert begun == min(most, claims.count(True))
    assert ended == list(range(1, begun + 1))
    assert bool(empty) == (begun == most)
    assert slots.take() == (begun < most)


def test_several_are_taken_at_once_and_half_is_left_for_others() -> None:
    slots = Slots(8, freed=lambda _: None, empty=lambda: None, most=7)
    assert [slots.take(64) for _ in range(3)] == [4, 2, 1]
    slots.put_back(3)
    assert slots.take(1) == 1
    assert slots.take(64) == 2
    slots.close()
    assert slots.take(64) == 0


def test_the_few_that_are_free_while_others_are_in_use_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "_GATHER_SECONDS", 60.0)
    slots = Slots(8, freed=lambda _: None, empty=lambda: None)
    for number in (4, 2, 2):  # the last two are a quarter
        with monkeypatch.context() as at_once:
            at_once.setattr(slots_module, "_GATHER_SECONDS", 0.0)
            assert slots.take(64) == number
    taken: list[int] = []
    taker = threading.Thread(target=lambda: taken.append(slots.take(64)))
    taker.start()
    for _ in range(8):
        assert taken == [], "some are in use, and may be free in a moment"
        slots.put_back()
    taker.join()
    assert taken == [4], "all are free: nothing more to wait for, and half is left for others"


def test_no_slot_is_taken_for_what_may_not_begin() -> None:
    slots = Slots(4, freed=lambda _: None, empty=lambda: None, most=2)
    assert slots.take()
    assert slots.take()
    assert not slots._may_take()
    slots.put_back()
    assert slots._may_take()


def agent(task, llm):
    import os
    import signal
    import time

    if isinstance(task, str) and not os.path.exists(task):
        open(task, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if isinstance(task, list) and not os.path.exists(task[0]):
        open(task[0], "w").close()
        raise InfrastructureError("a machine is gone")
    while isinstance(task, float):
        time.sleep(10)
    return 1.0


def test_a_runner_ends_when_its_rollouts_have_also_where_a_process_died_or_an_agent_hung(server, tmp_path) -> None:
    """Four of the six: the first kills its process and is tried again here, as is the second, whose machine is gone;
    the third hangs on past its time."""
    tasks = [str(tmp_path / "killed"), [str(tmp_path / "gone")], 1.5, 0, 1, 2]
    limits = [RolloutConfig(timeout_seconds=1 if isinstance(task, float) else None) for task in tasks]
    requests = [RolloutRequest(task=task, config=config) for task, config in zip(tasks, limits, strict=True)]
    ids = [rollout.rollout_id for rollout in server.store.enqueue(requests)]
    with launch(1, as_agent(agent), server.url, server.runner_key, log_dir=tmp_path, most=4) as working:
        rollouts = Asked(server, working, ids)
        rollouts.until(lambda: working.done)
        [pid] = working.pids
        rollouts.until(lambda: working._runners[0].child.process.poll() is not None)
    ended = [server.store.rollout(each) for each in ids]
    assert pid
    assert [each.status for each in ended].count("queued") == 2
    assert sum(each.ended_at is not None for each in ended) == 4
    assert sum(each.attempt_count for each in ended) == 6
    for each in ids:
        server.store.cancel(each)


def test_a_runner_ends_where_the_death_of_its_process_ended_the_last_rollout(server, tmp_path) -> None:
    def dies(task, llm):
        import os

        os._exit(3)

    [rollout] = server.store.enqueue([RolloutRequest(task=0, config=RolloutConfig(max_attempts=1))])
    with launch(1, as_agent(dies), server.url, server.runner_key, log_dir=tmp_path, most=1) as working:
        Asked(server, working, [rollout.rollout_id]).until(lambda: working.done)
    assert server.store.rollout(rollout.rollout_id).status == "failed"
