"""The quickstart's task with vLLM as its engine: it learns, also where vLLM is killed in the middle."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import lightning_rl as lrl
from examples.sql_agent.agent import sql_agent
from examples.sql_agent.data import make
from examples.sql_agent.train import CONFIG
from lightning_rl.config import compose
from tests.chaos import test_resumed
from tests.vllm.server import PYTHON, processes

STEPS = 6
KILLED_AT = 3
VLLM = {
    "actor_rollout_ref": {"rollout": {"name": "vllm", "python": str(PYTHON)}},
    "trainer": {"total_training_steps": STEPS, "test_freq": STEPS, "logger": ["jsonl"]},
}


class Killed(lrl.PPO):
    """Its engine is killed while it samples for a step."""

    def on_sample_begin(self) -> None:
        if self.step == KILLED_AT:
            self.killer = threading.Timer(0.7, self._kill)
            self.killer.start()

    def _kill(self) -> None:
        [engine] = self.policy.registrations()
        for pid in processes(engine["url"]):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> lrl.PPO:
    folder = tmp_path_factory.mktemp("run")
    tasks = make(folder / "data")
    ppo = Killed(compose(OmegaConf.merge(CONFIG, VLLM)))
    lrl.Trainer(sql_agent, n_runners=32, run_dir=folder).fit(ppo, tasks["train"], val_dataset=tasks["heldout"])
    return ppo


@pytest.mark.long
def test_it_learns(trained: lrl.PPO) -> None:
    rewards = {row["step"]: row["val/reward"] for row in trained.history if "val/reward" in row}
    assert rewards[STEPS] > rewards[0] + 0.1


@pytest.mark.long
def test_sampler_and_trainer_agree(trained: lrl.PPO) -> None:
    steps: list[dict[str, Any]] = [row for row in trained.history if row["step"] >= 1]
    assert steps[0]["training/rollout_probs_diff_max"] < 1e-3
    assert all(row["training/mismatch_kl"] < 1e-6 for row in steps)


@pytest.mark.long
def test_a_trainer_killed_between_two_checkpoints_goes_on_at_the_first_resume(tmp_path: Path) -> None:
    kills = (("asked", 4), ("sent", 4))
    test_resumed.survives(tmp_path, "sync", 2, kills, str(PYTHON))


@pytest.mark.long
def test_a_killed_engine_costs_no_rollout(trained: lrl.PPO) -> None:
    assert trained.step == STEPS
    assert (trained.run_dir / "vllm-0.log").read_text().count("Application startup complete") == 2
    steps = [row for row in trained.history if row["step"] >= 1]
    assert [row["rollouts/agent_failed"] + row["rollouts/without_reward"] for row in steps] == [0] * STEPS
