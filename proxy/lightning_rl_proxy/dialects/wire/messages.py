"""Bodies of Anthropic Messages."""

from typing import Annotated, Any, Literal

import msgspec

from lightning_rl_proxy.dialects.wire.sampling import Count, SamplingWire


class Text(msgspec.Struct, tag="text"):
    text: str


class Base64(msgspec.Struct, tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class Url(msgspec.Struct, tag="url"):
    url: str


class ImageBlock(msgspec.Struct, tag="image"):
    source: Base64 | Url


class PlainSource(msgspec.Struct, tag="text"):
    data: str


class ContentSource(msgspec.Struct, tag="content"):
    content: str | list[Text]


class Document(msgspec.Struct, tag="document"):
    source: PlainSource | ContentSource
    title: str | None = None
    context: str | None = None


class SearchResult(msgspec.Struct, tag="search_result"):
    source: str
    title: str
    content: list[Text]


class Thinking(msgspec.Struct, tag="thinking"):
    thinking: str


class RedactedThinking(msgspec.Struct, tag="redacted_thinking"):
    pass


class ToolUse(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[Text | ImageBlock | Document | SearchResult] | None = None
    is_error: bool | None = None


class User(msgspec.Struct, tag_field="role", tag="user"):
    content: str | list[Text | ImageBlock | ToolResultBlock | Document | SearchResult]


class Assistant(msgspec.Struct, tag_field="role", tag="assistant"):
    content: str | list[Text | Thinking | RedactedThinking | ToolUse]


class System(msgspec.Struct, tag_field="role", tag="system"):
    content: str | list[Text]


class MessagesTool(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None


class MessagesToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Format(msgspec.Struct, tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    format: Format | None = None


class CountWire(SamplingWire, kw_only=True):
    """The honoured fields but `max_tokens`, which a request to count tokens has not."""

    model: str
    messages: list[User | Assistant | System]
    system: str | list[Text] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: MessagesToolChoice | None = None
    stop_sequences: list[Annotated[str, msgspec.Meta(min_length=1)]] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None


class MessagesWire(CountWire, kw_only=True):
    """The honoured fields."""

    max_tokens: Count


class CustomTool(msgspec.Struct):
    """A tool; one of Anthropic's own has a `type`, and no `input_schema`."""

    name: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class CountTokensRequest(CountWire, kw_only=True):
    tools: list[CustomTool] | None = None  # type: ignore[assignment]


class MessagesRequest(MessagesWire, kw_only=True):
    tools: list[CustomTool] | None = None  # type: ignore[assignment]


class AnswerThinking(msgspec.Struct, tag="thinking"):
    thinking: str
    signature: str


class MessagesUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class Message(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Text | AnswerThinking | ToolUse]
    stop_reason: str
    stop_sequence: str | None
    usage: MessagesUsage


class InputTokens(msgspec.Struct):
    input_tokens: int
