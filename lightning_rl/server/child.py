"""Child processes of ours: started by module name, told all they need through stdin, ended by its end.

Invariants: a child never runs the user's script again; its environment holds no key; when its parent dies, however
that comes, stdin ends and so does the child.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

_SECRET_VARIABLES = ("LIGHTNING_RL_ADMIN_KEY", "LIGHTNING_RL_RUNNER_KEY")
_STOP_SECONDS = 15.0
_LOG_TAIL = 4000  # bytes


class ChildDied(RuntimeError):
    """A child process ended before it was told to."""


class Child:
    """`python -m module` with its own process group; `name` is what messages call it."""

    def __init__(self, module: str, *, name: str, log: Path, first: bytes) -> None:
        self.name = name
        self._log = log
        environment = {key: value for key, value in os.environ.items() if key not in _SECRET_VARIABLES}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # a Ctrl-C is the parent's to handle
            )
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(first)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.died() from None

    def first_line(self) -> bytes:
        """The first line that the child prints. Raises ChildDied when it ends without one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.died()
        return line

    def check(self) -> None:
        """Raises ChildDied, with the end of its log, when the child has ended."""
        if self.process.poll() is not None:
            raise self.died()

    def died(self) -> ChildDied:
        """The error that says how the child ended; stops what is left of it."""
        self.stop()
        tail = self._log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
        return ChildDied(f"{self.name} ended with status {self.process.returncode}; the end of {self._log}:\n{tail}")

    def ask_to_stop(self) -> None:
        """End its stdin; it stops by itself."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def stop(self) -> None:
        """Ask it to stop and wait; then kill its whole process group."""
        self.ask_to_stop()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
