"""vLLM on a GPU: weights reach it by each transfer, it sleeps and wakes with what it was given last, and a run learns.

The interpreter of vLLM's environment is VLLM_PYTHON's; without it this one. `ipc` and `nccl` are vLLM's code in the
trainer's process too, so they need vLLM in this environment.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from omegaconf import OmegaConf

import lightning_rl as lrl
from examples.sql_agent.agent import sql_agent
from examples.sql_agent.data import make
from examples.sql_agent.train import CONFIG
from lightning_rl.config import compose
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.cards import Cards
from lightning_rl.training import lora
from tests.gpu.checks import CHECKPOINT
from tests.gpu.machine import used_memory

PYTHON = os.environ.get("VLLM_PYTHON") or sys.executable
STEPS = 8
ROLLOUT, ACTOR = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    if subprocess.run([PYTHON, "-c", "import vllm"], capture_output=True).returncode:
        pytest.skip(f"there is no vLLM in the environment of {PYTHON}: make test-gpu VLLM_PYTHON=...")


class Running:
    """A policy on a server, whole or with an adapter that does something."""

    def __init__(self, policy: VllmPolicy) -> None:
        self.policy = policy
        self.model: Any = policy.model
        if policy.takes_adapter:
            self.model = lora.adapted(policy.model, rank=8, alpha=16, targets="all-linear")
            self.change()

    def change(self) -> None:
        """So much that old weights are found out."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.1).add_(0.02 * torch.randn_like(parameter) * self.policy.takes_adapter)

    def send(self, version: int) -> None:
        """It compares log probabilities, and raises EngineMismatch."""
        weights = lora.low_rank(self.model) if self.policy.takes_adapter else self.model
        self.policy.update_weights(weights, version)


@contextmanager
def running(folder: Path, way: str, *words: str) -> Iterator[Running]:
    """With the weights that it begins with."""
    always = [f"{ROLLOUT}name=vllm", f"{ROLLOUT}python={PYTHON}", f"{ACTOR}fsdp_config.model_dtype=bf16"]
    always += ["trainer.device=cuda", f"{ROLLOUT}gpu_memory_utilization=0.3", f"{ROLLOUT}enforce_eager=true"]
    always += [f"{ROLLOUT}weight_transfer={'file' if way == 'adapter' else way}"]
    config = compose(command_line=[*always, *words])
    cards = Cards(config, {"actor"})
    options = resolved_config.vllm_options(config, cards.placement, cards.names)
    made = VllmPolicy(
        ModelSource(CHECKPOINT, device=cards.device, dtype=torch.bfloat16),
        msgspec.structs.replace(options, adapters=1, adapter_rank=8),
        folder,
        tolerance=resolved_config.sampler_tolerance(config),
        beside=[] if way == "adapter" else None,
    )
    found = Running(made)
    try:
        made.start()
        found.send(0)
        yield found
    finally:
        made.close()


@pytest.mark.parametrize("way", ["adapter", "ipc", "nccl"])
def test_new_weights_are_sampled_from(way: str, tmp_path: Path) -> None:
    if way in ("ipc", "nccl") and importlib.util.find_spec("vllm") is None:
        pytest.skip(f"{way} needs vLLM in this environment: pip install -e '.[vllm]'")
    if way == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("nccl goes between GPUs, and there is one")
    with running(tmp_path, way) as found:
        for version in (1, 2):
            found.change()
            found.send(version)


@pytest.mark.parametrize("way", ["file", "adapter", "ipc"])
def test_asleep_it_gives_its_memory_and_awake_it_has_the_last_weights(way: str, tmp_path: Path) -> None:
    if way in ("ipc", "nccl") and importlib.util.find_spec("vllm") is None:
        pytest.skip(f"{way} needs vLLM in this environment: pip install -e '.[vllm]'")
    with running(tmp_path, way, f"{ROLLOUT}devices=colocated") as found:
        policy = found.policy
        assert policy.sleeps
        awake = used_memory()
        for version in (1, 2):
            policy.sleep()
            assert used_memory() < awake - 1024, "MiB in use while vLLM sleeps"
            found.change()
            found.send(version)
        policy.sleep()
        policy.wake()
        found.send(3)
        assert used_memory() > awake - 1024


def test_an_agent_learns_where_trainer_and_engine_share_the_gpu(tmp_path: Path) -> None:
    rollout = {"name": "vllm", "python": PYTHON, "devices": "colocated", "dtype": "bfloat16", "enforce_eager": True}
    given = {
        "actor_rollout_ref": {
            "rollout": {**rollout, "gpu_memory_utilization": 0.3},
            "actor": {"fsdp_config": {"dtype": "bfloat16"}},
        },
        "trainer": {"device": "cuda", "total_training_steps": STEPS, "test_freq": STEPS, "logger": ["jsonl"]},
    }
    ppo = lrl.PPO(compose(OmegaConf.merge(CONFIG, given)))
    tasks = make(tmp_path / "data")
    lrl.Trainer(sql_agent, n_runners=32, run_dir=tmp_path).fit(ppo, tasks["train"], val_dataset=tasks["heldout"])
    rewards = {row["step"]: row["val/reward"] for row in ppo.history if "val/reward" in row}
    assert rewards[STEPS] > rewards[0] + 0.1
    steps = [row for row in ppo.history if row["step"] >= 1]
    assert all(row["training/mismatch_kl"] < 0.01 for row in steps)
