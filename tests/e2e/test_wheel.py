"""The wheel carries what the quickstart needs: it runs from the wheel alone, away from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    return built


def test_it_holds_three_packages_and_the_tutorial(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "lightning_rl",
        "lightning_rl_proxy",
        "lightning_rl_adapters",
    }
    for needed in ("agent.py", "data.py", "train.py", "checkpoint/model.safetensors", "checkpoint/tokenizer.json"):
        assert f"lightning_rl/_examples/sql_agent/{needed}" in names
    assert "lightning_rl/config/ppo.yaml" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".db")]
    assert wheel.stat().st_size < 4_000_000


def test_the_quickstart_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    command = [sys.executable, "-m", "lightning_rl", "quickstart", "--steps", "1", "--run-dir", "run"]
    environment = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(installed / "lightning_rl" / "_examples") in done.stdout.replace("\n", "")
    assert (tmp_path / "run" / "checkpoints" / "step-1" / "model.safetensors").exists()
