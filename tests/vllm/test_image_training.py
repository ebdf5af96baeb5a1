"""A run whose agent shows images to a policy on vLLM: what the trainer computes is what vLLM sampled with."""

import os
from pathlib import Path

import pytest

import lightning_rl as lrl
from lightning_rl.telemetry.metrics import jsonl
from tests.e2e.test_images import looker
from tests.vllm.seeing import PATH, make_folder
from tests.vllm.server import PYTHON

STEPS = 3


@pytest.mark.long
def test_what_was_sampled_of_images_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PATH, os.environ.get("PYTHONPATH", "")]))
    config = {
        "actor_rollout_ref": {
            "model": {"path": str(make_folder(tmp_path / "model"))},
            "rollout": {"name": "vllm", "python": str(PYTHON), "n": 2, "max_model_len": 600},
            "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-3}},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_batch_size": 2},
        "trainer": {"total_training_steps": STEPS, "logger": ["jsonl"], "device": "cpu"},
    }
    run = tmp_path / "run"
    lrl.Trainer(looker, n_runners=2, run_dir=run).fit(lrl.PPO(config), [{"seed": seed} for seed in range(4)])
    steps = jsonl.read(run / "metrics.jsonl")
    assert len(steps) == STEPS
    assert all(0 < step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    assert steps[-1]["tokens/trained"] == steps[-1]["tokens/received"] > 0
