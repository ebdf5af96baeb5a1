"""Runs that attach again in the very moment in which they are given up, and runs whose gateway is gone."""

import asyncio
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_rl.control_plane.gateways.runs import RunRequest, Runs
from lightning_rl.store.contract import RolloutRequest
from lightning_rl.store.errors import Conflict
from lightning_rl.store.sql import SqlStore


class SlowStore:
    """The store's thread, in which the look at the runs that are remembered takes until `go_on`."""

    def __init__(self) -> None:
        self.looked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def run(self, work: Any, *args: Any, **keywords: Any) -> Any:
        if work.__name__ == "remembered_runs":
            self.looked.set()
            await self.go_on.wait()
        return work(*args, **keywords)


def test_a_run_that_attaches_again_while_it_is_given_up_stays(tmp_path: Path) -> None:
    asyncio.run(_attach_while_given_up(tmp_path))


async def _attach_while_given_up(tmp_path: Path) -> None:
    removed: list[str] = []

    async def remove(engine_id: str) -> None:
        removed.append(engine_id)

    async def end(overdue: Any) -> list[Any]:
        return []

    engine = SimpleNamespace(engine_id="e1")
    together: Any = SimpleNamespace(
        gateway_id="", knows_who_is_gone=False, engines_of=lambda model: [engine], remove_engine=remove
    )
    pauses: Any = SimpleNamespace(is_paused=lambda model: False)
    gateway: Any = SimpleNamespace(now_ns=lambda: 1)
    thread: Any = SlowStore()
    with closing(SqlStore(f"sqlite:///{tmp_path}/store.db")) as store:
        runs = Runs(store, thread, gateway, pauses, together, model="m", end=end)
        await runs.begin("r", RunRequest(model="policy", lease_seconds=1e-3))
        watching = asyncio.create_task(runs.watch())
        await thread.looked.wait()  # its lease is over, and it is about to be given up
        removed.clear()
        await runs.begin("r", RunRequest(model="policy", lease_seconds=60))
        assert removed == ["e1"], "what its last lease left is cleared away once"
        thread.go_on.set()
        await asyncio.sleep(0.05)
        assert removed == ["e1"]
        assert list(store.remembered_runs("")) == ["r"]
        await runs.heartbeat("r")
        watching.cancel()


def test_what_is_queued_of_a_run_waits_when_its_gateway_is_gone_and_no_longer_when_it_attaches_to_another(
    tmp_path: Path,
) -> None:
    asyncio.run(_outlive_a_gateway(tmp_path))


async def _outlive_a_gateway(tmp_path: Path) -> None:
    async def work(do: Any, *args: Any, **keywords: Any) -> Any:
        return do(*args, **keywords)

    async def end(overdue: Any) -> list[Any]:
        return []

    async def live() -> list[Any]:
        return [SimpleNamespace(gateway_id=name) for name in there]

    def gateway(name: str) -> Runs:
        together: Any = SimpleNamespace(
            gateway_id=name, knows_who_is_gone=True, live=live, engines_of=lambda model: [], remove_engine=None
        )
        pauses: Any = SimpleNamespace(is_paused=lambda model: False)
        thread, door = cast(Any, SimpleNamespace(run=work)), cast(Any, SimpleNamespace(now_ns=lambda: 1))
        return Runs(store, thread, door, pauses, together, model="m", end=end)

    there = ["one", "two"]
    with closing(SqlStore(f"sqlite:///{tmp_path}/store.db")) as store:
        one, two = gateway("one"), gateway("two")
        await one.begin("r", RunRequest(model="policy"))
        store.enqueue([RolloutRequest(task=1, rollout_id="train-0.r")])
        watching = asyncio.create_task(two.watch())
        await asyncio.sleep(0.7)
        await one.heartbeat("r")
        there.remove("one")
        while not store.remembered_runs("two"):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert store.claim("w", limit=1) == []
        with pytest.raises(Conflict, match="run r is not attached here"):
            await two.heartbeat("r")
        there.append("one")  # it was only slow, and finds out
        watching_too = asyncio.create_task(one.watch())
        await asyncio.sleep(0.7)
        with pytest.raises(Conflict, match="run r is not attached here"):
            await one.heartbeat("r")
        await one.begin("r", RunRequest(model="policy"))
        store.enqueue([RolloutRequest(task=1, rollout_id="train-0.r")])
        await asyncio.sleep(0.7)
        assert [claim.rollout.rollout_id for claim in store.claim("w", limit=1)] == ["train-0.r"]
        await one.heartbeat("r")
        for task in (watching, watching_too):
            task.cancel()
