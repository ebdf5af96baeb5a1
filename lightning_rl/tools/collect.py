"""The tools of a file: the functions in it that are marked, and tools that it makes.

Invariant: a file is run once, and its tools are those that stand in it when it has run: nothing is collected on the
side, so a second file or a second load finds all of its own.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_rl.loading import explained
from lightning_rl.tools.accept import as_tool, is_marked
from lightning_rl.tools.base_tool import BaseTool
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
    return _loaded(file) or _load(file)


def _loaded(file: Path) -> ModuleType | None:
    """The module that was made of this file already: a script that trains must not be run again by its own tools."""
    for module in list(sys.modules.values()):
        known = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(known, str) and os.path.basename(known) == file.name and Path(known).resolve() == file:
            return module
    return None


def _load(file: Path) -> ModuleType:
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, so that its neighbours hide no installed module
    with explained(f"function_tool_path {str(file)!r}", ToolError):
        return importlib.import_module(file.stem) if _is_importable(file) else _apart(file)


def _is_importable(file: Path) -> bool:
    """Whether `import` finds this file by its name, as its neighbours do."""
    spec = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def _apart(file: Path) -> ModuleType:
    """The file as a module of a name that no other has."""
    digest = hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"tools_{file.stem}_{digest}", file)
    assert spec is not None  # its name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
