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

# A value may hold what ends one: it ends where another follows, or none.
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_LAST = re.compile(r"</function>\s*(?=</tool_call>)")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_SPACE, _BETWEEN = re.compile(r"\s*"), re.compile(r"[\s;]*")  # before a call, and between two
_WORDS = {"true": True, "false": False, "none": None, "null": None}  # in the letters of any language
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

    `opening` is empty where an answer that calls begins with its calls, `closing` where a region ends with its calls.
    `inner` are marks within a region, `last` is what stands right before its closing. `read` gives the calls that a
    region begins with, and how many characters they take; None where it is no call.
    """

    opening: str
    closing: str
    read: Callable[[str, Tools], tuple[list[WrittenCall], int] | None]
    inner: tuple[str, ...] = ()
    last: re.Pattern[str] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """What opens and closes a region, as far as it is anything."""
        return tuple(mark for mark in (self.opening, self.closing) if mark)

    def split(self, call_id: str, text: str, tools: Tools) -> tuple[str, list[dict[str, Any]]]:
        """The text without its well-formed calls, and those calls as OpenAI has them. Malformed ones stay text."""
        calls: list[dict[str, Any]] = []
        kept, at = "", 0
        for region in self._regions(text, tools):
            kept += text[at : region.start]
            calls += [
                call | {"id": tool_call_id(call_id, place)} for place, call in enumerate(region.calls, len(calls))
            ]
            at = region.end
        kept += text[at:]
        return (kept.rstrip() if calls else kept), calls

    def ids(self, text: str, tools: Tools) -> list[str | None]:
        """The ids that the model itself gave the calls of a text."""
        return [own_id for region in self._regions(text, tools) for own_id in region.ids]

    def _regions(self, text: str, tools: Tools) -> "Iterator[_Region]":
        """The regions that hold calls."""
        if not self.opening:
            if (region := self._region(text, 0, 0, len(text), tools)) is not None:
                yield region
            return
        at = 0  # a regular expression would read an unclosed region again and again
        while (start := text.find(self.opening, at)) >= 0:
            inside = start + len(self.opening)
            end = self._end(text, inside)
            if end < 0:
                return
            region = self._region(text, start, inside, end, tools)
            at = end + len(self.closing) if region is None else region.end
            if region is not None:
                yield region

    def _end(self, text: str, inside: int) -> int:
        """Where what stands in a region ends; -1: nowhere."""
        if self.closing and self.last is None:
            return text.find(self.closing, inside)
        following = text.find(self.opening, inside)
        following = len(text) if following < 0 else following
        if self.last is None:
            return following
        # What closes before the last mark within stands in a value.
        last = self.last.search(text, inside, following)
        return text.find(self.closing, inside) if last is None else last.end()

    def _region(self, text: str, start: int, inside: int, end: int, tools: Tools) -> "_Region | None":
        """What is called between two places; None where nothing is."""
        try:
            written, taken = self.read(text[inside:end], tools) or ([], 0)
            calls = [tool_call("", call.name, call.arguments) for call in written]
        except (ValueError, RecursionError):  # no JSON, nested too deep, or with a number that JSON has not
            return None
        if not calls or (self.closing and text[inside + taken : end].strip()):
            return None
        behind = end + len(self.closing) if self.closing else inside + taken
        return _Region(start, behind, calls, [call.id for call in written])


class _Region(NamedTuple):
    """Calls, as OpenAI has them but for their ids, the model's own ids, and where they stand in a text, marks
    included."""

    start: int
    end: int
    calls: list[dict[str, Any]]
    ids: list[str | None]


def form_of(own: str, name: str, arguments: Mapping[str, Any], tools: Tools) -> CallForm | None:
    """The form of a call of tool `name` with these arguments that a template writes as `own`; None: it has another."""
    for form in FORMS:
        functions = [call["function"] for call in form.split("", own, tools)[1]]
        if [(each["name"], json.loads(each["arguments"])) for each in functions] == [(name, arguments)]:
            return form
    return None


def form_by_tokens(is_token: Callable[[str], bool], prompt: str) -> CallForm:
    """The form of a model whose template writes no calls: one whose marks are tokens of the model. Of several it is one
    of which the `prompt` with tools tells, and that with most marks; of none Hermes', which many are told by their
    prompts."""
    known = [form for form in FORMS if form.opening and all(map(is_token, form.marks))]
    return max(
        known,
        key=lambda form: (form.opening in prompt, len(form.marks) + sum(map(is_token, form.inner))),
        default=HERMES,
    )


def _one_object(text: str, tools: Tools) -> tuple[list[WrittenCall], int] | None:
    call = _call_of(json.loads(text), ("arguments",))
    return None if call is None else ([call], len(text))


def _list_or_object(text: str, tools: Tools) -> tuple[list[WrittenCall], int] | None:
    """`[{"name": ..., "arguments": {...}}, ...]`, or one of these."""
    content, end = _DECODER.raw_decode(text, _SPACE.match(text).end())  # type: ignore[union-attr]  # it matches nothing, too
    listed = content if isinstance(content, list) else [content]
    calls = [call for each in listed if (call := _call_of(each, ("arguments", "parameters"))) is not None]
    return (calls, end) if len(calls) == len(listed) else None


def _bare_objects(text: str, tools: Tools) -> tuple[list[WrittenCall], int] | None:
    """`{"name": ..., "parameters": {...}}`, and more behind a semicolon: of the tools that there are, or it is text."""
    names = {tool["function"]["name"] for tool in tools or ()}
    calls: list[WrittenCall] = []
    end, between = 0, _SPACE
    while (at := between.match(text, end).end()) < len(text):  # type: ignore[union-attr]  # it matches nothing, too
        try:
            content, following = _DECODER.raw_decode(text, at)
        except ValueError:
            break
        call = _call_of(content, ("parameters", "arguments"))
        if call is None or call.name not in names:
            break
        calls.append(call)
        end, between = following, _BETWEEN
    return calls, end


def _call_of(content: Any, keys: Sequence[str]) -> WrittenCall | None:
    if not isinstance(content, dict):
        return None
    name, own_id = content.get("name"), content.get("id")
    arguments = next((content[key] for key in keys if key in content), None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return WrittenCall(name, arguments, own_id if isinstance(own_id, str) else None)


def _name_and_arguments(text: str, tools: Tools) -> tuple[list[WrittenCall], int] | None:
    """`name[ARGS]{...}`, or `name[CALL_ID]id[ARGS]{...}`."""
    head, mark, arguments = text.partition(_ARGS)
    name, _, own_id = head.partition(_CALL_ID)
    if not mark:
        return None
    content, end = _DECODER.raw_decode(arguments, _SPACE.match(arguments).end())  # type: ignore[union-attr]
    if not isinstance(content, dict):
        return None
    return [WrittenCall(name.strip(), content, own_id.strip() or None)], len(head) + len(mark) + end


def _function_tags(text: str, tools: Tools) -> tuple[list[WrittenCall], int] | None:
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
    return None if body[at:].strip() else ([WrittenCall(name, arguments)], len(text))


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
        value = json.loads(text, parse_constant=_number, parse_float=_number)
    except ValueError:
        value = _WORDS.get(text.strip().lower(), text)
    if not kinds:
        return value if isinstance(value, dict | list) else text
    is_allowed = not isinstance(value, str) and not _kinds_of_value(value).isdisjoint(kinds)
    return text if "string" in kinds and not is_allowed else value


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return number


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
    CallForm("<tool_call>", "</tool_call>", _function_tags, last=_LAST),  # Qwen3-Coder
    CallForm("<|tool_call|>", "<|/tool_call|>", _list_or_object),  # Phi-4-mini
    CallForm("<TOOLCALL>", "</TOOLCALL>", _list_or_object),  # Nemotron
    CallForm("[TOOL_CALLS]", "", _list_or_object),  # Mistral, up to 2024
    CallForm("[TOOL_CALLS]", "", _name_and_arguments, (_CALL_ID, _ARGS)),  # Mistral since
    CallForm("<|tool_call|>", "", _list_or_object),  # Granite
    CallForm("", "", _bare_objects),  # Llama 3
)
