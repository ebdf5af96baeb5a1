"""A whole run on two workers; one of them is killed, and the run goes on from its last checkpoint by itself."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lightning_rl as lrl
from lightning_rl.telemetry.metrics import jsonl
from lightning_rl.trajectories import step_record
from lightning_rl_adapters.span import unpack_logprobs
from tests import seeing
from tests.e2e.test_images import looker
from tests.lightning_rl.ppo.agents import two_calls
from tests.lightning_rl.training.distributed.stories import CHECKPOINT

pytestmark = pytest.mark.cluster

CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 2, "max_response_length": 8},
    "actor_rollout_ref": {
        "model": {"path": str(CHECKPOINT)},
        "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-3}},
        "rollout": {"n": 2, "renderer": "qwen3", "max_model_len": 128},
    },
    "algorithm": {"adv_estimator": "gae"},
    "critic": {"optim": {"lr": 1e-3}},
    "trainer": {
        "device": "cpu",
        "n_gpus_per_node": 2,
        "total_training_steps": 3,
        "save_freq": 1,
        "logger": ["jsonl"],
        "resume_mode": "auto",
    },
}


class Unlucky(lrl.PPO):
    """Loses a worker in its second step, so many times as `losses` says."""

    losses = 0

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.sampled: list[int] = []

    def on_sample_end(self, trajectories: Any) -> None:
        self.sampled.append(self.step)
        if self.step == 2 and self.losses:
            self.losses -= 1
            crew: Any = self.models._crew
            os.kill(crew._all[0].pids[1], signal.SIGKILL)


def run(run_dir: Path, *, losses: int = 0, **trainer: Any) -> Unlucky:
    ppo = Unlucky(CONFIG | {"trainer": CONFIG["trainer"] | trainer})
    ppo.losses = losses
    lrl.Trainer(two_calls, n_runners=4, run_dir=run_dir).fit(ppo, [0, 1, 2, 3])
    return ppo


def test_a_model_that_sees_is_trained_by_two_workers(local_ray: None, tmp_path: Path) -> None:
    """The workers' log probabilities of rows with images are the engine's, before and after an update."""
    folder = seeing.make_folder(tmp_path / "model", family="qwen3_vl")
    changes = {"model": {"path": str(folder)}, "rollout": {"n": 2, "max_model_len": 600}}
    config = CONFIG | {"actor_rollout_ref": CONFIG["actor_rollout_ref"] | changes}
    config["trainer"] = CONFIG["trainer"] | {"total_training_steps": 2, "save_freq": -1}
    lrl.Trainer(looker, n_runners=2, run_dir=tmp_path / "run").fit(
        lrl.PPO(config), [{"seed": seed} for seed in range(4)]
    )
    metrics = jsonl.read(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 2
    assert all(line["training/rollout_probs_diff_max"] < 1e-4 for line in metrics)
    assert all(line["tokens/trained"] == line["tokens/received"] for line in metrics[-1:])
    trained = [
        each for step in step_record.read_all(tmp_path / "run") for one in step.rollouts for each in one.calls.values()
    ]
    assert all(len(unpack_logprobs(each.entropies)) == each.trained_tokens > 0 for each in trained)
    begun, ended = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "run" / "model"))
    assert any("visual" in name and not torch.equal(tensor, begun[name]) for name, tensor in ended.items())


@pytest.mark.long
def test_a_run_that_loses_a_worker_ends_as_one_that_trains_alone(local_ray: None, tmp_path: Path) -> None:
    lost = run(tmp_path / "two", losses=1, max_restarts=1)
    assert lost.sampled == [1, 2, 2, 3]  # what was sampled of the second step is read again
    assert [row["step"] for row in jsonl.read(tmp_path / "two" / "metrics.jsonl")] == [1, 2, 3]

    (tmp_path / "one").mkdir()
    for name in ("store.db", "run.id"):
        shutil.copy(tmp_path / "two" / name, tmp_path / "one")
    alone = run(tmp_path / "one", n_gpus_per_node=1)
    assert alone.sampled == [1, 2, 3]
    for ours, theirs in zip(weights(tmp_path / "one"), weights(tmp_path / "two"), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=5e-5)
    begun = load_file(CHECKPOINT / "model.safetensors")
    assert any((tensor - begun[name]).abs().max() > 5e-4 for name, tensor in load_file(end(tmp_path / "two")).items())


def weights(run_dir: Path) -> list[torch.Tensor]:
    return list(load_file(end(run_dir)).values())


def end(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "step-3" / "model.safetensors"
