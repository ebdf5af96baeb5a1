"""Harbor's folders: read as tasks, and what their `task.toml` says. `tests/sandboxes` runs one in a container."""

from pathlib import Path

import pytest

from lightning_rl.command_agent import harbor
from lightning_rl.command_agent.template import CommandError
from lightning_rl.config.schema import SandboxSection
from lightning_rl.data import DataError, load_tasks


def harbor_task(folder: Path, name: str = "hello", toml: str = "[agent]\ntimeout_sec = 120.0\n") -> Path:
    task = folder / name
    for part in ("environment", "tests"):
        (task / part).mkdir(parents=True)
    (task / "task.toml").write_text(toml, encoding="latin-1")
    (task / "instruction.md").write_text("Say hello.\n")
    return task


def test_a_folder_of_tasks_is_read(tmp_path: Path) -> None:
    for name in ("b", "a"):
        harbor_task(tmp_path, name)
    tasks = load_tasks(tmp_path)
    assert tasks[0] == {"name": "a", "prompt": "Say hello.", "harbor": str(tmp_path / "a")}
    assert [task["name"] for task in tasks] == ["a", "b"]
    (tmp_path / "a" / "instruction.md").unlink()
    with pytest.raises(DataError, match=r"a: a Harbor task has an instruction\.md"):
        load_tasks(tmp_path)


def test_image_and_times_are_the_tasks(tmp_path: Path) -> None:
    docker = SandboxSection(kind="docker", tests="mine")
    folder = harbor_task(tmp_path)
    task = harbor.of_task({"harbor": str(folder)})
    assert task is not None
    settings = task.settings(docker)
    assert (settings.image, settings.timeout_seconds, settings.tests) == (str(folder / "environment"), 120.0, None)
    assert task.settings(SandboxSection(kind="docker", image="own", timeout_seconds=5)).timeout_seconds == 5
    named = harbor.of_task({"harbor": str(harbor_task(tmp_path, "n", '[environment]\ndocker_image = "img:1"\n'))})
    assert named is not None
    assert named.settings(docker).image == "img:1"
    assert harbor.of_task({"prompt": "x"}) is None


@pytest.mark.parametrize(
    ("toml", "message"), [("[[steps]]\n", "several steps"), ("= 1", "cannot be read"), ("# é", "cannot be read")]
)
def test_what_is_not_run_is_said(toml: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=message):
        harbor.of_task({"harbor": str(harbor_task(tmp_path, toml=toml))})
    task = harbor.of_task({"harbor": str(harbor_task(tmp_path, "fine"))})
    assert task is not None
    with pytest.raises(CommandError, match="needs a container"):
        task.settings(SandboxSection())
