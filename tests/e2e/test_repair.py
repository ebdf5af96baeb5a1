"""The tutorial of the coding agent: its tasks are broken and can be mended, its commands train, its page says so."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.repair.tasks import main, of_database
from lightning_rl.telemetry.metrics.jsonl import read
from tests.pages import ROOT

REPAIR = ROOT / "examples" / "repair"
PAGE = (ROOT / "docs" / "tutorials" / "repair.md").read_text()


def checked(task: dict[str, object], query: str, folder: Path) -> bool:
    """Whether the tutorial's tests take this report."""
    (folder / "report.sql").write_text(query)
    (folder / "task.json").write_text(json.dumps(task))
    told = os.environ | {"LIGHTNING_RL_TASK": str(folder / "task.json")}
    done = subprocess.run([sys.executable, REPAIR / "tests" / "check.py"], cwd=folder, env=told, capture_output=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


def test_reports_are_broken_and_the_right_query_mends_them(tmp_path: Path) -> None:
    tasks = of_database(7, 8)
    assert len({task["prompt"] for task in tasks}) == 8
    for task, before in zip(tasks, tasks[-1:] + tasks[:-1], strict=True):
        # The broken report of the task before is the right one of this.
        assert checked(task, before["files"]["report.sql"], tmp_path)
        assert not checked(task, "DROP TABLE x", tmp_path)
    assert sum(checked(task, task["files"]["report.sql"], tmp_path) for task in tasks) <= 1


def test_the_page_shows_the_program_and_the_configuration() -> None:
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert program in (REPAIR / "program" / "mend.py").read_text()
    [config] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert config in (REPAIR / "config.yaml").read_text()


def trained(folder: Path, steps: int) -> tuple[list[float], str]:
    """The rewards of the steps of the page's own command, with fewer steps; and what it printed."""
    main(folder / "repair")
    [command] = re.findall(r"^lightning-rl train .*", PAGE, re.MULTILINE)
    words = [word.replace("=repair/", f"={folder}/repair/") for word in command.split()[1:]]
    fewer = [f"trainer.total_training_steps={steps}", "trainer.test_freq=0", "trainer.val_before_train=false"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rl", *words, *fewer, "--run-dir", str(folder / "run")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [step["critic/rewards/mean"] for step in read(folder / "run" / "metrics.jsonl")], done.stdout


@pytest.mark.long
@pytest.mark.e2e
def test_the_pages_command_trains(tmp_path: Path) -> None:
    [reward], printed = trained(tmp_path, 1)
    assert 0.2 < reward < 0.8
    [rollout] = re.findall(r"lightning-rl explain (\S+) --run-dir", printed)
    told = subprocess.run(
        [sys.executable, "-m", "lightning_rl", "explain", rollout, "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "> SELECT" in told


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_coding_agent_learns(tmp_path: Path) -> None:
    rewards, _ = trained(tmp_path, 24)
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.1
