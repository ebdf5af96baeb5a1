"""The how-to page on TypeScript: its agent, with the `openai` package of npm, is trained (`make test-sdk`)."""

import os
import re
from pathlib import Path

import pytest

from tests.e2e.test_how_to import files_of, run_in
from tests.pages import ROOT

pytestmark = pytest.mark.sdk
NODE = ROOT / ".venv-node"


@pytest.mark.long
def test_the_agent_in_typescript_trains(tmp_path: Path) -> None:
    assert files_of("typescript-agent.md", tmp_path) == ["agent.ts", "train.py"]
    (tmp_path / "node_modules").symlink_to(NODE / "node_modules")
    printed = run_in(tmp_path, "train.py", PATH=f"{NODE / 'bin'}:{os.environ['PATH']}")
    assert re.findall(r"^step (\d)/2  reward 0\.[1-9]\d*", printed, re.MULTILINE) == ["1", "2"]
