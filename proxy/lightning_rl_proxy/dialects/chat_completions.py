"""OpenAI Chat Completions: request bytes -> `Request`, sampled answers -> response bytes. Pure.

A field is honoured, or a hint that changes no token (accepted), or changes the answer and cannot be honoured (400
naming it), or unknown (accepted, recorded and counted).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering import Answer
from lightning_rl_proxy.sampling import Sampling

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

_HONOURED = frozenset(
    {
        "model",
        "messages",
        "tools",
        "tool_choice",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "logprobs",
    }
)
_HINTS = frozenset(
    {"user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
)
# Accepted only at the value that means "off": honouring them otherwise would need what the engine does not do yet.
_OFF: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "stop": ([],),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": (),
    "function_call": (),
    "web_search_options": (),
}


class _Wire(msgspec.Struct):
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request in internal form: messages and tools as the renderer takes them."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    sampling: Sampling
    n: int
    logprobs: bool
    ignored_fields: list[str]


def parse(body: bytes) -> Request:
    """The request in `body`. Raises GatewayError(400) naming the field that is wrong or cannot be honoured."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        wire = msgspec.convert(fields, _Wire)
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise GatewayError(400, f"the request body is not a chat completion request: {error}") from error
    ignored = []
    for name, value in fields.items():
        if name in _HONOURED or name in _HINTS or value is None:
            continue
        if name not in _OFF:
            ignored.append(name)
        elif value not in _OFF[name]:
            raise GatewayError(
                400, f"{name}={value!r} is not supported here; leave it out", param=name, kind="unsupported_parameter"
            )
    if not wire.messages:
        raise GatewayError(400, "messages is empty; send at least one", param="messages")
    _check_ranges(wire)
    return Request(
        model=wire.model,
        messages=[_message(i, m) for i, m in enumerate(wire.messages)],
        tools=_tools(wire),
        sampling=Sampling(
            temperature=wire.temperature,
            top_p=wire.top_p,
            top_k=wire.top_k,
            max_tokens=wire.max_completion_tokens if wire.max_completion_tokens is not None else wire.max_tokens,
            seed=wire.seed,
        ),
        n=wire.n or 1,
        logprobs=bool(wire.logprobs),
        ignored_fields=ignored,
    )


def serialize(
    call_id: str, model: str, created: int, answers: Sequence[Answer], prompt_tokens: int, logprobs: bool
) -> bytes:
    """The response body; `created` is in seconds since the epoch."""
    sampled = sum(len(answer.token_ids) for answer in answers)
    return msgspec.json.encode(
        {
            "id": f"chatcmpl-{call_id}",
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [_choice(i, answer, logprobs) for i, answer in enumerate(answers)],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": sampled,
                "total_tokens": prompt_tokens + sampled,
            },
        }
    )


def serialize_error(error: GatewayError) -> bytes:
    """An error in the shape that OpenAI's SDKs read."""
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}}
    )


def _choice(index: int, answer: Answer, logprobs: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = answer.tool_calls
        message["content"] = answer.content or None
    finish = "tool_calls" if answer.tool_calls and answer.finish_reason == "stop" else answer.finish_reason
    choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": finish, "logprobs": None}
    if logprobs and answer.logprobs is not None:
        choice["logprobs"] = {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(answer.token_texts(), answer.logprobs, strict=True)
            ]
        }
    return choice


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise GatewayError(
            400, f"messages[{index}].role is {role!r}; it is one of {sorted(_ROLES)}", param=f"messages[{index}].role"
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(index, part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise GatewayError(
            400, f"messages[{index}].content is neither text nor parts", param=f"messages[{index}].content"
        )
    return message | {"role": "system" if role == "developer" else role, "content": content or ""}


def _part(index: int, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise GatewayError(
        400, f"messages[{index}] has a part of type {kind!r}; this model takes text", param=f"messages[{index}].content"
    )


def _tools(wire: _Wire) -> list[dict[str, Any]] | None:
    if wire.tool_choice not in (None, "auto", "none"):
        raise GatewayError(
            400,
            f"tool_choice={wire.tool_choice!r} is not supported here; use 'auto' or 'none'",
            param="tool_choice",
            kind="unsupported_parameter",
        )
    return None if wire.tool_choice == "none" else wire.tools or None


def _check_ranges(wire: _Wire) -> None:
    for name, low, high in (
        ("temperature", 0, 100),
        ("top_p", 1e-6, 1),
        ("n", 1, 128),
        ("max_tokens", 1, 2**31),
        ("max_completion_tokens", 1, 2**31),
    ):
        value = getattr(wire, name)
        if value is not None and not low <= value <= high:
            raise GatewayError(400, f"{name}={value} is out of range; it is from {low} to {high}", param=name)
