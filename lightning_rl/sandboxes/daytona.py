"""A sandbox of Daytona for each rollout, by its SDK (`pip install daytona`), with the key in DAYTONA_API_KEY."""

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_rl.sandboxes import Output, SandboxError, SandboxUnusable

_START_SECONDS = 600
_LIFE_MINUTES = 60  # what is never closed ends by itself


class DaytonaSandbox:
    """See `Sandbox`. The image is one of a registry. What a program prints comes when it has ended."""

    home = "/tmp/lightning_rl"
    shares_network = False

    def __init__(self, image: str | None = None, options: Sequence[str] = ()) -> None:
        if image is None:
            raise SandboxUnusable("sandbox.kind=daytona needs an image of a registry: sandbox.image=python:3.12")
        if options:
            raise SandboxUnusable("sandbox.kind=daytona takes no options")
        self.image = image
        self._client: Any = None
        self._box: Any = None

    async def open(self) -> None:
        """See `Sandbox`."""
        with _explained():
            from daytona import AsyncDaytona, CreateSandboxFromImageParams

            self._client = AsyncDaytona()
            # Without an interval of 0 it stops when its program waits for a long answer.
            how = CreateSandboxFromImageParams(image=self.image, auto_stop_interval=0, ttl_minutes=_LIFE_MINUTES)
            self._box = await self._client.create(how, timeout=_START_SECONDS)

    async def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str | None,
        timeout_seconds: float | None,
        output: Output,
    ) -> int | None:
        """See `Sandbox`."""
        with _explained():
            from daytona import DaytonaProcessExecutionTimeoutError

            try:
                done = await self._box.process.exec(
                    shlex.join(command),
                    cwd=folder,
                    env=dict(environment),
                    timeout=None if timeout_seconds is None else max(1, round(timeout_seconds)),
                )
            except DaytonaProcessExecutionTimeoutError:
                if timeout_seconds is None:
                    raise
                return None
        output(done.result)
        return int(done.exit_code)

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        with _explained():
            await self._box.fs.upload_file(data, path)

    async def read(self, path: str) -> bytes | None:
        """See `Sandbox`."""
        with _explained():
            from daytona import DaytonaFileNotFoundError, DaytonaNotFoundError

            with contextlib.suppress(DaytonaFileNotFoundError, DaytonaNotFoundError):
                found = await self._box.fs.download_file(path)
                return None if found is None else bytes(found)
        return None

    async def close(self) -> None:
        """See `Sandbox`."""
        with _explained():
            try:
                if self._box is not None:
                    await self._box.delete()
            finally:
                if self._client is not None:
                    await self._client.close()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        from daytona import DaytonaError
    except ImportError as error:
        raise SandboxError("sandbox.kind=daytona needs Daytona's SDK: pip install daytona") from error
    try:
        yield
    except DaytonaError as error:
        raise SandboxError(f"Daytona: {error}") from error
