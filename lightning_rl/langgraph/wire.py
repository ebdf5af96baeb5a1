"""LangChain's messages -> Chat Completions. Pure.

A message goes out as it came in: what the model said, its reasoning and the tool calls that could not be read included,
so that its call is found again. The reasoning is in `additional_kwargs["reasoning_content"]`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.utils import convert_to_openai_messages

from lightning_rl_adapters.text import encodable

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
    # Half a surrogate pair, as models write some, can be sent as an escape alone.
    text = encodable(arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False))
    return {"id": call["id"], "type": "function", "function": {"name": call["name"] or "", "arguments": text}}
