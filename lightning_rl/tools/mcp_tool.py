"""A tool of an MCP server.

Invariant: what the server answers reaches the model: text and images as they are, and of anything else a line that says
what it was.
"""

import json
from typing import Any

from lightning_rl.tools.base_tool import BaseTool
from lightning_rl.tools.errors import ToolFailed
from lightning_rl.tools.mcp_server import McpServer
from lightning_rl.tools.schemas import OpenAIFunctionToolSchema, Returned, ToolResponse


class McpTool(BaseTool):
    """One tool of a server; `server` is set where it is made, and `config.timeout` bounds each call (30 seconds).

    A subclass may read answers in its own way, as verl's do: `_parse_tool_result(content) -> (text, metrics)`.
    """

    server: McpServer
    takes_any_arguments = True  # the server says what is missing

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        if self.timeout_seconds is None:
            self.timeout_seconds = float(config.get("timeout", 30))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Returned:
        answer = await self.server.call(self.name, parameters)
        text, metrics = self._parse_tool_result(answer.content)
        if not answer.content and answer.structured_content is not None:
            text = json.dumps(answer.structured_content, ensure_ascii=False)
        if answer.is_error:
            raise ToolFailed(text)
        images = [f"data:{part.mime_type};base64,{part.data}" for part in answer.content if part.type == "image"]
        return ToolResponse(text=text, image=images or None), 0.0, metrics

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        return "\n".join(_line(part) for part in content if part.type != "image"), {}


def _line(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource" and hasattr(part.resource, "text"):
        return str(part.resource.text)
    if part.type == "resource_link":
        return f"[{part.name}: {part.uri}]"
    inner = part.resource if part.type == "resource" else part
    return f"[{part.type} of type {inner.mime_type}, which cannot be shown]"
