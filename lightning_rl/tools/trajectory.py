"""The tools of one trajectory: what the model may call, what its calls did, and what they leave open at the end.

Invariant: every call is answered, in order, whatever a tool does; a call that cannot run is answered with what is wrong
with it, so that the model can try again. State is the trajectory's own, and released once when it ends, also by an
error or a cancellation.
"""

import asyncio
import difflib
import json
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from lightning_rl.tools.base_tool import BaseTool, check_required, schema_of
from lightning_rl.tools.coerce import as_tool, merged
from lightning_rl.tools.errors import ToolError, ToolFailed, WrongArguments
from lightning_rl.tools.instance import Instance
from lightning_rl.tools.limits import ResultLimits
from lightning_rl.tools.media import Content, content_of
from lightning_rl.tools.schemas import Returned, ToolResponse, returned
from lightning_rl.tools.threads import in_thread
from lightning_rl_adapters.text import encodable

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it; `arguments` is JSON text, possibly malformed."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolResult:
    """What became of a call.

    `content` is that of an OpenAI `role: tool` message: text, or parts. `metrics` are the tool's, with `truncated`, the
    characters or tokens that were cut, where any were. `error` is a short reason, and None if the tool ran: `unknown
    tool`, `malformed arguments`, `wrong arguments`, `timeout`, `tool error` (the tool said so), or the type of what it
    raised.
    """

    call_id: str
    name: str
    content: Content
    reward: float
    metrics: dict[str, Any]
    error: str | None


class _CallRefused(Exception):
    """A call that is answered with this message; `reason` is the result's `error`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TrajectoryTools:
    """The tools of one trajectory; an async context manager, at whose end their state is released.

    Args:
        tools: what there is; functions and LangChain tools too.
        limits: how long results may be, and how many calls run at once.
        selection: the names that this trajectory may use; None: all.
        create_kwargs: by tool name, what the sample gives to `create`.

    Raises:
        ToolError: a name in `selection` or `create_kwargs` that no tool has, or two tools of one name.
    """

    def __init__(
        self,
        tools: Sequence[BaseTool | Callable[..., Any]],
        limits: ResultLimits,
        *,
        selection: Sequence[str] | None = None,
        create_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        by_name = {tool.name: tool for tool in merged((as_tool(one), f"tools[{at}]") for at, one in enumerate(tools))}
        _check_known("selection", selection or (), by_name)
        _check_known("create_kwargs", create_kwargs or (), by_name)
        chosen = by_name if selection is None else {name: by_name[name] for name in by_name if name in set(selection)}
        kwargs = create_kwargs or {}
        self._instances = {name: Instance(tool, kwargs.get(name, {})) for name, tool in chosen.items()}
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.max_parallel_calls)
        self._running: set[asyncio.Task[ToolResult]] = set()
        self._open = False
        self.schemas: list[dict[str, Any]] = [schema_of(tool).request_form() for tool in chosen.values()]
        self.results: list[ToolResult] = []

    async def __aenter__(self) -> Self:
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._open = False
            await _to_its_end(asyncio.create_task(self._close()))

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls of one answer, `max_parallel_calls` at a time; the results are in the order of `calls`.

        Raises nothing for what a tool does, and RuntimeError outside of `async with`.
        """
        if not self._open:
            raise RuntimeError("the tools of a trajectory run inside `async with TrajectoryTools(...)`")
        tasks: list[asyncio.Task[ToolResult]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for call in calls:
                    tasks.append(group.create_task(self._answer(call)))
                self._running.update(tasks)
        finally:  # cancelled, what has run counts all the same
            self._running.difference_update(tasks)
            self.results += [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
        return [task.result() for task in tasks]

    async def _answer(self, call: ToolCall) -> ToolResult:
        error: str | None = None
        reward, metrics = 0.0, dict[str, Any]()
        async with self._slots:
            try:
                response, reward, metrics = await self._executed(call)
                content, cut = await self._content(call, response)
            except _CallRefused as refused:
                error = refused.reason
                content, cut = await self._cut(f"Error: {refused}")
        if cut:
            _log.info("tool %r: %d of its answer were cut", call.name, cut)
            metrics = metrics | {"truncated": cut}
        return ToolResult(call.id, call.name, content, reward, metrics, error)

    async def _executed(self, call: ToolCall) -> Returned:
        """What the tool returned, or _Refused, for whatever else became of the call."""
        instance = self._instance(call)
        arguments = _arguments(call)
        tool = instance.tool
        clock = asyncio.timeout(tool.timeout_seconds)
        try:
            async with clock:
                check_required(tool, arguments)
                value = returned(await tool.execute(await instance.id(), arguments))
        except WrongArguments as error:
            takes = ", ".join(schema_of(tool).function.parameters.properties) or "no arguments"
            raise _refused(
                call, "wrong arguments", f"{error}. It takes {takes}; correct them and call it again."
            ) from error
        except ToolFailed as error:
            raise _refused(call, "tool error", str(traceback.TracebackException.from_exception(error))) from error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise _refused(call, "cancelled", "it was cancelled.") from error
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # sys.exit() in a tool, or what a library in Rust raises where it panics
            if clock.expired():
                message = f"it took longer than {tool.timeout_seconds:g} seconds and was given up."
                raise _refused(call, "timeout", message) from error
            _log.warning("tool %r raised, and the model is told so", call.name, exc_info=error)
            raise _refused(call, type(error).__name__, f"it raised {_text_of(error)}") from error
        return _joined(instance.greeting(), value)

    def _instance(self, call: ToolCall) -> Instance:
        if call.name in self._instances:
            return self._instances[call.name]
        near = difflib.get_close_matches(call.name, self._instances, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        there_are = ", ".join(self._instances) or "none"
        raise _refused(call, "unknown tool", f"there is no such tool.{hint} The tools are: {there_are}.")

    async def _cut(self, text: str) -> tuple[str, int]:
        sendable = encodable(text)
        if len(sendable) < _LONG:
            return self._limits.cut(sendable)
        cut: tuple[str, int] = await in_thread(self._limits.cut, sendable)
        return cut

    async def _content(self, call: ToolCall, response: ToolResponse) -> tuple[Content, int]:
        text, cut = await self._cut(response.text or "")
        if not response.image and not response.video:
            return text, cut
        try:
            return await in_thread(content_of, response, text), cut
        except Exception as error:
            _log.warning("tool %r answered with what is no image", call.name, exc_info=error)
            raise _refused(call, type(error).__name__, f"its answer cannot be shown: {_text_of(error)}") from error

    async def _close(self) -> None:
        for task in self._running:  # of a run that was left behind
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        await asyncio.gather(*(instance.release() for instance in self._instances.values()))


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments) if call.arguments.strip() else {}
    except ValueError as error:
        message = f"its arguments are no valid JSON: {error}. Call it again with one JSON object."
        raise _refused(call, "malformed arguments", message) from error
    except RecursionError as error:
        raise _refused(call, "malformed arguments", "its arguments are nested too deeply.") from error
    if not isinstance(arguments, dict):
        message = f'its arguments are a JSON {_JSON_NAMES[type(arguments)]}, and must be an object: {{"name": value}}.'
        raise _refused(call, "malformed arguments", message)
    return arguments


_LONG = 100_000  # characters: what is counted in tokens for longer than the event loop may wait
_JSON_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _refused(call: ToolCall, reason: str, message: str) -> _CallRefused:
    _log.info("call of tool %r failed (%s): %s", call.name, reason, encodable(message))
    return _CallRefused(reason, f"{call.name}: {message}")


def _text_of(error: BaseException) -> str:
    """An error's type and message, also of one that cannot be printed."""
    return "".join(traceback.format_exception_only(error)).strip()


def _joined(greeting: ToolResponse | None, value: Returned) -> Returned:
    """The value, after what the tool said when it was created."""
    if greeting is None:
        return value
    response, reward, metrics = value
    text = "\n".join(one for one in (greeting.text, response.text) if one) or None
    image, video = (greeting.image or []) + (response.image or []), (greeting.video or []) + (response.video or [])
    return ToolResponse(text=text, image=image or None, video=video or None), reward, metrics


def _check_known(field: str, names: Iterable[str], tools: Mapping[str, BaseTool]) -> None:
    unknown = [name for name in names if name not in tools]
    if unknown:
        near = difflib.get_close_matches(unknown[0], tools, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ToolError(
            f"{field} of the sample names {', '.join(map(repr, unknown))}, which no tool has; there are "
            f"{', '.join(tools) or 'none'}{hint}"
        )


async def _to_its_end(task: "asyncio.Task[None]") -> None:
    """Wait for a task that a cancellation does not stop; it is raised when the task is done."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
