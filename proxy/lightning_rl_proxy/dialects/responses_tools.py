"""Tools of OpenAI Responses: to the model each is a function, and a call of it is an item of the tool's kind. Pure.

Those whose calls are a text (custom ones, the shell, patches) are functions with one argument that holds it.
"""

import re
import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from lightning_rl_proxy.dialects.base import NamedTool, Opening, Request, ToolChoice, allowed, refused, text_of
from lightning_rl_proxy.dialects.wire.engine_fields import unsupported
from lightning_rl_proxy.rendering.base import ParsedAnswer

# Tools whose calls are a text: what they are to the model, and the one argument that holds it.
_TEXT_TOOLS = {
    "custom": ("input", ""),
    "local_shell": ("command", "Run a command in a shell on this machine."),
    "apply_patch": ("patch", "Change files: *** Begin Patch, *** Update File: PATH, the difference, *** End Patch."),
}
_PATCH = re.compile(
    r"\*\*\* Begin Patch\n\*\*\* (Add|Update|Delete) File: ([^\n]+)\n(.*?)\n?\*\*\* End Patch\s*", re.DOTALL
)
_FILE_OF_PATCH = re.compile(r"^\*\*\* (Add|Update|Delete) File: ", re.MULTILINE)
_VERBS = {"Add": "create_file", "Update": "update_file", "Delete": "delete_file"}


def shown_tools(tools: Sequence[Any]) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """The tools that the model is shown, and the places of those that it is not.

    Those of a `namespace` are shown one by one, each with the namespace in its name.
    """
    shown, unseen = [], []
    for index, tool in enumerate(tools):
        named = {f"tools[{index}]": tool}
        if _is_namespace(tool):
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise refused(f"tools[{index}].tools", "is no list of tools")
            space = text_of(f"tools[{index}]", tool, "name")
            named = {f"tools[{index}].tools[{i}]": named_in(space, one) for i, one in enumerate(inner)}
        for where, one in named.items():
            function = _tool(where, one)
            if function is None:
                unseen.append(where)
            else:
                shown.append(function)
    return shown or None, unseen


def _tool(where: str, tool: Any) -> dict[str, Any] | None:
    """A tool as a function; None for one that OpenAI's servers run, which the model is not shown."""
    if not isinstance(tool, dict) or not isinstance(kind := tool.get("type"), str):
        raise refused(f"{where}.type", "is missing; a tool is an object with a type")
    if kind in _TEXT_TOOLS:
        argument, description = _TEXT_TOOLS[kind]
        name = text_of(where, tool, "name") if kind == "custom" else kind
        if not isinstance(tool.get("description"), str | None):
            raise refused(f"{where}.description", "is no text")
        about = {"name": name, "description": tool.get("description") or description}
        if isinstance(form := tool.get("format"), dict) and form.get("type") == "grammar":
            about["description"] += f"\nThe {argument} is a text of this grammar:\n{form.get('definition')}"
        properties = {argument: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [argument]}
        return {"type": "function", "function": {**about, "parameters": parameters}}
    if kind != "function":
        return None
    function: dict[str, Any] = {"name": text_of(where, tool, "name")}
    for name, form in (("description", str), ("parameters", dict), ("strict", bool)):
        value = tool.get(name)
        if not isinstance(value, form | None):
            raise refused(f"{where}.{name}", f"is no {form.__name__}")
        if value is not None:
            function[name] = value
    return {"type": "function", "function": function}


def tool_choice(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]] | None, ToolChoice]:
    """The tools that the model is shown, and the choice among them."""
    names = [tool["function"]["name"] for tool in tools or ()]
    match choice:
        case None | "auto":
            return tools, "auto"
        case "none":
            return tools, "none"
        case "required":
            if not names:
                raise refused("tool_choice", "is 'required', but there are no tools")
            return tools, "required"
        case {"type": "allowed_tools", **named}:
            return allowed("tool_choice", named.get("mode"), named.get("tools"), tools)
        case {"type": "function" | "custom" | "local_shell" | "apply_patch" as kind}:
            name = text_of("tool_choice", choice, "name") if kind in ("function", "custom") else kind
            if name not in names:
                raise refused("tool_choice.name", f"is {name!r}, but tools are {names}")
            return tools, NamedTool(name)
        case {"type": kind}:
            raise unsupported("tool_choice.type", kind)
    raise unsupported("tool_choice", choice)


def _is_namespace(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "namespace"


def named_in(space: str, tool: Any) -> Any:
    """A tool or a call under the name that the model knows it by."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return tool
    return tool | {"name": f"{space}__{tool['name']}"}


def called(where: str, item: dict[str, Any]) -> dict[str, Any]:
    """A call of a function, as Chat Completions has it."""
    function = {name: text_of(where, item, name) for name in ("name", "arguments")}
    return {"id": text_of(where, item, "call_id"), "type": "function", "function": function}


def called_with_text(where: str, kind: str, item: dict[str, Any], recorded: dict[str, Any] | None) -> dict[str, Any]:
    """A call of a tool whose calls are a text, as one of a function: `recorded`, where that was told so."""
    tool = kind.removesuffix("_call").removesuffix("_tool")
    if recorded is not None and _tells(item, recorded, tool):
        return recorded
    name = text_of(where, item, "name") if tool == "custom" else tool
    inner = item.get("action" if tool == "local_shell" else "operation")
    if tool == "custom":
        text = text_of(where, item, "input")
    elif not isinstance(inner, dict):
        raise refused(where, f"is no {kind}: it says not what is to be done")
    elif tool == "local_shell":
        text = _command_of(f"{where}.action", inner)
    else:
        verb = next((verb for verb, operation in _VERBS.items() if operation == inner.get("type")), None)
        if verb is None:
            raise refused(f"{where}.operation.type", f"is {inner.get('type')!r}; it is one of {list(_VERBS.values())}")
        text = _patch(verb, text_of(f"{where}.operation", inner, "path"), inner.get("diff") or "")
    arguments = msgspec.json.encode({_TEXT_TOOLS[tool][0]: text}).decode()
    return {
        "id": text_of(where, item, "call_id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _command_of(where: str, action: dict[str, Any]) -> str:
    words = action.get("command")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise refused(f"{where}.command", "is no list of words")
    return words[2] if words[:2] == ["bash", "-lc"] and len(words) == 3 else shlex.join(words)


def _patch(verb: str, path: str, diff: str) -> str:
    lines = [f"*** {verb} File: {path}", *([diff] if diff else ())]
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def _tells(item: dict[str, Any], call: dict[str, Any], kind: str) -> bool:
    """Whether an item of this kind says what the client was told of the call."""
    for name, value in (_details(call, kind) or {"type": None}).items():
        mine = item.get(name)
        if mine != value and not (isinstance(mine, dict) and isinstance(value, dict) and value.items() <= mine.items()):
            return False
    return True


def call_items(request: Request, opening: Opening, answer: ParsedAnswer) -> list[dict[str, Any]]:
    """The calls of an answer as output items, each of the kind that its tool is."""
    kinds: dict[str, str] = {}
    spaces: dict[str, dict[str, str]] = {}
    for tool in request.fields.get("tools") or ():
        if _is_namespace(tool):
            for one in (one for one in tool["tools"] if "name" in one):
                name = named_in(tool["name"], one)["name"]
                kinds[name], spaces[name] = one["type"], {"namespace": tool["name"], "name": one["name"]}
        else:
            kinds[tool.get("name") or tool["type"]] = tool["type"]
    calls = (
        _call(opening, index, call, kinds.get(call["function"]["name"], "function"))
        for index, call in enumerate(answer.tool_calls)
    )
    return [item | spaces.get(item.get("name", ""), {}) for item in calls]


def _call(opening: Opening, index: int, call: dict[str, Any], kind: str) -> dict[str, Any]:
    """A call as an item of that kind; one that says not what the kind needs is a function's."""
    details = _details(call, kind)
    if details is None:
        return _function_call(opening, index, call)
    prefix = {"custom": "ctc", "local_shell": "lsh", "apply_patch": "apc"}[kind]
    item = {"id": f"{prefix}_{opening.call_id}_{index}", "type": f"{'custom_tool' if kind == 'custom' else kind}_call"}
    return item | details | {"status": "completed", "call_id": call["id"]}


def _details(call: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """What an item of this kind says of a call; None where the call does not say what the kind needs."""
    arguments = call["function"]["arguments"]
    value = _only_value(_TEXT_TOOLS[kind][0], arguments) if kind in _TEXT_TOOLS else None
    if kind == "custom":
        return {"name": call["function"]["name"], "input": value if isinstance(value, str) else arguments}
    if kind == "local_shell":
        words = ["bash", "-lc", value] if isinstance(value, str) else value
        is_command = isinstance(words, list) and bool(words) and all(isinstance(word, str) for word in words)
        return {"action": {"type": "exec", "command": words, "env": {}}} if is_command else None
    patch = _PATCH.fullmatch(value) if kind == "apply_patch" and isinstance(value, str) else None
    if patch is None or _FILE_OF_PATCH.search(patch[3]) is not None:  # an operation is of one file
        return None
    operation = {"type": _VERBS[patch[1]], "path": patch[2]}
    return {"operation": operation if patch[1] == "Delete" else operation | {"diff": patch[3]}}


def _only_value(name: str, arguments: str) -> Any:
    """What arguments hold under that name; None where they hold something else."""
    try:
        values = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    return values[name] if values.keys() == {name} else None


def _function_call(opening: Opening, index: int, call: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"fc_{opening.call_id}_{index}",
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
    }
