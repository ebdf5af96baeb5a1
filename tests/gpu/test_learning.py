"""The quickstart on a GPU: the trainer and the embedded engine compute there, and the agent learns."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_quickstarts_agent_learns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_rl", "quickstart", "--steps", "16", "--run-dir", "run"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "training on GPU 0" in done.stdout
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["val/reward"] for row in metrics if "val/reward" in row]
    assert rewards[-1] > rewards[0] + 0.15
