"""Where metrics go. A tracker is anything with `log(step, metrics)` and `close()`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lightning_rl.config import ConfigError


class Tracker(Protocol):
    """Receives the metrics of each step, under verl's names where verl has one."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of `step`."""
        ...

    def close(self) -> None:
        """Write out what is left."""
        ...


NAMES = ("console", "jsonl")


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError for a tracker that there is not."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"trainer.logger {name!r} cannot be written to; there are {', '.join(NAMES)}")


def open_trackers(names: Sequence[str], run_dir: Path, total_steps: int, began_at: int = 0) -> list[Tracker]:
    """The trackers of `trainer.logger`, for a run of `total_steps` that begins after step `began_at`."""
    from lightning_rl.tracking.console import ConsoleTracker
    from lightning_rl.tracking.jsonl import JsonlTracker

    check_names(names)
    trackers: list[Tracker] = []
    if "console" in names:
        trackers.append(ConsoleTracker(total_steps, began_at=began_at))
    if "jsonl" in names:
        trackers.append(JsonlTracker(run_dir / "metrics.jsonl"))
    return trackers
