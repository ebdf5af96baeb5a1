"""Waking: whoever listened before something happened is woken by it, and nobody is left behind."""

import asyncio

from lightning_rl.server.signals import Signals


def test_what_happens_between_listening_and_waiting_is_not_missed() -> None:
    async def scenario() -> None:
        signals = Signals()
        queued = signals.next_queued()
        with signals.next_ended(["r1", "r2", "r1"]) as ended:
            signals.queued()
            signals.ended(["r3"])
            assert queued.done()
            assert not ended.done()
            assert not signals.next_queued().done()
            signals.ended(["r2", "r1"])
            assert ended.done()
        signals.ended(["r1"])  # nobody waits any more

    asyncio.run(scenario())


def test_a_server_that_stops_lets_everybody_go() -> None:
    async def scenario() -> None:
        signals = Signals()
        queued = signals.next_queued()
        with signals.next_ended(["r1"]) as ended:
            signals.close()
            assert queued.done()
            assert ended.done()
        with signals.next_ended(["r1"]) as late:
            assert late.done()
        assert signals.next_queued().done()

    asyncio.run(scenario())
