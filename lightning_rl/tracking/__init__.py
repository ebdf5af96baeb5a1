"""Where metrics go. A tracker is anything with `log(step, metrics)` and `close()`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """Receives the metrics of each step, under verl's names where verl has one."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of `step`."""
        ...

    def close(self) -> None:
        """Write out what is left."""
        ...


def open_trackers(names: list[str], run_dir: Path, total_steps: int) -> list[Tracker]:
    """The trackers of `trainer.logger`. Raises ValueError for an unknown name."""
    from lightning_rl.tracking.console import ConsoleTracker
    from lightning_rl.tracking.jsonl import JsonlTracker

    trackers: list[Tracker] = []
    for name in names:
        if name == "console":
            trackers.append(ConsoleTracker(total_steps))
        elif name == "jsonl":
            trackers.append(JsonlTracker(run_dir / "metrics.jsonl"))
        else:
            raise ValueError(f"trainer.logger {name!r} is unknown; there are console, jsonl")
    return trackers
