"""Files that are whole or not there, a run folder that one process holds, and the names of its checkpoints.

A run may be cut off at any moment.
"""

import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from lightning_rl.errors import Explained

LOCK = "run.lock"
MANIFEST = "manifest.json"  # of a checkpoint, which has it once it is whole
TOKENIZER_FOLDER = "tokenizer"  # of a run that keeps its model's, but makes no checkpoints
_FINISHED = "finished.json"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_POLL_SECONDS = 0.05  # a file system tells nobody that a lock is free


class RunFolderBusy(Explained, RuntimeError):
    """Another process is using the run folder."""


class RunFolderUnusable(Explained, OSError):
    """The run folder cannot be made, or written to."""


def make_run_dir(run_dir: Path) -> None:
    """Make the run folder where it is not there. Raises RunFolderUnusable."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / LOCK).touch(mode=0o600)  # whoever may write it may hold the folder
    except OSError as error:
        raise RunFolderUnusable(
            f"the run folder {run_dir} cannot be made or written to ({error.strerror}: {error.filename}): name another"
        ) from error


@contextmanager
def owned(run_dir: Path, *, lock: str = LOCK, patience_seconds: float = 0) -> Iterator[None]:
    """Hold the run folder, by the file `lock` in it. Raises RunFolderBusy where another process does for longer than
    `patience_seconds`; the death of a process ends its hold."""
    last = time.monotonic() + patience_seconds
    with (run_dir / lock).open("a") as file:
        while not _hold(file):
            if time.monotonic() >= last:
                raise RunFolderBusy(f"another process is using the run folder {run_dir}; wait for it or stop it")
            time.sleep(_POLL_SECONDS)
        yield


def is_held(lock: Path) -> bool:
    """Whether a process holds this lock file. It is looked up, never taken: whoever takes it could refuse a trainer."""
    try:
        status = lock.stat()
        held = Path("/proc/locks").read_text(encoding="utf-8")
    except OSError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(device in line.split() for line in held.splitlines())


def _hold(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def newest_checkpoints(checkpoints: Path, most: int) -> list[Path]:
    """The `most` newest checkpoints among the `step-N` folders of `checkpoints`, the newest first; their files are not
    looked at (`training.checkpoint.fault`)."""
    return [folder for folder in by_step(checkpoints) if is_checkpoint(folder)][:most]


def by_step(checkpoints: Path) -> list[Path]:
    """The `step-N` folders, newest first."""
    return sorted((f for f in checkpoints.glob("step-*") if f.name[5:].isdecimal()), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """N of a folder `step-N`."""
    return int(folder.name[5:])


def is_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was written there to its end."""
    return (folder / MANIFEST).exists()


def note_finished(run_dir: Path, **numbers: int) -> None:
    """Note that the run in this folder has come to its end, and what it says of that."""
    write_whole(run_dir / _FINISHED, json.dumps(numbers).encode())


def note_unfinished(run_dir: Path) -> None:
    """Take back that the run has come to its end: it goes on."""
    (run_dir / _FINISHED).unlink(missing_ok=True)


def finished(run_dir: Path) -> dict[str, int] | None:
    """What the run that has come to its end said of that; None where none has."""
    file = run_dir / _FINISHED
    return json.loads(file.read_bytes()) if file.is_file() else None


def write_whole(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace `path` by `content` as `whole_file` does."""
    with whole_file(path, mode=mode) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """What is written in the block becomes the file in one step when it ends well; a link stays one, and who may
    not read a file still may not.

    A pipe and a device are written to as it comes, and so is what this process prints to. Raises OSError naming the
    file.
    """
    if is_standard_output(path):
        yield sys.stdout.buffer
        sys.stdout.flush()
        return
    if path.exists() and not path.is_file():
        with named_in_errors(path), path.open("wb") as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # of a process that was killed, which may have left it read-only
    try:
        with (
            named_in_errors(path),
            os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file,
        ):
            with suppress(OSError):  # there is none yet, or its file system knows no modes
                os.fchmod(file.fileno(), path.stat().st_mode & mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def is_standard_output(path: Path) -> bool:
    """Whether what is written to a file goes to where this process prints."""
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError, AttributeError):  # there is no such file, or standard output is none, or closed
        return False


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """What fails while the file is written names it, and what to do where its disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        advice = ": make room, and do that again" if error.errno in _FULL else ""
        raise OSError(error.errno, f"{error.strerror}{advice}", str(path)) from error


def is_a_runs_own(path: Path, run_dir: Path, *written: str) -> bool:
    """Whether a file is there and in a run's folder, under another name than what may be `written` there anew."""
    path = path.resolve()
    return path.is_file() and run_dir.resolve() in path.parents and path.name not in written
