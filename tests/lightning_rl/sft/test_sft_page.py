"""The script of docs/sft.md runs as it stands: teacher, SFT and PPO, one after the other."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "sft.md"


@pytest.mark.long
@pytest.mark.e2e
def test_the_script_trains_on_traces_and_ppo_goes_on_from_there(tmp_path: Path) -> None:
    [script] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    of_sft, of_ppo = (
        [json.loads(line) for line in (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("sft", "ppo")
    )
    assert of_sft[-1]["sft/calls/as_sampled"] == 32
    assert of_sft[-1]["tokens/pending"] == 0
    assert of_ppo[-1]["step"] == 2
    assert f"path: {tmp_path / 'runs' / 'sft' / 'model'}" in (tmp_path / "runs" / "ppo" / "config.yaml").read_text()
