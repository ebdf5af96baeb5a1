"""The Spider tutorial's command in small, with Qwen2.5-Coder: two steps, on vLLM where it is there.

SPIDER names Spider's folder; without it a folder of a few questions stands in. MODEL names another model.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rl.telemetry.metrics import jsonl
from tests.e2e.test_spider import write_folder

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("VLLM_PYTHON") or sys.executable
MODEL = os.environ.get("MODEL", "Qwen/Qwen2.5-Coder-0.5B-Instruct")


@pytest.mark.timeout(1800)
def test_two_steps_of_spider(tmp_path: Path) -> None:
    spider = os.environ.get("SPIDER") or str(write_folder(tmp_path / "spider"))
    there = subprocess.run([PYTHON, "-c", "import vllm"], capture_output=True).returncode == 0
    engine = ["--engine", "vllm", "--python", PYTHON] if there else ["--engine", "embedded"]
    few = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.val_before_train=false"]
    wanted = ["--spider", spider, "--model", MODEL, "--run-dir", str(tmp_path / "run"), "--steps", "2", *engine, *few]
    command = [sys.executable, "-m", "examples.sql_agent.train_graph", *wanted]
    online = {**os.environ, "HF_HUB_OFFLINE": os.environ.get("GPU_OFFLINE", "0")}
    done = subprocess.run(command, cwd=ROOT, env=online, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    steps = [row for row in jsonl.read(tmp_path / "run" / "metrics.jsonl") if row["step"] >= 1]
    assert len(steps) >= 2
    assert steps[-1]["tokens/trained"] > 0
