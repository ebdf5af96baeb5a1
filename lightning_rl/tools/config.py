"""The tools and limits that `actor_rollout_ref.rollout.multi_turn` names.

Invariant: both registries, `tool_config_path` and `function_tool_path`, are loaded, and a name in both is an error.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenizers import Tokenizer

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import MultiTurn
from lightning_rl.loading import NotLoadable, explained, find_neighbours, made_of, run_apart
from lightning_rl.tools.base_tool import BaseTool
from lightning_rl.tools.coerce import as_tool, is_marked, merged
from lightning_rl.tools.declared import declared_tools
from lightning_rl.tools.errors import ToolError
from lightning_rl.tools.limits import ResultLimits

_AT = "config key actor_rollout_ref.rollout.multi_turn"


def load_tools(multi_turn: MultiTurn) -> list[BaseTool]:
    """The tools of both registries; call it once in a process, since each load opens its MCP servers anew.

    Raises:
        ConfigError: a file, a class, a function or a server is not what it has to be, or names stand for more than
            one tool; naming each.
    """
    placed = []
    try:
        if multi_turn.tool_config_path is not None:
            placed += declared_tools(multi_turn.tool_config_path)
        paths = multi_turn.function_tool_path
        for path in [paths] if isinstance(paths, str) else paths or []:
            placed += tools_of(path)
        return merged(placed)
    except (ToolError, NotLoadable) as error:
        raise ConfigError(f"{_AT}: {error}") from error


def limits_of(multi_turn: MultiTurn, tokenizer: str | Path | None = None) -> ResultLimits:
    """The limits of tool results.

    Args:
        multi_turn: the config.
        tokenizer: the model's folder, or its id on the hub; needed where lengths are counted in tokens.

    Raises:
        ConfigError: lengths are counted in tokens, and there is no tokenizer.
    """
    return ResultLimits(
        max_parallel_calls=multi_turn.max_parallel_calls,
        max_length=multi_turn.max_tool_response_length,
        side=multi_turn.tool_response_truncate_side,
        tokenizer=_tokenizer(tokenizer) if multi_turn.tool_response_length_unit == "tokens" else None,
    )


def _tokenizer(of: str | Path | None) -> Tokenizer:
    if of is None:
        raise ConfigError(f"{_AT}.tool_response_length_unit=tokens needs the model's tokenizer, and none is known here")
    file = Path(of).expanduser() / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(str(of))


def tools_of(place: str) -> list[tuple[BaseTool, str]]:
    """The tools of a Python file or of a module, each with where it stands.

    Raises:
        ToolError: there is no such file or module, it cannot be imported, or it has no tool.
    """
    module = _module(place)
    tools = [(as_tool(thing), f"{place}:{name}") for name, thing in _things(module)]
    if not tools:
        raise ToolError(f"function_tool_path {place!r}: there is no tool in it; mark its functions with @function_tool")
    return tools


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
