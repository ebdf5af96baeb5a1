"""The sweeper and a store that cannot be written: all of that time is made up for, and it sweeps on."""

import asyncio
import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rl.control_plane import sweeper as sweeper_module
from lightning_rl.control_plane.gateways.notifications import Notifications
from lightning_rl.control_plane.sweeper import Sweeper
from lightning_rl.store.contract import Overdue
from lightning_rl.store.errors import StoreUnwritable
from lightning_rl.store.sql_thread import SqlThread


class FullStore:
    """Can be written again at the fifth try."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.tries: list[float] = []
        self.swept = asyncio.Event()

    def make_up(self, seconds: float, *, gateway_id: None) -> None:
        self.tries.append(seconds)
        if len(self.tries) < 5:
            raise StoreUnwritable("full")

    def overdue(self):
        self.loop.call_soon_threadsafe(self.swept.set)
        return []


class Noting:
    """A store with nothing overdue; notes how far leases and deadlines were moved."""

    shared = False

    def __init__(self) -> None:
        self.moved: list[tuple[float, float]] = []
        self.due = False

    def postpone(self, seconds: float, *, lease_seconds: float, gateway_id: None) -> None:
        self.moved.append((seconds, lease_seconds))

    def overdue(self):
        return []

    def merge_counts(self) -> None:
        pass

    def claimable(self, *, newly_seconds: float | None) -> bool:
        due, self.due = self.due, False
        return due


class NoPauses:
    def any_paused(self) -> bool:
        return False


def test_the_whole_time_in_which_nothing_could_be_written_is_made_up_for(caplog) -> None:
    async def scenario() -> list[float]:

        store, sql = FullStore(asyncio.get_running_loop()), SqlThread()
        sql.unwritable = True
        sweeper = Sweeper(store, sql, None, NoPauses(), Notifications(), seconds=0.01)
        task = asyncio.create_task(sweeper.run())
        await asyncio.wait_for(store.swept.wait(), 20)
        task.cancel()
        assert not sql.unwritable
        sql.close()
        return store.tries

    tries = asyncio.run(scenario())
    assert len(tries) == 5
    assert all(earlier < later for earlier, later in itertools.pairwise(tries))
    assert [
        record.getMessage() for record in caplog.records if record.name == "lightning_rl_proxy.recording.alerts"
    ] == [
        "trouble with the store: full",
        "trouble with the store is over",
    ]


def test_of_several_servers_each_makes_up_for_its_own_attempts() -> None:
    """Else a store that is away for all of them moves each deadline once for each of them."""

    asked: list[str | None] = []

    class Own(Noting):
        def make_up(self, seconds: float, *, gateway_id: str | None) -> None:
            asked.append(gateway_id)

        def postpone(self, seconds: float, *, gateway_id: str | None, lease_seconds: float = 0) -> None:
            asked.append(gateway_id)

    class Paused:
        def any_paused(self) -> bool:
            return True

    async def scenario() -> None:
        store, sql = Own(), SqlThread()
        fleet: Any = SimpleNamespace(gateway_id="g1")
        sweeper = Sweeper(store, sql, None, Paused(), Notifications(), seconds=1, fleet=fleet)
        await sweeper.sweep(5, stood_still=2)
        sql.unwritable = True
        await sweeper.sweep(5)
        sql.close()

    asyncio.run(scenario())
    assert asked == ["g1", "g1", "g1"]


def test_a_store_that_hangs_is_told_and_the_time_made_up_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_rl.store.sql_thread._PATIENCE_SECONDS", 0.1)
    answers = threading.Event()

    class Hangs(Noting):
        def make_up(self, seconds: float, *, gateway_id: None) -> None:
            self.moved.append((seconds, 0))

    async def scenario() -> list[tuple[float, float]]:
        store, sql = Hangs(), SqlThread()
        sweeper = Sweeper(store, sql, None, NoPauses(), Notifications(), seconds=1)
        asked = asyncio.create_task(sql.run(answers.wait))
        while not sql.unwritable:
            await asyncio.sleep(0.01)
        assert not asked.done(), "who asks waits"
        answers.set()
        await asked
        await sweeper.sweep(1)
        assert not sql.unwritable
        sql.close()
        return store.moved

    assert asyncio.run(scenario()) == [(1, 0)]
    told = [record.getMessage() for record in caplog.records if record.name.endswith("recording.alerts")]
    assert told[0].startswith("trouble with the store: it has not answered for 0.1 s: see what holds the database")
    assert told[1:] == ["trouble with the store is over"]


def test_time_in_which_the_process_stood_still_counts_against_nobody() -> None:
    async def scenario() -> list[tuple[float, float]]:
        store, sql = Noting(), SqlThread()
        sweeper = Sweeper(store, sql, None, NoPauses(), Notifications(), seconds=0.2)
        task = asyncio.create_task(sweeper.run())
        await asyncio.sleep(0.1)
        time.sleep(1.5)
        while not store.moved:
            await asyncio.sleep(0.01)
        task.cancel()
        sql.close()
        return store.moved

    (seconds, lease_seconds), *_ = asyncio.run(scenario())
    assert seconds == lease_seconds
    assert 1.0 < seconds < 60


def test_a_claim_that_waits_is_woken_when_a_pause_before_a_retry_is_over() -> None:
    async def scenario() -> tuple[bool, bool]:
        store, sql, signals = Noting(), SqlThread(), Notifications()
        sweeper = Sweeper(store, sql, None, NoPauses(), signals, seconds=1)
        waiting = signals.next_queued()
        await sweeper.sweep(1)
        before = waiting.done()
        store.due = True
        await sweeper.sweep(1)
        sql.close()
        return before, waiting.done()

    assert asyncio.run(scenario()) == (False, True)


LATE = Overdue(rollout_id="r1", attempt_id="a1", lease_seconds=6.0, why="lease")


def test_a_heartbeat_that_came_while_the_store_was_busy_keeps_its_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper_module, "_LATE_SECONDS", 0.1)

    class Busy(Noting):
        """Something takes long as it is asked what is overdue; a heartbeat comes meanwhile, and stands in line."""

        renewed, asked = False, 0

        def overdue(self):
            self.asked += 1
            if self.asked == 1:
                asyncio.run_coroutine_threadsafe(sql.run(self.heartbeat), loop)
                time.sleep(0.3)
            return [] if self.renewed else [LATE]

        def heartbeat(self) -> None:
            self.renewed = True

    async def scenario() -> int:
        nonlocal loop, sql
        loop, sql, store = asyncio.get_running_loop(), SqlThread(), Busy()
        sweeper = Sweeper(store, sql, NoCalls(), NoPauses(), Notifications(), seconds=1)
        await sweeper.sweep(1)
        sql.close()
        return store.asked

    loop = sql = None
    assert asyncio.run(scenario()) == 2


class NoCalls:
    """A gateway to which the attempt never called; it is not to be sealed."""

    def idle_seconds(self, rollout_id: str, attempt_id: str) -> None:
        return None


def test_a_sweep_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Noting):
        asked = 0

        def overdue(self):
            self.asked += 1
            if self.asked == 1:
                raise OverflowError("a defect")
            return []

    async def scenario() -> int:
        store, sql = Failing(), SqlThread()
        task = asyncio.create_task(Sweeper(store, sql, NoCalls(), NoPauses(), Notifications(), seconds=0.01).run())
        while store.asked < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        sql.close()
        return store.asked

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) >= 3
    assert "OverflowError: a defect" in caplog.text
