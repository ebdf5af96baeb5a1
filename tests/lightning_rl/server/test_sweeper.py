"""The sweeper and a store that cannot be written: all of that time is made up for, and it sweeps on."""

import asyncio
import itertools

from lightning_rl.server.signals import Signals
from lightning_rl.server.sql_thread import SqlThread
from lightning_rl.server.sweeper import Sweeper
from lightning_rl.store.errors import StoreUnwritable


class FullStore:
    """Can be written again at the fifth try."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.tries: list[float] = []
        self.swept = asyncio.Event()

    def make_up(self, seconds: float) -> None:
        self.tries.append(seconds)
        if len(self.tries) < 5:
            raise StoreUnwritable("full")

    def overdue(self):
        self.loop.call_soon_threadsafe(self.swept.set)
        return []


class NoPauses:
    def any_paused(self) -> bool:
        return False


def test_the_whole_time_in_which_nothing_could_be_written_is_made_up_for(caplog) -> None:
    async def scenario() -> list[float]:

        store, sql = FullStore(asyncio.get_running_loop()), SqlThread()
        sql.unwritable = True
        sweeper = Sweeper(store, sql, None, NoPauses(), Signals(), seconds=0.01)
        task = asyncio.create_task(sweeper.run())
        await asyncio.wait_for(store.swept.wait(), 20)
        task.cancel()
        assert not sql.unwritable
        sql.close()
        return store.tries

    tries = asyncio.run(scenario())
    assert len(tries) == 5
    assert all(earlier < later for earlier, later in itertools.pairwise(tries))
    assert [record.getMessage() for record in caplog.records if record.name == "lightning_rl_proxy.alarm"] == [
        "trouble with the store: full",
        "trouble with the store is over",
    ]
