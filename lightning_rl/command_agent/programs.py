"""What programs read besides `llm.env()` to find their model. A program is known by its name in the command."""

import re
from dataclasses import dataclass, field

from lightning_rl.agents.resources import LLM


@dataclass(frozen=True)
class ProgramSettings:
    """Environment variables, and files by path."""

    variables: dict[str, str]
    files: dict[str, str] = field(default_factory=dict)


def settings_of(command: str, llm: LLM, home: str, model_context_window: int | None) -> ProgramSettings:
    """The settings of the programs that `command` names; `home` is a folder in which theirs are kept."""
    variables, files = llm.env(), {}
    if _names("claude", command):
        variables |= llm.claude_code_env(model_context_window)
        variables |= {"CLAUDE_CONFIG_DIR": f"{home}/claude", "IS_SANDBOX": "1"}
    if _names("codex", command):
        variables["CODEX_HOME"] = f"{home}/codex"
        files[f"{home}/codex/config.toml"] = llm.codex_config(model_context_window)
    return ProgramSettings(variables, files)


def _names(program: str, command: str) -> bool:
    return re.search(rf"(^|[\s/'\";&|]){program}($|[\s'\";&|])", command) is not None
