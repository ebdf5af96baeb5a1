"""SGLang's native wire, `POST /generate` with `input_ids`: token in, token out, as SGLang 0.5.23 has it.

What it says there, and what this module stands on:

- `output_ids` has the stop token; events of a stream hold all tokens so far, or with --incremental-streaming-output the
  new ones. Either way `meta_info.completion_tokens` counts all, and so the last of `output_ids` that are not yet
  counted are new. (The event of an abort repeats a token of an incremental stream.)
- `meta_info.output_token_logprobs` are `[logprob, token_id, null]`, of log softmax(logits / temperature) before any
  truncation, or without the temperature where SGLANG_RETURN_ORIGINAL_LOGPROB is set; at temperature 0 of temperature 1.
  Penalties, biases and grammars have changed the logits by then.
- `sampling_params` refuses names that it does not know; what is absent is the server's (--preferred-sampling-params),
  max_new_tokens 128, and null the end of the context. A prompt and a limit that exceed it together are refused.
- With `ignore_eos` it looks at no stop token, `stop_token_ids` included.
- An order to abort means all requests whose id begins with that one. A connection that is closed is seen after seconds.
- A pause that retracts keeps the tokens, gives up their attention cache and lets it be flushed; on going on it is
  computed again, by the weights of then. One that keeps the cache in place makes such a flush fail.
- `/v1/loads` has the queue of each data-parallel rank as its scheduler published it last; zeros before it did.
- A token outside the vocabulary (logits that are not finite) is replaced by a stop token; the match then is a text.
"""

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from lightning_rl_proxy.engines.base import (
    EngineFinish,
    EngineRefused,
    EngineTokens,
    EngineUnavailable,
    Load,
    TokenRequest,
)
from lightning_rl_proxy.engines.client import HttpResponse
from lightning_rl_proxy.engines.http import EngineConnection, Problem, events, finish, refusal
from lightning_rl_proxy.engines.sglang_probe import GENERATE, NAME, READY, Abilities
from lightning_rl_proxy.engines.token_labels import Labelled, Labels, is_biased, known
from lightning_rl_proxy.sampling import Sampling

T = TypeVar("T")

_ABILITIES = frozenset(
    {"min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos"}
)
_CONSTRAINTS = frozenset({"json_schema", "regex", "choice", "grammar"})
_NEEDS = f"{NAME} is the oldest that has it"
_MODEL = "/model_info"
_LOADS = "/v1/loads?include=core"
_ABORT_SECONDS = 2.0
_ANY_OBJECT = {"type": "object"}


class _Reason(msgspec.Struct):
    """Why a generation ended. An abort with a status is a refusal."""

    type: str
    matched: int | list[int] | str | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    finish_reason: _Reason | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    weight_versions: list[Labelled] | None = None


class _SglangGenerated(msgspec.Struct):
    """A whole answer, or an event of a stream."""

    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: Problem | None = None


class _Weights(msgspec.Struct):
    weight_version: str | int | None = None


class _Rank(msgspec.Struct):
    num_waiting_reqs: int
    max_running_requests: int


class _Loads(msgspec.Struct):
    loads: list[_Rank]


_generated = msgspec.json.Decoder(_SglangGenerated)
_weights = msgspec.json.Decoder(_Weights)
_loads = msgspec.json.Decoder(_Loads)


class SGLangEngine:
    """One SGLang server, which labels its tokens with the policy version that it was told of last.

    What it sampled before is believed to be of the version that it was registered with. Of two requests the one with
    the lower `priority` is more urgent, as with vLLM.
    """

    def __init__(
        self,
        *,
        model: str,
        url: str,
        stop_token_ids: list[int],
        policy_version: int,
        able: Abilities,
    ) -> None:
        self.model = model
        self.policy_version = policy_version
        self.context = able.room
        self.abilities = _ABILITIES | _CONSTRAINTS if able.schemas else _ABILITIES
        self._able = able
        self._stop_token_ids = stop_token_ids
        self._labels = Labels(policy_version)
        self._server = EngineConnection(url)
        self.url = self._server.url
        self._paused = False

    async def generate(self, request: TokenRequest) -> AsyncGenerator[EngineTokens | EngineFinish]:
        """See `Engine`. Leaving the iterator early closes the connection and orders an abort."""
        sampling = request.sampling
        if sampling.ignore_eos and sampling.stop_token_ids:
            raise EngineRefused("SGLang stops at no token where ignore_eos is true: leave out stop_token_ids, or it")
        rid = f"{request.request_id}-{secrets.token_hex(8)}"  # no other request's id begins like this
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": request.prompt if request.encoded is None else msgspec.Raw(request.encoded),
            "sampling_params": self._parameters(sampling, len(request.prompt)),
            "return_logprob": not is_biased(sampling),
            "stream": request.stream,
        }
        if sampling.priority:
            body["priority"] = -sampling.priority
        await self._tell_version()
        ended = False
        try:
            async with aclosing(self._sample(body)) as parts:
                async for part in parts:
                    ended = isinstance(part, EngineFinish)
                    yield part
        except (GeneratorExit, asyncio.CancelledError):
            if not ended:
                await self._abort(rid)
            raise

    async def check(self) -> int:
        """See `Engine`. While it is paused a server calls itself not ready, which is well if the pause is ours."""
        status, _ = await self._server.get(READY)
        if status != 200 and not (status == 503 and self._paused):
            raise EngineUnavailable(f"{self.url}{READY} answered {status}")
        status, body = await self._server.get(_MODEL)
        if status != 200:
            raise EngineUnavailable(f"{self.url}{_MODEL} answered {status}")
        return self._labels.fingerprint_of(_decoded(self.url + _MODEL, body, _weights).weight_version)

    async def load(self) -> Load | None:
        """See `Engine`."""
        status, body = await self._server.get(_LOADS)
        if status != 200:
            return None
        ranks = _decoded(self.url + _LOADS, body, _loads).loads
        capacity = sum(rank.max_running_requests for rank in ranks)
        return Load(sum(rank.num_waiting_reqs for rank in ranks), capacity) if capacity else None

    async def pause(self) -> None:
        """See `Engine`. Tokens are kept, and their attention cache is computed anew by the weights after the pause."""
        await self._order("/pause_generation", {"mode": "retract"})
        self._paused = True

    async def resume(self) -> None:
        """See `Engine`."""
        await self._tell_version()
        await self._order("/continue_generation", {})
        self._paused = False

    def logprob_kind(self, sampling: Sampling) -> str:
        """See `Engine`."""
        if sampling.temperature == 0:
            return "greedy"
        return "sampled" if self._able.tempered or sampling.temperature == 1 else "raw"

    async def close(self) -> None:
        """See `Engine`."""
        await self._server.close()

    def _parameters(self, sampling: Sampling, prompt_tokens: int) -> dict[str, Any]:
        """Every parameter by SGLang's name; also those that are not given, since a server may have its own defaults."""
        parameters: dict[str, Any] = {
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p or 0.0,
            "frequency_penalty": sampling.frequency_penalty or 0.0,
            "presence_penalty": sampling.presence_penalty or 0.0,
            "repetition_penalty": 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
            "max_new_tokens": self._limit(sampling.max_tokens, prompt_tokens),
            "stop_token_ids": [
                *([] if sampling.ignore_eos else self._stop_token_ids),
                *(sampling.stop_token_ids or ()),
            ],
        }
        if sampling.min_tokens:
            parameters["min_new_tokens"] = sampling.min_tokens
        if sampling.ignore_eos:
            parameters["ignore_eos"] = True
        if sampling.seed is not None:
            parameters["sampling_seed"] = sampling.seed
        if sampling.logit_bias:
            parameters["logit_bias"] = sampling.logit_bias
        if sampling.json_schema is not None:
            parameters["json_schema"] = msgspec.json.encode(sampling.json_schema or _ANY_OBJECT).decode()
        if sampling.choice is not None:
            parameters["regex"] = f"({'|'.join(map(re.escape, sampling.choice))})"
        if sampling.regex is not None:
            parameters["regex"] = sampling.regex
        if sampling.grammar is not None:
            parameters["ebnf"] = sampling.grammar
        return parameters

    def _limit(self, max_tokens: int | None, prompt_tokens: int) -> int | None:
        """What of `max_tokens` the context has room for; of a prompt that has none SGLang says so itself."""
        if max_tokens is None or self._able.room is None:
            return max_tokens
        return max(1, min(max_tokens, self._able.room - prompt_tokens))

    async def _sample(self, body: dict[str, Any]) -> AsyncGenerator[EngineTokens | EngineFinish]:
        async with self._server.post(GENERATE, body) as response:
            sampled = 0
            async for answer, meta in self._answers(response, stream=body["stream"]):
                new = meta.completion_tokens - sampled
                if not 0 <= new <= len(answer.output_ids):
                    raise EngineUnavailable(
                        f"engine {self.url} has sampled {meta.completion_tokens} tokens of request {body['rid']}, and "
                        f"gave {len(answer.output_ids)} where {new} were new"
                    )
                sampled = meta.completion_tokens
                if new:
                    yield _tokens(answer.output_ids[-new:], meta)
                if meta.finish_reason is not None:
                    yield self._finish(meta.finish_reason, answer.output_ids, meta, sampled)
                    await finish(response)
                    return

    async def _answers(self, response: HttpResponse, *, stream: bool) -> AsyncIterator[tuple[_SglangGenerated, _Meta]]:
        """The answers in a response: those of a stream's events, or the one that it is. Raises what they refuse."""
        async for data in events(response) if stream else _whole(response):
            answer = _decoded(response.url, data, _generated)
            if answer.error is not None:
                raise refusal(response.url, answer.error.status, data)
            if answer.meta_info is None:
                raise EngineUnavailable(f"{response.url} answered without meta_info: {data[:200]!r}")
            self._check(answer.meta_info.finish_reason)
            yield answer, answer.meta_info

    def _check(self, reason: _Reason | None) -> None:
        """Raises for an end that is a refusal, or whose last token the model never sampled."""
        if reason is None:
            return
        if reason.type == "abort" and reason.status_code is not None:
            raise refusal(self.url + GENERATE, reason.status_code, (reason.message or "").encode())
        if reason.type == "stop" and isinstance(reason.matched, str):  # no stop strings are ever asked for
            raise EngineUnavailable(f"engine {self.url} sampled no token of the vocabulary: {reason.matched}")

    def _finish(self, reason: _Reason, output_ids: list[int], meta: _Meta, sampled: int) -> EngineFinish:
        stop = None
        if reason.type == "stop":
            stop = reason.matched if isinstance(reason.matched, int) else output_ids[-1]
        return EngineFinish(reason.type, stop, self._labels.ranges(meta.weight_versions, self.policy_version, sampled))

    async def _tell_version(self) -> None:
        """Let the server label what it samples from now on, where the version is another than it was told."""
        version = self.policy_version
        if version != self._labels.current:
            await self._order("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
            self._labels.current = version

    async def _abort(self, rid: str) -> None:
        """Order an abort; a server that cannot be told sees the closed connection in the end."""
        with contextlib.suppress(EngineUnavailable, EngineRefused):
            await self._server.order("/abort_request", {"rid": rid}, needs=_NEEDS, seconds=_ABORT_SECONDS)

    async def _order(self, path: str, body: dict[str, Any]) -> None:
        await self._server.order(path, body, needs=_NEEDS)


def _decoded(url: str, data: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise EngineUnavailable(f"{url} does not answer as {NAME} does ({error}): {data[:200]!r}") from error


async def _whole(response: HttpResponse) -> AsyncIterator[bytes]:
    yield await response.read()


def _tokens(token_ids: list[int], meta: _Meta) -> EngineTokens:
    """The tokens with their logprobs, which are those of the same tokens or none."""
    logprobs = (meta.output_token_logprobs or [])[-len(token_ids) :]
    if [token for _, token, _ in logprobs] != token_ids:
        return EngineTokens(token_ids, None)
    return EngineTokens(token_ids, known([logprob for logprob, _, _ in logprobs]))
