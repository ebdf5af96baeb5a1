"""What a program did, judged: by a command, by the tests of a Harbor task, or by what it wrote itself.

Invariant: a reward comes from what the program did, or there is an error. Tests that could not run are no reward of 0.
"""

import json
import uuid
from typing import Any

import msgspec

from lightning_rl.command_agent import harbor
from lightning_rl.command_agent.script import filled_script
from lightning_rl.command_agent.template import CommandError, filled
from lightning_rl.command_agent.workspace import Workspace, copy, folder_of, restored, shell
from lightning_rl.sandboxes import NOT_FOUND

REWARD_VARIABLE = "LIGHTNING_RL_REWARD"  # names the file that a reward is written to
TASK_VARIABLE = "LIGHTNING_RL_TASK"  # names a file with the task as JSON, for the command that judges


async def judged(space: Workspace, task: Any, reward: str, of_harbor: "harbor.HarborTask | None") -> Any:
    """The reward that a command gives to what the program did."""
    box, settings = space.box, space.settings
    await restored(space)
    if settings.tests is not None:
        await copy(space, filled(settings.tests, space.values), "sandbox.tests")
    if of_harbor is not None:
        return await _judged_by_harbor(space, reward, of_harbor)
    # Names that the program cannot know, so that it writes no reward of its own.
    file, about = (f"{box.home}/{name}-{uuid.uuid4().hex}" for name in ("reward", "task"))
    await box.write(about, json.dumps(task).encode())
    script, variables = filled_script(reward, space.values)
    status = await shell(space, script, {**variables, REWARD_VARIABLE: file, TASK_VARIABLE: about})
    if status in NOT_FOUND:
        raise CommandError(f"reward.command: {reward!r} cannot be run (status {status}): is it in the sandbox?")
    return reward_of(await box.read(file), status)


async def _judged_by_harbor(space: Workspace, reward: str, of_harbor: "harbor.HarborTask") -> Any:
    """The reward that a Harbor task's tests write."""
    await shell(space, f"rm -rf {harbor.TESTS} {harbor.VERIFIER}")  # what the program may have put there
    tests = space._replace(folder=await folder_of(space.box, harbor.TESTS))
    await copy(tests, str(of_harbor.folder / "tests"), "Harbor")
    await folder_of(space.box, harbor.VERIFIER)
    status = await shell(space, reward, seconds=of_harbor.verifier_seconds)
    for name in harbor.REWARD_FILES:
        if (written := await space.box.read(f"{harbor.VERIFIER}/{name}")) is not None:
            return reward_of(written, status)
    raise CommandError(
        f"the tests of {of_harbor.folder} ended with status {status} and wrote no {' or '.join(harbor.REWARD_FILES)}"
    )


def reward_of(written: bytes | None, status: int | None) -> Any:
    """What is written, a number or JSON with a `reward`; else what an exit status says."""
    if written is None:
        return float(status == 0)
    try:
        return msgspec.json.decode(written, type=float | dict[str, float])
    except msgspec.DecodeError as error:
        raise CommandError(
            f"the reward that was written is neither a number nor JSON of numbers by name: {written[:200]!r}: {error}"
        ) from error
