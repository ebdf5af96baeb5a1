"""Bodies of OpenAI Chat Completions."""

from typing import Annotated, Any, Literal

import msgspec

from lightning_rl_proxy.dialects.wire.common import OpenAIUsage, RefusalPart, TextPart
from lightning_rl_proxy.dialects.wire.sampling import Count, SamplingWire


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Function(msgspec.Struct):
    name: str


class AllowedTools(msgspec.Struct):
    mode: Any = None
    tools: Any = None


class ChatToolChoice(msgspec.Struct):
    type: Literal["function", "allowed_tools"]
    function: Function | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchema(msgspec.Struct):
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatCompletionsWire(SamplingWire, kw_only=True):
    """The honoured fields, as OpenAI types them; `top_k`, `chat_template_kwargs` and the like are vLLM's extensions."""

    model: str
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Literal["auto", "none"] | Function | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    max_context_tokens: Count | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class RelayedWire(msgspec.Struct):
    messages: list[dict[str, Any]]
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    stream: bool | None = None


class ImageUrl(msgspec.Struct):
    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, tag="image_url"):
    image_url: ImageUrl


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ChatToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[str | TextPart | RefusalPart | ImagePart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionSchema(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct):
    type: Literal["function"]
    function: FunctionSchema


class ChatCompletionsRequest(ChatCompletionsWire, kw_only=True):
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]  # type: ignore[assignment]
    tools: list[ChatTool] | None = None  # type: ignore[assignment]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float | None
    bytes: list[int] | None


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob] | None


class ChatAnswer(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatAnswer
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage | None = None
    prompt_token_ids: list[int] | None = None
