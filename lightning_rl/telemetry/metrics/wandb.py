"""Metrics to Weights & Biases, as its own variables say (`WANDB_API_KEY`, `WANDB_MODE=offline`, ...)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning_rl.telemetry.metrics.about import About, kept_id


class WandbTracker:
    """One W&B run for a run folder: a run that goes on goes on there too."""

    def __init__(self, run_dir: Path, about: About) -> None:
        import wandb

        self._run = wandb.init(
            project=about.project,
            name=about.name,
            config=dict(about.config),
            dir=str(run_dir),
            id=kept_id(run_dir / "wandb.id", lambda: uuid4().hex),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of W&B's history."""
        values: dict[str, Any] = dict(metrics)
        self._run.log(values, step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
