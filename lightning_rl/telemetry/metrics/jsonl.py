"""Metrics as one JSON object a line, whole lines only, readable while the run goes on."""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from lightning_rl.files import named_in_errors, write_whole

_log = logging.getLogger(__name__)


class JsonlTracker:
    """Appends `{"step": ..., "time": ..., name: value, ...}` to a file; the time is in seconds since the epoch."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line. Raises OSError naming the file, which has none of the line then."""
        line = msgspec.json.encode({"step": step, "time": time.time(), **metrics}) + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        with named_in_errors(self._path):
            try:
                while line:
                    line = line[self._file.write(line) :]  # where the disk runs full it takes a part of them first
            except OSError:
                with suppress(OSError):  # what is left of it is passed over
                    os.ftruncate(self._file.fileno(), size)
                raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics file, in order. Half a line at the end, as a killed run may leave it, is skipped; of other
    lines that are none of ours it is told."""
    return [row for _, row in _rows(path)]


def history(path: Path) -> list[dict[str, float]]:
    """The metrics of each step that a file has, as an algorithm's `history` has them: without the time."""
    return [{name: value for name, value in row.items() if name != "time"} for row in read(path)]


def keep_until(path: Path, step: int | None) -> list[dict[str, float]]:
    """Drop what was written after `step` (a run that goes on from there writes it again; None: from its beginning); the
    `history` that is kept."""
    if not path.exists() or step is None:
        path.unlink(missing_ok=True)
        return []
    lines = [line for line, row in _rows(path) if row["step"] <= step]
    write_whole(path, b"".join(line + b"\n" for line in lines))
    return history(path)


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, float]]]:
    for number, line in enumerate(path.read_bytes().rpartition(b"\n")[0].splitlines(), 1):
        try:
            row = msgspec.json.decode(line, type=dict[str, float | None])
            msgspec.convert(row.get("step"), float)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _tell(path, number, str(error))
        else:
            # A number that was none, of a run that has diverged, is null in JSON.
            yield line, {name: value for name, value in row.items() if value is not None}


@cache
def _tell(path: Path, number: int, why: str) -> None:
    """Once: a page that shows the run reads the file again and again."""
    _log.warning("%s: line %d is no step's metrics, and left out: %s", path, number, why)
