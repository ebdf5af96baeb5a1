"""A machine of E2B for each rollout, by its SDK (`pip install e2b`), with the key in E2B_API_KEY."""

import shlex
from collections.abc import Mapping, Sequence

from lightning_rl.sandboxes import Output
from lightning_rl.sandboxes.service import LIFE_SECONDS, ServiceSandbox


class E2BSandbox(ServiceSandbox):
    """See `Sandbox`. The image is a template of E2B's."""

    service = "E2B"
    package = "e2b"
    errors = ("e2b:SandboxException", "e2b:AuthenticationException", "e2b:ServiceBusyException")
    needs_image = False

    async def open(self) -> None:
        """See `Sandbox`."""
        with self.explained():
            from e2b import AsyncSandbox

            self._box = await AsyncSandbox.create(template=self.image, timeout=LIFE_SECONDS)

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

        with self.explained():
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
        with self.explained():
            await self._box.files.write(path, data)

    async def read(self, path: str) -> bytes | None:
        """See `Sandbox`."""
        with self.explained():
            if not await self._box.files.exists(path):
                return None
            return bytes(await self._box.files.read(path, format="bytes"))

    async def close(self) -> None:
        """See `Sandbox`."""
        if self._box is not None:
            with self.explained():
                await self._box.kill()
