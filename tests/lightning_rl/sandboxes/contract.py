"""What every sandbox does: the same checks for each kind."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lightning_rl.sandboxes import NOT_FOUND, Sandbox, SandboxError


class SandboxContract:
    """Subclass it and say how one is made."""

    def make(self) -> Sandbox:
        raise NotImplementedError

    def inside(self, use: Callable[[Sandbox], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            box = self.make()
            try:
                await box.open()
                return await use(box)
            finally:
                await box.close()

        return asyncio.run(whole())

    def test_a_program_gets_its_words_folder_and_variables_and_no_input(self) -> None:
        async def use(box: Sandbox) -> None:
            await box.write(f"{box.home}/here/x", b"")
            script = 'cat; echo "$1|$VALUE|$PWD"; echo more >&2; exit 3'
            status, printed = await ran(box, "sh", "-c", script, "sh", "a 'b' $c", folder=f"{box.home}/here")
            assert status == 3
            assert f"a 'b' $c|two\nlines|{box.home}/here\n" in printed
            assert "more\n" in printed

        self.inside(use)

    def test_files_are_what_was_written(self) -> None:
        async def use(box: Sandbox) -> None:
            data = bytes(range(256)) * 300
            await box.write(f"{box.home}/deep/in/it", data)
            assert await box.read(f"{box.home}/deep/in/it") == data
            assert await box.read(f"{box.home}/nothing") is None

        self.inside(use)

    def test_a_program_whose_time_is_over_is_ended_and_what_it_did_is_there(self) -> None:
        async def use(box: Sandbox) -> None:
            file = f"{box.home}/beats"
            await box.write(file, b"")
            script = 'while :; do echo beat >> "$0"; sleep 0.05; done'
            status, _ = await ran(box, "sh", "-c", script, file, seconds=1.5)
            assert status is None
            before = await box.read(file)
            await asyncio.sleep(0.5)
            assert before
            assert await box.read(file) == before

        self.inside(use)

    def test_a_program_that_is_not_there_says_so_by_its_status(self) -> None:
        async def use(box: Sandbox) -> None:
            status, _ = await ran(box, "no-such-program", "x")
            assert status in NOT_FOUND

        self.inside(use)

    def test_one_that_never_opened_can_be_closed(self) -> None:
        asyncio.run(self.make().close())

    def test_one_that_is_gone_is_an_error_and_no_status(self) -> None:
        async def use(box: Sandbox) -> None:
            await box.close()
            with pytest.raises(SandboxError):
                await ran(box, "true")

        self.inside(use)


async def ran(
    box: Sandbox, *command: str, folder: str | None = None, seconds: float | None = None
) -> tuple[int | None, str]:
    """The status of a program, and what it printed."""
    printed: list[str] = []
    status = await box.run(
        command,
        environment={"VALUE": "two\nlines"},
        folder=folder,
        timeout_seconds=seconds,
        output=printed.append,
    )
    return status, "".join(printed)


# A process that runs a script in a sandbox until it is killed: `python -c OWNER program module:Class [image]`.
OWNER = """
import asyncio, sys
from lightning_rl.loading import load

async def main():
    box = load(sys.argv[2], "sandbox")(*sys.argv[3:])
    await box.open()
    print(getattr(box, "name", ""), flush=True)
    script = "echo pid $$; sleep 60 & sleep 60"
    await box.run([*sys.argv[1].split(), "-c", script], environment={}, folder=None, timeout_seconds=None,
                  output=lambda text: print(text, end="", flush=True))

asyncio.run(main())
"""


def killed_owner(*sandbox: str, program: str = "sh") -> list[str]:
    """What a process printed that ran a script in a sandbox, and was killed while it ran."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, program, *sandbox], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    lines = [owner.stdout.readline().strip() for _ in range(2)]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    return lines


def soon(holds: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether something holds before long."""
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()
