"""The log of a server on a disk that is full."""

import logging

import pytest

from lightning_rl.processes.logs import LogFile


def line(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("a", logging.INFO, "a.py", 1, text, arguments, None)


def test_a_log_that_cannot_be_written_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogFile("/dev/full")
    for _ in range(3):
        log.emit(line("a rollout ended"))
    assert capsys.readouterr().err == "/dev/full cannot be written: [Errno 28] No space left on device\n"
    log.emit(line("%d rollouts ended", "none"))  # what is no fault of the disk is told as ever
    assert "TypeError" in capsys.readouterr().err
