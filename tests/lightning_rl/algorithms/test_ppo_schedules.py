"""PPO under each schedule, through the real parts: versions are bounded, generations outlive updates, tokens balance."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.algorithms import step_record
from lightning_rl.tracking.jsonl import read
from tests.lightning_rl.algorithms.agents import straggles
from tests.lightning_rl.algorithms.test_ppo import config

pytestmark = pytest.mark.e2e

STEPS, N, BATCH = 6, 2, 4


def given(schedule: str, *, algorithm: dict[str, Any] | None = None, **trainer: Any) -> dict[str, Any]:
    found = config(**{"schedule": schedule, "total_training_steps": STEPS, **trainer}) | {"algorithm": algorithm or {}}
    found["actor_rollout_ref"]["actor"] = {"optim": {"lr": 1e-3}}
    return found


def trained(run_dir: Path, config: dict[str, Any], tasks: int = 12, **fit: Any) -> lrl.PPO:
    ppo = lrl.PPO(config)
    lrl.Trainer(straggles, run_dir=run_dir).fit(ppo, list(range(tasks)), **fit)
    return ppo


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [row for row in read(run_dir / "metrics.jsonl") if row["step"]]


def assert_conserved(rows: list[dict[str, float]]) -> None:
    for row in rows:
        excluded = sum(value for name, value in row.items() if name.startswith("tokens/excluded/"))
        assert row["tokens/received"] == row["tokens/trained"] + excluded + row["tokens/pending"]


def assert_trained_once(run_dir: Path) -> None:
    times = Counter(rollout.rollout_id for record in step_record.read_all(run_dir) for rollout in record.rollouts)
    assert set(times.values()) == {1}
    assert len(times) == STEPS * N * BATCH


@pytest.mark.parametrize(("schedule", "bound"), [("one_step_off", 1), ("async", 2)])
def test_off_policy_runs_stay_within_the_bound_and_balance(tmp_path: Path, schedule: str, bound: int) -> None:
    trained(tmp_path, given(schedule, test_freq=2), val_dataset=[0, 1])
    rows = rows_of(tmp_path)
    assert len(rows) == STEPS
    assert rows[0]["training/staleness/max"] == 0
    assert max(row["training/staleness/max"] for row in rows) == bound
    assert any(row["tokens/pending"] > 0 for row in rows[:-1])  # rollouts were in flight when the account was checked
    assert_conserved(rows)
    assert rows[-1]["tokens/pending"] == 0
    assert "tokens/excluded/stale" not in rows[-1]
    assert all("rollout_corr/rollout_is_mean" in row for row in rows)  # corrected by default
    assert_trained_once(tmp_path)
