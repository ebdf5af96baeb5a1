"""LangChain's tools as they are: `@tool`, `StructuredTool`, subclasses of its `BaseTool`.

Invariant: what the model sees is LangChain's own description of the tool, and what runs is the tool itself.
"""

import sys
from typing import Any

from pydantic import ValidationError

from lightning_rl.tools.base_tool import BaseTool
from lightning_rl.tools.errors import WrongArguments
from lightning_rl.tools.schemas import Returned, ToolResponse, returned, tool_schema
from lightning_rl.tools.threads import in_thread


def is_langchain_tool(thing: Any) -> bool:
    """Whether it is one of LangChain's; where LangChain is not loaded, nothing is."""
    module = sys.modules.get("langchain_core.tools.base")
    return module is not None and isinstance(thing, module.BaseTool)


class LangChainTool(BaseTool):
    """A LangChain tool: its coroutine on the event loop, or, where it has none, its function in a thread."""

    def __init__(self, tool: Any, timeout: float | None = None) -> None:
        from langchain_core.utils.function_calling import convert_to_openai_tool

        self.tool = tool
        self.timeout_seconds = timeout
        super().__init__({}, tool_schema(convert_to_openai_tool(tool), f"LangChain tool {tool.name!r}"))

    def __reduce__(self) -> tuple[Any, ...]:
        return LangChainTool, (self.tool, self.timeout_seconds)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Returned:
        try:
            if _has_coroutine(self.tool):
                return returned(_shown(await self.tool.ainvoke(parameters)))
            return returned(_shown(await in_thread(self.tool.invoke, parameters)))
        except ValidationError as error:
            if error.title != getattr(self.tool.args_schema, "__name__", None):
                raise  # the tool's own, not of its arguments
            raise WrongArguments(
                "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            ) from error


def _shown(value: Any) -> Any:
    """LangChain's content blocks as a response; anything else as it is."""
    if not (isinstance(value, list) and value and all(isinstance(block, dict) and "type" in block for block in value)):
        return value
    texts = [block["text"] for block in value if block["type"] == "text"]
    images = [_image(block) for block in value if block["type"] in ("image", "image_url")]
    if len(texts) + len(images) < len(value):
        return value  # with a block of another type: shown as it is written
    return ToolResponse(text="\n".join(texts), image=images or None)


def _image(block: dict[str, Any]) -> Any:
    if block["type"] == "image_url":
        image_url = block["image_url"]
        return image_url["url"] if isinstance(image_url, dict) else image_url
    data = block.get("base64") or block.get("data")
    return f"data:{block.get('mime_type', 'image/png')};base64,{data}" if data else block.get("url")


def _has_coroutine(tool: Any) -> bool:
    """Whether it runs on the event loop; else LangChain would put it into the pool that all of asyncio shares."""
    from langchain_core.tools import BaseTool as LangChains
    from langchain_core.tools import StructuredTool, Tool

    if isinstance(tool, StructuredTool | Tool):
        return tool.coroutine is not None
    return type(tool)._arun is not LangChains._arun
