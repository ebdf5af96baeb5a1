"""A machine of E2B for each rollout, by its SDK (`pip install e2b`), with the key in E2B_API_KEY."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_rl.sandboxes import Output, SandboxError, SandboxUnusable

_LIFE_SECONDS = 3600  # what is never closed ends by itself


class E2BSandbox:
    """See `Sandbox`. The image is a template of E2B's."""

    home = "/tmp/lightning_rl"
    shares_network = False

    def __init__(self, image: str | None = None, options: Sequence[str] = ()) -> None:
        if options:
            raise SandboxUnusable("sandbox.kind=e2b takes no options")
        self.template = image
        self._box: Any = None

    async def open(self) -> None:
        """See `Sandbox`."""
        with _explained():
            from e2b import AsyncSandbox

            self._box = await AsyncSandbox.create(template=self.template, timeout=_LIFE_SECONDS)

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
        from e2b import CommandExitException, TimeoutException

        with _explained():
            try:
                await self._box.commands.run(
                    shlex.join(command),
                    envs=dict(environment),
                    cwd=folder,
                    on_stdout=output,
                    on_stderr=output,
                    timeout=timeout_seconds or 0,  # 0: none
                )
            except CommandExitException as error:
                return int(error.exit_code)
            except TimeoutException as error:
                # Its subclasses say that the machine is gone.
                if timeout_seconds is None or type(error) is not TimeoutException:
                    raise
                return None
        return 0

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        with _explained():
            await self._box.files.write(path, data)

    async def read(self, path: str) -> bytes | None:
        """See `Sandbox`."""
        with _explained():
            if not await self._box.files.exists(path):
                return None
            return bytes(await self._box.files.read(path, format="bytes"))

    async def close(self) -> None:
        """See `Sandbox`."""
        if self._box is not None:
            with _explained():
                await self._box.kill()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        from e2b import AuthenticationException, SandboxException, ServiceBusyException
    except ImportError as error:
        raise SandboxError("sandbox.kind=e2b needs E2B's SDK: pip install e2b") from error
    try:
        yield
    except (SandboxException, AuthenticationException, ServiceBusyException) as error:
        raise SandboxError(f"E2B: {error}") from error
