"""The tools of a file: the functions in it that are marked, and tools that it makes.

Invariant: a file is run once, and its tools are those that stand in it when it has run: nothing is collected on the
side, so a second file or a second load finds all of its own.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_rl.loading import explained, find_neighbours, made_of, run_apart
from lightning_rl.tools.base_tool import BaseTool
from lightning_rl.tools.coerce import as_tool, is_marked
from lightning_rl.tools.errors import ToolError


def tools_of(place: str) -> list[tuple[BaseTool, str]]:
    """The tools of a Python file or of a module, each with where it stands.

    Raises:
        ToolError: there is no such file or module, it cannot be imported, or it has no tool.
    """
    module = _module(place)
    found = [(as_tool(thing), f"{place}:{name}") for name, thing in _things(module)]
    if not found:
        raise ToolError(f"function_tool_path {place!r}: there is no tool in it; mark its functions with @function_tool")
    return found


def _things(module: ModuleType) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, thing in vars(module).items():
        if is_marked(thing) and id(thing) not in seen:
            seen.add(id(thing))
            yield name, thing


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        with explained(f"function_tool_path {place!r}", ToolError):
            return importlib.import_module(place)
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise ToolError(f"function_tool_path {place!r}: there is no file {file}")
    return made_of(file) or _load(file)


def _load(file: Path) -> ModuleType:
    find_neighbours(file)
    with explained(f"function_tool_path {str(file)!r}", ToolError):
        module = importlib.import_module(file.stem) if _is_importable(file) else run_apart(file, "tools")
    assert module is not None  # its name ends in .py
    return module


def _is_importable(file: Path) -> bool:
    """Whether `import` finds this file by its name, as its neighbours do."""
    spec = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file
