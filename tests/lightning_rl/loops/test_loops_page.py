"""The code of `docs/loops.md` runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rl.agents.agent import agent_of_run
from lightning_rl.config import compose
from lightning_rl.loops.configured import configured_agents
from tests.lightning_rl.compat.test_sessions import Server, server
from tests.lightning_rl.loops.conftest import Run
from tests.pages import ROOT
from tests.proxy.conftest import Served

__all__ = ["server"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files."""
    folder = tmp_path_factory.mktemp("page")
    page = (ROOT / "docs" / "loops.md").read_text()
    files = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(files) == page.count("```python\n") == 5
    for name, code in files:
        (folder / name).write_text(code)
    [loops] = re.findall(r"^```yaml\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (folder / "loops.yaml").write_text(loops)
    return folder


def run_in(place: Path, script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, script], cwd=place, capture_output=True, text=True, timeout=280, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.e2e
def test_a_run_without_an_agent(place: Path) -> None:
    assert re.search(r"^step 1/1  reward \d", run_in(place, "train.py"), re.MULTILINE)


def test_a_loop_of_ones_own(place: Path, served: Served, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    agent = {"agent_loop_config_path": "loops.yaml", "default_agent_loop": "twice"}
    configured = configured_agents(compose({"actor_rollout_ref": {"rollout": {"agent": agent}}}))
    served.engine.script.extend(["Yes.", "Yes."])
    ran = run(agent_of_run(None, configured), "sure?")
    assert (ran.returned, ran.end["agent_loop"], ran.end["user_turns"]) == (1.0, "twice", 1)


def test_sessions(place: Path, server: Server) -> None:
    printed = run_in(place, "sessions.py", SERVER=server.url, ADMIN_KEY="admin")
    assert printed.splitlines() == [
        "SessionStats(sessions=4, succeeded=4, failed=0, groups=1, groups_left_out=0, reasons={})",
        "4 {'trained': 12}",
    ]
