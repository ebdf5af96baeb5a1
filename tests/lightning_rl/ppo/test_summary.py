"""A run's first words, and its last."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_rl import files
from lightning_rl.config.schema import Config
from lightning_rl.ppo import reporting
from lightning_rl.ppo.reporting import Finished
from lightning_rl.processes import cores


@pytest.mark.parametrize(("limit", "said"), [(2, True), (64, False), (None, False)])
def test_a_container_that_may_not_use_all_cores_is_named(
    limit: int | None, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "limit", lambda: limit)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    models: Any = SimpleNamespace(config=Config(), learning_rate_by_size=False)
    [_, *line] = reporting.first_lines(models)
    computes = f"torch computes with {torch.get_num_threads()} (OMP_NUM_THREADS)"
    assert line == [f"cores: this container may use 2 of 64; {computes}"] * said


def test_rewards_before_and_after_the_folder_and_the_next_commands(tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    (run_dir / "model").mkdir(parents=True)
    history = [{"step": 0.0, "val/reward": 0.25}] + [
        {"step": float(step), "critic/score/mean": step / 10} for step in range(1, 9)
    ]
    history[-1] |= {"val/reward": 0.75, "tune/reward": 0.5}
    assert reporting.summary_lines(run_dir, history, "train-0-8-1-0.4f2a1c") == [
        "reward      0.150 -> 0.750 (step 1 to 8)",  # means of a quarter of the steps
        "held-out    0.250 -> 0.750 (step 0 to 8)",
        "tuning      0.500 (step 8)",
        f"run         {run_dir}",
        f"model       {run_dir / 'model'}",
        f"next        lightning-rl dashboard '{run_dir}'",
        f"            lightning-rl report '{run_dir}'",
        f"            lightning-rl doctor '{run_dir}'",
        f"            lightning-rl explain train-0-8-1-0.4f2a1c --run-dir '{run_dir}'",
    ]


def test_a_run_without_steps_says_where_it_is(tmp_path: Path) -> None:
    assert reporting.summary_lines(tmp_path, [], None) == [
        f"run         {tmp_path}",
        f"next        lightning-rl dashboard {tmp_path}",
        f"            lightning-rl report {tmp_path}",
        f"            lightning-rl doctor {tmp_path}",
    ]


def test_an_end_is_one_with_its_model(tmp_path: Path) -> None:
    assert reporting.end_of(tmp_path) is None
    files.note_finished(tmp_path, asked=4, made=3)
    assert reporting.end_of(tmp_path) is None
    (tmp_path / "model").mkdir()
    assert reporting.end_of(tmp_path) == Finished(asked=4, made=3)
    files.note_finished(tmp_path)
    assert reporting.end_of(tmp_path) is None, "of another algorithm"
    files.note_unfinished(tmp_path)
    assert reporting.end_of(tmp_path) is None


@pytest.mark.parametrize(
    ("end", "steps", "patience", "goes_on"),
    [
        (Finished(asked=4, made=4, patience=0), 4, None, False),
        (Finished(asked=4, made=4, patience=0), 6, None, True),
        (Finished(asked=4, made=2, patience=1), 4, 1, False),
        (Finished(asked=4, made=2, patience=1), 4, 2, True),
        (Finished(asked=4, made=2, patience=1), 4, None, True),
        (Finished(asked=4, made=2, patience=1), 2, 2, False),
        (Finished(asked=4, made=2), 4, 2, False),
    ],
)
def test_more_steps_and_more_patience_go_on_with_a_finished_run(
    end: Finished, steps: int, patience: int | None, goes_on: bool
) -> None:
    assert end.goes_on(steps, patience) == goes_on
