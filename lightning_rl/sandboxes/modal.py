"""A sandbox of Modal for each rollout, by its SDK (`pip install modal`), with its own token."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_rl.sandboxes import Output, SandboxError
from lightning_rl.sandboxes.service import LIFE_SECONDS, ServiceSandbox

_APP = "lightning_rl"
_TIME_OVER = -1  # the status that the SDK gives then


class ModalSandbox(ServiceSandbox):
    """See `Sandbox`. The image is one of a registry."""

    service = "Modal"
    package = "modal"
    errors = ("modal.exception:Error",)

    async def open(self) -> None:
        """See `Sandbox`."""
        with self.explained():
            import modal

            app = await modal.App.lookup.aio(_APP, create_if_missing=True)
            image = modal.Image.from_registry(self.image)
            self._box = await modal.Sandbox.create.aio(app=app, image=image, timeout=LIFE_SECONDS)

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
            process = await self._box.exec.aio(
                *command,
                env=dict(environment),
                workdir=folder,
                timeout=None if timeout_seconds is None else max(1, round(timeout_seconds)),
            )
            await asyncio.gather(*(_passed_on(stream, output) for stream in (process.stdout, process.stderr)))
            status = int(await process.wait.aio())
        if status == _TIME_OVER and timeout_seconds is None:
            raise SandboxError("Modal: the sandbox ended while a program ran in it")
        return None if status == _TIME_OVER else status

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        with self.explained():
            await self._box.filesystem.write_bytes.aio(data, path)

    async def read(self, path: str) -> bytes | None:
        """See `Sandbox`."""
        there = await self.run(
            ["test", "-f", path], environment={}, folder=None, timeout_seconds=None, output=lambda _: None
        )
        if there != 0:
            return None
        with self.explained():
            return bytes(await self._box.filesystem.read_bytes.aio(path))

    async def close(self) -> None:
        """See `Sandbox`."""
        if self._box is not None:
            with self.explained():
                await self._box.terminate.aio()


async def _passed_on(stream: Any, output: Output) -> None:
    async for text in stream:
        output(text)
