"""Results leave together, and none is held up, lost or told twice by what becomes of another."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from lightning_rl.runner.leases import ActiveClaims
from lightning_rl.runner.outcome import SpanBatch
from lightning_rl.runner.results import Result, Results
from lightning_rl.store.answers import AttemptsAnswer
from lightning_rl.store.contract import AttemptLog, Claim, Ending, Finish, Log, RolloutRequest
from lightning_rl.store.errors import Conflict, Invalid, Unreachable
from lightning_rl.store.sql import SqlStore


class Server:
    """A store of which `troubles` are raised, one a request; None: it answers."""

    def __init__(self, store: SqlStore) -> None:
        self.store = store
        self.troubles: list[Exception | None] = []
        self.requests: list[list[str]] = []
        self.logs: list[list[str]] = []  # of a request each

    def finish_many(self, endings: Sequence[Ending]) -> AttemptsAnswer:
        self.requests.append([ending.rollout_id for ending in endings])
        if self.troubles and (trouble := self.troubles.pop(0)) is not None:
            raise trouble
        return AttemptsAnswer(attempts=[attempt for _, attempt in self.store.finish_many(endings)])

    def add_logs(self, logs: Sequence[AttemptLog]) -> None:
        self.logs.append([f"{each.rollout_id}: {each.log.stdout}" for each in logs])


class World:
    """Five claimed rollouts, and what becomes of their results."""

    def __init__(self) -> None:
        self.store = SqlStore("sqlite://")
        self.store.enqueue([RolloutRequest(task=n, rollout_id=f"r{n}") for n in range(5)])
        self.claims = self.store.claim("w", limit=5)
        self.server: Any = Server(self.store)
        self.active, self.stop = ActiveClaims(), threading.Event()
        self.spans: list[list[str]] = []  # of a request each: whose they are
        self.results = Results(
            self.server, self.active, self.stop, lambda emitted: self.spans.append([name for name, _ in emitted])
        )
        self.over: dict[str, list[bool]] = {claim.rollout.rollout_id: [] for claim in self.claims}
        for claim in self.claims:
            self.active.add(claim)

    def result(self, claim: Claim, log: Log | None = None, **finish: Any) -> Result:
        rollout_id = claim.rollout.rollout_id
        ending = Ending(
            rollout_id=rollout_id,
            attempt_id=claim.attempt.attempt_id,
            finish=Finish(**{"status": "succeeded", "reward": 1.0} | finish),
        )
        return Result(claim, ending, log, [SpanBatch(1, b"")], lambda taken, _: self.over[rollout_id].append(taken))

    def send(self, results: Sequence[Result]) -> None:
        for result in results:
            self.results.put(result)
        while sum(map(len, self.over.values())) < len(results):
            self.results._send_due()

    def statuses(self) -> list[str]:
        return [self.store.rollout(f"r{n}").status for n in range(5)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("lightning_rl.runner.results._BACKOFF_SECONDS", 0.01)
    world = World()
    yield world
    world.store.close()


def test_what_is_there_together_is_one_request(world: World) -> None:
    world.send([world.result(claim, Log(stdout="x") if n >= 3 else None) for n, claim in enumerate(world.claims)])
    assert world.server.requests == [["r0", "r1", "r2", "r3", "r4"]]
    assert world.spans == [["r0", "r1", "r2", "r3", "r4"]]
    assert world.server.logs == [["r3: x", "r4: x"]]
    assert world.statuses() == ["succeeded"] * 5
    assert list(world.over.values()) == [[True]] * 5


def test_one_that_is_refused_is_dropped_alone(world: World) -> None:
    world.store.cancel("r2")
    world.send([world.result(claim) for claim in world.claims])
    assert world.statuses() == ["succeeded", "succeeded", "cancelled", "succeeded", "succeeded"]
    assert list(world.over.values()) == [[True], [True], [False], [True], [True]]


def test_one_whose_reward_is_no_number_fails_alone(world: World) -> None:
    bad = [world.result(claim, reward=float("nan") if n == 1 else 0.5) for n, claim in enumerate(world.claims)]
    world.send(bad)
    assert world.statuses() == ["succeeded", "failed", "succeeded", "succeeded", "succeeded"]
    assert list(world.over.values()) == [[True]] * 5


def test_a_server_that_is_away_is_told_again_what_is_still_ours(world: World) -> None:
    world.server.troubles = [Unreachable("gone"), Unreachable("gone")]
    world.active.remove(world.claims[4])
    world.send([world.result(claim) for claim in world.claims])
    assert world.server.requests == [["r0", "r1", "r2", "r3", "r4"], ["r0", "r1", "r2", "r3"], ["r0", "r1", "r2", "r3"]]
    assert world.spans == [["r0", "r1", "r2", "r3", "r4"]]
    assert list(world.over.values()) == [[True]] * 4 + [[False]]


def test_a_gateway_that_nobody_can_speak_of_holds_up_no_result_of_another(world: World) -> None:
    places = ["http://one", "http://one", "http://two", "http://two", None]
    claims = [msgspec.structs.replace(c, gateway_url=url) for c, url in zip(world.claims, places, strict=True)]
    for claim in claims:
        world.active.add(claim)
    world.server.troubles = [Unreachable("gateway one"), None, None]
    world.send([world.result(claim) for claim in claims])
    assert world.server.requests == [["r0", "r1"], ["r2", "r3"], ["r4"], ["r0", "r1"]]
    assert list(world.over.values()) == [[True]] * 5


def test_a_process_that_stops_does_not_wait_for_a_server_that_is_away(world: World) -> None:
    world.server.troubles = [Unreachable("gone")]
    world.stop.set()
    world.send([world.result(claim) for claim in world.claims])
    assert len(world.server.requests) == 1
    assert list(world.over.values()) == [[False]] * 5


@pytest.mark.parametrize("trouble", [Conflict("ended"), Invalid("bad")])
def test_a_refusal_that_is_over_by_the_second_try_is_none(world: World, trouble: Exception) -> None:
    world.server.troubles = [trouble]
    world.send([world.result(claim) for claim in world.claims])
    assert [len(request) for request in world.server.requests] == [5, 1, 1, 1, 1, 1]
    assert list(world.over.values()) == [[True]] * 5
