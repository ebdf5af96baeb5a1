"""Metrics as one JSON object a line, whole lines only, readable while the run goes on."""

from collections.abc import Mapping
from pathlib import Path

import msgspec


class JsonlTracker:
    """Appends `{"step": ..., name: value, ...}` to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line."""
        self._file.write(msgspec.json.encode({"step": step, **metrics}) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics file, in order."""
    return [msgspec.json.decode(line, type=dict[str, float]) for line in path.read_bytes().splitlines() if line]
