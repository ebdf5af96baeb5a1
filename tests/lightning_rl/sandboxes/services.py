"""The SDKs of E2B, Modal and Daytona, played: the calls that we make, by the names and arguments that they have.

The shapes are those of e2b 2.63, modal 1.6 and daytona 0.226. What a service would do on a machine of its own is done
in a local sandbox.
"""

import shlex
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_rl.sandboxes.local import LocalSandbox


class Machine:
    """What a service starts. `gone`: it has been ended."""

    def __init__(self) -> None:
        self.box = LocalSandbox()
        self.gone = False

    async def run(self, words: list[str], envs: Any, cwd: Any, seconds: Any) -> tuple[int | None, str]:
        printed: list[str] = []
        status = await self.box.run(
            words, environment=envs or {}, folder=cwd, timeout_seconds=seconds or None, output=printed.append
        )
        return status, "".join(printed)


def play_e2b(monkeypatch: pytest.MonkeyPatch) -> None:
    e2b: Any = ModuleType("e2b")

    class SandboxException(Exception): ...

    class TimeoutException(SandboxException): ...

    class SandboxNotRunningException(TimeoutException): ...

    class CommandExitException(SandboxException):
        def __init__(self, exit_code: int) -> None:
            self.exit_code = exit_code

    class AsyncSandbox:
        def __init__(self) -> None:
            self.machine = Machine()
            self.commands = SimpleNamespace(run=self._run)
            self.files = SimpleNamespace(write=self._write, read=self._read, exists=self._exists)

        @classmethod
        async def create(cls, template: str | None = None, timeout: int | None = None) -> Any:
            made = cls()
            await made.machine.box.open()
            return made

        async def _run(
            self, cmd: str, *, envs: Any, cwd: Any, on_stdout: Any, on_stderr: Any, timeout: float | None
        ) -> Any:
            if self.machine.gone:
                raise SandboxNotRunningException("it is not running")
            status, printed = await self.machine.run(["sh", "-c", cmd], envs, cwd, timeout)
            on_stdout(printed)
            if status is None:
                raise TimeoutException("deadline")
            if status:
                raise CommandExitException(status)

        async def _write(self, path: str, data: bytes) -> None:
            await self.machine.box.write(path, data)

        async def _read(self, path: str, format: str) -> bytearray:
            return bytearray(await self.machine.box.read(path) or b"")

        async def _exists(self, path: str) -> bool:
            return await self.machine.box.read(path) is not None

        async def kill(self) -> bool:
            self.machine.gone = True
            await self.machine.box.close()
            return True

    for made in (SandboxException, TimeoutException, SandboxNotRunningException, CommandExitException, AsyncSandbox):
        setattr(e2b, made.__name__, made)
    e2b.AuthenticationException = type("AuthenticationException", (Exception,), {})
    e2b.ServiceBusyException = type("ServiceBusyException", (Exception,), {})
    monkeypatch.setitem(sys.modules, "e2b", e2b)


def play_modal(monkeypatch: pytest.MonkeyPatch) -> None:
    modal: Any = ModuleType("modal")
    exception: Any = ModuleType("modal.exception")

    class Error(Exception): ...

    async def text(printed: str) -> Any:
        yield printed

    class Process:
        def __init__(self, status: int | None, printed: str) -> None:
            self.stdout, self.stderr = text(printed), text("")
            self.wait = both(self._wait)
            self._status = status

        async def _wait(self) -> int:
            return -1 if self._status is None else self._status

    class Sandbox:
        def __init__(self) -> None:
            self.machine = Machine()
            self.exec, self.terminate = both(self._exec), both(self._terminate)
            self.filesystem = SimpleNamespace(write_bytes=both(self._write), read_bytes=both(self._read))

        async def _exec(self, *args: str, env: Any, workdir: Any, timeout: int | None) -> Process:
            if self.machine.gone:
                raise Error("the sandbox has ended")
            return Process(*await self.machine.run(list(args), env, workdir, timeout))

        async def _write(self, data: bytes, remote_path: str) -> None:
            await self.machine.box.write(remote_path, data)

        async def _read(self, remote_path: str) -> bytes:
            found = await self.machine.box.read(remote_path)
            assert found is not None
            return found

        async def _terminate(self) -> None:
            self.machine.gone = True
            await self.machine.box.close()

    async def create(*, app: Any, image: Any, timeout: int) -> Sandbox:
        made = Sandbox()
        await made.machine.box.open()
        return made

    async def lookup(name: str, *, create_if_missing: bool) -> str:
        return name

    modal.App = SimpleNamespace(lookup=both(lookup))
    modal.Image = SimpleNamespace(from_registry=lambda tag: tag)
    modal.Sandbox = SimpleNamespace(create=both(create))
    modal.exception = exception
    exception.Error = Error
    monkeypatch.setitem(sys.modules, "modal", modal)
    monkeypatch.setitem(sys.modules, "modal.exception", exception)


def both(function: Any) -> Any:
    """As Modal's methods are: `method(...)` waits, `method.aio(...)` is awaited. We only await."""
    return SimpleNamespace(aio=function)


def play_daytona(monkeypatch: pytest.MonkeyPatch) -> None:
    daytona: Any = ModuleType("daytona")

    class DaytonaError(Exception): ...

    class DaytonaProcessExecutionTimeoutError(DaytonaError): ...

    class DaytonaNotFoundError(DaytonaError): ...

    class DaytonaFileNotFoundError(DaytonaNotFoundError): ...

    class Sandbox:
        def __init__(self) -> None:
            self.machine = Machine()
            self.process = SimpleNamespace(exec=self._exec)
            self.fs = SimpleNamespace(upload_file=self._upload, download_file=self._download)

        async def _exec(self, command: str, cwd: Any, env: Any, timeout: int | None) -> Any:
            if self.machine.gone:
                raise DaytonaNotFoundError("no such sandbox")
            status, printed = await self.machine.run(["sh", "-c", command], env, cwd, timeout)
            if status is None:
                raise DaytonaProcessExecutionTimeoutError(f"{shlex.quote(command)} timed out")
            return SimpleNamespace(exit_code=status, result=printed)

        async def _upload(self, src: bytes, dst: str) -> None:
            await self.machine.box.write(dst, src)

        async def _download(self, path: str) -> bytes:
            found = await self.machine.box.read(path)
            if found is None:
                raise DaytonaFileNotFoundError(path)
            return found

        async def delete(self) -> None:
            self.machine.gone = True
            await self.machine.box.close()

    class AsyncDaytona:
        async def create(self, params: Any, *, timeout: float) -> Sandbox:
            assert (params.image, params.auto_stop_interval) == ("python:3.12", 0)
            made = Sandbox()
            await made.machine.box.open()
            return made

        async def close(self) -> None: ...

    for made in (
        DaytonaError,
        DaytonaProcessExecutionTimeoutError,
        DaytonaNotFoundError,
        DaytonaFileNotFoundError,
        AsyncDaytona,
    ):
        setattr(daytona, made.__name__, made)
    daytona.CreateSandboxFromImageParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "daytona", daytona)
