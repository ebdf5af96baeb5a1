"""The gateway's doors as an OpenAPI 3.1 document, made from what the dialects decode: it cannot say what they do not.

The dialects' wire types give the fields, their tables the hints and what is refused. Where a wire type takes any object
(messages, items, tools), since it is read by hand, the shapes stand here. Unknown fields are allowed everywhere.
"""

import functools
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from lightning_rl_proxy.address import ID_PATTERN
from lightning_rl_proxy.dialects import chat_completions, completions, messages, responses
from lightning_rl_proxy.dialects.base import Tables

PATH = "/openapi.json"

_Schema = dict[str, Any]
_SCHEMAS = "#/components/schemas/"
_HINT = "A hint: accepted, and no token changes with it."
_REFUSED = "Every other value is refused with 400."


# Chat Completions


class _TextPart(msgspec.Struct, tag="text"):
    text: str


class _RefusalPart(msgspec.Struct, tag="refusal"):
    refusal: str


class _ImageUrl(msgspec.Struct):
    url: str
    detail: str | None = None


class _ImagePart(msgspec.Struct, tag="image_url"):
    image_url: _ImageUrl


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction


class _ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[str | _TextPart | _RefusalPart | _ImagePart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _FunctionSchema(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ChatTool(msgspec.Struct):
    type: Literal["function"]
    function: _FunctionSchema


class _OpenAIUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _TokenLogprob(msgspec.Struct):
    token: str
    logprob: float | None
    bytes: list[int] | None


class _ChatLogprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None


class _ChatAnswer(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _ChatChoice(msgspec.Struct):
    index: int
    message: _ChatAnswer
    finish_reason: str
    logprobs: _ChatLogprobs | None = None


class _ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[_ChatChoice]
    usage: _OpenAIUsage | None = None


# Completions


class _TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int]


class _TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str
    logprobs: _TextLogprobs | None = None


class _TextCompletion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[_TextChoice]
    usage: _OpenAIUsage


_Prompt = Annotated[
    Any,
    Meta(
        description="One text or the token ids of one.",
        extra_json_schema={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                {"type": "array", "minItems": 1, "maxItems": 1, "items": {"type": "string", "minLength": 1}},
            ]
        },
    ),
]


# Responses


class _InputText(msgspec.Struct, tag="input_text"):
    text: str


class _OutputText(msgspec.Struct, tag="output_text"):
    text: str


class _InputImage(msgspec.Struct, tag="input_image"):
    image_url: str
    detail: str | None = None


_Content = str | list[_InputText | _OutputText | _RefusalPart | _InputImage]


class _MessageItem(msgspec.Struct, kw_only=True):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    id: str | None = None


class _FunctionCall(msgspec.Struct, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None


class _CustomToolCall(msgspec.Struct, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str
    id: str | None = None


class _Command(msgspec.Struct):
    command: list[str]


class _LocalShellCall(msgspec.Struct, tag="local_shell_call"):
    call_id: str
    action: _Command
    id: str | None = None


class _FileOperation(msgspec.Struct):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class _ApplyPatchCall(msgspec.Struct, tag="apply_patch_call"):
    call_id: str
    operation: _FileOperation
    id: str | None = None


class _TextCallOutput(msgspec.Struct, kw_only=True):
    type: Literal["custom_tool_call_output", "local_shell_call_output", "apply_patch_call_output"]
    call_id: str
    output: _Content


class _Tool(msgspec.Struct):
    """A function, or a tool of another type (`custom`, `local_shell`, `apply_patch`; others are left out)."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _FunctionCallOutput(msgspec.Struct, tag="function_call_output"):
    call_id: str
    output: _Content


class _Said(msgspec.Struct):
    text: str


class _Reasoning(msgspec.Struct, tag="reasoning"):
    id: str | None = None
    summary: list[_Said] | None = None
    content: list[_Said] | None = None


class _ItemReference(msgspec.Struct, kw_only=True):
    type: Literal["item_reference"] | None = None
    id: str


class _PlainText(msgspec.Struct, tag="text"):
    pass


class _JsonObject(msgspec.Struct, tag="json_object"):
    pass


class _JsonSchema(msgspec.Struct, tag="json_schema"):
    schema: dict[str, Any]


class _TextConfig(msgspec.Struct):
    format: _PlainText | _JsonObject | _JsonSchema | None = None


_Includable = Annotated[str, Meta(extra_json_schema={"enum": list(responses.INCLUDABLE)})]


class _ResponsesUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class _AnswerMessage(msgspec.Struct, tag="message"):
    id: str
    role: Literal["assistant"]
    status: str
    content: list[_OutputText]


class _Response(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[_AnswerMessage | _FunctionCall | _CustomToolCall | _LocalShellCall | _ApplyPatchCall | _Reasoning]
    usage: _ResponsesUsage


_ITEMS = (
    _MessageItem, _FunctionCall, _CustomToolCall, _LocalShellCall, _ApplyPatchCall, _FunctionCallOutput,
    _TextCallOutput, _Reasoning, _ItemReference,
)  # fmt: skip
_Items = Annotated[
    list[Any],
    Meta(extra_json_schema={"items": {"anyOf": [{"$ref": f"{_SCHEMAS}{i.__name__}"} for i in _ITEMS]}}),
]


# Messages


class _CustomTool(msgspec.Struct):
    """A tool; one of Anthropic's own has a `type`, and no `input_schema`."""

    name: Annotated[str, Meta(min_length=1)] | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


_TOOLS = list[_CustomTool] | None


class _AnswerThinking(msgspec.Struct, tag="thinking"):
    thinking: str
    signature: str


class _AnswerToolUse(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _MessagesUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class _Message(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[_TextPart | _AnswerThinking | _AnswerToolUse]
    stop_reason: str
    stop_sequence: str | None
    usage: _MessagesUsage


class _InputTokens(msgspec.Struct):
    input_tokens: int


# Errors, models, embeddings


class _OpenAIErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | int | None


class _OpenAIError(msgspec.Struct):
    error: _OpenAIErrorDetail


class _AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class _AnthropicError(msgspec.Struct):
    type: Literal["error"]
    error: _AnthropicErrorDetail


class _Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    type: Literal["model"]
    created: int
    owned_by: str
    display_name: str
    created_at: str


class _Models(msgspec.Struct):
    object: Literal["list"]
    data: list[_Model]
    has_more: bool


class _EmbeddingsRequest(msgspec.Struct):
    model: str
    input: Any


# The document


_REQUESTS = {
    "chat_completions": msgspec.defstruct(
        "ChatCompletionsRequest",
        [
            ("messages", Annotated[list[_ChatMessage], Meta(min_length=1)]),
            ("tools", list[_ChatTool] | None, None),
        ],
        bases=(chat_completions.Wire,),
        kw_only=True,
    ),
    "completions": msgspec.defstruct(
        "CompletionsRequest", [("prompt", _Prompt)], bases=(completions.Wire,), kw_only=True
    ),
    "responses": msgspec.defstruct(
        "ResponsesRequest",
        [
            ("input", str | _Items | None, None),
            ("tools", list[_Tool] | None, None),
            ("text", _TextConfig | None, None),
            ("include", list[_Includable] | None, None),
        ],
        bases=(responses.Wire,),
        kw_only=True,
    ),
    "messages": msgspec.defstruct("MessagesRequest", [("tools", _TOOLS, None)], bases=(messages.Wire,), kw_only=True),
    "count_tokens": msgspec.defstruct(
        "CountTokensRequest", [("tools", _TOOLS, None)], bases=(messages.CountWire,), kw_only=True
    ),
}
_TABLES: dict[str, Tables] = {
    "chat_completions": chat_completions.TABLES,
    "completions": completions.TABLES,
    "responses": responses.TABLES,
    "messages": messages.TABLES,
    "count_tokens": messages.TABLES,
}


class _Operation(NamedTuple):
    """What is behind every door; `stream` says what the answer is where the client asks for a stream."""

    name: str
    method: Literal["get", "post"]
    path: str
    summary: str
    answer: type[msgspec.Struct] | None
    request: type[msgspec.Struct] | None = None
    stream: str | None = None
    error: type[msgspec.Struct] = _OpenAIError


_OPERATIONS = (
    _Operation(
        "chat_completions", "post", "/chat/completions", "OpenAI Chat Completions", _ChatCompletion,
        _REQUESTS["chat_completions"], "`chat.completion.chunk` objects, one per event; `[DONE]` at the end",
    ),
    _Operation(
        "completions", "post", "/completions", "OpenAI Completions: a prompt of the client's own", _TextCompletion,
        _REQUESTS["completions"], "`text_completion` objects, one per event; `[DONE]` at the end",
    ),
    _Operation(
        "responses", "post", "/responses", "OpenAI Responses", _Response,
        _REQUESTS["responses"], "numbered `response.*` events; the last holds the response",
    ),
    _Operation(
        "messages", "post", "/messages", "Anthropic Messages", _Message,
        _REQUESTS["messages"], "`message_start` to `message_stop`", _AnthropicError,
    ),
    _Operation(
        "count_tokens", "post", "/messages/count_tokens", "How many tokens a request of Messages has", _InputTokens,
        _REQUESTS["count_tokens"], error=_AnthropicError,
    ),
    _Operation(
        "embeddings", "post", "/embeddings", "Embeddings, of a chat backend that has some",
        None, _EmbeddingsRequest,
    ),
    _Operation("models", "get", "/models", "The models that are served", _Models),
    _Operation("model", "get", "/models/{model}", "One of the models", _Model),
)  # fmt: skip
_IDS = {"type": "string", "pattern": f"^{ID_PATTERN}$"}
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_DOORS = {"": (), "_of_attempt": ("rollout", "attempt"), "_of_agent": ("rollout", "attempt", "agent")}
# The types' names: an underscore says that a type is nobody's but its module's; the module is told where two agree.
_PRIVATE = re.compile(r"^(?:lightning_rl_proxy\.(?:dialects\.|http\.)?(\w+\.))?_?")


@functools.cache
def encoded() -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    """The document: every operation behind every door."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "lightning_rl gateway",
            "version": "1",
            "description": "An attempt's key opens its doors; a URL that names the attempt needs the same key.",
        },
        "security": [{"bearer": []}, {"x-api-key": []}],
        "paths": {
            _prefix(names) + operation.path: {operation.method: _operation(operation, suffix, names)}
            for suffix, names in _DOORS.items()
            for operation in _OPERATIONS
        }
        | {PATH: {"get": _this()}},
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _prefix(names: Sequence[str]) -> str:
    return "".join(f"/{name}/{{{name}}}" for name in names) + "/v1"


def _this() -> _Schema:
    answer = {"description": "This document", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"operationId": "openapi", "summary": "This document", "security": [], "responses": {"200": answer}}


def _operation(operation: _Operation, suffix: str, names: Sequence[str]) -> _Schema:
    parameters = [{"name": name, "in": "path", "required": True, "schema": _IDS} for name in names]
    if "{model}" in operation.path:
        parameters.append(
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        )
    told: _Schema = {
        "operationId": operation.name + suffix,
        "summary": operation.summary,
        "tags": [operation.name],
        "parameters": parameters,
        "responses": {"200": _answered(operation), "4XX": _refused(operation), "5XX": _refused(operation)},
    }
    if operation.request is not None:
        told["requestBody"] = {"required": True, "content": _json(_ref(operation.request))}
    return told


def _answered(operation: _Operation) -> _Schema:
    content = _json({"type": "object"} if operation.answer is None else _ref(operation.answer))
    if operation.stream is not None:
        content["text/event-stream"] = {"schema": _EVENT | {"description": f"Each event: {operation.stream}"}}
    return {"description": "The answer", "content": content}


def _refused(operation: _Operation) -> _Schema:
    """Errors say whether the same request may succeed later, and when."""
    return {
        "description": "An error, in the shape that the dialect's clients read",
        "headers": {
            "x-should-retry": {"required": True, "schema": {"type": "string", "enum": ["true", "false"]}},
            "retry-after": {"schema": {"type": "integer", "minimum": 1, "maximum": 60}},
        },
        "content": _json(_ref(operation.error)),
    }


def _json(schema: _Schema) -> _Schema:
    return {"application/json": {"schema": schema}}


def _ref(shape: type[msgspec.Struct]) -> _Schema:
    return {"$ref": _SCHEMAS + _public(shape.__name__)}


def _public(name: str) -> str:
    return _PRIVATE.sub(r"\1", name)


def _schemas() -> _Schema:
    """The types that go in and out and those that they are made of, by their public names."""
    told = [shape for o in _OPERATIONS for shape in (o.request, o.answer, o.error) if shape is not None]
    _, found = msgspec.json.schema_components([*dict.fromkeys(told), *_ITEMS], ref_template=_SCHEMAS + "{name}")
    schemas = {_public(name): _renamed(schema) for name, schema in found.items()}
    for name, request in _REQUESTS.items():
        _tell_tables(schemas[request.__name__]["properties"], _TABLES[name])
    return schemas


def _renamed(schema: Any) -> Any:
    """A schema whose references lead to public names; titles only repeat names, and go."""
    if isinstance(schema, list):
        return [_renamed(item) for item in schema]
    if isinstance(schema, str) and schema.startswith(_SCHEMAS):
        return _SCHEMAS + _public(schema.removeprefix(_SCHEMAS))
    if not isinstance(schema, dict):
        return schema
    return {key: _renamed(value) for key, value in schema.items() if not (key == "title" and isinstance(value, str))}


def _tell_tables(properties: _Schema, tables: Tables) -> None:
    """Add the hints, and the fields that are honoured only at values that mean "off"."""
    for name in sorted(tables.hints):
        properties.setdefault(name, {})["description"] = _HINT
    for name, done in tables.relaxed.items():
        properties.setdefault(name, {})["description"] = f"Relaxed: {done}."
    for name, off in tables.off.items():
        properties[name] = {"enum": [*off, None], "description": _REFUSED}
