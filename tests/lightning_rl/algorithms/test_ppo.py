"""PPO through the real parts, a step or two: it refuses a wrong engine, and agents that fail are data."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

import lightning_rl as lrl
from lightning_rl.algorithms import ppo as ppo_module
from lightning_rl.algorithms.ppo import SamplerMismatch
from lightning_rl.config import ConfigError, compose
from lightning_rl.server.child import ChildDied
from lightning_rl.tracking.jsonl import read

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "examples" / "sql_agent" / "checkpoint"

pytestmark = pytest.mark.e2e


def config(**trainer: Any) -> dict[str, Any]:
    return {
        "data": {"train_batch_size": 4, "max_response_length": 8},
        "actor_rollout_ref": {
            "model": {"path": str(CHECKPOINT)},
            "rollout": {"n": 2, "renderer": "qwen3", "max_model_len": 128},
        },
        "trainer": {"total_training_steps": 1, "logger": ["jsonl"], **trainer},
    }


@lrl.rollout
async def some_fail(task: int, llm: lrl.LLM) -> float | None:
    """Task 1 raises after its call, task 2 gives no reward, task 3 makes no call."""
    if task != 3:
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            chat: Any = [{"role": "user", "content": f"number {task}"}]
            await client.chat.completions.create(model=llm.model, messages=chat)
    if task == 1:
        raise RuntimeError("this agent has a bug")
    return None if task == 2 else 1.0


def test_agents_that_fail_are_data(tmp_path: Path) -> None:
    algorithm = lrl.PPO(config())
    lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3])
    [row] = read(tmp_path / "metrics.jsonl")
    assert row["rollouts/agent_failed"] == 4  # of tasks 1 and 2, two each
    assert row["critic/rewards/mean"] == 0.5
    assert row["rollouts/rows"] == 6
    assert row["tokens/received"] == row["tokens/trained"] > 0


def test_rollouts_without_calls_train_nothing(tmp_path: Path) -> None:
    algorithm = lrl.PPO(config())
    lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path).fit(algorithm, [3, 3, 3, 3])
    [row] = read(tmp_path / "metrics.jsonl")
    assert (row["rollouts/rows"], row["tokens/received"], row["critic/rewards/mean"]) == (0, 0, 1)
    assert "actor/pg_loss" not in row


def test_a_rule_may_leave_failed_agents_out(tmp_path: Path) -> None:
    algorithm = lrl.PPO(config() | {"algorithm": {"agent_failure": "exclude"}})
    lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3])
    [row] = read(tmp_path / "metrics.jsonl")
    assert row["rollouts/without_reward"] == 4
    assert row["critic/rewards/mean"] == 1.0
    assert row["tokens/excluded/no_reward"] > 0


def test_an_engine_with_other_weights_is_refused(tmp_path: Path) -> None:
    class WrongEngine(lrl.PPO):
        def open(self, run_dir: Path) -> Any:
            endpoint = super().open(run_dir)
            torch.manual_seed(0)
            weights = {name: w + 0.01 * torch.randn_like(w) for name, w in self.model.named_parameters()}
            self.engine.update_weights(weights, 0)
            return endpoint

    trainer = lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path)
    with pytest.raises(SamplerMismatch, match="on the first batch sampler and trainer log probabilities differ"):
        trainer.fit(WrongEngine(config()), [0, 1, 2, 3])
    assert not (tmp_path / "checkpoints").exists()


def test_a_server_that_dies_ends_the_run_by_name_and_leaves_no_process(tmp_path: Path) -> None:
    def children(module: str) -> list[int]:
        command = ["pgrep", "-P", str(os.getpid()), "-f", module]
        return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True).stdout.split()]

    class ServerDies(lrl.PPO):
        def roll_out(self, *arguments: Any) -> Any:
            [server] = children("lightning_rl.server.process")
            os.kill(server, signal.SIGKILL)
            return super().roll_out(*arguments)

    with pytest.raises(ChildDied, match=r"the server ended with status -9; the end of .*server\.log"):
        lrl.Trainer(some_fail, n_runners=2, run_dir=tmp_path).fit(ServerDies(config()), [0, 1, 2, 3])
    assert children("lightning_rl") == []


def test_recomputed_old_log_probs_train_too(tmp_path: Path) -> None:
    algorithm = lrl.PPO(config(total_training_steps=2, save_freq=1))
    lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3], val_dataset=[0, 3])
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all("training/rollout_probs_diff_max" in row for row in rows[1:])
    assert rows[-1]["val/reward"] == 1.0
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-2"]
    assert json.loads((tmp_path / "checkpoints" / "step-2" / "config.json").read_text())["model_type"] == "qwen2"


def test_too_few_tasks_are_named() -> None:
    with pytest.raises(ConfigError, match="2 tasks are fewer than data"):
        lrl.PPO(config(total_training_steps=None)).run([0, 1])
    with pytest.raises(ValueError, match="train_dataset is empty"):
        lrl.PPO(config()).run([])


def test_every_packaged_key_is_read_by_the_algorithm() -> None:
    source = Path(str(ppo_module.__file__)).read_text()

    def leaves(section: Any) -> list[str]:
        inner = [
            leaf
            for name in section
            for leaf in (leaves(section[name]) if isinstance(section[name], DictConfig) else [name])
        ]
        return [str(name) for name in inner]

    defaults = compose({"actor_rollout_ref": {"model": {"path": "x"}}})
    assert OmegaConf.is_readonly(defaults)
    unread = [name for name in leaves(defaults) if not re.search(rf"\.{name}\b", source)]
    assert unread == []
