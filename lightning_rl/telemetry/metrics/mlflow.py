"""Metrics to MLflow: where `MLFLOW_TRACKING_URI` says, else into `mlflow.db` of the run's folder."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_rl.files import finished
from lightning_rl.telemetry.metrics.about import About, kept_id

_AT_ONCE = 1000  # metrics, and 100 parameters: the limits of one request
_LONGEST = 500  # characters of a parameter's value
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_\-. :/]")
_ID = "mlflow.id"  # the file that keeps the id of the folder's run


def tracking_uri(run_dir: Path) -> str:
    """Where MLflow keeps what is told of the run in this folder; a database in the folder is its owner's alone."""
    named = os.environ.get("MLFLOW_TRACKING_URI")
    if named:
        return named
    database = run_dir.resolve() / "mlflow.db"
    database.touch(0o600)
    return f"sqlite:///{database}"


def experiment_of(client: Any, project: str) -> str:
    """The id of the experiment of the project's name; it is made where there is none."""
    experiment = client.get_experiment_by_name(project)
    return str(experiment.experiment_id if experiment else client.create_experiment(project))


def run_id_of(run_dir: Path) -> str | None:
    """The id of the folder's MLflow run; None where no metrics go there."""
    return (run_dir / _ID).read_text(encoding="utf-8") if (run_dir / _ID).exists() else None


class MlflowTracker:
    """One MLflow run for a run folder, in the experiment of the project's name; the config is its parameters.

    MLflow takes nothing back: a step that a resumed run does again is there twice.
    """

    def __init__(self, run_dir: Path, about: About) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._run_dir = run_dir
        self._client: Any = MlflowClient(tracking_uri(run_dir))
        experiment = experiment_of(self._client, about.project)
        made = run_id_of(run_dir) is None
        self._run = kept_id(run_dir / _ID, lambda: self._client.create_run(experiment, run_name=about.name).info.run_id)
        self._client.update_run(self._run, status="RUNNING")  # a session before has ended it
        if made:
            values = [Param(name, str(value)[:_LONGEST]) for name, value in _leaves(about.config)]
            for start in range(0, len(values), 100):
                self._client.log_batch(self._run, params=values[start : start + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One value a metric. What MLflow takes in no name (`pass@1`) is `_` there."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(_NOT_IN_NAMES.sub("_", name), float(value), now, step) for name, value in metrics.items()]
        for start in range(0, len(values), _AT_ONCE):
            self._client.log_batch(self._run, metrics=values[start : start + _AT_ONCE])

    def close(self) -> None:
        """The run is over, or has broken off."""
        self._client.set_terminated(self._run, "FAILED" if finished(self._run_dir) is None else "FINISHED")


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
