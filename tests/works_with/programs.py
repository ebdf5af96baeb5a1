"""Programs that people run from a shell, and the command lines of two turns of each."""

import json
import shlex
from pathlib import Path
from typing import Any

QUESTIONS = ("Say what is in hello.txt.", "And in world.txt?")


def _two_turns(first: list[str], second: list[str]) -> list[str]:
    return ["bash", "-ec", f"{shlex.join(first)}\n{shlex.join(second)}"]


def claude_code(llm: Any, folder: Path, variables: dict[str, str]) -> list[str]:
    """Claude Code without a terminal."""
    variables |= llm.claude_code_env() | {"CLAUDE_CONFIG_DIR": str(folder / "claude"), "IS_SANDBOX": "1"}
    claude = ["claude", "--dangerously-skip-permissions", "-p"]
    return _two_turns([*claude, QUESTIONS[0]], [*claude, "--continue", QUESTIONS[1]])


def codex(llm: Any, folder: Path, variables: dict[str, str]) -> list[str]:
    """Codex without a terminal."""
    home = folder / "codex"
    home.mkdir()
    (home / "config.toml").write_text(llm.codex_config())
    variables |= {"CODEX_HOME": str(home)}
    freely = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return _two_turns(
        ["codex", "exec", *freely, QUESTIONS[0]], ["codex", "exec", "resume", "--last", *freely, QUESTIONS[1]]
    )


def opencode(llm: Any, folder: Path, variables: dict[str, str]) -> list[str]:
    """opencode without a terminal."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": llm.base_url, "apiKey": llm.api_key},
        "models": {llm.model: {"limit": {"context": 100_000, "output": 4000}}},
    }
    model = f"gateway/{llm.model}"
    config = {
        "provider": {"gateway": provider}, "model": model, "small_model": model, "share": "disabled",
        "autoupdate": False, "snapshot": False,
    }  # fmt: skip
    variables |= {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "XDG_DATA_HOME": str(folder / "data")}
    return _two_turns(["opencode", "run", QUESTIONS[0]], ["opencode", "run", "--continue", QUESTIONS[1]])


def qwen_code(_llm: Any, _folder: Path, _variables: dict[str, str]) -> list[str]:
    """Qwen Code without a terminal."""
    qwen = ["qwen", "--yolo", "--auth-type", "openai"]
    return _two_turns([*qwen, "-p", QUESTIONS[0]], [*qwen, "--continue", "-p", QUESTIONS[1]])


def aider(llm: Any, _folder: Path, _variables: dict[str, str]) -> list[str]:
    """aider, one message for each turn."""
    model = f"openai/{llm.model}"
    aider = ["aider", "--model", model, "--weak-model", model, "--yes-always", "--no-git", "--map-tokens", "0"]
    quiet = ["--no-show-model-warnings", "--analytics-disable", "--no-check-update", "--no-detect-urls", "--no-pretty"]
    ask = [*aider, *quiet, "--restore-chat-history"]
    return _two_turns([*ask, "--message", QUESTIONS[0]], [*ask, "--message", QUESTIONS[1]])


def mini(llm: Any, folder: Path, variables: dict[str, str]) -> list[str]:
    """mini-swe-agent: one task."""
    variables |= {
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder), "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
    }  # fmt: skip
    return ["mini", "--model", f"openai/{llm.model}", "--task", QUESTIONS[0], "--yolo", "--exit-immediately"]
