"""Pages for those who come from TRL and verifiers are true: their scripts train, and the keys they name are there."""

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


@pytest.mark.parametrize("other", ["trl", "verifiers"])
def test_the_keys_that_a_page_names_are_there(other: str) -> None:
    page = (DOCS / f"coming-from-{other}.md").read_text()
    named = set(re.findall(r"`((?:actor_rollout_ref|algorithm|data|gateway|trainer)\.[a-z_.]+)", page))
    theirs = {"trainer.model.lora"}
    known = {key.name for key in keys()}
    assert len(named) > 20
    assert [
        name for name in sorted(named - theirs) if not any(key == name or key.startswith(f"{name}.") for key in known)
    ] == []


def trained(other: str, folder: Path) -> dict[str, Any]:
    """The last step's metrics of the page's script."""
    [script] = re.findall(
        r"^```python\n(.*?)^```", (DOCS / f"coming-from-{other}.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )
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


@pytest.mark.agents
@pytest.mark.smoke
@pytest.mark.skipif(
    not IN_ITS_ENVIRONMENT and importlib.util.find_spec("verifiers") is None, reason="needs verifiers: make test-agents"
)
def test_the_script_with_an_environment_of_verifiers_trains(tmp_path: Path) -> None:
    row = trained("verifiers", tmp_path)
    assert row["critic/score/mean"] == pytest.approx(row["rollouts/reward/right"] + 0.2 * row["rollouts/reward/brief"])
    assert row["rollouts/rows"] == 8
