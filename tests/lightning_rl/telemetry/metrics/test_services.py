"""TensorBoard, Weights & Biases (offline), MLflow, each read back by its own library; a run that goes on is one."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rl.config import ConfigError
from lightning_rl.files import note_finished
from lightning_rl.telemetry import metrics as trackers
from lightning_rl.telemetry.metrics.about import About, kept_id
from lightning_rl.telemetry.metrics.service import ServiceTracker, TrackerUnusable

ABOUT = About(project="p", name="n", config={"data": {"seed": 3}, "long": "x" * 9000})


def log(name: str, run_dir: Path, steps: dict[int, dict[str, float]], began_at: int = 0) -> None:
    [tracker] = trackers.open_trackers([name], run_dir, 9, began_at, ABOUT)
    for step, metrics in steps.items():
        tracker.log(step, metrics)
    tracker.close()


def test_tensorboard_shows_what_was_logged_and_not_what_a_resumed_run_takes_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log("tensorboard", tmp_path, {1: {"critic/rewards/mean": 9.0}, 2: {"critic/rewards/mean": 9.0}})
    log("tensorboard", tmp_path, {1: {"critic/rewards/mean": 0.5}, 2: {"critic/rewards/mean": 0.75}})
    log("tensorboard", tmp_path, {2: {"critic/rewards/mean": 1.0}}, began_at=1)
    found: Any = EventAccumulator(str(tmp_path / "tensorboard"))  # type: ignore[no-untyped-call]
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("critic/rewards/mean")] == [(1, 0.5), (2, 1.0)]


@pytest.mark.long
def test_mlflow_keeps_one_run_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log("mlflow", tmp_path, {1: {"tokens/excluded/zero_variance": 2.0, "rollouts/reward/pass@1": 1.0}})
    [tracker] = trackers.open_trackers(["mlflow"], tmp_path, 9, 1, ABOUT)
    client: Any = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("p").experiment_id
    assert [run.info.status for run in client.search_runs([experiment])] == ["RUNNING"]
    tracker.close()
    assert [run.info.status for run in client.search_runs([experiment])] == ["FAILED"]  # it broke off
    note_finished(tmp_path)
    log("mlflow", tmp_path, {2: {"tokens/excluded/zero_variance": 4.0}}, began_at=1)
    [run] = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status, run.data.params["data.seed"]) == ("n", "FINISHED", "3")
    history = client.get_metric_history(run.info.run_id, "tokens/excluded/zero_variance")
    assert [(metric.step, metric.value) for metric in history] == [(1, 2.0), (2, 4.0)]
    assert run.data.metrics["rollouts/reward/pass_1"] == 1.0


@pytest.mark.long
def test_wandb_writes_offline_where_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log("wandb", tmp_path, {1: {"critic/rewards/mean": 0.5}})
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert file.stem.removeprefix("run-") == (tmp_path / "wandb.id").read_text()
    last = time.monotonic() + 60
    while b"critic/rewards/mean" not in file.read_bytes():  # a process of wandb's own writes it
        assert time.monotonic() < last, file.read_bytes()
        time.sleep(0.05)


class AtTimesAway:
    """A service that takes nothing while it is away; `took` has the steps that it took."""

    def __init__(self) -> None:
        self.away, self.took, self.is_closed = False, list[int](), False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.away:
            raise OSError("503, busy")
        self.took.append(step)

    def close(self) -> None:
        self.is_closed = True


def test_what_a_service_does_not_take_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    service = AtTimesAway()
    tracker = ServiceTracker("mlflow", lambda: service)
    for step, service.away in ((1, False), (2, True), (3, True)):
        tracker.log(step, {"loss": 1.0})
    tracker._not_before = 1.0  # the pause is over
    service.away = False
    tracker.log(4, {"loss": 1.0})
    assert service.took == [1, 2, 3, 4]
    assert caplog.messages == [
        "mlflow does not take the metrics of step 2 (OSError: 503, busy): the run goes on, and they wait for it",
        "mlflow takes metrics again, and has those that waited",
    ]
    service.away = True
    tracker.log(5, {"loss": 1.0})
    tracker.close()
    assert service.is_closed
    assert caplog.messages[-1] == "mlflow lacks steps 5 to 5: metrics.jsonl has them"


def test_a_step_that_a_service_never_takes_holds_no_other_back(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(AtTimesAway):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == 2:
                raise ValueError("a name with @")
            super().log(step, metrics)

    service = Picky()
    tracker = ServiceTracker("mlflow", lambda: service)
    for step in range(1, 6):
        tracker.log(step, {"loss": 1.0})
        tracker._not_before = min(tracker._not_before, 1.0)  # the pause is over
    tracker.close()
    assert service.took == [1, 3, 4, 5]
    assert "mlflow never takes step 2 (ValueError: a name with @): metrics.jsonl has it" in caplog.messages


class Slow(AtTimesAway):
    """A service of which each try takes a second of a clock that stands still otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.tries, self.values = 100.0, 0, list[float]()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.now, self.tries = self.now + 1, self.tries + 1
        super().log(step, metrics)
        self.values.append(metrics["loss"])


def test_a_service_that_is_away_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service, metrics = Slow(), {"loss": 1.0}
    clock = SimpleNamespace(monotonic=lambda: service.now)
    monkeypatch.setattr("lightning_rl.telemetry.metrics.service.time", clock)
    tracker, service.away = ServiceTracker("mlflow", lambda: service), True
    for step, tries in ((1, 1), (2, 1), (3, 1)):
        tracker.log(step, metrics)
        assert service.tries == tries, "its library has tried for long, and the run would wait each time"
    service.now, service.away = service.now + 19, False
    tracker.log(4, metrics)
    assert service.took == []
    metrics["loss"] = 2.0  # of another step
    service.now += 1
    tracker.log(5, {"loss": 3.0})
    tracker.log(6, metrics)
    assert service.took == [1, 2, 3, 4, 5, 6]
    assert service.values == [1.0, 1.0, 1.0, 1.0, 3.0, 2.0]
    assert len(caplog.messages) == 2, "that it is away, and that it is back"


def test_at_the_end_of_a_run_what_waits_is_given_once_more(caplog: pytest.LogCaptureFixture) -> None:
    service = AtTimesAway()
    tracker, service.away = ServiceTracker("mlflow", lambda: service), True
    values = {"loss": 1.0}
    for step in (1, 2):
        tracker.log(step, values)
    tracker._not_before = 1e30
    service.away = False
    tracker.close()
    assert (service.took, service.is_closed) == ([1, 2], True)
    assert caplog.messages[-1] == "mlflow takes metrics again, and has those that waited"


def test_a_service_that_cannot_be_closed_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(AtTimesAway):
        def close(self) -> None:
            raise OSError("  " + "x" * 400)

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise OSError

    tracker = ServiceTracker("mlflow", Breaks)
    for step in (3, 4):
        tracker.log(step, {})
    tracker.close()
    assert "metrics of step 3 (OSError: (no message)):" in caplog.messages[0]
    assert caplog.messages[-2:] == [
        "mlflow lacks steps 3 to 4: metrics.jsonl has them", f"mlflow could not be closed: OSError: {'x' * 300}"
    ]  # fmt: skip


def test_a_service_that_cannot_be_opened_is_named() -> None:
    def refuses() -> AtTimesAway:
        raise PermissionError("no API key")

    with pytest.raises(
        TrackerUnusable, match=r"'wandb', which cannot be opened: PermissionError: no API key. Mend that"
    ):
        ServiceTracker("wandb", refuses)


def test_a_run_that_goes_on_keeps_its_id(tmp_path: Path) -> None:
    made = iter(["first", "second"])
    assert [kept_id(tmp_path / "wandb.id", lambda: next(made)) for _ in range(2)] == ["first", "first"]


def test_a_missing_library_is_told_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'wandb' needs a library: pip install 'lightning-rl\[tracking\]'"):
        trackers.check_names(["console", "wandb"])
