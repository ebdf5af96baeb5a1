"""`docs/coming-from-trl.md` is true: its script trains with TRL's reward functions, and the keys it names are there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rl.config import keys

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from-trl.md").read_text()


def test_the_keys_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`((?:actor_rollout_ref|algorithm|data|trainer)\.[a-z_.]+)", PAGE))
    known = {key.name for key in keys()}
    assert len(named) > 20
    assert [name for name in sorted(named) if not any(key == name or key.startswith(f"{name}.") for key in known)] == []


@pytest.mark.e2e
def test_the_pages_script_trains(tmp_path: Path) -> None:
    [script] = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2  reward" in done.stdout
    [lines] = (tmp_path / "runs").glob("*/metrics.jsonl")
    row = json.loads(lines.read_text().splitlines()[-1])
    assert {"rollouts/reward/right", "rollouts/reward/brief"} <= row.keys()
    assert row["critic/score/mean"] == pytest.approx(row["rollouts/reward/right"] + 0.2 * row["rollouts/reward/brief"])
