"""OpenAI Chat Completions: request bytes -> `Request`, sampled answers -> response bytes. Pure.

A field is honoured, or a hint that changes no token (accepted), or changes the answer and cannot be honoured (400
naming it), or unknown (accepted, recorded and counted). What goes on to a chat backend is `Relayed`: there all fields
but `n` and `stream` are the service's business.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering import Answer
from lightning_rl_proxy.sampling import Sampling, published

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


class Relayed(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request that goes on to a service: `fields` as they came, without `n` and `stream`."""

    model: str | None
    messages: list[dict[str, Any]]
    tools: Any
    n: int
    fields: dict[str, Any]

    def body(self, sampling: Mapping[str, float | int], index: int) -> dict[str, Any]:
        """The request for choice `index`. Their seeds differ: equal requests with one seed get one answer n times."""
        body = published(self.fields, sampling)
        if index and isinstance(body.get("seed"), int):
            body["seed"] += index
        return body


class _RelayedWire(msgspec.Struct):
    messages: list[dict[str, Any]]
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    stream: bool | None = None


def decode(body: bytes) -> dict[str, Any]:
    """The fields of a request. Raises GatewayError(400) for a body that is no JSON object."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise _no_request(error) from error


def parse_relayed(fields: dict[str, Any]) -> Relayed:
    """The request that goes on to a service. Raises GatewayError(400) for what no service could be asked."""
    try:
        wire = msgspec.convert(fields, _RelayedWire)
    except msgspec.ValidationError as error:
        raise _no_request(error) from error
    if wire.stream:
        raise _unsupported("stream", True)
    model = fields.get("model")
    return Relayed(
        model=model if isinstance(model, str) else None,
        messages=wire.messages,
        tools=fields.get("tools"),
        n=wire.n or 1,
        fields={name: value for name, value in fields.items() if name not in ("n", "stream")},
    )


def merge(answers: Sequence[dict[str, Any]]) -> bytes:
    """One response body of answers that have one choice each; alone, an answer stays as the service gave it."""
    if len(answers) == 1:
        return msgspec.json.encode(answers[0])
    merged = dict(answers[0])
    merged["choices"] = [answer["choices"][0] | {"index": i} for i, answer in enumerate(answers)]
    if isinstance(merged.get("usage"), dict):
        merged["usage"] = _usage([answer.get("usage") for answer in answers])
    return msgspec.json.encode(merged)


def _usage(usages: Sequence[Any]) -> dict[str, int]:
    """The prompt once, all that was sampled; the finer details of single answers cannot be added up."""
    counts = [usage if isinstance(usage, dict) else {} for usage in usages]
    prompt = counts[0].get("prompt_tokens") or 0
    sampled = sum(count.get("completion_tokens") or 0 for count in counts)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def parse(fields: dict[str, Any]) -> Request:
    """The request for a token engine. Raises GatewayError(400) naming what is wrong or cannot be honoured."""
    try:
        wire = msgspec.convert(fields, _Wire)
    except msgspec.ValidationError as error:
        raise _no_request(error) from error
    ignored = []
    for name, value in fields.items():
        if name in _HONOURED or name in _HINTS or value is None:
            continue
        if name not in _OFF:
            ignored.append(name)
        elif value not in _OFF[name]:
            raise _unsupported(name, value)
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


def _no_request(error: msgspec.DecodeError) -> GatewayError:
    return GatewayError(400, f"the request body is not a chat completion request: {error}")


def _unsupported(name: str, value: Any) -> GatewayError:
    return GatewayError(
        400, f"{name}={value!r} is not supported here; leave it out", param=name, kind="unsupported_parameter"
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
