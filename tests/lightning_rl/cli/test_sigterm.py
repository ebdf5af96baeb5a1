"""SIGTERM ends a command from inside, and what it had before is put back."""

import signal
import threading

import pytest

from lightning_rl.cli.sigterm import ended_by_sigterm


def test_sigterm_raises_in_the_block_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_in_another_thread_it_changes_nothing() -> None:
    found: list[object] = []

    def enter() -> None:
        with ended_by_sigterm():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
