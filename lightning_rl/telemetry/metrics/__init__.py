"""Where metrics go. A tracker is anything with `log(step, metrics)` and `close()`."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lightning_rl.config import ConfigError
from lightning_rl.telemetry.metrics.about import About
from lightning_rl.telemetry.metrics.service import ServiceTracker


class Tracker(Protocol):
    """Receives the metrics of each step, under verl's names where verl has one."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of `step`."""
        ...

    def close(self) -> None:
        """Write out what is left."""
        ...


NAMES = ("console", "jsonl", "tensorboard", "wandb", "mlflow")


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError for a tracker that there is not, or whose library is not installed."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"trainer.logger {name!r} cannot be written to; there are {', '.join(NAMES)}")
        if name not in ("console", "jsonl") and importlib.util.find_spec(name) is None:
            raise ConfigError(f"trainer.logger {name!r} needs a library: pip install 'lightning-rl[tracking]'")


def of_run(logger: Sequence[str], *, console: bool) -> list[str]:
    """The trackers of a run: `trainer.logger`, on a console only where that is to be shown, and always the file that
    `report`, `doctor` and `dashboard` read."""
    return [*(name for name in logger if name not in ("console", "jsonl") or (name == "console" and console)), "jsonl"]


def open_trackers(
    names: Sequence[str], run_dir: Path, total_steps: int, began_at: int = 0, about: About | None = None
) -> list[Tracker]:
    """The trackers of `trainer.logger`, for a run of `total_steps` that begins after step `began_at`.

    Raises ConfigError as `check_names` does, and TrackerUnusable for a service that cannot be reached.
    """
    check_names(names)
    description = about or About(name=run_dir.name)
    trackers: list[Tracker] = []
    if "console" in names:
        from lightning_rl.telemetry.metrics.console import ConsoleTracker
        from lightning_rl.telemetry.metrics.notebook import NotebookTracker, in_notebook

        shown = NotebookTracker if in_notebook() else ConsoleTracker
        trackers.append(shown(total_steps, began_at=began_at))
    if "jsonl" in names:
        from lightning_rl.telemetry.metrics.jsonl import JsonlTracker

        trackers.append(JsonlTracker(run_dir / "metrics.jsonl"))
    if "tensorboard" in names:
        from lightning_rl.telemetry.metrics.tensorboard import TensorBoardTracker

        trackers.append(TensorBoardTracker(run_dir, began_at))
    if "wandb" in names:
        from lightning_rl.telemetry.metrics.wandb import WandbTracker

        trackers.append(ServiceTracker("wandb", lambda: WandbTracker(run_dir, description)))
    if "mlflow" in names:
        from lightning_rl.telemetry.metrics.mlflow import MlflowTracker

        trackers.append(ServiceTracker("mlflow", lambda: MlflowTracker(run_dir, description)))
    return trackers
