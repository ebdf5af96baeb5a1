"""The state that one tool keeps for one trajectory.

Invariant: it is created at its first use, once, however many calls come at the same time; what was created is released
once. A creation is never cut short: cancelled calls leave it running, and the release waits for it.
"""

import asyncio
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from lightning_rl.tools.base_tool import BaseTool
from lightning_rl.tools.schemas import ToolResponse

CLOSING_SECONDS = 60.0  # a creation that is under way at the end, and a release, may take so long
_log = logging.getLogger(__name__)


class Instance:
    """One tool in one trajectory; `create_kwargs` are handed to `create`."""

    def __init__(self, tool: BaseTool, create_kwargs: Mapping[str, Any]) -> None:
        self.tool = tool
        self._kwargs = dict(create_kwargs)
        self._creation: asyncio.Task[tuple[str, ToolResponse]] | None = None
        self._response: ToolResponse | None = None

    async def id(self) -> str:
        """The instance id, created now if this is the first use; a creation that failed is tried again.

        Raises what `create` raises.
        """
        if self._creation is None or _failed(self._creation):
            self._creation = asyncio.create_task(self._create())
        instance_id, _ = await asyncio.shield(self._creation)
        return instance_id

    def greeting(self) -> ToolResponse | None:
        """What `create` said, the first time it is asked for."""
        response, self._response = self._response, None
        return response

    async def release(self) -> None:
        """Give the state back; what goes wrong is logged, since the trajectory is over."""
        created = await self._created()
        if created is None:
            return
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                await self.tool.release(created)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - whatever a tool raises is data
            _log.exception(
                "tool %r: release of instance %s failed; what it held may still be open", self.tool.name, created
            )

    async def _created(self) -> str | None:
        if self._creation is None:
            return None
        await asyncio.wait({self._creation}, timeout=CLOSING_SECONDS)
        if not self._creation.done():
            self._creation.cancel()
            _log.error("tool %r: create does not end; it was cancelled, without a release", self.tool.name)
            return None
        return None if _failed(self._creation) else self._creation.result()[0]

    async def _create(self) -> tuple[str, ToolResponse]:
        try:
            value: Any = await self.tool.create(None, **self._passed())
        except SystemExit as error:  # in a task it would end the event loop
            raise RuntimeError(f"create raised SystemExit: {error}") from error
        instance_id, response = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if not isinstance(instance_id, str):
            raise TypeError(f"create returned {value!r}; it returns (instance id, ToolResponse)")
        self._response = response if isinstance(response, ToolResponse) and not response.is_empty() else None
        return instance_id, response or ToolResponse()

    def _passed(self) -> dict[str, Any]:
        """The arguments by name, and in verl's way, all of them under `create_kwargs`, where that is taken too."""
        if not self._kwargs:
            return {}
        parameters = inspect.signature(self.tool.create).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        by_name = {name: value for name, value in self._kwargs.items() if takes_any or name in parameters}
        if takes_any or "create_kwargs" in parameters:
            return by_name | {"create_kwargs": self._kwargs}
        return self._kwargs  # one that it does not take is an error, and says so


def _failed(task: "asyncio.Task[Any]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
