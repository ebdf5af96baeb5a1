"""Files that are whole or not there, and a run folder that one process holds: a run may be cut off at any moment."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_rl.errors import Explained


class RunFolderBusy(Explained, RuntimeError):
    """Another process is using the run folder."""


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Hold the run folder. Raises RunFolderBusy where another process does."""
    with (run_dir / "run.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderBusy(f"another process is using the run folder {run_dir}; wait for it or stop it") from None
        yield


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
