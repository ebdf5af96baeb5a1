"""What a run was made with: command, commit, versions, threads and GPUs, a line for each session of the run.

A run that goes on elsewhere, or with another torch, says so by it. It decides nothing: it is for people.
"""

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

FILE = "made_with.jsonl"  # in the run folder
_PACKAGES = ("lightning-rl", "torch", "transformers", "renderers", "vllm")
_OF_NUMBERS = ("torch", "transformers")  # whose versions change the last bits of what is computed
_GIT_SECONDS = 5.0  # in which the state of a large repository is looked up, or left out


class MadeWith(msgspec.Struct):
    """One session of a run. `began` is in seconds since the epoch; `commit` and `changed_files` are those of the folder
    that it was started in, None where git does not tell; `threads` are torch's, None where it is not loaded; `gpus` are
    the names of the machine's.
    """

    began: float
    command: str
    folder: str
    commit: str | None
    changed_files: int | None
    versions: dict[str, str]
    threads: int | None
    gpus: list[str]
    machine: str


def here() -> MadeWith:
    """What this process has."""
    commit, changed_files = _commit()
    return MadeWith(
        began=time.time(),
        command=_shown(shlex.join(sys.orig_argv)),
        folder=_shown(_folder()),
        commit=commit,
        changed_files=changed_files,
        versions=versions(),
        threads=_threads(),
        gpus=_gpus(),
        machine=f"{platform.platform()}, {os.cpu_count()} cores",
    )


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a run stands on, as they are here."""
    by_package = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            by_package[name] = version(name)
        except PackageNotFoundError:
            continue
    return by_package


def note(run_dir: Path) -> None:
    """Write down what this session of the run is made with, for the owner alone: a command may hold a key.

    Raises OSError naming the file.
    """
    file = run_dir / FILE
    is_half = file.is_file() and not file.read_bytes().endswith(b"\n")
    with open(file, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as lines:
        lines.write((b"\n" if is_half else b"") + msgspec.json.encode(here()) + b"\n")


def sessions(run_dir: Path) -> list[MadeWith]:
    """The sessions of a run, in order; without half lines, as a full disk may leave them."""
    file, read = run_dir / FILE, []
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            read.append(msgspec.json.decode(line, type=MadeWith))
        except msgspec.DecodeError:
            continue
    return read


def changes(run_dir: Path) -> Iterator[str]:
    """What this process has otherwise than the run's last session, of what changes the last bits of its numbers."""
    if not (noted := sessions(run_dir)):
        return
    before, present, threads, gpus = noted[-1], versions(), _threads(), _gpus()
    for name in _OF_NUMBERS:
        if before.versions.get(name) != present.get(name):
            yield f"{name} {present.get(name)} (it was {before.versions.get(name)})"
    if before.threads != threads:
        yield f"{threads} of torch's threads (it had {before.threads}; OMP_NUM_THREADS sets them)"
    if before.gpus != gpus:
        yield f"{_named(gpus)} (the machine had {_named(before.gpus)})"


def _named(gpus: list[str]) -> str:
    return ", ".join(gpus) or "no GPU"


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    return None if torch is None else torch.get_num_threads()


def _gpus() -> list[str]:
    if "torch" not in sys.modules:
        return []
    from lightning_rl.processes.gpus import nvidia_smi  # brings torch

    return [name for [name] in nvidia_smi("name")]


def _folder() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "(deleted)"


def _shown(text: str) -> str:
    """Bytes of file names that are no text as question marks."""
    return text.encode(errors="replace").decode()


def _commit() -> tuple[str | None, int | None]:
    """The commit of the working folder, and how many of its files differ from it; None for what git does not tell."""
    if (commit := _git("rev-parse", "HEAD")) is None:
        return None, None
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return commit.strip(), None if changed is None else len(changed.splitlines())


def _git(*words: str) -> str | None:
    command = ["git", "--no-optional-locks", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
