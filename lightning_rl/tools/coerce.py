"""Whatever is a tool: ours, a function, a LangChain tool. And several of them together, each name once."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from lightning_rl.tools.base_tool import BaseTool
from lightning_rl.tools.errors import ToolError
from lightning_rl.tools.function_tool import FunctionTool, Mark, Schema, mark_of
from lightning_rl.tools.langchain import LangChainTool, is_langchain_tool


def as_tool(
    thing: BaseTool | Callable[..., Any],
    *,
    name: str | None = None,
    schema: Schema | None = None,
    timeout: float | None = None,
) -> BaseTool:
    """The tool that `thing` is; name, schema and timeout are those of a function that is not marked.

    Raises:
        ToolError: it is not a tool, and cannot be made one.
    """
    if isinstance(thing, BaseTool):
        return thing
    if is_langchain_tool(thing):
        return LangChainTool(thing, timeout)
    if callable(thing):
        mark = Mark(name, schema, timeout)
        return FunctionTool(thing, mark_of(thing) if mark == Mark() else mark)
    raise ToolError(
        f"{thing!r} of type {type(thing).__name__} is no tool; give a BaseTool, a function, or a LangChain tool"
    )


BaseTool.from_callable = staticmethod(as_tool)


def is_marked(thing: Any) -> bool:
    """Whether a module that holds `thing` means it as a tool."""
    return isinstance(thing, BaseTool) or is_langchain_tool(thing) or mark_of(thing) is not None


def merged(placed: Iterable[tuple[BaseTool, str]]) -> list[BaseTool]:
    """The tools of several places, in order; the same function at two places is one tool.

    Raises:
        ToolError: names that stand for more than one tool: all of them, each with its places.
    """
    by_name: dict[str, list[tuple[BaseTool, str]]] = defaultdict(list)
    for tool, place in placed:
        namesakes = by_name[tool.name]
        if all(_origin(tool) is not _origin(other) for other, _ in namesakes):
            namesakes.append((tool, place))
    twice = {name: [place for _, place in namesakes] for name, namesakes in by_name.items() if len(namesakes) > 1}
    if twice:
        conflicts = "; ".join(f"{name!r} in {' and in '.join(places)}" for name, places in sorted(twice.items()))
        raise ToolError(f"a name is one tool, and these are several: {conflicts}; rename all but one of each")
    return [namesakes[0][0] for namesakes in by_name.values()]


def _origin(tool: BaseTool) -> Any:
    """What the tool was made of: the function, the LangChain tool, or itself."""
    if isinstance(tool, FunctionTool):
        return tool.function
    return tool.tool if isinstance(tool, LangChainTool) else tool
