"""Waking: whoever listened before something happened is woken by it, and nobody is left behind."""

import asyncio

from lightning_rl.control_plane.gateways.notifications import Notifications


def test_what_happens_between_listening_and_waiting_is_not_missed() -> None:
    async def scenario() -> None:
        signals = Notifications()
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
        signals = Notifications()
        queued = signals.next_queued()
        with signals.next_ended(["r1"]) as ended:
            signals.close()
            assert queued.done()
            assert ended.done()
        with signals.next_ended(["r1"]) as late:
            assert late.done()
        assert signals.next_queued().done()

    asyncio.run(scenario())


def test_who_waits_the_longest_has_the_first_turn_and_who_left_has_none() -> None:
    async def work() -> None:
        signals = Notifications()
        with signals.next_room() as first, signals.next_room() as second:
            with signals.next_room():
                assert signals.held_back == 3
            signals.room(1)
            assert (first.done(), second.done(), signals.held_back) == (True, False, 1)
            signals.room(float("inf"))
            assert second.done()
        assert signals.held_back == 0
        with signals.next_room() as held:
            signals.close()
            assert held.done()
        with signals.next_room() as late:
            assert late.done()

    asyncio.run(work())
