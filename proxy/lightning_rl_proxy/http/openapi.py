"""The gateway's doors as an OpenAPI 3.1 document, generated from the types in `dialects/wire/`.

The types that the dialects decode give the fields, their tables the hints and what is refused; so the document cannot
name a field that a dialect does not know. Unknown fields are allowed everywhere.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from lightning_rl_proxy.address import ID_PATTERN
from lightning_rl_proxy.dialects import chat_completions, completions, messages, responses
from lightning_rl_proxy.dialects.base import Tables
from lightning_rl_proxy.dialects.wire.chat_completions import ChatCompletion, ChatCompletionsRequest
from lightning_rl_proxy.dialects.wire.common import (
    SCHEMAS,
    AnthropicError,
    EmbeddingsRequest,
    ModelInfo,
    ModelList,
    OpenAIError,
)
from lightning_rl_proxy.dialects.wire.completions import CompletionsRequest, TextCompletion
from lightning_rl_proxy.dialects.wire.messages import CountTokensRequest, InputTokens, Message, MessagesRequest
from lightning_rl_proxy.dialects.wire.responses import ITEMS, Response, ResponsesRequest

PATH = "/openapi.json"

_Schema = dict[str, Any]
_HINT = "A hint: accepted, and no token changes with it."
_REFUSED = "Every other value is refused with 400."
_TABLES: dict[type[msgspec.Struct], Tables] = {
    ChatCompletionsRequest: chat_completions.TABLES,
    CompletionsRequest: completions.TABLES,
    ResponsesRequest: responses.TABLES,
    MessagesRequest: messages.TABLES,
    CountTokensRequest: messages.TABLES,
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
    error: type[msgspec.Struct] = OpenAIError


_OPERATIONS = (
    _Operation(
        "chat_completions", "post", "/chat/completions", "OpenAI Chat Completions", ChatCompletion,
        ChatCompletionsRequest, "`chat.completion.chunk` objects, one per event; `[DONE]` at the end",
    ),
    _Operation(
        "completions", "post", "/completions", "OpenAI Completions: a prompt of the client's own", TextCompletion,
        CompletionsRequest, "`text_completion` objects, one per event; `[DONE]` at the end",
    ),
    _Operation(
        "responses", "post", "/responses", "OpenAI Responses", Response,
        ResponsesRequest, "numbered `response.*` events; the last holds the response",
    ),
    _Operation(
        "messages", "post", "/messages", "Anthropic Messages", Message,
        MessagesRequest, "`message_start` to `message_stop`", AnthropicError,
    ),
    _Operation(
        "count_tokens", "post", "/messages/count_tokens", "How many tokens a request of Messages has", InputTokens,
        CountTokensRequest, error=AnthropicError,
    ),
    _Operation(
        "embeddings", "post", "/embeddings", "Embeddings, of a chat backend that has some", None, EmbeddingsRequest
    ),
    _Operation("models", "get", "/models", "The models that are served", ModelList),
    _Operation("model", "get", "/models/{model}", "One of the models", ModelInfo),
)  # fmt: skip
_IDS = {"type": "string", "pattern": f"^{ID_PATTERN}$"}
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_KEY = {"type": "string", "minLength": 1}
_DOORS = {
    "": (), "_of_attempt": ("rollout", "attempt"), "_of_agent": ("rollout", "attempt", "agent"), "_by_key": ("key",),
    "_by_key_of_agent": ("key", "agent"),
}  # fmt: skip


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
            "description": "An attempt's key opens its doors. A URL that names the attempt needs the same key; one "
            "that holds the key needs none.",
        },
        "security": [{"bearer": []}, {"x-api-key": []}],
        "paths": {
            _prefix(names) + operation.path: {operation.method: _operation(operation, suffix, names)}
            for suffix, names in _DOORS.items()
            for operation in _OPERATIONS
        }
        | {PATH: {"get": _document_itself()}},
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


def _document_itself() -> _Schema:
    answer = {"description": "This document", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"operationId": "openapi", "summary": "This document", "security": [], "responses": {"200": answer}}


def _operation(operation: _Operation, suffix: str, names: Sequence[str]) -> _Schema:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _KEY if name == "key" else _IDS} for name in names
    ]
    if "{model}" in operation.path:
        parameters.append(
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        )
    described: _Schema = {
        "operationId": operation.name + suffix,
        "summary": operation.summary,
        "tags": [operation.name],
        "parameters": parameters,
        "responses": {"200": _answer(operation), "4XX": _refusal(operation), "5XX": _refusal(operation)},
    }
    if "key" in names:
        described["security"] = []
    if operation.request is not None:
        described["requestBody"] = {"required": True, "content": _json(_ref(operation.request))}
    return described


def _answer(operation: _Operation) -> _Schema:
    content = _json({"type": "object"} if operation.answer is None else _ref(operation.answer))
    if operation.stream is not None:
        content["text/event-stream"] = {"schema": _EVENT | {"description": f"Each event: {operation.stream}"}}
    return {"description": "The answer", "content": content}


def _refusal(operation: _Operation) -> _Schema:
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
    return {"$ref": SCHEMAS.format(name=shape.__name__)}


def _schemas() -> _Schema:
    """The types that go in and out, and those that they are made of."""
    bodies = [shape for o in _OPERATIONS for shape in (o.request, o.answer, o.error) if shape is not None]
    _, schemas = msgspec.json.schema_components([*dict.fromkeys(bodies), *ITEMS], ref_template=SCHEMAS)
    for request, tables in _TABLES.items():
        _add_tables(schemas[request.__name__]["properties"], tables)
    return schemas


def _add_tables(properties: _Schema, tables: Tables) -> None:
    """Add the hints, and the fields that are honoured only at values that mean "off"."""
    for name in sorted(tables.hints):
        properties.setdefault(name, {})["description"] = _HINT
    for name, done in tables.relaxed.items():
        properties.setdefault(name, {})["description"] = f"Relaxed: {done}."
    for name, off in tables.off.items():
        properties[name] = {"enum": [*off, None], "description": _REFUSED}
