"""How many rollouts may begin: as many as the engines bear, never none where none runs, and whoever waits is woken."""

import asyncio
import math
import threading
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.control_plane.gateways.admission import Admission, room
from lightning_rl.control_plane.gateways.notifications import Notifications
from lightning_rl.store.contract import Finish
from lightning_rl_proxy.gateway import GatewayLoad
from lightning_rl_proxy.routing.load_balancer import ModelLoad
from tests.lightning_rl.control_plane.test_api import enqueue, in_thread
from tests.lightning_rl.control_plane.test_operations import read, scrape

FEW = st.integers(0, 40)


def load(
    capacity: int | None, *, calls: int = 0, starting: int = 0, running: int = 0, engines: int = 1, **others: ModelLoad
) -> GatewayLoad:
    policy = ModelLoad(engines=engines, calls=calls, waiting=0, capacity=capacity)
    return GatewayLoad("policy", {"policy": policy, **others}, {"policy": starting}, running)


loads = st.builds(
    lambda capacity, calls, starting, more, engines: load(
        capacity, calls=calls, starting=starting, running=starting + more, engines=engines
    ),
    st.none() | FEW,
    FEW,
    FEW,
    FEW,
    st.integers(0, 4),
)


@given(loads, FEW)
def test_one_rollout_always_may_begin_where_none_runs(now: GatewayLoad, handing_out: int) -> None:
    if now.open_attempts + handing_out == 0:
        assert room(now, handing_out) >= 1


@given(loads, FEW)
def test_what_begins_and_what_calls_is_never_more_than_the_engines_bear(now: GatewayLoad, handing_out: int) -> None:
    policy, free = now.models["policy"], room(now, handing_out)
    running = now.open_attempts + handing_out
    if policy.capacity is not None and free:
        expected = policy.calls + now.starting["policy"] + handing_out + free
        assert expected <= policy.capacity or running + free <= max(1, policy.engines)


@given(loads, FEW)
def test_a_call_that_ends_never_takes_room_away(now: GatewayLoad, handing_out: int) -> None:
    policy = now.models["policy"]
    fewer = now._replace(models={"policy": policy._replace(calls=max(0, policy.calls - 1))})
    assert room(fewer, handing_out) >= room(now, handing_out)


def test_there_is_no_bound_where_nobody_says_what_the_engines_bear() -> None:
    assert room(load(None, calls=1000, starting=1000, running=2000)) == math.inf
    assert room(GatewayLoad("policy", {}, {"policy": 3}, 3)) == math.inf  # chat backends alone


def test_agents_that_are_busy_with_their_tools_count_for_nothing() -> None:
    assert room(load(4, running=100)) == 4
    assert room(load(4, calls=3, running=100)) == 1
    assert room(load(4, calls=3, starting=1, running=100)) == 0


def test_each_engine_has_a_rollout_whatever_it_says() -> None:
    assert room(load(2, calls=9, running=1, engines=3)) == 2
    assert room(load(2, calls=9, running=3, engines=3)) == 0


def test_a_frozen_model_that_is_full_holds_rollouts_back_and_an_idle_one_does_not() -> None:
    judge = ModelLoad(engines=1, calls=2, waiting=5, capacity=2)
    assert room(load(8, starting=3, running=9, judge=judge)) == 0
    assert room(load(8, starting=3, running=9, judge=judge._replace(calls=0, capacity=4))) == 4


class Gateway:
    """Attempts that run until they are told to end, each as busy as it is told to be."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.calls, self.running = capacity, 0, 0
        self.tell: Any = None

    def load(self) -> GatewayLoad:
        return load(self.capacity, calls=self.calls, running=self.running)

    def when_capacity_freed(self, tell: Any) -> None:
        self.tell = tell


@given(st.integers(1, 6), st.integers(1, 20), st.randoms(use_true_random=False))
def test_all_who_wait_get_their_turn_and_the_engines_are_never_over_full(
    capacity: int, workers: int, random: Any
) -> None:
    """Workers that take a rollout each when they may; it calls at once, and its calls end in any order."""

    async def work() -> None:
        gateway, signals = Gateway(capacity), Notifications()
        admission = Admission(gateway, signals)
        done, most = 0, 0

        async def worker() -> None:
            nonlocal done, most
            while not admission.room():
                with signals.next_room() as turn:
                    await turn
            with admission.handing_out(1):
                await asyncio.sleep(0)  # the store
                gateway.calls += 1
                gateway.running += 1
            most = max(most, gateway.calls)
            for _ in range(random.randrange(4)):
                await asyncio.sleep(0)
            gateway.calls -= 1
            gateway.tell()
            await asyncio.sleep(0)  # a tool
            gateway.running -= 1
            done += 1

        await asyncio.wait_for(asyncio.gather(*(worker() for _ in range(workers))), 20)
        assert done == workers
        assert most <= capacity
        assert signals.held_back == 0

    asyncio.run(work())


def test_a_claim_that_finds_nothing_queued_leaves_its_room_to_the_next() -> None:
    async def work() -> None:
        signals = Notifications()
        admission = Admission(Gateway(1), signals)
        with signals.next_room() as turn:
            with admission.handing_out(1):
                assert not admission.room()
                admission.capacity_freed()
                assert not turn.done()
            assert turn.done()

    asyncio.run(work())


# Through the server, whose gateway's load is scripted


def busy(served: Any, capacity: int | None, calls: int) -> None:
    served.gateway.model = ModelLoad(
        engines=1, calls=calls, waiting=max(0, calls - (capacity or calls)), capacity=capacity
    )
    served.gateway.eased_in_its_loop()


def held_back(served: Any) -> int:
    return int(served.call("GET", "/api/v1/state")[1]["claims_held_back"])


def test_a_claim_waits_for_room_and_is_woken_when_a_call_ends(served: Any, eventually: Any) -> None:
    busy(served, 2, 2)
    enqueue(served, "r1", "r2")
    waiting = [in_thread(lambda: served.client("runner").claim("w", wait_seconds=60)) for _ in range(2)]
    eventually(lambda: held_back(served) == 2)
    assert served.client("runner").claim("w") == []
    found = read(scrape(served).data.decode())
    assert (found["lightning_rl_claims_held_back"], found["lightning_rl_capacity m"]) == (2, 2)
    busy(served, 2, 1)
    eventually(lambda: held_back(served) < 2)
    busy(served, 2, 0)
    for thread, _ in waiting:
        thread.join(20)
    assert sorted(answers[0][0].rollout.rollout_id for _, answers in waiting) == ["r1", "r2"]


def test_what_waits_in_the_engines_and_what_they_bear_is_told(served: Any) -> None:
    busy(served, 4, 9)
    found = read(scrape(served).data.decode())
    assert (found["lightning_rl_calls_waiting m"], found["lightning_rl_capacity m"]) == (5, 4)
    busy(served, None, 9)
    assert "lightning_rl_capacity m" not in read(scrape(served).data.decode())


def test_a_claim_whose_answer_was_lost_gets_it_without_room(served: Any) -> None:
    enqueue(served, "r1", "r2")
    body = {"worker_id": "w", "claim_id": "c1"}
    first = served.call("POST", "/api/v1/rollouts/claim", body)[1]["claims"]
    busy(served, 1, 1)
    assert served.call("POST", "/api/v1/rollouts/claim", body)[1]["claims"] == first
    assert served.call("POST", "/api/v1/rollouts/claim", body | {"claim_id": "c2"})[1]["claims"] == []


def test_a_claim_of_several_takes_as_many_as_there_is_room_for(served: Any, eventually: Any) -> None:
    enqueue(served, *(f"r{number}" for number in range(8)))
    busy(served, 5, 2)
    claimed = served.client("runner").claim("w", limit=8, claim_id="c1")
    assert [claim.rollout.rollout_id for claim in claimed] == ["r0", "r1", "r2"]
    assert served.client("runner").claim("w", limit=8, claim_id="c1") == claimed
    busy(served, 5, 5)
    thread, answers = in_thread(lambda: served.client("runner").claim("w", limit=5, wait_seconds=60))
    eventually(lambda: held_back(served) == 5)
    busy(served, 5, 3)
    thread.join(20)
    assert [claim.rollout.rollout_id for claim in answers[0]] == ["r3", "r4"]


def test_a_claim_without_room_waits_no_longer_than_it_may_and_leaves_no_place_in_line(served: Any) -> None:
    busy(served, 1, 1)
    enqueue(served, "r1")
    assert served.client("runner").claim("w", wait_seconds=0.02) == []
    assert held_back(served) == 0


def test_the_first_rollout_begins_however_full_the_engines_are(served: Any) -> None:
    busy(served, 1, 5)  # of others
    served.gateway.open_attempts = 0
    enqueue(served, "r1")
    assert len(served.client("runner").claim("w")) == 1


def test_rollouts_that_end_make_room_for_all_that_are_queued(served: Any) -> None:
    """An engine that bears two, agents that never call: as long as they run they are expected to."""
    names = [f"r{n}" for n in range(20)]
    gateway = served.gateway
    gateway.open_attempts, counting = 0, threading.Lock()
    most: list[int] = []
    opened, sealed = gateway.open, gateway.seal

    def count(more: int) -> None:
        with counting:
            gateway.starting += more
            gateway.open_attempts += more
            most.append(gateway.starting)

    def open_and_count(info: Any) -> None:
        opened(info)
        count(1)

    async def seal_and_count(rollout_id: str, attempt_id: str) -> None:
        await sealed(rollout_id, attempt_id)
        count(-1)
        gateway.capacity_freed()

    gateway.open, gateway.seal = open_and_count, seal_and_count
    busy(served, 2, 0)
    enqueue(served, *names)
    claimed: list[str] = []

    def work() -> None:
        client = served.client("runner")
        while len(claimed) < len(names):
            for claim in client.claim("w", wait_seconds=0.2):
                claimed.append(claim.rollout.rollout_id)
                done = Finish(status="succeeded", reward=1.0)
                client.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, done)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sorted(claimed) == sorted(names)
    assert max(most) == 2
