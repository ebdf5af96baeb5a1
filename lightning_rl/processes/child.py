"""Child processes of ours: started by module name, told all they need through stdin, ended by its end.

Invariants: a child never runs the user's script again; its environment holds no key; when its parent dies, however
that comes, stdin ends and so does the child. A child tells its parent of itself in lines of JSON on its stdout; its
alarms become warnings in the parent.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lightning_rl.errors import Explained
from lightning_rl.processes.service_keys import ADMIN_KEY, RUNNER_KEY

_SECRET_VARIABLES = (ADMIN_KEY, RUNNER_KEY)
_STOP_SECONDS = 15.0
_LOG_TAIL = 4000  # bytes
_LAST_LINES_SECONDS = 1.0  # for what a child that has ended said last
_log = logging.getLogger(__name__)


class ChildDied(Explained, RuntimeError):
    """A child process ended before it was told to."""


def how_it_ended(status: int) -> str:
    """What a process that was not told to end did, in words; `status` as `subprocess` has it, a signal's negative."""
    if status >= 0:
        return f"ended with status {status}"
    hint = ", most often since the system's memory ran out" if -status == signal.SIGKILL else ""
    name = next((each.name for each in signal.Signals if each == -status), f"signal {-status}")
    return f"was killed by {name}{hint}"


class Child:
    """`python -m module` with its own process group; `name` is what messages call it.

    It is made without a process, so that `start` can stand in a block that ends with `stop`: an interrupt in between
    finds nothing that nobody owns. `reported` collects what the child told, by name; `heard` is called after each line
    of it, and when there will be no more, in the thread that listens.
    """

    def __init__(
        self, module: str, *, name: str, log: Path, first: bytes = b"", heard: Callable[[], None] = lambda: None
    ) -> None:
        self.name = name
        self.reported: dict[str, Any] = {}
        self._module = module
        self._log = log
        self._first = first
        self._heard = heard
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Its process. Raises RuntimeError before the start."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process

    def start(self) -> None:
        """Start it. Raises OSError when its log cannot be written."""
        environment = {key: value for key, value in os.environ.items() if key not in _SECRET_VARIABLES}
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # a Ctrl-C is the parent's to handle
            )
        try:
            self._write(self._first)
        except BrokenPipeError:
            raise self.died() from None

    def write(self, more: bytes) -> None:
        """Tell it more on its stdin. Without effect when it has ended, or was asked to stop."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._write(more)

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        remaining = memoryview(data)
        while remaining:  # not through a buffer, whose rest an interrupted write would leave to `close`
            remaining = remaining[os.write(self.process.stdin.fileno(), remaining) :]

    def next_line(self) -> bytes:
        """The next line that the child prints. Raises ChildDied when it ends without one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.died()
        return line

    def wait_for(self, name: str, refused: Callable[[str], Exception]) -> str:
        """What it tells by that name once it works; listens from then on.

        Raises what `refused` makes of its `error`, where it tells one, and ChildDied when it ends without either.
        """
        while name not in self.reported:
            self.hear(self.next_line())
            if "error" in self.reported:
                raise refused(self.reported["error"])
        self.listen()
        return str(self.reported[name])

    def listen(self) -> None:
        """Hear what else the child tells, in a thread of its own."""
        self._listener = threading.Thread(target=self._hear, name=f"listening to {self.name}", daemon=True)
        self._listener.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.hear(line)
                self._heard()
        self.process.wait()
        self._heard()

    def hear(self, line: bytes) -> None:
        """Take in what the child told: an alarm is warned of, the rest is put into `reported`."""
        try:
            message = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:  # a library that prints
            _log.warning("%s: %s", self.name, line.decode(errors="replace").rstrip())
            return
        if "alarm" in message:
            _log.warning("%s: %s", self.name, message["alarm"])
        self.reported.update(message)

    def check(self) -> None:
        """Raises ChildDied, with the end of its log, when the child has ended."""
        if self.process.poll() is not None:
            raise self.died()

    def died(self) -> ChildDied:
        """The error that says how the child ended; ends what it has left behind."""
        self.stop()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        tail = self._log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
        how = how_it_ended(self.process.returncode)
        return ChildDied(f"{self.name} {how}; the end of {self._log}:\n{tail}")

    def ask_to_stop(self) -> None:
        """End its stdin; it stops by itself. Without effect before the start."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def stop(self) -> None:
        """Ask it to stop and wait; then, or when the wait is interrupted, kill its whole process group."""
        if self._process is None:
            return
        try:
            self.ask_to_stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if self._listener is not None:
            self._listener.join(_LAST_LINES_SECONDS)  # it closes stdout
        elif self._process.stdout is not None:
            self._process.stdout.close()


# The child's side


def tell(message: dict[str, Any], stdout: int = 1) -> None:
    """Tell the parent, for as long as there is one."""
    with contextlib.suppress(OSError):
        os.write(stdout, msgspec.json.encode(message) + b"\n")


class TellAlarms(logging.Handler):
    """Tells the parent of every alarm that is logged."""

    def __init__(self, stdout: int = 1) -> None:
        super().__init__()
        self._stdout = stdout

    def emit(self, record: logging.LogRecord) -> None:
        """Tell of one."""
        tell({"alarm": record.getMessage()}, self._stdout)
