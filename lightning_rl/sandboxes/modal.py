"""A sandbox of Modal for each rollout, by its SDK (`pip install modal`), with its own token."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_rl.sandboxes import Output, SandboxError, SandboxUnusable

_APP = "lightning_rl"
_LIFE_SECONDS = 3600  # what is never closed ends by itself
_TIME_OVER = -1  # the status that the SDK gives then


class ModalSandbox:
    """See `Sandbox`. The image is one of a registry."""

    home = "/tmp/lightning_rl"
    shares_network = False

    def __init__(self, image: str | None = None, options: Sequence[str] = ()) -> None:
        if image is None:
            raise SandboxUnusable("sandbox.kind=modal needs an image of a registry: sandbox.image=python:3.12")
        if options:
            raise SandboxUnusable("sandbox.kind=modal takes no options")
        self.image = image
        self._box: Any = None

    async def open(self) -> None:
        """See `Sandbox`."""
        with _explained():
            import modal

            app = await modal.App.lookup.aio(_APP, create_if_missing=True)
            image = modal.Image.from_registry(self.image)
            self._box = await modal.Sandbox.create.aio(app=app, image=image, timeout=_LIFE_SECONDS)

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
            process = await self._box.exec.aio(
                *command,
                env=dict(environment),
                workdir=folder,
                timeout=None if timeout_seconds is None else max(1, round(timeout_seconds)),
            )
            await asyncio.gather(*(_passed_on(stream, output) for stream in (process.stdout, process.stderr)))
            status = int(await process.wait.aio())
        return None if status == _TIME_OVER else status

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        with _explained():
            await self._box.filesystem.write_bytes.aio(data, path)

    async def read(self, path: str) -> bytes | None:
        """See `Sandbox`."""
        there = await self.run(
            ["test", "-f", path], environment={}, folder=None, timeout_seconds=None, output=lambda _: None
        )
        if there != 0:
            return None
        with _explained():
            return bytes(await self._box.filesystem.read_bytes.aio(path))

    async def close(self) -> None:
        """See `Sandbox`."""
        if self._box is not None:
            with _explained():
                await self._box.terminate.aio()


async def _passed_on(stream: Any, output: Output) -> None:
    async for text in stream:
        output(text)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        from modal.exception import Error
    except ImportError as error:
        raise SandboxError("sandbox.kind=modal needs Modal's SDK: pip install modal") from error
    try:
        yield
    except Error as error:
        raise SandboxError(f"Modal: {error}") from error
