"""What a gateway does for runs whose trainers speak to others: calls wait while their engines are away, and a run whose
gateway is gone for long is given up, unless it is attached again."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest

from lightning_rl.control_plane.gateways.gateway_control import PauseRequest, ResumeRequest
from lightning_rl.control_plane.gateways.runs import RunRequest
from lightning_rl.control_plane.gateways.runs_elsewhere import RunsElsewhere
from lightning_rl.store.contract import GatewayInfo, Overdue, RolloutRequest
from lightning_rl.store.errors import Conflict, StoreUnwritable
from lightning_rl.store.sql import SqlStore


class Here:
    """A gateway, and all that it knows of others, with their clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.store = SqlStore("sqlite://", clock=lambda: self.now)
        self.away: dict[str, str | None] = {}  # by model, of its engine
        self.paused: dict[str, PauseRequest] = {}
        self.ended: list[Overdue] = []
        self.knows_who_is_gone = True
        self.gateway_id = "here"
        self.elsewhere: Any = RunsElsewhere(self.store, self, self, self, self, end=self.end)  # type: ignore[arg-type]
        self.elsewhere._now = lambda: self.now

    async def run(self, work: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        return work(*args, **keywords)

    def is_deserted(self, model: str) -> bool:
        return self.away.get(model) is not None

    async def live(self) -> list[GatewayInfo]:
        return self.store.gateways.live()

    def may_be_gone(self, lease_left: float) -> bool:
        return lease_left < 13.0

    def is_paused(self, model: str) -> bool:
        return model in self.paused

    def holds(self, request: PauseRequest) -> bool:
        return self.paused.get(str(request.model)) is request

    async def pause(self, request: PauseRequest) -> None:
        self.paused[str(request.model)] = request

    async def resume(self, request: ResumeRequest) -> None:
        del self.paused[str(request.model)]

    async def seal(self, rollout_id: str, attempt_id: str) -> None: ...

    async def end(self, overdue: list[Overdue]) -> list[Any]:
        self.ended += overdue
        return self.store.expire(overdue)

    def announce(self, gateway_id: str) -> None:
        self.store.gateways.announce(GatewayInfo(gateway_id=gateway_id, url="http://g"), 15.0)

    def attach(self, gateway_id: str, run_id: str = "run", model: str = "policy") -> None:
        request = RunRequest(model=model, lease_seconds=60.0)
        self.store.remember_run(gateway_id, run_id, msgspec.json.encode(request).decode())

    def looks(self, seconds: float = 0.0) -> None:
        """It looks every second for so long."""
        for _ in range(max(int(seconds), 1)):
            self.now += min(seconds, 1.0)
            self.announce("here")
            work: Coroutine[Any, Any, None] = self.elsewhere.look()
            asyncio.run(work)

    def claimed(self) -> list[str]:
        return sorted(claim.rollout.rollout_id for claim in self.store.claim("w", limit=9))


@pytest.fixture
def here() -> Iterator[Here]:
    made = Here()
    yield made
    made.store.close()


def ask_for(here: Here, *rollout_ids: str) -> None:
    here.store.enqueue([RolloutRequest(task=1, rollout_id=rollout_id) for rollout_id in rollout_ids])


def test_calls_wait_while_the_engines_of_a_run_elsewhere_are_away(here: Here) -> None:
    here.announce("there")
    here.attach("there")
    here.away = {"policy": "it does not answer", "other": "nor does this one, of no run elsewhere"}
    here.looks()
    assert list(here.paused) == ["policy"]  # at once: an agent's call comes again but for a second or two
    here.looks(10)
    assert list(here.paused) == ["policy"]
    here.away = {}
    here.looks()
    assert not here.paused


def test_calls_go_on_where_the_gateway_of_the_run_is_heard_of(here: Here) -> None:
    """Its trainer lets calls wait where they are to; else it is this gateway alone that does not reach the engines."""
    here.attach("there")
    here.away = {"policy": "it does not answer"}
    for _ in range(7):
        assert ("policy" in here.paused) == (here.now > 1000)
        here.announce("there")
        here.looks(1)
    here.announce("there")
    here.looks(1)
    assert not here.paused
    here.looks(1)
    assert not here.paused
    here.looks(10)  # and is not heard of any more
    assert "policy" in here.paused


def test_a_pause_that_the_trainer_makes_meanwhile_is_the_trainers(here: Here) -> None:
    here.attach("there")
    here.away = {"policy": "it does not answer"}
    here.looks()
    here.paused["policy"] = PauseRequest(model="policy")
    here.away = {}
    here.looks()
    assert "policy" in here.paused
    here.away = {"policy": "once more"}
    here.looks()
    here.paused.clear()
    here.away = {}
    here.looks()  # it is not ended again


def test_a_run_whose_gateway_is_gone_for_its_lease_is_given_up(here: Here) -> None:
    here.announce("there")
    here.attach("there")
    here.attach("there", "another")
    ask_for(here, "a.run", "b.run", "c.elsewhere")
    [claim] = here.store.claim("w", limit=1)
    here.looks(70)
    assert not here.ended  # 15 s it was believed to live, and 60 may the trainer be silent
    here.attach("here", "another")
    here.looks(10)
    assert [(each.rollout_id, each.attempt_id) for each in here.ended] == [("a.run", claim.attempt.attempt_id)]
    assert here.claimed() == ["c.elsewhere"]
    assert here.store.runs_elsewhere("here") == []
    assert list(here.store.remembered_runs("here")) == ["another"]
    here.attach("here")  # the trainer is there again
    ask_for(here, "a.run", "b.run")
    here.looks(100)
    assert here.claimed() == ["a.run", "b.run"]


@pytest.mark.parametrize("what", ["it lives", "it is back", "nobody knows who is gone"])
def test_a_run_is_left_to_its_gateway_that_may_be_there(here: Here, what: str) -> None:
    here.announce("there")
    here.attach("there")
    ask_for(here, "a.run")
    here.knows_who_is_gone = what != "nobody knows who is gone"
    for _ in range(20):
        here.looks(10)
        if what == "it lives" or (what == "it is back" and here.now > 1060):
            here.announce("there")
    assert here.claimed() == ["a.run"]


def test_what_a_run_that_was_attached_again_has_asked_for_is_handed_out(here: Here) -> None:
    """It is attached again while its attempts are ended here."""
    here.attach("there")
    ask_for(here, "a.run")
    assert here.claimed() == ["a.run"]
    end = here.end

    async def end_late(overdue: list[Overdue]) -> list[Any]:
        ended = await end(overdue)
        here.attach("third")
        ask_for(here, "a.run")
        return ended

    here.elsewhere._end = end_late
    here.looks(70)
    assert len(here.ended) == 1  # which is what ran when it was given up
    assert here.claimed() == ["a.run"]
    assert [run.gateway_id for run in here.store.runs_elsewhere("here")] == ["third"]


def test_what_ran_is_ended_when_its_gateway_can_seal_it(here: Here) -> None:
    here.attach("there")
    ask_for(here, "a.run", "b.run")
    here.store.claim("w", limit=1)
    seal = here.seal

    async def refuse(rollout_id: str, attempt_id: str) -> None:
        raise StoreUnwritable("ask again")

    here.seal = refuse  # type: ignore[method-assign]
    here.looks(70)
    assert not here.ended
    assert here.store.runs_elsewhere("here") == []  # whoever comes back finds it given up, and its trainer hears of it
    here.seal = seal  # type: ignore[method-assign]
    here.looks()
    assert [each.rollout_id for each in here.ended] == ["a.run"]
    assert here.claimed() == []
    here.looks()
    assert len(here.ended) == 1


def test_a_run_whose_request_cannot_be_read_keeps_no_other_from_being_looked_after(here: Here) -> None:
    here.store.remember_run("there", "odd", '{"model": 7}')
    here.attach("there")
    here.away = {"policy": "it does not answer"}
    here.looks(70)
    assert [run.run_id for run in here.store.runs_elsewhere("here")] == ["odd"]


def test_an_engine_that_cannot_be_frozen_keeps_no_run_from_being_given_up(here: Here) -> None:
    here.attach("there")
    here.away = {"policy": "it hangs"}

    async def refuse(request: PauseRequest) -> None:
        raise Conflict("it hangs")

    here.pause = refuse  # type: ignore[method-assign]
    here.looks(70)
    assert here.store.runs_elsewhere("here") == []
