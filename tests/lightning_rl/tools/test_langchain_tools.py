"""LangChain's tools are taken as they are."""

import asyncio
import json
import threading
from typing import Annotated, Any

import pytest
from langchain_core.tools import BaseTool as LangChains
from langchain_core.tools import StructuredTool, tool
from pydantic import BaseModel, Field

from lightning_rl.tools import BaseTool, ResultLimits, ToolCall, TrajectoryTools


class Query(BaseModel):
    text: str = Field(description="what to look for")
    limit: int = Field(default=3, description="how many")


@tool
def lookup(word: str, tags: list[str]) -> str:
    """Look a word up."""
    return f"{word} {tags} {threading.current_thread() is threading.main_thread()}"


@tool("find", args_schema=Query)
async def find_async(text: str, limit: int = 3) -> Any:
    """Find it."""
    return {"text": text, "limit": limit, "main": threading.current_thread() is threading.main_thread()}, 0.5


def plain(a: Annotated[int, "a number"]) -> int:
    """Double."""
    return 2 * a


class Shout(LangChains):
    name: str = "shout"
    description: str = "Say it loud."

    def _run(self, text: str) -> str:
        return text.upper()


def run(given: Any, **arguments: Any) -> Any:
    async def trajectory() -> Any:
        async with TrajectoryTools([given], ResultLimits(max_length=None)) as tools:
            return (await tools.run([ToolCall("c", tools.schemas[0]["function"]["name"], json.dumps(arguments))]))[0]

    return asyncio.run(trajectory())


def test_each_kind_runs_where_it_should() -> None:
    assert run(lookup, word="a", tags=["b"]).content == "a ['b'] False"
    found = run(find_async, text="t")
    assert (json.loads(found.content), found.reward) == ({"text": "t", "limit": 3, "main": True}, 0.5)
    assert run(StructuredTool.from_function(plain), a="4").content == "8"
    assert run(Shout(), text="hey").content == "HEY"


BLOCKS = [
    {"type": "text", "text": "look"},
    {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}},
    {"type": "image", "base64": "AAAA", "mime_type": "image/png"},
    {"type": "image", "url": "https://x.org/b.png"},
]


def test_content_blocks_are_shown() -> None:
    def look(other: bool) -> Any:
        """Look."""
        return [*BLOCKS, {"type": "audio", "base64": "AAAA"}] if other else BLOCKS

    content = run(StructuredTool.from_function(look), other=False).content
    assert content[0] == {"type": "text", "text": "look"}
    urls = [part["image_url"]["url"] for part in content[1:]]
    assert urls == ["https://x.org/a.png", "data:image/png;base64,AAAA", "https://x.org/b.png"]
    assert "'type': 'audio'" in run(StructuredTool.from_function(look), other=True).content


def test_the_schema_is_langchains() -> None:
    made = BaseTool.from_callable(find_async)
    assert made.name == "find"
    function = TrajectoryTools([find_async], ResultLimits()).schemas[0]["function"]
    assert function["description"] == "Find it."
    assert function["parameters"]["required"] == ["text"]
    assert function["parameters"]["properties"]["limit"] == {"type": "integer", "default": 3, "description": "how many"}


@pytest.mark.parametrize(
    ("arguments", "missing"), [({}, "missing: word"), ({"word": 1, "tags": 2}, "word: Input shou")]
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], missing: str) -> None:
    result = run(lookup, **arguments)
    assert result.error == "wrong arguments"
    assert missing in result.content
