"""A program that runs containers here, and an image that is made here: busybox, with nothing to be fetched.

CONTAINERS names the program; by default it is docker, or podman. Each is asked to run a container before it is taken.
`python -m tests.sandboxes.containers` says which it is, or why there is none.
"""

import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

IMAGE = "lightning_rl-busybox"
_COMMANDS = (
    "sh",
    "cat",
    "ls",
    "mkdir",
    "dirname",
    "rm",
    "tar",
    "sleep",
    "grep",
    "wget",
    "test",
    "env",
    "true",
    "chmod",
)
# Podman needs one kind of control groups, where some virtual machines have both.
_ONE_KIND = """#!/bin/sh
exec unshare -m sh -c 'umount -l /sys/fs/cgroup/unified; exec podman "$@"' podman "$@"
"""


class NoContainers(Exception):
    """No program here runs containers; the message says what was tried."""


def program() -> str:
    """The program, with `IMAGE` in its store. Raises NoContainers."""
    own = Path(tempfile.gettempdir()) / f"lightning_rl-podman-{os.getuid()}"
    own.write_text(_ONE_KIND)
    own.chmod(own.stat().st_mode | stat.S_IXUSR)
    tried = []
    for name in [os.environ.get("CONTAINERS", ""), "docker", "podman", str(own)]:
        if name and shutil.which(name):
            why = _imported(name) or _failed([name, "run", "--rm", "--network", "host", IMAGE, "true"], b"")
            if why is None:
                return name
            tried.append(f"{name}: {why}")
    raise NoContainers(f"no program here runs containers: {'; '.join(tried) or 'neither docker nor podman is here'}")


def _imported(name: str) -> str | None:
    """Make the image; why it cannot be made."""
    busybox = shutil.which("busybox")
    if busybox is None:
        return "busybox is not here: apt-get install busybox-static"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(Path(busybox).resolve(), "bin/busybox")
        for made in ("tmp", "work"):
            folder = tarfile.TarInfo(made)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o777
            archive.addfile(folder)
        for command in (*_COMMANDS, "seq"):
            link = tarfile.TarInfo(f"bin/{command}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    return _failed([name, "import", "--change", "WORKDIR /work", "-", IMAGE], packed.getvalue())


def _failed(command: list[str], typed: bytes) -> str | None:
    done = subprocess.run(command, input=typed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    return None if done.returncode == 0 else done.stdout.decode(errors="replace").strip()[-300:]


if __name__ == "__main__":
    try:
        print(program())
    except NoContainers as error:
        sys.exit(str(error))
