"""The time of calls: steady, whoever sets the machine's clock, and behind all that was recorded before."""

import time

import pytest

from lightning_rl_proxy.recording.clock import Clock


def test_setting_the_machines_clock_moves_it_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, before = Clock(), time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: before - 3 * 3600 * 10**9)
    assert clock() >= clock.began_ns
    assert clock() - before < 3600 * 10**9


def test_it_begins_behind_what_was_recorded_by_a_clock_that_was_ahead() -> None:
    clock = Clock()
    newest = clock() + 3600 * 10**9
    clock.begin_after(newest)
    assert newest < clock.began_ns <= clock()
    began = clock.began_ns
    clock.begin_after(began - 7200 * 10**9)
    assert began <= clock.began_ns < began + 3600 * 10**9
