"""Tasks in the folders of Harbor: `instruction.md`, `task.toml`, `environment/Dockerfile`, `tests/test.sh`.

The format: harborframework.com/docs/tasks. Tasks of several steps are refused; several containers
(`docker-compose.yaml`) and the health checks of an environment are not read.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lightning_rl.command_agent.template import CommandError
from lightning_rl.config.schema import SandboxSection
from lightning_rl.data import HARBOR

TESTS = "/tests"
VERIFIER = "/logs/verifier"
REWARD_FILES = ("reward.txt", "reward.json")  # in the order in which Harbor reads them


@dataclass(frozen=True)
class HarborTask:
    """A task's folder, and what its `task.toml` says."""

    folder: Path
    image: str | None
    agent_seconds: float | None
    verifier_seconds: float | None
    reward: str = f"chmod +x {TESTS}/test.sh && {TESTS}/test.sh"

    def settings(self, sandbox: SandboxSection) -> SandboxSection:
        """The sandbox of this task: its own image, and the time that it gives an agent where none is given."""
        if sandbox.kind == "local":
            raise CommandError(f"{self.folder}: a Harbor task needs a container: say sandbox.kind=docker, or a service")
        image = sandbox.image or self.image or str(self.folder / "environment")
        return msgspec.structs.replace(
            sandbox, image=image, tests=None, timeout_seconds=sandbox.timeout_seconds or self.agent_seconds
        )


def of_task(task: Any) -> HarborTask | None:
    """The Harbor task that a task is, as `data.train_files` reads their folders; None: it is none."""
    folder = task.get(HARBOR) if isinstance(task, Mapping) else None
    return None if folder is None else _read(Path(folder))


def _read(folder: Path) -> HarborTask:
    try:
        fields = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CommandError(f"{folder / 'task.toml'} cannot be read: {error}") from error
    if "steps" in fields:
        raise CommandError(f"{folder}: a Harbor task of several steps is not run here")
    return HarborTask(
        folder,
        image=fields.get("environment", {}).get("docker_image"),
        agent_seconds=fields.get("agent", {}).get("timeout_sec"),
        verifier_seconds=fields.get("verifier", {}).get("timeout_sec"),
    )
