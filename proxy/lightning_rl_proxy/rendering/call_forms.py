"""The forms in which models write tool calls, and which of them a chat template writes.

A template tells how its model calls a tool only by writing a call. So a form is used where it reads that call back.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_rl_proxy.rendering.base import tool_call, tool_call_id

Tools = Sequence[dict[str, Any]] | None

_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_BETWEEN = re.compile(r"[\s;]*")  # calls that stand behind each other
_PYTHON = {"True": True, "False": False, "None": None}  # as templates print these values
# JSON's types of Python's; a bool is an int, too.
_KINDS: Sequence[tuple[type, set[str]]] = (
    (bool, {"boolean"}),
    (int, {"number", "integer"}),
    (float, {"number"}),
    (str, {"string"}),
    (list, {"array"}),
    (dict, {"object"}),
    (object, {"null"}),
)
_CALL_ID, _ARGS = "[CALL_ID]", "[ARGS]"
_DECODER = json.JSONDecoder()


class WrittenCall(NamedTuple):
    """A call as a model wrote it; some give it an id of their own."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class CallForm(NamedTuple):
    """How a model writes calls: each region from `opening` to `closing` holds one or several.

    `closing` is empty where a region ends with the next one or with the answer, `opening` where an answer that calls is
    nothing but calls. `inner` are marks within a region. `read` gives the calls of a region, None where it holds
    anything else.
    """

    opening: str
    closing: str
    read: Callable[[str, Tools], list[WrittenCall] | None]
    inner: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """What opens and closes a region, as far as it is anything."""
        return tuple(mark for mark in (self.opening, self.closing) if mark)

    def split(self, call_id: str, text: str, tools: Tools) -> tuple[str, list[dict[str, Any]]]:
        """The text without its well-formed calls, and those calls as OpenAI has them. Malformed ones stay text."""
        calls: list[dict[str, Any]] = []
        kept, at = "", 0
        for start, end, region in self._regions(text):
            made = self._made(call_id, len(calls), region, tools)
            kept += text[at : end if made is None else start]
            calls += made or []
            at = end
        kept += text[at:]
        return (kept.rstrip() if calls else kept), calls

    def ids(self, text: str, tools: Tools) -> list[str | None]:
        """The ids that the model itself gave the calls that `split` finds."""
        ids: list[str | None] = []
        for _, _, region in self._regions(text):
            if self._made("", 0, region, tools) is not None:
                ids += [call.id for call in self.read(region, tools) or ()]
        return ids

    def _regions(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Where each region begins and ends, marks included, and what stands between these."""
        if not self.opening:
            yield 0, len(text), text
            return
        at = 0  # a regular expression would read an unclosed region again and again
        while (start := text.find(self.opening, at)) >= 0:
            inside = start + len(self.opening)
            end = text.find(self.closing or self.opening, inside)
            if end < 0 and self.closing:
                return
            end = len(text) if end < 0 else end
            at = end + len(self.closing)
            yield start, at, text[inside:end]

    def _made(self, call_id: str, before: int, region: str, tools: Tools) -> list[dict[str, Any]] | None:
        """The calls of a region, which so many stand before; None where it holds anything else."""
        try:
            written = self.read(region, tools)
            if not written:
                return None
            places = enumerate(written, before)
            return [tool_call(tool_call_id(call_id, at), call.name, call.arguments) for at, call in places]
        except (ValueError, RecursionError):  # no JSON, nested too deep, or with a number that JSON has not
            return None


def form_of(own: str, name: str, arguments: Mapping[str, Any], tools: Tools) -> CallForm | None:
    """The form of a call of tool `name` with these arguments that a template writes as `own`; None: it has another."""
    for form in FORMS:
        functions = [call["function"] for call in form.split("", own, tools)[1]]
        if [(each["name"], json.loads(each["arguments"])) for each in functions] == [(name, arguments)]:
            return form
    return None


def form_by_tokens(is_token: Callable[[str], bool]) -> CallForm:
    """The form of a model whose template writes no calls: one whose marks are tokens of the model, of several that with
    most of them, and else Hermes', which many are told by their prompts."""
    known = [form for form in FORMS if form.opening and all(map(is_token, form.marks))]
    return max(known, key=lambda form: len(form.marks) + sum(map(is_token, form.inner)), default=HERMES)


def _one_object(text: str, tools: Tools) -> list[WrittenCall] | None:
    call = _call_of(json.loads(text), ("arguments",))
    return None if call is None else [call]


def _list_or_object(text: str, tools: Tools) -> list[WrittenCall] | None:
    """`[{"name": ..., "arguments": {...}}, ...]`, or one of these."""
    content = json.loads(text)
    listed = content if isinstance(content, list) else [content]
    calls = [call for each in listed if (call := _call_of(each, ("arguments", "parameters"))) is not None]
    return calls if len(calls) == len(listed) else None


def _bare_objects(text: str, tools: Tools) -> list[WrittenCall] | None:
    """`{"name": ..., "parameters": {...}}`, and more behind a semicolon: of the tools that there are, or it is text."""
    names = {tool["function"]["name"] for tool in tools or ()}
    calls: list[WrittenCall] = []
    at = len(text) - len(text.lstrip())
    while at < len(text):
        content, at = _DECODER.raw_decode(text, at)
        call = _call_of(content, ("parameters", "arguments"))
        if call is None or call.name not in names:
            return None
        calls.append(call)
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
    return calls


def _call_of(content: Any, keys: Sequence[str]) -> WrittenCall | None:
    if not isinstance(content, dict):
        return None
    name, own_id = content.get("name"), content.get("id")
    arguments = next((content[key] for key in keys if key in content), None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return WrittenCall(name, arguments, own_id if isinstance(own_id, str) else None)


def _name_and_arguments(text: str, tools: Tools) -> list[WrittenCall] | None:
    """`name[ARGS]{...}`, or `name[CALL_ID]id[ARGS]{...}`."""
    head, mark, arguments = text.partition(_ARGS)
    name, _, own_id = head.partition(_CALL_ID)
    content = json.loads(arguments) if mark else None
    return [WrittenCall(name.strip(), content, own_id.strip() or None)] if isinstance(content, dict) else None


def _function_tags(text: str, tools: Tools) -> list[WrittenCall] | None:
    """`<function=name><parameter=key>value</parameter>...</function>`: a value is what its parameter's schema says."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return None
    name, body = function[1].strip(), function[2]
    schemas = _parameters_of(name, tools)
    arguments: dict[str, Any] = {}
    at = 0
    while parameter := _PARAMETER.match(body, at):
        key = parameter[1].strip()
        arguments[key] = _typed(parameter[2].removeprefix("\n").removesuffix("\n"), schemas.get(key))
        at = parameter.end()
    return None if body[at:].strip() else [WrittenCall(name, arguments)]


def _parameters_of(name: str, tools: Tools) -> Mapping[str, Any]:
    functions = (tool["function"] for tool in tools or ())
    parameters = next((each.get("parameters") for each in functions if each.get("name") == name), None)
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _typed(text: str, schema: Any) -> Any:
    """A value that is written without quotes: a text where the schema allows it one and it is nothing else of it."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=_no_number)
    except ValueError:
        value = _PYTHON.get(text, text)
    if isinstance(value, float) and not math.isfinite(value):
        return text
    if not kinds:
        return value if isinstance(value, dict | list) else text
    is_allowed = not isinstance(value, str) and not _kinds_of_value(value).isdisjoint(kinds)
    return text if "string" in kinds and not is_allowed else value


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows; empty where it says nothing of them."""
    if not isinstance(schema, Mapping):
        return set()
    named = [schema.get("type")] if isinstance(schema.get("type"), str) else _listed(schema, "type")
    kinds = {kind for kind in named if isinstance(kind, str)}
    for branch in (branch for name in ("anyOf", "oneOf", "allOf") for branch in _listed(schema, name)):
        kinds |= _kinds(branch)
    return kinds or {kind for value in _listed(schema, "enum") for kind in _kinds_of_value(value)}


def _listed(schema: Mapping[Any, Any], name: str) -> list[Any]:
    """A list of a schema, which is the client's and may hold anything."""
    listed = schema.get(name)
    return listed if isinstance(listed, list) else []


def _kinds_of_value(value: Any) -> set[str]:
    if isinstance(value, float) and value.is_integer():
        return {"number", "integer"}
    return next(kinds for types, kinds in _KINDS if isinstance(value, types))


HERMES = CallForm("<tool_call>", "</tool_call>", _one_object)
FORMS = (
    HERMES,
    CallForm("<tool_call>", "</tool_call>", _function_tags),  # Qwen3-Coder
    CallForm("<|tool_call|>", "<|/tool_call|>", _list_or_object),  # Phi-4-mini
    CallForm("<TOOLCALL>", "</TOOLCALL>", _list_or_object),  # Nemotron
    CallForm("[TOOL_CALLS]", "", _list_or_object),  # Mistral, up to 2024
    CallForm("[TOOL_CALLS]", "", _name_and_arguments, (_CALL_ID, _ARGS)),  # Mistral since
    CallForm("<|tool_call|>", "", _list_or_object),  # Granite
    CallForm("", "", _bare_objects),  # Llama 3
)
