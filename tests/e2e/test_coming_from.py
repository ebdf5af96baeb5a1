"""Pages for those who come from other projects are true: their scripts train, and the keys they name are there."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.config import keys

DOCS = Path(__file__).parents[2] / "docs"
IN_ITS_ENVIRONMENT = Path(sys.prefix).name == ".venv-agents"  # `make test-agents`, where verifiers must be


@pytest.mark.parametrize("other", ["areal", "art", "rllm", "skyrl", "trl", "verifiers"])
def test_the_keys_that_a_page_names_are_there(other: str) -> None:
    page = (DOCS / f"coming-from-{other}.md").read_text()
    others_column = re.compile(r"^\| .*? \|", re.MULTILINE)
    ours = page if other == "trl" else others_column.sub("", page)
    named = set(re.findall(r"`((?:actor_rollout_ref|algorithm|data|gateway|reward|trainer)\.[a-z_.]+)", ours))
    known = {key.name for key in keys()}
    assert len(named) > 20
    assert [name for name in sorted(named) if not any(key == name or key.startswith(f"{name}.") for key in known)] == []


def trained(other: str, folder: Path) -> dict[str, Any]:
    """The last step's metrics of the page's script, its last block; those before it say their names."""
    page = (DOCS / f"coming-from-{other}.md").read_text()
    *modules, script = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    for module in modules:
        name = module.split("\n", 1)[0].removeprefix("# ")
        (folder / name).write_text(module)
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2  reward" in done.stdout
    [lines] = (folder / "runs").glob("*/metrics.jsonl")
    row: dict[str, Any] = json.loads(lines.read_text().splitlines()[-1])
    return row


@pytest.mark.e2e
def test_the_script_with_trls_reward_functions_trains(tmp_path: Path) -> None:
    row = trained("trl", tmp_path)
    assert {"rollouts/reward/right", "rollouts/reward/brief"} <= row.keys()
    assert row["critic/score/mean"] == pytest.approx(row["rollouts/reward/right"] + 0.2 * row["rollouts/reward/brief"])


@pytest.mark.e2e
def test_the_script_with_an_agent_workflow_of_areals_trains(tmp_path: Path) -> None:
    row = trained("areal", tmp_path)
    assert 0 < row["critic/rewards/mean"] <= 1
    assert row["rollouts/rows"] == 8  # one for each rollout, of one call or two


RLLM = {  # what the script imports of rLLM, which no package index has, by the shapes of 0.3
    "__init__.py": """
class Function:
    def __init__(self, function):
        self.arun = self.evaluate = function

rollout = evaluator = Function
""",
    "types.py": """
from dataclasses import dataclass

@dataclass
class Task:
    id: str
    instruction: str
    metadata: dict

@dataclass
class AgentConfig:
    base_url: str
    model: str
    session_uid: str

@dataclass
class Step:
    chat_completions: list
    action: str

@dataclass
class Trajectory:
    name: str
    steps: list

@dataclass
class Episode:
    trajectories: list
    artifacts: dict
""",
    "eval/types.py": """
from dataclasses import dataclass

@dataclass
class Signal:
    name: str
    value: float

@dataclass
class EvalOutput:
    reward: float
    is_correct: bool
    signals: list
""",
}


@pytest.mark.e2e
def test_the_script_with_an_agent_flow_of_rllms_trains(tmp_path: Path) -> None:
    for name, module in RLLM.items():
        file = tmp_path / "rllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(module)
    row = trained("rllm", tmp_path)
    assert row["critic/score/mean"] > 0
    assert 0 <= row["rollouts/reward/brief"] <= 1
    assert row["rollouts/rows"] == 8  # one for each rollout, of two calls


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not IN_ITS_ENVIRONMENT and importlib.util.find_spec(package) is None,
        reason=f"needs {package}: make test-agents",
    )


@pytest.mark.agents
@pytest.mark.smoke
@needs("art")
def test_the_script_with_a_rollout_of_arts_trains(tmp_path: Path) -> None:
    row = trained("art", tmp_path)
    assert row["critic/score/mean"] == row["rollouts/reward/right"] > 0
    assert row["rollouts/rows"] == 8


@pytest.mark.agents
@pytest.mark.smoke
@needs("skyrl_gym")
def test_the_script_with_an_environment_of_skyrls_trains(tmp_path: Path) -> None:
    row = trained("skyrl", tmp_path)
    assert 1 < row["rollouts/reward/turns"] < 2
    assert row["rollouts/rows"] == 8  # one for each rollout, whose turns are its


@pytest.mark.agents
@pytest.mark.smoke
@needs("verifiers")
def test_the_script_with_an_environment_of_verifiers_trains(tmp_path: Path) -> None:
    row = trained("verifiers", tmp_path)
    assert row["critic/score/mean"] == pytest.approx(row["rollouts/reward/right"] + 0.2 * row["rollouts/reward/brief"])
    assert row["rollouts/rows"] == 8
