"""Counting the instructions of servers, by Valgrind: what a call costs, whatever else the machine does.

Counted are instructions of the program and its libraries, not of the kernel. A count is the same from run to run within
a few percent, with other work on the machine too. It is not time: instructions that wait for memory take longer.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

_AT_REST_SECONDS = 5.0
_PATIENCE_SECONDS = 60.0  # a process writes its count when it runs next


class Instructions:
    """Counts what processes do between `begin` and `end`, without what they do all the time. Their files are in
    `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began = 0.0

    def begin(self, pids: Sequence[int]) -> None:
        """What they still do behind earlier calls is waited for first."""
        time.sleep(1)
        self._on(pids)

    def end(self, pids: Sequence[int]) -> float:
        """How many instructions they took together since `begin`, less what they take of as many seconds at rest."""
        time.sleep(1)  # what is written behind the last answers belongs to them
        counted, seconds = self._off(pids)
        self._on(pids)
        time.sleep(_AT_REST_SECONDS)
        at_rest, rested = self._off(pids)
        return counted - at_rest * seconds / rested

    def _on(self, pids: Sequence[int]) -> None:
        for pid in pids:
            self._control("--instr=on", pid)
        self._began = time.monotonic()

    def _off(self, pids: Sequence[int]) -> tuple[int, float]:
        """How many instructions since they are counted, and how many seconds that was."""
        for pid in pids:
            self._control("--instr=off", pid)
        return sum(self._count(pid) for pid in pids), time.monotonic() - self._began

    def _control(self, what: str, pid: int) -> None:
        command = ["callgrind_control", what, str(pid)]
        subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE_SECONDS)

    def _count(self, pid: int) -> int:
        before = set(self._folder.glob(f"count.{pid}.*"))
        self._control("--dump", pid)
        late = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < late:
            for file in set(self._folder.glob(f"count.{pid}.*")) - before:
                for line in file.read_text().splitlines():
                    if line.startswith("totals: "):
                        return int(line.split()[1])
            time.sleep(0.1)
        raise RuntimeError(f"process {pid} has not written its count")


@contextmanager
def counted() -> Iterator[Instructions]:
    """Run the Python processes that are started in the block, by `sys.executable`, under Valgrind's Callgrind, which
    takes ten times as long."""
    if shutil.which("callgrind_control") is None:
        raise SystemExit("Valgrind is not installed (Debian: apt-get install valgrind)")
    with tempfile.TemporaryDirectory() as name:
        python = Path(name, "python")
        tool = f"--tool=callgrind --instr-atstart=no --callgrind-out-file={name}/count.%p --log-file={name}/log.%p"
        python.write_text(f'#!/bin/sh\nexec valgrind {tool} {sys.executable} "$@"\n')
        python.chmod(0o700)
        with mock.patch.object(sys, "executable", str(python)):
            yield Instructions(Path(name))
