"""A run that attaches again, here or at another gateway, while it is given up or ended here."""

import asyncio
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rl.control_plane.gateways import runs as module
from lightning_rl.control_plane.gateways.runs import RunRequest, Runs
from lightning_rl.store.contract import RolloutRequest
from lightning_rl.store.errors import Conflict, StoreUnwritable
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


async def at_once(work: Any, *args: Any, **keywords: Any) -> Any:
    return work(*args, **keywords)


async def end_nothing(overdue: Any) -> list[Any]:
    return []


def server(gateway_id: str, **more: Any) -> Any:
    """All that runs need of a server beside its store: thread, gateway, pauses, and what others do."""
    quiet = {"engines_of": lambda model: [], "is_paused": lambda model: False, "now_ns": lambda: 1}
    return SimpleNamespace(**{"gateway_id": gateway_id, "run": at_once} | quiet | more)


def runs_of(store: SqlStore, at: Any, end: Any = end_nothing) -> Runs:
    return Runs(store, at, at, at, at, model="m", end=end)


def test_a_run_that_attaches_again_while_it_is_given_up_stays(tmp_path: Path) -> None:
    asyncio.run(_attach_while_given_up(tmp_path))


async def _attach_while_given_up(tmp_path: Path) -> None:
    removed: list[str] = []

    async def remove(engine_id: str) -> None:
        removed.append(engine_id)

    engine, thread = SimpleNamespace(engine_id="e1"), SlowStore()
    at = server("", run=thread.run, engines_of=lambda model: [engine], remove_engine=remove)
    with closing(SqlStore(f"sqlite:///{tmp_path}/store.db")) as store:
        runs = runs_of(store, at)
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


def test_a_run_that_another_gateway_has_since_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer is well: it is another copy of the run that has gone there."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(module, "_CONFIRM_SECONDS", 0.001)
    asyncio.run(_attach_elsewhere(tmp_path))


async def _attach_elsewhere(tmp_path: Path) -> None:
    with closing(SqlStore(f"sqlite:///{tmp_path}/store.db")) as store:
        runs = runs_of(store, server("one"))
        await runs.begin("r", RunRequest(model="policy"))
        watching = asyncio.create_task(runs.watch())
        await asyncio.sleep(0.05)
        await runs.heartbeat("r")
        store.remember_run("two", "r", "{}")
        while runs._attached:
            await asyncio.sleep(0.001)
        with pytest.raises(Conflict, match="run r is not attached here"):
            await runs.heartbeat("r")
        watching.cancel()


def test_a_run_that_is_given_up_hears_it_though_its_attempts_cannot_be_sealed_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued of it waits from then on: its trainer would wait for that for ever."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    asyncio.run(_give_up_late(tmp_path))


async def _give_up_late(tmp_path: Path) -> None:
    async def end(overdue: Any) -> list[Any]:
        return store.expire(overdue)

    async def refuse(rollout_id: str, attempt_id: str) -> None:
        refused.set()
        raise StoreUnwritable("ask again")

    async def seal(rollout_id: str, attempt_id: str) -> None: ...

    refused, at = asyncio.Event(), server("", seal=refuse)
    with closing(SqlStore(f"sqlite:///{tmp_path}/store.db")) as store:
        runs = runs_of(store, at, end)
        await runs.begin("r", RunRequest(model="policy", lease_seconds=1e-3))
        store.enqueue([RolloutRequest(task=1, rollout_id=name) for name in ("a.r", "b.r")])
        store.claim("w", limit=1)
        watching = asyncio.create_task(runs.watch())
        await refused.wait()
        with pytest.raises(Conflict, match="run r is not attached here"):
            await runs.heartbeat("r")
        at.seal = seal
        while runs._attached:
            await asyncio.sleep(0.001)
        assert store.claim("w", limit=9) == []
        assert store.remembered_runs("") == {}
        watching.cancel()


def test_the_end_of_a_run_leaves_what_another_gateway_has_of_it(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        with closing(SqlStore(f"sqlite:///{tmp_path}/store.db")) as store:
            runs = runs_of(store, server("one"))
            await runs.begin("r", RunRequest(model="policy"))
            store.remember_run("two", "r", "{}")
            store.enqueue([RolloutRequest(task=1, rollout_id="a.r")])
            await runs.end("r")
            return [claim.rollout.rollout_id for claim in store.claim("w", limit=9)]

    assert asyncio.run(scenario()) == ["a.r"]
