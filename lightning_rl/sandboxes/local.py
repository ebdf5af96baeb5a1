"""A folder and a home of its own on this machine. Nothing is kept apart: a program may do what its user may.

A folder holds a file that is locked by the process which made it, so that those of killed processes are known.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_rl.sandboxes import Output, SandboxError, SandboxUnusable
from lightning_rl.sandboxes.child_program import run_whole

_FOLDERS = "lightning_rl-"  # begins their names, in the temporary folder
_LOCK = "sandbox.lock"  # of no other folder: what holds it is removed
_OURS = "LIGHTNING_RL_"  # begins the names of variables that hold keys of the server: not a program's concern


class LocalSandbox:
    """See `Sandbox`. It begins in an empty folder."""

    shares_network = True
    home = ""

    def __init__(self, image: str | None = None, options: Sequence[str] = ()) -> None:
        if image is not None or options:
            raise SandboxUnusable(
                "sandbox.kind=local takes neither an image nor options: say sandbox.kind=docker, or another"
            )
        self._root: Path | None = None
        self._lock: int | None = None  # the file's descriptor

    async def open(self) -> None:
        """See `Sandbox`."""
        try:
            self._root = Path(tempfile.mkdtemp(prefix=_FOLDERS))
            self._lock = os.open(self._root / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
            with contextlib.suppress(OSError):  # of a file system without locks: the folder is never swept
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                os.rename(self._root / f"{_LOCK}.new", self._root / _LOCK)
            for name in ("work", "home"):
                (self._root / name).mkdir()
        except OSError as error:
            raise SandboxError(f"no folder for a rollout can be made in {tempfile.gettempdir()}: {error}") from error
        self.home = str(self._root / "home")

    async def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str | None,
        timeout_seconds: float | None,
        output: Output,
    ) -> int | None:
        """See `Sandbox`."""
        if not Path(self._path(folder or "")).is_dir():
            raise SandboxError(f"{self._path(folder or '')}, where {command[0]} is to run, is not there")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        done = await run_whole(
            command,
            environment=inherited | {"HOME": self.home, "PWD": self._path(folder or "")} | dict(environment),
            folder=self._path(folder or ""),
            timeout_seconds=timeout_seconds,
            output=output,
        )
        return done.status

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        file = Path(self._path(path))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        except OSError as error:
            raise SandboxError(f"{file} cannot be written: {error}") from error

    async def read(self, path: str) -> bytes | None:
        """See `Sandbox`."""
        file = Path(self._path(path))
        return file.read_bytes() if file.is_file() else None

    async def close(self) -> None:
        """See `Sandbox`."""
        if self._root is not None:
            await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _path(self, path: str) -> str:
        assert self._root is not None, "it is opened first"
        return str(self._root / "work" / path)


def remove_left_behind() -> None:
    """Remove the folders of processes that ended without closing them, killed ones, say."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*/{_LOCK}"):
        try:
            file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone by now
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # it is in use
            continue
        else:
            shutil.rmtree(lock.parent, ignore_errors=True)
        finally:
            os.close(file)
