"""Folders on this machine: the contract, and what a program sees of its user's."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from lightning_rl.sandboxes import Sandbox, SandboxUnusable, child_program, sandbox_class
from lightning_rl.sandboxes.local import LocalSandbox, remove_left_behind
from tests.lightning_rl.sandboxes.contract import SandboxContract, killed_owner, ran, soon


class TestLocal(SandboxContract):
    def make(self) -> Sandbox:
        return LocalSandbox()

    def test_it_has_a_home_of_its_own_and_no_key_of_the_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LIGHTNING_RL_ADMIN_KEY", "secret")
        monkeypatch.setenv("OTHER", "kept")

        async def use(box: Sandbox) -> None:
            _, printed = await ran(box, "sh", "-c", 'echo "$HOME|$LIGHTNING_RL_ADMIN_KEY|$OTHER"')
            assert printed == f"{box.home}||kept\n"
            assert Path(box.home) != Path.home()

        self.inside(use)

    @pytest.mark.parametrize(
        "script",
        [
            "(while :; do sleep 0.1; done) & echo $!",  # it holds the pipe, too
            "timeout 60 sleep 60 & echo $!",
            "setsid sleep 60 & echo $!",
            "set -m; sleep 60 & echo $!",
            "(cd /; setsid timeout 60 sh -c 'echo $$; sleep 60' &); sleep 0.5",
        ],
    )
    def test_what_a_program_left_running_ends_with_it_and_the_folder_goes(self, script: str) -> None:
        async def use(box: Sandbox) -> tuple[str, int]:
            status, printed = await ran(box, "sh", "-c", script)
            assert status == 0
            return box.home, next(int(word) for word in printed.split() if word.isdigit())

        home, left = self.inside(use)
        assert not Path(home).parent.exists()
        assert not runs(left)

    def test_a_run_that_is_cancelled_ends_its_program(self) -> None:
        async def use(box: Sandbox) -> str:
            running = asyncio.create_task(ran(box, "sh", "-c", 'echo $$ > "$0"; sleep 60', f"{box.home}/pid"))
            while not (pid := await box.read(f"{box.home}/pid")):
                await asyncio.sleep(0.02)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return pid.decode()

        assert not runs(int(self.inside(use)))


def runs(process: int) -> bool:
    """Whether a process is there and more than a status that nobody has asked for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("program", ["sh", "setsid -w sh", "timeout 60 sh"])
def test_a_program_ends_with_the_process_that_started_it_however_that_ends(program: str) -> None:
    _, pid = killed_owner("lightning_rl.sandboxes.local:LocalSandbox", program=program)
    assert soon(lambda: not runs(int(pid.removeprefix("pid "))))


def test_the_folder_of_a_killed_process_is_removed_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Folders hold whole repositories, and the files that grade a task."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    killed_owner("lightning_rl.sandboxes.local:LocalSandbox")
    (tmp_path / "lightning_rl-of-mine").mkdir()
    (tmp_path / "lightning_rl-of-mine" / "lock").touch()
    kept = LocalSandbox()
    asyncio.run(kept.open())
    assert len(list(tmp_path.iterdir())) == 3
    remove_left_behind()
    assert {path.name for path in tmp_path.iterdir()} == {"lightning_rl-of-mine", Path(kept.home).parent.name}
    asyncio.run(kept.close())
    assert [path.name for path in tmp_path.iterdir()] == ["lightning_rl-of-mine"]


def test_an_argument_that_is_too_long_is_said() -> None:
    with pytest.raises(OSError, match=r"the longest has 300,000 characters\): let the program read a long text from a"):
        asyncio.run(child_program.run(["true", 300_000 * "x"], environment={}, folder=None, timeout_seconds=None))


def test_what_cannot_be_is_refused_when_it_is_named() -> None:
    with pytest.raises(SandboxUnusable, match=r"local, docker, e2b, modal, daytona"):
        sandbox_class("dokcer")
    with pytest.raises(SandboxUnusable, match="neither an image"):
        sandbox_class("local")("python:3.12", [])
    with pytest.raises(SandboxUnusable, match=r"sandbox\.image"):
        sandbox_class("docker")(None, [])
    with pytest.raises(SandboxUnusable, match="--pid"):
        sandbox_class("docker")("python:3.12", ["--pid=host"])
    with pytest.raises(SandboxUnusable, match="takes no options"):
        sandbox_class("e2b")(None, ["--x"])
