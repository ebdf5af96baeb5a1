"""Sandboxes: where the program of a rollout runs. A folder on this machine, a container, or a machine of a service.

Invariant: what a sandbox cannot do is a `SandboxError`, never an exit status; so nothing that broke is taken for a
result of the program.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lightning_rl.errors import Explained, InfrastructureError
from lightning_rl.loading import load

KINDS = {
    "local": "lightning_rl.sandboxes.local:LocalSandbox",
    "docker": "lightning_rl.sandboxes.docker:DockerSandbox",
    "e2b": "lightning_rl.sandboxes.e2b:E2BSandbox",
    "modal": "lightning_rl.sandboxes.modal:ModalSandbox",
    "daytona": "lightning_rl.sandboxes.daytona:DaytonaSandbox",
}
NOT_FOUND = (126, 127)  # the statuses by which a shell says that a program cannot be run, or is not there

Output = Callable[[str], Any]  # takes what a program prints, as it comes


class SandboxError(InfrastructureError):
    """A sandbox cannot be had, or is lost: nobody knows what the program in it came to."""


class SandboxUnusable(Explained, ValueError):
    """A sandbox that is configured and cannot be: `sandbox.kind` names none, or it lacks what it needs."""


class Sandbox(Protocol):
    """One sandbox, of one rollout. Made with `image` (None: the kind's own) and `options` (strings, of the kind).

    `home` is a folder in it for what is not the program's work: configurations, rewards. `shares_network`: whether
    127.0.0.1 in it is this machine's, so that a gateway there can be reached.
    """

    home: str
    shares_network: bool

    async def open(self) -> None:
        """Start it. Raises SandboxError."""
        ...

    async def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str | None,
        timeout_seconds: float | None,
        output: Output,
    ) -> int | None:
        """Run a program to its end; its exit status, or None where its time was over and it was ended.

        `folder` is where it starts; None: where the sandbox begins. Its standard input is empty. A status of 126 or
        127 says that it cannot be run. Raises SandboxError.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file and the folders that it lies in; a relative path is from where the sandbox begins. Raises
        SandboxError."""
        ...

    async def read(self, path: str) -> bytes | None:
        """What a file holds, or None where there is none. Raises SandboxError."""
        ...

    async def close(self) -> None:
        """End it, with all that runs in it. Also what never opened."""
        ...


def sandbox_class(kind: str) -> Callable[..., Sandbox]:
    """The class of a kind: one of `KINDS`, or `module:Class`. Raises SandboxUnusable or NotLoadable."""
    if kind not in KINDS and ":" not in kind:
        raise SandboxUnusable(
            f"sandbox.kind={kind}: there are {', '.join(KINDS)}, or a class of yours: module:Class, or file.py:Class"
        )
    made: Callable[..., Sandbox] = load(KINDS.get(kind, kind), "sandbox")
    return made
