"""Shapes that several APIs share, and those of errors, models and embeddings."""

from typing import Any, Literal

import msgspec

SCHEMAS = "#/components/schemas/{name}"  # where the document keeps a shape


class TextPart(msgspec.Struct, tag="text"):
    text: str


class RefusalPart(msgspec.Struct, tag="refusal"):
    refusal: str


class OpenAIUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class OpenAIErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | int | None


class OpenAIError(msgspec.Struct):
    error: OpenAIErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    type: Literal["error"]
    error: AnthropicErrorDetail


class ModelInfo(msgspec.Struct):
    id: str
    object: Literal["model"]
    type: Literal["model"]
    created: int
    owned_by: str
    display_name: str
    created_at: str


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelInfo]
    has_more: bool


class EmbeddingsRequest(msgspec.Struct):
    model: str
    input: Any
