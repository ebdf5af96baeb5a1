"""A sandbox of Daytona for each rollout, by its SDK (`pip install daytona`), with the key in DAYTONA_API_KEY."""

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_rl.sandboxes import Output
from lightning_rl.sandboxes.service import LIFE_SECONDS, ServiceSandbox

_START_SECONDS = 600


class DaytonaSandbox(ServiceSandbox):
    """See `Sandbox`. The image is one of a registry. What a program prints comes when it has ended."""

    service = "Daytona"
    package = "daytona"
    errors = ("daytona:DaytonaError",)
    _client: Any = None

    async def open(self) -> None:
        """See `Sandbox`."""
        with self.explained():
            from daytona import AsyncDaytona, CreateSandboxFromImageParams

            self._client = AsyncDaytona()
            # Without an interval of 0 it stops when its program waits for a long answer.
            how = CreateSandboxFromImageParams(image=self.image, auto_stop_interval=0, ttl_minutes=LIFE_SECONDS // 60)
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
        with self.explained():
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
        with self.explained():
            await self._box.fs.upload_file(data, path)

    async def read(self, path: str) -> bytes | None:
        """See `Sandbox`."""
        with self.explained():
            from daytona import DaytonaFileNotFoundError, DaytonaNotFoundError

            with contextlib.suppress(DaytonaFileNotFoundError, DaytonaNotFoundError):
                content = await self._box.fs.download_file(path)
                return None if content is None else bytes(content)
        return None

    async def close(self) -> None:
        """See `Sandbox`."""
        with self.explained():
            try:
                if self._box is not None:
                    await self._box.delete()
            finally:
                if self._client is not None:
                    await self._client.close()
