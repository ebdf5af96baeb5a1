"""Tools of real MCP servers, in processes of their own."""

import asyncio
import base64
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from lightning_rl.tools import BaseTool, ResultLimits, ToolCall, TrajectoryTools
from lightning_rl.tools.declared import declared_tools
from lightning_rl.tools.errors import ToolError
from lightning_rl.tools.mcp_tool import McpTool

SERVER = str(Path(__file__).with_name("mcp_server_of_tests.py"))
STDIO = {"command": sys.executable, "args": [SERVER, "stdio"]}


def write(folder: Path, servers: dict[str, Any], entry: str = "") -> str:
    (folder / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    mcp = "mcp: {mcp_servers_config_path: servers.json}"
    (folder / "tools.yaml").write_text(f"tools:\n- {entry or 'config: {type: mcp}'}\n  {mcp}\n")
    return str(folder / "tools.yaml")


def run(tools: list[BaseTool], *calls: tuple[str, str]) -> Any:
    async def trajectory() -> Any:
        async with TrajectoryTools(tools, ResultLimits(max_length=None)) as opened:
            return [(await opened.run([ToolCall("c", *call)]))[0] for call in calls]

    return asyncio.run(trajectory())


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BaseTool]]:
    """Of one stdio server, for all tests of this file."""
    config = "config: {type: mcp, timeout: 77, rate_limit: 5000}"
    made = [tool for tool, _ in declared_tools(write(tmp_path_factory.mktemp("mcp"), {"stdio": STDIO}, config))]
    yield made
    server_of(made).close()


def server_of(tools: list[BaseTool]) -> Any:
    assert isinstance(tools[0], McpTool)
    assert len({id(tool.server) for tool in tools if isinstance(tool, McpTool)}) == 1
    return tools[0].server


def test_schemas_come_from_the_server_whole(tools: list[BaseTool]) -> None:
    assert [tool.name for tool in tools] == ["add", "remember", "draw", "fail", "hang", "whoami", "die"]
    function = TrajectoryTools(tools, ResultLimits()).schemas[0]["function"]
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["properties"]["a"]["type"] == "integer"
    assert function["parameters"]["required"] == ["a", "b"]


def test_one_connection_serves_all_trajectories_and_event_loops(tools: list[BaseTool]) -> None:
    [added, *_] = run(tools, ("add", '{"a": 1, "b": 2}'))
    assert (added.content, added.error, added.reward) == ("3", None, 0.0)
    [first] = run(tools, ("remember", '{"word": "one"}'))
    [second] = run(tools, ("remember", '{"word": "two"}'))
    assert second.content == first.content + " two"  # the same process, in another event loop


def test_images_text_and_errors_reach_the_model(tools: list[BaseTool]) -> None:
    drawn, failed, wrong = run(tools, ("draw", "{}"), ("fail", "{}"), ("add", '{"a": 1}'))
    text, image = drawn.content
    assert text == {"type": "text", "text": "red"}
    data = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert np.asarray(Image.open(io.BytesIO(data))).tolist() == [[[255, 0, 0]] * 2] * 2
    assert failed.error == wrong.error == "tool error"
    assert "no luck" in failed.content
    assert "Field required" in wrong.content


def test_a_call_without_an_answer_is_given_up_and_the_next_one_runs(
    tools: list[BaseTool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {tool.timeout_seconds for tool in tools} == {77.0}  # as the config says
    for tool in tools:
        monkeypatch.setattr(tool, "timeout_seconds", 0.1 if tool.name == "hang" else 77.0)
    hung, added = run(tools, ("hang", "{}"), ("add", '{"a": 1, "b": 2}'))
    assert (hung.error, added.content) == ("timeout", "3")


def test_a_server_that_died_is_started_again_by_the_next_call(tools: list[BaseTool]) -> None:
    before, died, after = run(tools, ("remember", '{"word": "a"}'), ("die", "{}"), ("remember", '{"word": "b"}'))
    assert died.error == "MCPError"
    pid, *words = after.content.split()
    assert (words, pid != before.content.split()[0]) == (["b"], True)


def test_a_tool_that_goes_to_another_process_connects_there(tools: list[BaseTool]) -> None:
    gone = server_of(pickle.loads(pickle.dumps(tools)))
    assert (gone.spec, gone.rate_limit, gone._connection) == (STDIO, 5000, None)


WITHOUT_TOOLS = """
import anyio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

async def serve():
    server = Server("prompts alone")
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())

anyio.run(serve)
"""
FORKS = """
import asyncio, os, sys
from lightning_rl.tools import ResultLimits, ToolCall, TrajectoryTools
from lightning_rl.tools.declared import declared_tools

tools = [tool for tool, _ in declared_tools(sys.argv[1])]

async def remember(word):
    async with TrajectoryTools(tools, ResultLimits()) as opened:
        return (await opened.run([ToolCall("c", "remember", '{"word": "%s"}' % word)]))[0].content

print(asyncio.run(remember("before")), flush=True)
if (child := os.fork()) == 0:
    print(asyncio.run(remember("in the child")), flush=True)
    tools[0].server.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(asyncio.run(remember("after")))
"""


@pytest.mark.long
def test_a_forked_process_opens_its_own_connection_and_the_end_of_a_process_closes_its(tmp_path: Path) -> None:
    path = write(tmp_path, {"s": STDIO})
    done = subprocess.run([sys.executable, "-c", FORKS, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (parents, *first), (childs, *second), (again, *third) = [line.split(" ") for line in done.stdout.splitlines()]
    assert (first, second, third) == (["before"], ["in", "the", "child"], ["before", "after"])
    assert parents == again != childs
    assert not psutil.pid_exists(int(parents))
    assert not psutil.pid_exists(int(childs))


LOUD = """
from lightning_rl.tools.mcp_tool import McpTool

class Loud(McpTool):
    def _parse_tool_result(self, content):
        return " ".join(part.text for part in content).upper(), {"parts": len(content)}
"""


def test_a_server_over_http_with_headers_a_choice_of_tools_and_a_class_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, SERVER, "http"], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        url = f"http://127.0.0.1:{int(child.stdout.readline())}/mcp"
        (tmp_path / f"loud_{child.pid}.py").write_text(LOUD)
        monkeypatch.syspath_prepend(tmp_path)
        entry = f"class_name: loud_{child.pid}.Loud\n  config: {{type: mcp}}"
        path = write(tmp_path, {"web": {"url": url, "auth_token": "secret", "headers": {"X-Team": "red"}}}, entry)
        text = Path(path).read_text().replace("servers.json", "servers.json, tool_selected_list: [add, whoami]")
        Path(path).write_text(text)
        made = [tool for tool, _ in declared_tools(path)]
        assert [tool.name for tool in made] == ["add", "whoami"]
        added, me = run(made, ("add", '{"a": 1, "b": 2}'), ("whoami", "{}"))
        assert (added.content, me.content) == ("3", "BEARER SECRET RED")
        assert me.metrics == {"parts": 1}
        server_of(made).close()
    finally:
        child.terminate()
        child.communicate()


def test_so_many_calls_a_second_and_no_more(tools: list[BaseTool], monkeypatch: pytest.MonkeyPatch) -> None:
    connection = server_of(tools)._opened()
    assert connection._interval == 1 / 5000  # as the config says
    monkeypatch.setattr(connection, "_interval", 1 / 20)
    before = connection._loop.time()
    run(tools, *[("add", '{"a": 1, "b": 2}')] * 5)
    assert connection._loop.time() - before >= 4 / 20


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ({"s": {"command": "/no/such/program"}}, r"MCP server 's' \(/no/such/program\) cannot be used: FileNotFound"),
        (
            {"s": {"command": sys.executable, "args": ["-c", "pass"]}},
            "MCP server 's' .* cannot be used: MCPError: Conn",
        ),
        (
            {"s": {"command": sys.executable, "args": ["-c", WITHOUT_TOOLS]}},
            "MCP server 's' lists no tools: Method not found; leave it out",
        ),
        ({"s": {"url": "http://127.0.0.1:9/mcp"}}, r"MCP server 's' \(http://127.0.0.1:9/mcp\) cannot be used: "),
        ({"s": {"url": "http://x", "command": "y"}}, "mcpServers.s has either `command` or `url`"),
        ({"s": {"comand": "y"}}, "'comand' is unknown; did you mean 'command'"),
        ([], "is no JSON file with {mcpServers: {...}}: mcpServers is"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(tmp_path: Path, servers: Any, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        declared_tools(write(tmp_path, servers))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{class_name: McpTool, config: mcp}", "config is 'mcp'; it is a mapping"),
        ("{class_name: McpTool, config: {type: mcp}, mcp: servers.json}", "mcp is 'servers.json'; it is a mapping"),
    ],
)
def test_an_entry_whose_parts_are_no_mappings_is_named(tmp_path: Path, entry: str, message: str) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools: [{entry}]")
    with pytest.raises(ToolError, match=message):
        declared_tools(str(file))
