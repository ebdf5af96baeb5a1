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
    that it was started in, None where that is in no git repository; `threads` are torch's, None where it is not loaded;
    `gpus` are the names of the machine's.
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
    torch = sys.modules.get("torch")
    commit, changed_files = _commit()
    return MadeWith(
        began=time.time(),
        command=_shown(shlex.join(sys.orig_argv)),
        folder=_shown(_folder()),
        commit=commit,
        changed_files=changed_files,
        versions=versions(),
        threads=None if torch is None else torch.get_num_threads(),
        gpus=[] if torch is None else _gpus(),
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
    """Write down what this session of the run is made with. Raises OSError naming the file."""
    with (run_dir / FILE).open("ab") as file:
        file.write(msgspec.json.encode(here()) + b"\n")


def sessions(run_dir: Path) -> list[MadeWith]:
    """The sessions of a run, in order; without half a line, as a full disk may leave it."""
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
    before, now = noted[-1], here()
    for name in _OF_NUMBERS:
        if before.versions.get(name) != now.versions.get(name):
            yield f"{name} {now.versions.get(name)} (it was {before.versions.get(name)})"
    if before.threads != now.threads:
        yield f"{now.threads} of torch's threads (it had {before.threads}; OMP_NUM_THREADS sets them)"
    if before.gpus != now.gpus:
        yield f"{_named(now.gpus)} (the machine had {_named(before.gpus)})"


def _named(gpus: list[str]) -> str:
    return ", ".join(gpus) or "no GPU"


def _gpus() -> list[str]:
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
    """The commit of the working folder, and how many of its files differ from it; (None, None) in no repository."""
    try:
        commit = _git("rev-parse", "HEAD").strip()
        return commit, len(_git("status", "--porcelain", "--untracked-files=no").splitlines())
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "--no-optional-locks", *words],
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=_GIT_SECONDS,
    )
    return done.stdout
