"""The wheel carries what the quickstart needs: it runs from the wheel alone, away from the checkout."""

import email
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e


def test_it_holds_three_packages_and_the_tutorial(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "lightning_rl",
        "lightning_rl_proxy",
        "lightning_rl_adapters",
    }
    for needed in ("agent.py", "data.py", "train.py", "checkpoint/model.safetensors", "checkpoint/tokenizer.json"):
        assert f"lightning_rl/_examples/sql_agent/{needed}" in names
    for root in ("lightning_rl", "lightning_rl_proxy", "lightning_rl_adapters"):
        assert f"{root}/py.typed" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".db")]
    assert wheel.stat().st_size < 4_500_000


@pytest.mark.long
@pytest.mark.package
def test_the_quickstart_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    command = [sys.executable, "-m", "lightning_rl", "quickstart", "--steps", "1", "--run-dir", "run"]
    environment = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(installed / "lightning_rl" / "_examples") in done.stdout.replace("\n", "")
    assert (tmp_path / "run" / "checkpoints" / "step-1" / "model.safetensors").exists()


def test_it_holds_every_file_of_the_tutorial(wheel: Path) -> None:
    tutorial = ROOT / "examples" / "sql_agent"
    left_by_runs = {"__pycache__", "data", "runs"}
    ours = [path for path in tutorial.rglob("*") if path.is_file() and not left_by_runs & set(path.parts)]
    packed = set(zipfile.ZipFile(wheel).namelist())
    names = {f"lightning_rl/_examples/sql_agent/{path.relative_to(tutorial).as_posix()}" for path in ours}
    assert names - packed == set()


def test_its_extras_are_the_promised_ones(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    promised = {"litellm", "ray", "vllm", "langgraph", "tracking", "mcp", "postgres", "dev", "data", "mlflow"}
    assert promised <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["Requires-Python"] == ">=3.11"


USER = """\
import lightning_rl as lrl

@lrl.rollout
def agent(task: dict[str, str], llm: lrl.LLM) -> float:
    return float(task["question"] in llm.base_url)

trainer = lrl.Trainer(agent, n_runners=2)
trainer.fit(lrl.PPO({"data": {"train_batch_size": 8}}), [{"question": "how many?"}])
"""


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python whose site-packages hold the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    [site] = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    return folder / "bin" / "python"


def type_check(source: str, python: Path, folder: Path) -> str:
    """What mypy, strict, says of a user's file; the empty string when nothing."""
    (folder / "user.py").write_text(source)
    options = ["--no-incremental", "--strict", "--config-file=", "--no-error-summary", "--python-executable", python]
    command = [sys.executable, "-m", "mypy", *options, "user.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_a_users_types_are_checked(installed: Path, tmp_path: Path) -> None:
    assert type_check(USER, installed, tmp_path) == ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("n_runners=2", 'n_runners="x"', 'Argument "n_runners" to "Trainer" has incompatible type "str"'),
        ("llm.base_url", "llm.base_ulr", '"LLM" has no attribute "base_ulr"'),
        ("lrl.PPO(", "len(", 'Argument 1 to "fit" of "Trainer" has incompatible type "int"; expected "Algorithm | '),
    ],
)
def test_a_users_mistakes_are_reported(right: str, wrong: str, complaint: str, installed: Path, tmp_path: Path) -> None:
    assert complaint in type_check(USER.replace(right, wrong), installed, tmp_path)
