"""What a run was made with is written down, a line a session, and what a later session has otherwise is told."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lightning_rl.telemetry import made_with


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_session_has_the_commit_of_its_folder_and_how_much_of_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "--quiet")
    for name in ("agent.py", "tasks.jsonl"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("2")
    (tmp_path / "notes.txt").write_text("not part of it")
    made_with.note(tmp_path)
    [session] = made_with.sessions(tmp_path)
    assert (session.commit, session.changed_files) == (git(tmp_path, "rev-parse", "HEAD"), 1)
    assert session.folder == str(tmp_path)
    assert shlex.split(session.command) == sys.orig_argv
    assert session.versions["torch"] == torch.__version__
    assert session.threads == torch.get_num_threads()
    told = made_with._git
    monkeypatch.setattr(made_with, "_git", lambda *words: None if words[0] == "status" else told(*words))
    assert (made_with.here().commit, made_with.here().changed_files) == (session.commit, None)


def test_a_folder_in_no_repository_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # the tests may lie in one
    assert made_with.here().commit is made_with.here().changed_files is None
    monkeypatch.setenv("PATH", str(tmp_path))  # nor is there a git
    assert made_with.here().commit is None


def test_arguments_that_are_no_text_and_a_folder_that_is_gone_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(made_with.sys, "orig_argv", ["python", "train.py", "--name=\udcff"])
    made_with.note(tmp_path)
    [session] = made_with.sessions(tmp_path)
    assert (session.command, session.folder, session.commit) == ("python train.py '--name=?'", "(deleted)", None)


def test_half_a_line_is_passed_over_and_a_run_without_any_has_none(tmp_path: Path) -> None:
    assert made_with.sessions(tmp_path) == []
    assert list(made_with.changes(tmp_path)) == []
    made_with.note(tmp_path)
    file = tmp_path / made_with.FILE
    file.write_bytes(file.read_bytes() + file.read_bytes()[:40])
    assert len(made_with.sessions(tmp_path)) == 1
    made_with.note(tmp_path)
    assert len(made_with.sessions(tmp_path)) == 2
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ({}, []),
        ({"began": 0.0, "command": "other", "commit": "other", "machine": "other"}, []),
        ({"versions": {"torch": "1.0"}}, [f"torch {torch.__version__} (it was 1.0)"]),
        ({"threads": 99}, ["threads (it had 99; OMP_NUM_THREADS sets them)"]),
        ({"gpus": ["A card"]}, ["no GPU (the machine had A card)"]),
    ],
)
def test_what_changes_the_last_bits_of_numbers_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any], told: list[str]
) -> None:
    monkeypatch.setattr(made_with, "_gpus", list)
    session = msgspec.to_builtins(made_with.here()) | before
    if "versions" in before:
        session["versions"] = made_with.versions() | before["versions"]
    (tmp_path / made_with.FILE).write_bytes(msgspec.json.encode(session) + b"\n")
    found = list(made_with.changes(tmp_path))
    assert len(found) == len(told)
    assert all(part in each for part, each in zip(told, found, strict=True))
