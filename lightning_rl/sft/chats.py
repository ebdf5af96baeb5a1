"""Chats of the user's own as calls: records with `messages`, as services for fine-tuning take them.

Invariant: each message of the assistant is the answer of one call, which goes on with what was said before it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_rl.config import ConfigError
from lightning_rl_proxy.dialects import chat_completions
from lightning_rl_proxy.errors import GatewayError

MODEL = "chats"  # by which `sft.models` chooses them


def is_chat(record: Any) -> bool:
    """Whether a record is a chat, and no call of `lightning-rl export`."""
    return isinstance(record, Mapping) and "messages" in record and "rollout_id" not in record


def calls_of(record: Mapping[str, Any], rollout_id: str, place: str) -> Iterator[dict[str, Any]]:
    """The calls of a chat, as records of `export --what calls`.

    `tools` are those that it offers, `reward` is its rollout's; an answer with `weight` 0 is context.

    Raises ConfigError naming its `place` for messages that are none, or that have no answer.
    """
    new_messages: list[dict[str, Any]] = []
    number = 0
    messages, tools = _read(record, place)
    for message in messages:
        if (weight := message.pop("weight", 1)) not in (0, 1):
            raise ConfigError(f"{place}: an answer has weight {weight!r}; it is 1, which is learned, or 0: context")
        if message["role"] != "assistant" or weight == 0:
            new_messages.append(message)
            continue
        yield {
            "rollout_id": rollout_id,
            "call_id": f"{rollout_id}-{number}",
            "parent_call_id": f"{rollout_id}-{number - 1}" if number else None,
            "number": number,
            "mode": "train",
            "counts": True,
            "model": MODEL,
            "prompt_token_ids": [],
            "response_token_ids": [],
            "messages": new_messages,
            "answer": [message],
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
            "reward": record.get("reward"),
            "exact": False,
            "tools": tools,
        }
        new_messages, number = [], number + 1
    if not number:
        raise ConfigError(f"{place} has no message of the assistant: there is nothing to learn from")


def _read(record: Mapping[str, Any], place: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and tools as the gateway would read them in a request; `weight` stays."""
    raw_messages = record["messages"]
    if not isinstance(raw_messages, list):
        raise ConfigError(f"{place}: messages is {raw_messages!r:.80}; it must be a list")
    messages = []
    for number, one in enumerate(raw_messages):
        if not isinstance(one, Mapping):
            raise ConfigError(f"{place}: messages[{number}] is {one!r:.80}; it must be an object with a role")
        messages.append({name: value for name, value in one.items() if value is not None})
    offered = {name: record[name] for name in ("tools", "functions") if record.get(name)}
    try:
        read = chat_completions.parse({"model": MODEL, "messages": messages, **offered})
    except GatewayError as error:
        raise ConfigError(f"{place}: {error.message}") from error
    for number, message in enumerate(read.messages):
        for call in message.get("tool_calls") or ():
            if not isinstance(call["function"].get("arguments"), str | Mapping):
                raise ConfigError(f"{place}: messages[{number}].tool_calls has {call!r:.80}: it has no arguments")
    return read.messages, read.tools
