"""The how-to on coding agents: its code trains the tutorial's model inside Claude Code and inside Codex."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.works_with.environments import made, surroundings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "coding-agents.md"

pytestmark = [pytest.mark.works_with, pytest.mark.timeout(1200)]


COMMON = [
    "data.train_batch_size=1",
    "data.max_prompt_length=16000",
    "data.max_response_length=32",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_epochs=1",
    "reward=true",
]
WINDOW = "+actor_rollout_ref.model.override_config={max_position_embeddings: 16384}"


@pytest.mark.parametrize(("environment", "agent"), [("claude-code", "claude"), ("codex", "codex")])
def test_the_pages_command_trains_without_a_script(tmp_path: Path, environment: str, agent: str) -> None:
    [line] = re.findall(rf"^lightning-rl (train command='{agent} .*)", PAGE.read_text(), re.MULTILINE)
    (tmp_path / "repo").mkdir()
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "cars: size id\\nHow many cars are there?"}\n')
    variables = {**surroundings(made(environment)), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rl", *shlex.split(line), *COMMON, WINDOW],
        cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "step 1/1  reward 1.000" in done.stdout


@pytest.mark.parametrize(("environment", "agent"), [("claude-code", "claude"), ("codex", "codex")])
def test_the_page_trains_as_it_stands(tmp_path: Path, environment: str, agent: str) -> None:
    [script] = re.findall(r"```python\n(# train\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    variables = {**surroundings(made(environment)), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py", agent], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("step 2/2")]
    assert int(re.findall(r"(\d+) trained", line)[0]) > 0
