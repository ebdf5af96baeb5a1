"""A real MCP server: `python mcp_server_of_tests.py stdio`, or `http`, which prints its port."""

import io
import os
import socket
import sys
from typing import Any

import anyio
import uvicorn
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from PIL import Image as Pillow

server = MCPServer("of tests", log_level="ERROR")
seen: list[str] = []


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def remember(word: str) -> str:
    """Keep a word for as long as this process lives."""
    seen.append(word)
    return f"{os.getpid()} {' '.join(seen)}"


@server.tool(structured_output=False)
def draw() -> list[Any]:
    """A red image of 2 x 2, and a word."""
    written = io.BytesIO()
    Pillow.new("RGB", (2, 2), "red").save(written, format="PNG")
    return ["red", Image(data=written.getvalue(), format="png")]


@server.tool()
def fail() -> str:
    """Raise."""
    raise ToolError("no luck")


@server.tool()
async def hang() -> str:
    """Never answer."""
    await anyio.sleep_forever()
    return ""


@server.tool()
def whoami(context: Context) -> str:
    """Say who calls."""
    headers = context.headers or {}
    return f"{headers.get('authorization')} {headers.get('x-team')}"


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


def over_http() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    if sys.argv[1] == "http":
        over_http()
    else:
        server.run("stdio")
