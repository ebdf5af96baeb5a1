"""`@function_tool`: a plain function as a tool.

Invariant: the decorator only marks. The function stays what it was, callable and testable; there is no list of all
tools of a process. What is wrong with the function is said when it is marked, not when the model first calls it.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from lightning_rl.tools.base_tool import BaseTool
from lightning_rl.tools.errors import ToolError
from lightning_rl.tools.schemas import OpenAIFunctionToolSchema, Returned, returned, tool_schema
from lightning_rl.tools.signature import AsWritten, Signature, is_async, place_of
from lightning_rl.tools.threads import in_thread

F = TypeVar("F", bound=Callable[..., Any])
Schema = Mapping[str, Any] | OpenAIFunctionToolSchema
_MARK = "__function_tool__"


@dataclass(frozen=True)
class Mark:
    """What `@function_tool` was told of the function that bears it."""

    name: str | None = None
    schema: Schema | None = None
    timeout: float | None = None


@overload
def function_tool(name: F, /) -> F: ...
@overload
def function_tool(
    name: str | None = None, *, schema: Schema | None = None, timeout: float | None = None
) -> Callable[[F], F]: ...
def function_tool(name: Any = None, *, schema: Schema | None = None, timeout: float | None = None) -> Any:
    """Mark a function as a tool: `@function_tool`, `@function_tool("search")`, `@function_tool(schema={...})`.

    The schema is made of the type hints and of the docstring with its `Args:`; `schema` gives it instead, and then
    arguments come as the model wrote them.

    Args:
        name: what the model calls it; the function's name if left out.
        schema: the schema to show, in either documented shape or as an object.
        timeout: seconds that one call may take.

    Raises:
        ToolError: no docstring, an argument without type or description, `*args` or `**kwargs`; or the function is
            marked already, otherwise.
    """
    if callable(name):
        return _marked(name, Mark())
    return lambda function: _marked(function, Mark(name, schema, timeout))


def mark_of(function: Any) -> Mark | None:
    """How a function is marked, if it is."""
    mark = vars(function).get(_MARK) if hasattr(function, "__dict__") else None
    return mark if isinstance(mark, Mark) else None


def _marked(function: Any, mark: Mark) -> Any:
    FunctionTool(function, mark)  # says what is wrong
    if mark_of(function) not in (None, mark):
        raise ToolError(f"{place_of(function)} is marked twice, differently: {mark_of(function)} and {mark}")
    try:
        setattr(function, _MARK, mark)
    except AttributeError as error:  # a bound method, say
        raise ToolError(f"{place_of(function)} cannot be marked; give it to BaseTool.from_callable instead") from error
    return function


class FunctionTool(BaseTool):
    """A function as a tool: sync ones run in a thread, async ones on the event loop."""

    takes_any_arguments = True  # the function's own signature says what is missing

    def __init__(self, function: Callable[..., Any], mark: Mark | None = None) -> None:
        self.function = function
        self.mark = mark or mark_of(function) or Mark()
        self.timeout_seconds = self.mark.timeout
        if self.mark.schema is None:
            signature = Signature(function)
            self._bind = signature.bind
            function_schema = {
                "name": signature.name,
                "description": signature.description,
                "parameters": signature.parameters,
            }
        else:
            schema = tool_schema(self.mark.schema, place_of(function))
            self._bind = AsWritten(function, schema).bind
            function_schema = schema.request_form()["function"]
        super().__init__(
            {}, tool_schema(function_schema | ({"name": self.mark.name} if self.mark.name else {}), place_of(function))
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionTool, (self.function, self.mark)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Returned:
        bound = self._bind(parameters)
        if is_async(self.function):
            value = await self.function(*bound.args, **bound.kwargs)
        else:
            value = await in_thread(self.function, *bound.args, **bound.kwargs)
            if inspect.isawaitable(value):  # a sync wrapper around an async function
                value = await value
        return returned(value)
