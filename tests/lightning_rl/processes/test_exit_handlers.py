"""The end of a process by `os._exit`: what is registered with `atexit` runs, and does not hold it for ever."""

import atexit
import threading

from lightning_rl.processes import exit_handlers


def test_handlers_that_hang_are_left_with_a_word(monkeypatch, caplog) -> None:
    hanging = threading.Event()
    monkeypatch.setattr(exit_handlers, "_SECONDS", 0.01)
    monkeypatch.setattr(atexit, "_run_exitfuncs", hanging.wait)
    exit_handlers.run_exit_handlers()
    hanging.set()
    assert "took more than 0.01 s, and was left" in caplog.text
