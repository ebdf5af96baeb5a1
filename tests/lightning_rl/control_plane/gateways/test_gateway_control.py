"""The pauses of a gateway: each ends with its own lease."""

import asyncio
from typing import Any

import pytest

from lightning_rl.control_plane.gateways.engines import Engines
from lightning_rl.control_plane.gateways.gateway_control import PauseRequest, Pauses
from lightning_rl.store.errors import Conflict
from lightning_rl_proxy.engines.base import EngineUnavailable


class TwoModels:
    """A gateway whose models are paused at once."""

    def __init__(self) -> None:
        self.paused: set[str] = set()

    def state(self):
        return {"models": {name: {"paused": name in self.paused} for name in "ab"}}

    async def pause(self, model: str | None, drain_seconds: float) -> None:
        self.paused |= set("ab") if model is None else {model}

    async def resume(self, model: str | None, policy_version: int | None = None, outdated: Any = ()) -> None:
        self.paused -= set("ab") if model is None else {model}


def test_the_end_of_a_pause_of_all_models_ends_no_pause_that_one_of_them_has_by_its_name() -> None:
    async def scenario() -> tuple[bool, bool]:
        gateway: Any = TwoModels()
        engines = Engines(gateway, gateway)
        pauses = Pauses(gateway, engines)
        await pauses.pause(PauseRequest(lease_seconds=0.05))
        await pauses.pause(PauseRequest(model="b", lease_seconds=60))  # an update of its weights begins
        while pauses.is_paused("a"):
            await asyncio.sleep(0.01)
        found = pauses.is_paused("b"), (pauses.lease_left("b") or 0) > 30
        pauses.close()
        return found

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == (True, True)


def test_a_pause_that_fails_late_does_not_end_one_that_came_meanwhile() -> None:
    """An engine that hangs is tried for long; the trainer's pause may come then, and weights behind it."""

    async def scenario() -> bool:
        gateway: Any = TwoModels()
        pauses, pause, hangs = Pauses(gateway, Engines(gateway, gateway)), gateway.pause, asyncio.Event()

        async def hang(model: str | None, drain_seconds: float) -> None:
            await hangs.wait()
            raise EngineUnavailable("it cannot be frozen")

        gateway.pause = hang
        first = asyncio.create_task(pauses.pause(PauseRequest(model="a")))
        await asyncio.sleep(0)
        gateway.pause = pause
        await pauses.pause(PauseRequest(model="a"))
        hangs.set()
        with pytest.raises(Conflict):
            await first
        return pauses.is_paused("a")

    assert asyncio.run(asyncio.wait_for(scenario(), 20))
