"""Bodies of OpenAI Responses."""

from typing import Annotated, Any, Literal

import msgspec

from lightning_rl_proxy.dialects.wire.common import SCHEMAS, RefusalPart
from lightning_rl_proxy.dialects.wire.sampling import Count, SamplingWire

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    # No item here has any of what follows.
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip


class ResponsesWire(SamplingWire, kw_only=True):
    """Fields that are honoured or repeated, as OpenAI types them; `top_k` and the like are vLLM's extensions."""

    model: str
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stop: str | list[str] | None = None
    max_output_tokens: Count | None = None
    text: dict[str, Any] | None = None
    include: list[Any] | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    user: str | None = None


class InputText(msgspec.Struct, tag="input_text"):
    text: str


class OutputText(msgspec.Struct, tag="output_text"):
    text: str


class InputImage(msgspec.Struct, tag="input_image"):
    image_url: str
    detail: str | None = None


_Content = str | list[InputText | OutputText | RefusalPart | InputImage]


class MessageItem(msgspec.Struct, kw_only=True):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    id: str | None = None


class FunctionCall(msgspec.Struct, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None


class CustomToolCall(msgspec.Struct, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str
    id: str | None = None


class Command(msgspec.Struct):
    command: list[str]


class LocalShellCall(msgspec.Struct, tag="local_shell_call"):
    call_id: str
    action: Command
    id: str | None = None


class FileOperation(msgspec.Struct):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class ApplyPatchCall(msgspec.Struct, tag="apply_patch_call"):
    call_id: str
    operation: FileOperation
    id: str | None = None


class TextCallOutput(msgspec.Struct, kw_only=True):
    type: Literal["custom_tool_call_output", "local_shell_call_output", "apply_patch_call_output"]
    call_id: str
    output: _Content


class ResponsesTool(msgspec.Struct):
    """A function, or a tool of another type (`custom`, `local_shell`, `apply_patch`; others are left out)."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionCallOutput(msgspec.Struct, tag="function_call_output"):
    call_id: str
    output: _Content


class ReasoningText(msgspec.Struct):
    text: str


class Reasoning(msgspec.Struct, tag="reasoning"):
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None


class ItemReference(msgspec.Struct, kw_only=True):
    type: Literal["item_reference"] | None = None
    id: str


class PlainText(msgspec.Struct, tag="text"):
    pass


class JsonObject(msgspec.Struct, tag="json_object"):
    pass


class JsonSchemaFormat(msgspec.Struct, tag="json_schema"):
    schema: dict[str, Any]


class TextConfig(msgspec.Struct):
    format: PlainText | JsonObject | JsonSchemaFormat | None = None


ITEMS = (
    MessageItem, FunctionCall, CustomToolCall, LocalShellCall, ApplyPatchCall, FunctionCallOutput,
    TextCallOutput, Reasoning, ItemReference,
)  # fmt: skip
# msgspec tells the types of a union apart by their tags, which messages, references and outputs of several types lack.
_Items = Annotated[
    list[Any],
    msgspec.Meta(extra_json_schema={"items": {"anyOf": [{"$ref": SCHEMAS.format(name=i.__name__)} for i in ITEMS]}}),
]
_Includable = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(INCLUDABLE)})]


class ResponsesRequest(ResponsesWire, kw_only=True):
    input: str | _Items | None = None
    tools: list[ResponsesTool] | None = None
    text: TextConfig | None = None  # type: ignore[assignment]
    include: list[_Includable] | None = None


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class AnswerMessage(msgspec.Struct, tag="message"):
    id: str
    role: Literal["assistant"]
    status: str
    content: list[OutputText]


class Response(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[AnswerMessage | FunctionCall | CustomToolCall | LocalShellCall | ApplyPatchCall | Reasoning]
    usage: ResponsesUsage
