"""LangChain's messages <-> Chat Completions. Pure.

A message goes out as it came in: what the model said, its reasoning and the tool calls that could not be read included,
so that its call is found again. The reasoning is in `additional_kwargs["reasoning_content"]`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, InvalidToolCall, ToolCall, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.messages.utils import convert_to_openai_messages
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call

REASONING = "reasoning_content"
_NOT_TEXT = frozenset({"reasoning", "thinking", "redacted_thinking", "tool_call", "tool_use", "function_call"})


def to_wire(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """The messages as Chat Completions takes them."""
    return [sent for message in messages for sent in _sent(message)]


def _sent(message: BaseMessage) -> Iterator[dict[str, Any]]:
    if not isinstance(message, AIMessage):
        # Tool results may be several messages in one.
        yield from convert_to_openai_messages([message])
        return
    sent: dict[str, Any] = {"role": "assistant", "content": _text(message)}
    called: list[Mapping[str, Any]] = [*message.tool_calls, *message.invalid_tool_calls]
    calls = [_call(call) for call in called]
    if calls:
        sent["tool_calls"] = calls
    if reasoning := message.additional_kwargs.get(REASONING):
        sent[REASONING] = reasoning
    yield sent


def _text(message: AIMessage) -> str | list[Any]:
    """What an answer says to the eye; other providers keep reasoning and tool calls among its content."""
    if isinstance(message.content, str):
        return message.content
    parts = [part for part in message.content if isinstance(part, str) or part.get("type") not in _NOT_TEXT]
    if all(isinstance(part, str) or part.get("type") == "text" for part in parts):
        return "".join(part if isinstance(part, str) else part["text"] for part in parts)
    [converted] = convert_to_openai_messages([AIMessage(content=parts)])
    content: list[Any] = converted["content"]
    return content


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["args"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": call["name"] or "", "arguments": text}}


def from_wire(answer: Mapping[str, Any], index: int) -> AIMessage:
    """Choice number `index` of a chat completion."""
    choice = answer["choices"][index]
    said = choice["message"]
    calls, invalid = _read_calls(said.get("tool_calls") or ())
    return AIMessage(
        content=said.get("content") or "",
        additional_kwargs={REASONING: said[REASONING]} if said.get(REASONING) else {},
        tool_calls=calls,
        invalid_tool_calls=invalid,
        usage_metadata=_usage(answer.get("usage")) if index == 0 else None,
        # Of several choices only the first may have it: messages of one id replace each other in a graph's state.
        id=answer["id"] if index == 0 else None,
        response_metadata=_metadata(answer, choice),
    )


def _read_calls(sent: Sequence[Mapping[str, Any]]) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for call in sent:
        try:
            calls.append(parse_tool_call(dict(call)))  # type: ignore[arg-type]
        except OutputParserException as error:
            invalid.append(make_invalid_tool_call(dict(call), str(error)))
    return calls, invalid


def chunk_from_wire(part: Mapping[str, Any]) -> AIMessageChunk | None:
    """One chunk of a stream; None where it says nothing."""
    choice: Mapping[str, Any] = next(iter(part.get("choices") or ()), {})
    delta = choice.get("delta") or {}
    usage, finish = part.get("usage"), choice.get("finish_reason")
    calls = [
        tool_call_chunk(
            name=(call.get("function") or {}).get("name"),
            args=(call.get("function") or {}).get("arguments"),
            id=call.get("id"),
            index=call["index"],
        )
        for call in delta.get("tool_calls") or ()
    ]
    if not (delta.get("content") or delta.get(REASONING) or calls or usage or finish or choice.get("logprobs")):
        return None
    return AIMessageChunk(
        content=delta.get("content") or "",
        additional_kwargs={REASONING: delta[REASONING]} if delta.get(REASONING) else {},
        tool_call_chunks=calls,
        usage_metadata=_usage(usage),
        id=part["id"],
        response_metadata=_metadata(part, choice) if finish or choice.get("logprobs") else {},
    )


def _metadata(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"logprobs": choice["logprobs"]} if choice.get("logprobs") else {}
    if choice.get("finish_reason"):
        told |= {
            "finish_reason": choice["finish_reason"],
            "model_name": answer.get("model"),
            "model_provider": "openai",
        }
    return told


def _usage(told: Mapping[str, Any] | None) -> UsageMetadata | None:
    if not told:
        return None
    prompt, sampled = told.get("prompt_tokens") or 0, told.get("completion_tokens") or 0
    return UsageMetadata(
        input_tokens=prompt, output_tokens=sampled, total_tokens=told.get("total_tokens") or prompt + sampled
    )
