"""What an agent's own span says of a call's messages, in the form of Chat Completions, whichever convention wrote it.

Pure. Invariant: nothing is added to what was said: what cannot be read is left out, and nothing is raised.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lightning_rl_adapters import semconv

_READABLE = 2**20  # characters of a text that is parsed: a longer one is no answer of a model
_DETAILS = "gen_ai.client.inference.operation.details"  # an event that has the attributes of a span
_EVENT_ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_PROMPTS = ("llm.input_messages.", "gen_ai.prompt.", "llm.prompts.")  # numbered: OpenInference's, OpenLLMetry's
_ANSWERS = ("llm.output_messages.", "gen_ai.completion.", "llm.completions.")
_TOOLS = ("llm.tools.", "llm.request.functions.")


class SpanMessages(NamedTuple):
    """The conversation of one call: what it was asked, the answers as they were written (one a choice), its tools."""

    prompt: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def messages_of(attributes: Mapping[str, Any]) -> SpanMessages:
    """What a span's attributes say, and its events where these do not."""
    whole = with_details(attributes)
    prompt = [*_instructions(whole), *_listed(whole, semconv.INPUT_MESSAGES, _PROMPTS)] or [
        *_prompts_in_events(attributes)
    ]
    prompt = prompt or _of_litellm(whole, ".messages")
    answers = raw_answers(attributes)
    tools = [tool for each in _listed(whole, semconv.TOOL_DEFINITIONS, _TOOLS) if (tool := _tool(each)) is not None]
    return SpanMessages(chat(prompt), chat(answers), tools)


def raw_answers(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers as a span or its events have them, one a choice, with whatever else stands there, such as ids."""
    listed = _listed(with_details(attributes), semconv.OUTPUT_MESSAGES, _ANSWERS) or [*_answers_in_events(attributes)]
    if listed:
        return listed
    choices = _of_litellm(attributes, ".choices")
    return [{**message, **choice} for choice in choices if isinstance(message := choice.get("message"), dict)]


def with_details(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes, with those of the event that may hold them in their place."""
    details = [of for name, of in _events(attributes) if name == _DETAILS]
    return {**details[0], **attributes} if details else attributes


def chat(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of any convention as those of Chat Completions."""
    return [plain for message in messages for plain in _chat(message)]


def ending(attributes: Mapping[str, Any], end: str) -> list[str]:
    """The names `llm.PROVIDER.FIELD` of a field, as litellm writes them, and who took them up."""
    return [name for name in attributes if name.startswith("llm.") and name.endswith(end) and name.count(".") == 2]


def first(attributes: Mapping[str, Any], *names: str) -> Any:
    """What stands under the first of these names that says anything."""
    return next((attributes[name] for name in names if attributes.get(name) not in (None, "")), None)


def from_json(value: Any) -> Any:
    """What a text of JSON says, None where it is none; any other value as it is."""
    if not isinstance(value, str) or len(value) > _READABLE:
        return None if isinstance(value, str) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def from_literal(value: Any) -> Any:
    """What a text of JSON or of Python's literals says; any other as it is."""
    if not isinstance(value, str) or len(value) > _READABLE:
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return from_json(value) or value


def _listed(attributes: Mapping[str, Any], name: str, numbered: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of an attribute that holds a list, else of attributes that are numbered."""
    whole = _dicts(from_json(attributes.get(name)))
    return whole or next((objects for prefix in numbered if (objects := _numbered(attributes, prefix))), [])


def _numbered(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """`PREFIX0.role`, `PREFIX0.tool_calls.0.name`, ... as objects, in order of their numbers."""
    tree: dict[str, Any] = {}
    for name, value in attributes.items():
        if name.startswith(prefix):
            *path, last = name.removeprefix(prefix).split(".")
            inner = tree
            for part in path:
                below = inner.setdefault(part, {})
                if not isinstance(below, dict):  # `tools` is a value, and `tools.0` stands beside it
                    break
                inner = below
            else:
                inner[last] = value
    return [each for each in _in_order(tree) if isinstance(each, dict)]


def _in_order(tree: Mapping[str, Any]) -> list[Any]:
    return [tree[number] for number in sorted((key for key in tree if key.isdecimal()), key=int)]


def _instructions(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = _dicts(from_json(attributes.get(semconv.SYSTEM_INSTRUCTIONS)))
    return [{"role": "system", "parts": parts}] if parts else []


def _events(attributes: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    for event in _dicts(attributes.get(semconv.EVENTS)):
        event_attributes = event.get("attributes")
        yield event.get("name"), event_attributes if isinstance(event_attributes, dict) else {}


def _prompts_in_events(attributes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, of in _events(attributes):
        if name in _EVENT_ROLES:
            yield {"role": _EVENT_ROLES[name], **of}
        elif name == "gen_ai.content.prompt":
            yield from _dicts(from_json(of.get("gen_ai.prompt")))


def _answers_in_events(attributes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, of in _events(attributes):
        if name == "gen_ai.choice":
            message = from_json(of.get("message"))
            yield {**(message if isinstance(message, dict) else {}), **of}
        elif name == "gen_ai.content.completion":
            yield from _dicts(from_json(of.get("gen_ai.completion")))


def _of_litellm(attributes: Mapping[str, Any], end: str) -> list[dict[str, Any]]:
    return _dicts(from_literal(first(attributes, *ending(attributes, end))))


def _chat(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    inner = message.get("message")
    message = inner if isinstance(inner, dict) else message
    parts = _dicts(from_json(message.get("parts")))
    role = str(message.get("role") or "assistant")
    responses = [part for part in parts if part.get("type") == "tool_call_response"]
    for part in responses:
        result = part.get("response", part.get("result"))
        yield {"role": "tool", "tool_call_id": str(part.get("id") or ""), "content": _text(result)}
    calls = [part for part in parts if part.get("type") == "tool_call"] or _dicts(from_json(message.get("tool_calls")))
    chat_message: dict[str, Any] = {"role": role, "content": _content(message, parts)}
    if reasoning := _joined(parts, "reasoning") or message.get("reasoning_content"):
        chat_message["reasoning_content"] = reasoning
    if calls:
        chat_message["tool_calls"] = [_tool_call(call) for call in calls]
    if role == "tool" and message.get("tool_call_id", message.get("id")):
        chat_message["tool_call_id"] = str(message.get("tool_call_id", message.get("id")))
    if chat_message.keys() > {"role", "content"} or chat_message["content"] is not None or not responses:
        yield chat_message


def _content(message: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> Any:
    if parts:
        return _joined(parts, "text") or None
    contents = message.get("contents")  # OpenInference's, of a message of several parts
    if isinstance(contents, dict):
        inner_parts = [each.get("message_content") for each in _in_order(contents) if isinstance(each, dict)]
        return "".join(_text(each.get("text") or "") for each in _dicts(inner_parts))
    return message.get("content")


def _joined(parts: Sequence[Mapping[str, Any]], kind: str) -> str:
    return "".join(_text(part.get("content") or "") for part in parts if part.get("type") == kind)


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    inner = call.get("tool_call")
    call = inner if isinstance(inner, dict) else call
    function = call.get("function")
    function = function if isinstance(function, dict) else call
    called = {"name": str(function.get("name") or ""), "arguments": _text(function.get("arguments") or "{}")}
    return {"id": str(call.get("id") or ""), "type": "function", "function": called}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """A tool's definition as Chat Completions has it."""
    inner = tool.get("tool")
    schema = from_json(inner.get("json_schema")) if isinstance(inner, dict) else tool
    if not isinstance(schema, dict):
        return None
    function = schema.get("function", schema)
    if not isinstance(function, dict) or not function.get("name"):
        return None
    about = {name: function[name] for name in ("name", "description") if function.get(name)}
    parameters = from_json(function.get("parameters"))
    return {"type": "function", "function": about | ({"parameters": parameters} if parameters else {})}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()


def _dicts(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; those of an object whose keys are numbers, in their order; [] for anything else."""
    if isinstance(value, dict):
        value = _in_order({str(key): each for key, each in value.items()})
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
