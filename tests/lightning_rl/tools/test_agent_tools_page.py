"""The code of docs/agent-tools.md runs and prints what the page says."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import yaml

from lightning_rl.config import keys
from lightning_rl.tools.declared import _ENTRY, _MCP

PAGE = (Path(__file__).parents[3] / "docs" / "agent-tools.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_pages_code_prints_what_it_says() -> None:
    printed = io.StringIO()
    names: dict[str, Any] = {"__name__": "page"}
    with contextlib.redirect_stdout(printed):
        exec("\n".join(blocks("python")), names)
    assert printed.getvalue() == blocks("text")[0]
    assert names["Basket"]


def test_the_pages_keys_are_the_schemas() -> None:
    [native, mcp] = yaml.safe_load(blocks("yaml")[0])["tools"]
    assert native.keys() | mcp.keys() == set(_ENTRY)
    assert mcp["mcp"].keys() == set(_MCP)
    known = {key.name.rpartition("multi_turn.")[2] for key in keys()}
    named = re.findall(r"`((?:tool|function|max)_\w+)`", PAGE.split("Keys under")[1].split("Both registries")[0])
    assert len(named) == 6
    assert set(named) <= known
