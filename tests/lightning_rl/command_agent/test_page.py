"""`docs/command-agents.md`: its code makes the agent that it says, and its tables name what there is."""

import re
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from lightning_rl.config.schema import SandboxSection
from lightning_rl.sandboxes import KINDS, Sandbox
from tests.lightning_rl.command_agent.conftest import Run
from tests.pages import ROOT

PAGE = (ROOT / "docs" / "command-agents.md").read_text()


def test_the_code_of_the_page_makes_an_agent(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "claude").write_text('#!/bin/sh\necho "$2" > answer\n')
    (tmp_path / "claude").chmod(0o755)
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "test_answer.py").write_text("def test(): assert open('answer').read() == 'why?\\n'\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    fitted: list[Any] = []
    monkeypatch.setattr(lrl.Trainer, "fit", lambda trainer, *given: fitted.append((trainer.agent, *given)))
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "command-agents.md", "exec"), {"config": {}, "tasks": ["why?"]})
    [(agent, _, tasks)] = fitted
    assert run(agent, tasks[0]).returned == 1.0
    assert run(agent, "why not?").returned == 0.0


def test_its_tables_name_every_kind_key_and_method() -> None:
    assert all(f"sandbox.{key}" in PAGE for key in SandboxSection.__struct_fields__)
    assert all(f"`{kind}`" in PAGE for kind in KINDS)
    methods = [name for name in vars(Sandbox) if not name.startswith("_") and callable(getattr(Sandbox, name))]
    assert all(method in PAGE for method in methods)
