"""Tools that a YAML file declares, in verl's form: `tools: [{class_name, config, tool_schema}]`, or MCP servers'.

Invariant: a file is read whole or refused, naming file, entry and key; each of its keys is used.
"""

import difflib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_rl.loading import load
from lightning_rl.tools.base_tool import BaseTool
from lightning_rl.tools.errors import ToolError
from lightning_rl.tools.mcp_server import McpServer
from lightning_rl.tools.mcp_tool import McpTool
from lightning_rl.tools.schemas import tool_schema

Placed = tuple[BaseTool, str]  # a tool, and where it is declared
_ENTRY = ("class_name", "config", "tool_schema", "mcp")
_MCP = ("mcp_servers_config_path", "tool_selected_list")
_OF_OUR_MCP = ("type", "timeout", "rate_limit")  # another class may read other keys
_SERVER = ("command", "args", "env", "cwd", "url", "headers", "auth_token")
_OURS = ("verl.tools.mcp_base_tool.MCPBaseTool", "lightning_rl.tools.mcp_tool.McpTool")


def declared_tools(path: str) -> list[Placed]:
    """The tools of a YAML file, each with its place. Servers that it names are connected, and list their tools.

    Raises:
        ToolError: the file, an entry, a class or a server is not what it has to be.
    """
    file = Path(path).expanduser().resolve()
    entries = _read(file).get("tools")
    if not isinstance(entries, list) or not entries:
        raise ToolError(f"tool_config_path {file}: it has no list `tools:`")
    servers: dict[str, McpServer] = {}
    tools = []
    for at, entry in enumerate(entries):
        where = f"{file}: tools[{at}]"
        _check_keys(where, entry, _ENTRY)
        for name in ("config", "mcp"):
            if not isinstance(entry.get(name), Mapping | None):
                raise ToolError(f"{where}: {name} is {entry[name]!r}; it is a mapping")
        kind = (entry.get("config") or {}).get("type", "native")
        if kind == "native":
            tools.append((_native(where, entry), where))
        elif kind == "mcp":
            tools += _mcp(where, entry, file.parent, servers)
        else:
            raise ToolError(f"{where}: config.type is {kind!r}; there are native and mcp")
    return tools


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ToolError(f"tool_config_path: there is no file {file}")
    try:
        read = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ToolError(f"tool_config_path {file} cannot be read: {error}") from error
    return read if isinstance(read, dict) else {}  # type: ignore[return-value]


def _native(where: str, entry: Mapping[str, Any]) -> BaseTool:
    if entry.get("mcp") is not None:
        raise ToolError(f"{where}: `mcp` is for config.type: mcp")
    made = _class(where, entry.get("class_name"), BaseTool)
    raw_schema = entry.get("tool_schema")
    schema = None if raw_schema is None else tool_schema(raw_schema, where)
    return made(config=dict(entry.get("config") or {}), tool_schema=schema)  # type: ignore[no-any-return]


def _class(where: str, name: Any, base: type) -> Any:
    module, _, attribute = str(name or "").replace(":", ".").rpartition(".")
    if not module:
        raise ToolError(f"{where}: class_name is {name!r}; write package.module.Class")
    if module.startswith("verl.") and importlib.util.find_spec("verl") is None:
        raise ToolError(
            f"{where}: {name} is verl's, which is not installed; copy the class into a module of yours and import its "
            "base from lightning_rl.tools, the rest stays as it is"
        )
    candidate = load(f"{module}:{attribute}", f"{where}: class_name")
    if not (isinstance(candidate, type) and issubclass(candidate, base)):
        raise ToolError(f"{where}: class_name {name} is no subclass of {base.__module__}.{base.__qualname__}")
    return candidate


def _mcp(where: str, entry: Mapping[str, Any], folder: Path, servers: dict[str, McpServer]) -> list[Placed]:
    if importlib.util.find_spec("mcp") is None:
        raise ToolError(f"{where}: tools of MCP servers need mcp: pip install 'lightning-rl[mcp]'")
    if entry.get("tool_schema") is not None:
        raise ToolError(f"{where}: `tool_schema` is for config.type: native; the servers give their tools' schemas")
    name = entry.get("class_name")
    made = McpTool if name is None or name in _OURS else _class(where, name, McpTool)
    config = dict(entry.get("config") or {})
    if made is McpTool:
        _check_keys(f"{where}: config", config, _OF_OUR_MCP)
    options = entry.get("mcp") or {}
    _check_keys(f"{where}: mcp", options, _MCP)
    tools: list[Placed] = []
    for server in _servers(where, options.get("mcp_servers_config_path"), folder, config.get("rate_limit"), servers):
        for listed in server.tools():
            function_schema = {
                "name": listed.name,
                "description": listed.description or "",
                "parameters": listed.input_schema,
            }
            place = f"{where}: server {server.name!r}"
            tool = made(config=config, tool_schema=tool_schema(function_schema, place))
            tool.server = server
            tools.append((tool, place))
    return _selected(where, tools, options.get("tool_selected_list"))


def _selected(where: str, tools: list[Placed], names: list[str] | None) -> list[Placed]:
    if not names:
        return tools
    if isinstance(names, str):
        raise ToolError(f"{where}: tool_selected_list is {names!r}; it is a list of names")
    available = [tool.name for tool, _ in tools]
    for name in names:
        if name not in available:
            near = difflib.get_close_matches(name, available, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ToolError(
                f"{where}: tool_selected_list names {name!r}; the servers have {', '.join(available)}{hint}"
            )
    return [(tool, place) for tool, place in tools if tool.name in names]


def _servers(
    where: str, path: Any, folder: Path, rate_limit: float | None, servers_by_key: dict[str, McpServer]
) -> list[McpServer]:
    """The servers of an `mcpServers` file; the same one twice is one server."""
    if not path:
        raise ToolError(f"{where}: mcp.mcp_servers_config_path is missing: a JSON file with {{mcpServers: {{...}}}}")
    file = next((one for one in (folder / path, Path(path).expanduser()) if one.is_file()), None)
    if file is None:
        raise ToolError(f"{where}: there is no file {path} in {folder}, nor in {Path.cwd()}")
    try:
        specs = json.loads(file.read_text(encoding="utf-8"))["mcpServers"]
        if not isinstance(specs, dict):
            raise TypeError(f"mcpServers is {specs!r:.80}")
    except (ValueError, KeyError, TypeError) as error:
        raise ToolError(f"{where}: {file} is no JSON file with {{mcpServers: {{...}}}}: {error}") from error
    servers = []
    for name, spec in specs.items():
        _check_keys(f"{file}: mcpServers.{name}", spec, _SERVER)
        if ("command" in spec) == ("url" in spec):
            raise ToolError(f"{file}: mcpServers.{name} has either `command` or `url`")
        key = json.dumps([spec, rate_limit], sort_keys=True)
        servers.append(servers_by_key.setdefault(key, McpServer(name, spec, rate_limit)))
    return servers


def _check_keys(where: str, mapping: Any, valid_keys: Iterable[str]) -> None:
    if not isinstance(mapping, Mapping):
        raise ToolError(f"{where} is {mapping!r}; it is a mapping with {', '.join(valid_keys)}")
    for key in mapping:
        if key not in valid_keys:
            near = difflib.get_close_matches(str(key), list(valid_keys), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(valid_keys)}"
            raise ToolError(f"{where}: {key!r} is unknown{hint}")
