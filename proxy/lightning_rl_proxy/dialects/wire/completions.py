"""Bodies of OpenAI Completions."""

from typing import Annotated, Any, Literal

import msgspec

from lightning_rl_proxy.dialects.wire.common import OpenAIUsage
from lightning_rl_proxy.dialects.wire.sampling import Count, SamplingWire


class CompletionsWire(SamplingWire, kw_only=True):
    """The honoured fields, as OpenAI types them; `top_k` and the like are vLLM's extensions."""

    model: str
    prompt: str | list[Any]
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    echo: bool | None = None
    stop: str | list[str] | None = None
    max_tokens: Count | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    ignore_eos: bool | None = None


_Prompt = Annotated[
    Any,
    msgspec.Meta(
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


class CompletionsRequest(CompletionsWire, kw_only=True):
    prompt: _Prompt


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str
    logprobs: TextLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class TextCompletion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: OpenAIUsage
