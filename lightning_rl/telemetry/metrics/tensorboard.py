"""Metrics as TensorBoard's event files in the run's folder: `tensorboard --logdir runs`."""

from collections.abc import Mapping
from pathlib import Path


class TensorBoardTracker:
    """Writes below `run_dir/tensorboard`. A run that goes on after step `began_at` takes back what came later."""

    def __init__(self, run_dir: Path, began_at: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=began_at + 1 if began_at else 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is left."""
        self._writer.close()
