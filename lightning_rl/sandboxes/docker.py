"""A container for each rollout, by the command line of Docker, or of what has the same one (Podman)."""

import asyncio
import hashlib
import itertools
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from lightning_rl.sandboxes import Output, SandboxError, SandboxUnusable
from lightning_rl.sandboxes.child_program import Done, run

_PROGRAM = "LIGHTNING_RL_DOCKER"  # the variable that names another program than docker
_READY = "lightning_rl: ready"
_HOLD = f'echo "{_READY}"; while read _; do :; done'  # what the container does: it ends with its standard input
_NO_FILE = 44
_READ = f'if [ -f "$0" ]; then cat "$0"; else exit {_NO_FILE}; fi'
_WRITE = 'mkdir -p "$(dirname "$0")" && cat > "$0"'
# Tasks belong to the event loop that they were made on.
_building: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[str]]]" = WeakKeyDictionary()


class DockerSandbox:
    """See `Sandbox`. It begins in the image's working folder; `options` are those of `docker run`.

    Without a `--network` among them the container has the host's network, so that a gateway on 127.0.0.1 is reached.
    An image that is a folder with a Dockerfile is built, once a process.
    """

    home = "/tmp/lightning_rl"

    def __init__(self, image: str | None = None, options: Sequence[str] = ()) -> None:
        if image is None:
            raise SandboxUnusable(
                "sandbox.kind=docker needs an image: sandbox.image=NAME, or a folder with a Dockerfile"
            )
        self.image = image
        if any(option.split("=")[0] == "--pid" for option in options):
            raise SandboxUnusable(
                "sandbox.options: with --pid a program whose time is over cannot be told from the host's: leave it out"
            )
        networks = [option for option in options if option.split("=")[0] in ("--network", "--net")]
        self.shares_network = not networks or "--network=host" in options or _follows(options, "--network", "host")
        self.options = [*options, *([] if networks else ["--network", "host"])]
        self.name = f"lightning_rl-{uuid.uuid4().hex}"
        self._begun = False
        self._held: asyncio.Task[Done] | None = None

    async def open(self) -> None:
        """See `Sandbox`."""
        image = await _built(self.image) if Path(self.image).is_dir() else self.image
        self._begun = True
        names = ["--name", self.name, "--label", "lightning_rl"]
        # Nothing in it needs time to end: Podman would give it ten seconds when it is removed.
        names += ["--stop-signal", "KILL"]
        words = ["run", "--interactive", "--rm", *names, "--entrypoint", "sh", *self.options, image, "-c", _HOLD]
        printed, ready = list[str](), asyncio.Event()

        def heard(text: str) -> None:
            printed.append(text)
            if _READY in "".join(printed):
                ready.set()

        # The program that started it holds its standard input: so a container ends with this process, however it ends.
        held = run([_program(), *words], environment=os.environ, ends_with_us=True, output=heard)
        self._held = asyncio.create_task(held)
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([self._held, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.is_set():
            _check(self._held.result(), "run", "".join(printed))
            raise SandboxError(f"the container of {self.image} ended at once: {''.join(printed)}")

    async def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str | None,
        timeout_seconds: float | None,
        output: Output,
    ) -> int | None:
        """See `Sandbox`. A program whose time is over ends with all that runs beside it in the container."""
        where = [] if folder is None else ["--workdir", folder]
        named = [word for name in environment for word in ("--env", name)]  # values by the environment: keys are secret
        done = await run(
            [_program(), "exec", *where, *named, self.name, *command],
            environment=os.environ | dict(environment),
            timeout_seconds=timeout_seconds,
            output=output,
        )
        if done.status is None:
            await _docker(
                "exec", self.name, "sh", "-c", "kill -9 -1"
            )  # of this container's processes, all but the first
        elif done.status:
            await self._check()
        return done.status

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        await _docker("exec", "--interactive", self.name, "sh", "-c", _WRITE, path, standard_input=data)

    async def read(self, path: str) -> bytes | None:
        """See `Sandbox`."""
        done = await _docker("exec", self.name, "sh", "-c", _READ, path, expected=(0, _NO_FILE))
        return None if done.status == _NO_FILE else done.printed

    async def close(self) -> None:
        """See `Sandbox`."""
        if self._begun:
            await _docker("rm", "--force", "--volumes", self.name, expected=(0, 1))
        if self._held is not None and not self._held.done():
            self._held.cancel()
            await asyncio.wait([self._held])

    async def _check(self) -> None:
        """Raises SandboxError where the container has ended: what failed in it has no status of its own then."""
        done = await _docker("inspect", "--format", "{{.State.Running}}", self.name, expected=(0, 1, 125))
        if done.printed.strip() != b"true":
            raise SandboxError(f"the container {self.name} of {self.image} ended while a program ran in it")


async def _docker(*words: str, standard_input: bytes | None = None, expected: Sequence[int] = (0,)) -> Done:
    done = await run([_program(), *words], environment=os.environ, standard_input=standard_input)
    _check(done, words[0], done.printed.decode(errors="replace"), expected)
    return done


def _check(done: Done, command: str, printed: str, expected: Sequence[int] = (0,)) -> None:
    """Raises SandboxError where Docker's program did not end as it should, or is not there."""
    if shutil.which(_program()) is None:
        raise SandboxError(f"there is no program {_program()!r}: install Docker, or name another in {_PROGRAM}")
    if done.status not in expected:
        raise SandboxError(f"{_program()} {command} ended with status {done.status}: {printed.strip()}")


async def _built(folder: str) -> str:
    """The image that a folder makes, built once on this event loop; later builds come from Docker's own cache."""
    path, building = str(Path(folder).resolve()), _building.setdefault(asyncio.get_running_loop(), {})
    build = building.get(path)
    if build is None or (build.done() and (build.cancelled() or build.exception() is not None)):
        building[path] = asyncio.create_task(_build(path))
    return await asyncio.shield(building[path])


async def _build(folder: str) -> str:
    tag = f"lightning_rl-{hashlib.sha256(folder.encode()).hexdigest()[:16]}"
    await _docker("build", "--tag", tag, folder)
    return tag


def _program() -> str:
    return os.environ.get(_PROGRAM, "docker")


def _follows(words: Sequence[str], first: str, second: str) -> bool:
    return (first, second) in itertools.pairwise(words)
