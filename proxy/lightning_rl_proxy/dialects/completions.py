"""OpenAI Completions: the client writes the prompt itself, as text or as token ids, and gets text behind it. Pure.

Such a prompt continues an earlier call where it repeats that call's prompt and sampled text to the letter.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from lightning_rl_proxy.dialects.base import (
    Opening,
    Request,
    Tables,
    no_request,
    sse,
)
from lightning_rl_proxy.dialects.chat_completions import (
    PING,
    error_event,
    includes_usage,
    names_tokens_by_id,
    serialize_error,
    stops,
    usage,
)
from lightning_rl_proxy.dialects.wire.completions import CompletionsWire
from lightning_rl_proxy.dialects.wire.engine_fields import ENGINE_FIELDS, ENGINE_OFF, unsupported
from lightning_rl_proxy.dialects.wire.sampling import TokenId
from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.rendering.base import Delta, ParsedAnswer, SampledToken

__all__ = ["NAME", "PING", "TABLES", "error_event", "events", "parse", "serialize", "serialize_error"]

NAME = "completions"

TABLES = Tables(
    honoured=frozenset(
        {
            "model", "prompt", "n", "echo", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
            "presence_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "max_tokens", "logprobs",
            "stream", "stream_options", "best_of", "ignore_eos", "return_token_ids",
            "return_tokens_as_token_ids",
        }
        | ENGINE_FIELDS
    ),
    hints=frozenset({"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}),
    off={name: off for name, off in ENGINE_OFF.items() if name != "ignore_eos"}
    | {"suffix": ("",), "response_format": ({"type": "text"},)},
)  # fmt: skip

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


def parse(fields: dict[str, Any]) -> Request:
    """See `Dialect`. An absent `max_tokens` means 16, as it does at OpenAI."""
    try:
        wire = msgspec.convert(fields, CompletionsWire)
    except msgspec.ValidationError as error:
        raise no_request("completion", error) from error
    ignored = TABLES.ignored(fields)
    n = wire.n or 1
    if wire.best_of is not None and wire.best_of != n:
        raise unsupported("best_of", wire.best_of)
    if wire.logprobs is not None and wire.logprobs > 1:  # of the most likely tokens, the sampled one alone is known
        ignored.append("logprobs")
    if wire.echo and wire.logprobs is not None:
        raise GatewayError(400, "echo with logprobs is not supported: the prompt has none", param="echo")
    prompt = _prompt(wire.prompt)
    if wire.echo and not isinstance(prompt, str):
        raise GatewayError(400, "echo needs a prompt of text, not of token ids", param="echo")
    return Request(
        model=wire.model,
        messages=[],
        prompt=prompt,
        sampling=wire.sampling(
            max_tokens=_DEFAULT_MAX_TOKENS if wire.max_tokens is None else wire.max_tokens,
            stop=stops("stop", wire.stop),
            ignore_eos=wire.ignore_eos or None,
        ),
        n=n,
        stream=bool(wire.stream),
        logprobs=wire.logprobs is not None,
        token_ids=bool(wire.return_token_ids),
        ignored_fields=ignored,
        fields=fields,
    )


def serialize(request: Request, opening: Opening, answers: Sequence[ParsedAnswer]) -> bytes:
    """See `Dialect`."""
    choices = []
    for index, answer in enumerate(answers):
        tokens = answer.tokens() if request.logprobs else []
        choice = _choice(index, echoed(request) + answer.content, _logprobs(tokens, 0, request), answer.finish_reason)
        if request.token_ids:
            choice |= {"prompt_token_ids": opening.prompt_ids, "token_ids": answer.token_ids}
        choices.append(choice)
    return msgspec.json.encode(_opened(opening) | {"choices": choices, "usage": usage(opening, answers)})


def events(request: Request, opening: Opening) -> "TextEvents":
    """See `Dialect`."""
    return TextEvents(request, opening)


class TextEvents:
    """See `Events`: `text_completion` objects, each with some text more."""

    def __init__(self, request: Request, opening: Opening) -> None:
        self._request = request
        self._echoed = echoed(request)
        self._opening = opening
        self._usage = includes_usage(request)
        self._chunk = _opened(opening) | ({"usage": None} if self._usage else {})
        self._offsets = [0] * request.n

    def start(self) -> bytes:
        if not self._echoed and not self._request.token_ids:
            return b""
        prompt = {"prompt_token_ids": self._opening.prompt_ids} if self._request.token_ids else {}
        begun = (_choice(index, self._echoed, None, None) | prompt for index in range(self._request.n))
        return b"".join(self._piece(choice) for choice in begun)

    def delta(self, index: int, delta: Delta) -> bytes:
        tokens = delta.tokens or []
        choice = _choice(index, delta.text, _logprobs(tokens, self._offsets[index], self._request), None)
        self._offsets[index] += sum(len(token.text) for token in tokens)
        if self._request.token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        return self._piece(choice)

    def stop(self, index: int, answer: ParsedAnswer) -> bytes:
        return self._piece(_choice(index, "", None, answer.finish_reason))

    def end(self, answers: Sequence[ParsedAnswer]) -> bytes:
        counts = sse(self._chunk | {"choices": [], "usage": usage(self._opening, answers)}) if self._usage else b""
        return counts + b"data: [DONE]\n\n"

    def _piece(self, choice: dict[str, Any]) -> bytes:
        return sse(self._chunk | {"choices": [choice]})


def echoed(request: Request) -> str:
    """The prompt's text where the client wants it before the answer."""
    return request.prompt if request.fields.get("echo") is True and isinstance(request.prompt, str) else ""


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    """One prompt: its text, its token ids, or a list that holds nothing else."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if prompt:
            return prompt
    elif prompt:
        try:
            return msgspec.convert(prompt, list[TokenId])
        except msgspec.ValidationError as error:
            raise GatewayError(
                400, "prompt is one text or one list of token ids; send several prompts one by one", param="prompt"
            ) from error
    raise GatewayError(400, "prompt is empty", param="prompt")


def _opened(opening: Opening) -> dict[str, Any]:
    return {
        "id": f"cmpl-{opening.call_id}",
        "object": "text_completion",
        "created": opening.created,
        "model": opening.model,
    }


def _choice(index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(tokens: Sequence[SampledToken], offset: int, request: Request) -> dict[str, Any] | None:
    """Offsets are where each token's text begins, counted over the texts of the sampled tokens."""
    if not tokens or not request.logprobs or tokens[0].logprob is None:
        return None
    as_ids = names_tokens_by_id(request)
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [f"token_id:{token.id}" if as_ids else token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }
