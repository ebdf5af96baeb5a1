"""A run whose policy two workers hold in shards and a real vLLM samples: what it samples with is what they have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lightning_rl as lrl
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.telemetry.metrics import jsonl
from tests.lightning_rl.ppo.agents import two_calls
from tests.lightning_rl.training.distributed.stories import CHECKPOINT
from tests.vllm.server import PYTHON


class Watched(lrl.PPO):
    """Compares what vLLM samples with what the workers say after each update."""

    compared = 0

    def on_step_end(self, metrics: dict[str, float]) -> None:
        policy: Any = self.policy
        assert isinstance(policy, VllmPolicy)
        assert all(parameter.is_meta for parameter in policy.model.parameters())  # nobody has a copy here
        policy._compare()
        self.compared += 1


@pytest.mark.smoke
def test_two_workers_train_what_vllm_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config: dict[str, Any] = {
        "data": {"train_batch_size": 2, "max_response_length": 8},
        "actor_rollout_ref": {
            "model": {"path": str(CHECKPOINT)},
            "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-3}},
            "rollout": {"n": 2, "renderer": "qwen3", "max_model_len": 128, "name": "vllm", "python": str(PYTHON)},
        },
        "algorithm": {"adv_estimator": "gae"},
        "critic": {"optim": {"lr": 1e-3}},
        "trainer": {
            "device": "cpu",
            "n_gpus_per_node": 2,
            "total_training_steps": 2,
            "save_freq": 2,
            "logger": ["jsonl"],
        },
    }
    ppo = Watched(config)
    lrl.Trainer(two_calls, n_runners=2, run_dir=tmp_path / "run").fit(ppo, [0, 1, 2, 3])
    assert ppo.compared == 2
    assert ppo.policy._proven
    steps = jsonl.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["training/rollout_probs_diff_max"] < 1e-3 for row in steps)
    assert steps[-1]["tokens/trained"] == steps[-1]["tokens/received"]
    begun, ended = (load_file(at / "model.safetensors") for at in (CHECKPOINT, tmp_path / "run" / "model"))
    assert begun.keys() == ended.keys()
    assert any(not torch.equal(tensor, begun[name]) for name, tensor in ended.items())
