"""The sdist holds what a person needs to build and to test, and what is built from it is what the checkout gives."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e


def build(project: Path, kind: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    [built] = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sdist = build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    [project] = folder.iterdir()
    return project


def members(wheel: Path) -> dict[str, bytes]:
    """Every file's bytes; the lines of RECORD in any order."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    return {
        name: b"".join(sorted(content.splitlines(keepends=True))) if name.endswith("/RECORD") else content
        for name, content in found.items()
    }


@pytest.mark.smoke
def test_its_wheel_is_the_checkouts(tmp_path: Path) -> None:
    sdist, wheel = build(ROOT, "sdist", tmp_path / "sdist"), build(ROOT, "wheel", tmp_path / "wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [project] = (tmp_path / "unpacked").iterdir()
    ours, theirs = members(wheel), members(build(project, "wheel", tmp_path / "rebuilt"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.parametrize(
    "needed",
    [
        "Makefile",
        "LICENSE",
        "README.md",
        "CONTRIBUTING.md",
        "pyproject.toml",
        ".ci/run",
        "docs/architecture.md",
        "examples/sql_agent/checkpoint/model.safetensors",
        "benchmarks/gateway.py",
        "tests/e2e/test_sdist.py",
        "tests/data/agent_lightning_verl_config.json",
    ],
)
def test_it_holds_what_building_and_testing_need(needed: str, unpacked: Path) -> None:
    assert (unpacked / needed).is_file()


def test_it_holds_no_more_than_what_is_kept(unpacked: Path) -> None:
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    parts = {part for path in unpacked.rglob("*") for part in path.relative_to(unpacked).parts}
    assert not parts & (ignored | {".git"})
    assert not [path for path in unpacked.rglob("*") if path.suffix in (".pyc", ".db", ".log", ".key")]


def test_what_the_tutorial_leaves_in_its_folder_is_not_packed(unpacked: Path, tmp_path: Path) -> None:
    left = [unpacked / "examples/sql_agent" / name for name in ("data/questions.db", "__pycache__/agent.pyc")]
    for file in left:
        file.parent.mkdir()
        file.touch()
    try:
        packed = members(build(unpacked, "wheel", tmp_path / "dist"))
    finally:
        for file in left:
            file.unlink()
            file.parent.rmdir()
    assert not [name for name in packed if name.endswith(tuple(file.name for file in left))]
