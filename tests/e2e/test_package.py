"""The wheel in environments of its own. Slow, and in need of a package index: run by `make test-package`."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import ROOT

pytestmark = pytest.mark.package

# Whoever asks anything beyond this machine gets an error at once.
NO_NETWORK = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
}
# The examples are the user's own code, LangGraph's room and MLflow's traces have extras of their own, and Alembic alone
# runs its script.
IMPORT_ALL = """
import importlib, pkgutil
elsewhere = ("._examples", ".langgraph.", ".traces.mlflow", ".store.migrations.env")
for root in ("lightning_rl", "lightning_rl_proxy", "lightning_rl_adapters"):
    for module in pkgutil.walk_packages(importlib.import_module(root).__path__, root + "."):
        if not any(part in module.name for part in elsewhere):
            importlib.import_module(module.name)
try:
    importlib.import_module("lightning_rl.langgraph").agent_of
except ModuleNotFoundError as error:
    assert "pip install 'lightning-rl[langgraph]'" in str(error), error
else:
    raise AssertionError("it is there")
"""


def run(*command: str | Path, cwd: Path, timeout: float, **environment: str) -> str:
    """What a command prints, as run by a user in `cwd`; it must succeed."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of a new virtual environment that holds the wheel and what it requires.

    Torch comes by pip, whose configuration says which build is meant here, and the rest by uv, which is faster.
    """
    folder = tmp_path_factory.mktemp("environment")
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [torch] = (each for each in requires if each.startswith("torch>="))
    python, uv = folder / "venv/bin/python", Path(sys.prefix, "bin", "uv")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder, timeout=60)
    run(folder / "venv/bin/pip", "install", "--quiet", torch, cwd=folder, timeout=1200)
    run(uv, "pip", "install", "--quiet", "--python", python, wheel, cwd=folder, timeout=1200)
    yield folder / "venv" / "bin"
    shutil.rmtree(folder)  # more than a gigabyte, and pytest keeps the folders of three runs


@pytest.mark.smoke
def test_what_it_requires_fits_together(environment: Path, tmp_path: Path) -> None:
    assert "No broken requirements found" in run(environment / "pip", "check", cwd=tmp_path, timeout=60)


@pytest.mark.smoke
def test_no_module_needs_an_extra_to_be_imported(environment: Path, tmp_path: Path) -> None:
    run(environment / "python", "-c", IMPORT_ALL, cwd=tmp_path, timeout=120, **NO_NETWORK)


@pytest.mark.long
def test_the_quickstart_runs_without_a_network(environment: Path, tmp_path: Path) -> None:
    command = (environment / "lightning-rl", "quickstart", "--steps", "2", "--run-dir", "run")
    printed = run(*command, cwd=tmp_path, timeout=300, **NO_NETWORK)
    assert "in 2 steps" in printed
    assert (tmp_path / "run" / "checkpoints" / "step-2" / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


NO_OTHER = pytest.mark.skip(reason="there is no other Python than this one on the path")


def other_pythons() -> list[str]:
    """Those that start: a version manager's stand-in may be on the path without one behind it."""
    found = [shutil.which(f"python3.{minor}") for minor in (12, 13, 14)]
    return [path for path in found if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0]


@pytest.mark.long
@pytest.mark.parametrize("python", other_pythons() or [pytest.param(None, marks=NO_OTHER)])
def test_other_pythons_install_it_where_they_are_present(wheel: Path, tmp_path: Path, python: str) -> None:
    """Without what it requires, which not every index has for every Python; importing needs none of it."""
    names = "import lightning_rl as lrl; lrl.LLM, lrl.rollout, lrl.Agent, lrl.emit_reward"
    folder = tmp_path / "environment"
    run(python, "-m", "venv", folder, cwd=tmp_path, timeout=60)
    run(folder / "bin/pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path, timeout=60)
    run(folder / "bin/python", "-W", "error", "-c", names, cwd=tmp_path, timeout=60)
    [site] = folder.glob("lib/python*/site-packages")
    packages = [*site.glob("lightning_rl*")]
    assert {"lightning_rl", "lightning_rl_proxy", "lightning_rl_adapters"} <= {package.name for package in packages}
    compiles = ("-m", "compileall", "-q", "-f", *packages)
    run(folder / "bin/python", "-W", "error", *compiles, cwd=tmp_path, timeout=60)
