"""The tools and limits that `actor_rollout_ref.rollout.multi_turn` names.

Invariant: both registries, `tool_config_path` and `function_tool_path`, are loaded, and a name in both is an error.
"""

from pathlib import Path

from tokenizers import Tokenizer

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import MultiTurn
from lightning_rl.loading import NotLoadable
from lightning_rl.tools.base_tool import BaseTool
from lightning_rl.tools.coerce import merged
from lightning_rl.tools.collect import tools_of
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
        given = multi_turn.function_tool_path
        for path in [given] if isinstance(given, str) else given or []:
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
