"""Metrics as one JSON object a line, whole lines only, readable while the run goes on."""

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from lightning_rl.files import write_whole


class JsonlTracker:
    """Appends `{"step": ..., "time": ..., name: value, ...}` to a file; the time is in seconds since the epoch."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line. Raises OSError naming the file."""
        try:
            self._file.write(msgspec.json.encode({"step": step, "time": time.time(), **metrics}) + b"\n")
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: make room, then resume the run", str(self._path)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics file, in order; half a line, as a killed run may leave it, is skipped."""
    return [msgspec.json.decode(line, type=dict[str, float]) for line in _whole_lines(path) if line]


def history(path: Path) -> list[dict[str, float]]:
    """The metrics of each step that a file has, as an algorithm's `history` has them: without the time."""
    return [{name: value for name, value in row.items() if name != "time"} for row in read(path)]


def keep_until(path: Path, step: int | None) -> list[dict[str, float]]:
    """Drop what was written after `step` (a run that goes on from there writes it again; None: from its beginning); the
    `history` that is kept."""
    if not path.exists() or step is None:
        path.unlink(missing_ok=True)
        return []
    lines = [line for line in _whole_lines(path) if msgspec.json.decode(line)["step"] <= step]
    write_whole(path, b"".join(line + b"\n" for line in lines))
    return history(path)


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().rpartition(b"\n")[0].splitlines()
