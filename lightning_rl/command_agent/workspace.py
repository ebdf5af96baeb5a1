"""The sandbox of one rollout, with the files of its task in it: what the program, and then its tests, work in."""

import asyncio
import io
import posixpath
import sys
import tarfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lightning_rl.command_agent.script import filled_script
from lightning_rl.command_agent.template import CommandError, Values, filled
from lightning_rl.config.schema import SandboxSection
from lightning_rl.sandboxes import Sandbox, SandboxError


class Workspace(NamedTuple):
    """`folder` is where the program works, whole; `environment` is what every command in it is given."""

    box: Sandbox
    folder: str
    environment: dict[str, str]
    values: Values
    settings: SandboxSection


async def prepared(box: Sandbox, settings: SandboxSection, values: Values) -> Workspace:
    """The sandbox with the files of the task in it, and set up."""
    folder = await folder_of(box, settings.folder, box.home)
    space = Workspace(box, folder, dict(settings.environment), values, settings)
    if settings.files is not None:
        await copy(space, filled(settings.files, values), "sandbox.files")
    for name, text in values.files().items():
        await box.write(f"{folder}/{name}", text.encode())
    if settings.setup is not None:
        status = await shell(space, *filled_script(settings.setup, values))
        if status != 0:
            raise CommandError(f"sandbox.setup ended with status {status}: what it printed is in the rollout's log")
    return space


async def restored(space: Workspace) -> None:
    """Make the program's folder and home again where it removed them: what it did is judged, that too.

    Raises CommandError where they cannot be made: what the program left in their place is its own doing.
    """
    folders = [space.folder, space.box.home]
    status = await space.box.run(
        ["mkdir", "-p", *folders], environment={}, folder="/", timeout_seconds=None, output=print_as_it_comes
    )
    if status != 0:
        raise CommandError(f"the program left something else in the place of {' or '.join(folders)}: nothing is judged")


async def folder_of(box: Sandbox, folder: str | None, *others: str) -> str:
    """The whole path of a folder, by default the one where the sandbox begins. It is made where it is not there, as
    the others are."""
    printed: list[str] = []
    words = ["sh", "-c", 'mkdir -p "$0" "$@" && cd "$0" && pwd', folder or ".", *others]
    status = await box.run(words, environment={}, folder=None, timeout_seconds=None, output=printed.append)
    if status != 0:
        raise SandboxError(
            f"the folder {folder or '.'} of the sandbox cannot be had (status {status}): {''.join(printed)}"
        )
    return "".join(printed).strip()


def existing(source: str, key: str) -> Path:
    """The folder that a key names. Raises CommandError where there is none."""
    path = Path(source).expanduser()
    if not path.is_dir():
        raise CommandError(f"{key}: there is no folder {path.resolve()}")
    return path


async def copy(space: Workspace, source: str, key: str) -> None:
    """A folder's content, into the program's folder."""
    path = existing(source, key)
    archive = f"{space.box.home}/{uuid.uuid4().hex}.tar"
    packed, leading_out = await asyncio.to_thread(_packed, path)
    await space.box.write(archive, packed)
    words = ["sh", "-c", 'tar -xf "$0" && rm "$0"', archive]
    status = await space.box.run(
        words, environment={}, folder=space.folder, timeout_seconds=None, output=print_as_it_comes
    )
    if status != 0:
        raise CommandError(f"{key}: tar, which unpacks {path} in the sandbox, ended with status {status}")
    if leading_out:
        print_as_it_comes(
            f"[{key}: links that lead out of {path}, and so nowhere here: {', '.join(leading_out[:3])}]\n"
        )


def _packed(folder: Path) -> tuple[bytes, list[str]]:
    """The folder's content, and the links in it that lead out of it by a relative path."""
    packed, leading_out = io.BytesIO(), list[str]()

    def checked(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        leads_to = posixpath.normpath(posixpath.join(posixpath.dirname(entry.name), entry.linkname))
        if entry.issym() and leads_to.split("/")[0] == "..":
            leading_out.append(f"{entry.name} -> {entry.linkname}")
        return _of_nobody(entry)

    with tarfile.open(fileobj=packed, mode="w") as archive:
        for entry in sorted(folder.iterdir()):
            archive.add(entry, arcname=entry.name, filter=checked)
    return packed.getvalue(), leading_out


def _of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


async def shell(
    space: Workspace, command: str, variables: Mapping[str, str] | None = None, seconds: float | None = None
) -> int | None:
    """Run a shell command in the program's folder; its status, or None where its time was over."""
    return await space.box.run(
        ["sh", "-c", command],
        environment=space.environment | dict(variables or {}),
        folder=space.folder,
        timeout_seconds=seconds,
        output=print_as_it_comes,
    )


def print_as_it_comes(text: str) -> None:
    """Print: what an attempt prints is kept with it."""
    sys.stdout.write(text)
