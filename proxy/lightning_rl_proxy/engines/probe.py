"""What an engine server is able to do, asked once when it is registered: the questions to vLLM, and how any is asked.

A server that lacks what the gateway needs is refused then, by the name of the missing flag, and not at some later call.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable

T = TypeVar("T")

GENERATE = "/inference/v1/generate"
MODELS = "/v1/models"
TOP = 5  # logprobs by which the kind is told
_SECONDS = 45.0  # for all questions; an engine that was never asked before may still compile
_MASS = 1.001  # what probabilities add up to, at most
_HOW = "start it as: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out"


# `raw` are log softmax(logits), `processed` are of what was sampled from: after penalties, temperature and truncation.
LogprobsMode = Literal["raw", "processed"]


class _Entry(msgspec.Struct):
    token_id: int
    logprob: float


class _Position(msgspec.Struct):
    top_logprobs: list[_Entry]


class _ProbeLogprobs(msgspec.Struct):
    content: list[_Position]


class _ProbeChoice(msgspec.Struct):
    logprobs: _ProbeLogprobs


class _ProbeAnswer(msgspec.Struct):
    choices: list[_ProbeChoice]


class _Paused(msgspec.Struct):
    is_paused: bool


class _ProbeModel(msgspec.Struct):
    max_model_len: int | None = None


class _ProbeModels(msgspec.Struct):
    data: list[_ProbeModel]


class ProbedServer:
    """The server at `url`, which is asked over `session`; `name` is what it should be."""

    def __init__(self, url: str, session: aiohttp.ClientSession, name: str) -> None:
        self.url = url
        self._session = session
        self._name = name

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and body of the answer. Raises EngineUnavailable where there is none."""
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"engine {self.url} cannot be reached: {error}; start it first") from error

    def decoded(self, body: bytes, expected: type[T], path: str) -> T:
        """The answer's record. Raises EngineRefused for an answer that does not parse."""
        try:
            return msgspec.json.decode(body, type=expected)
        except msgspec.DecodeError as error:
            raise EngineRefused(
                f"{self.url}{path} does not answer as {self._name} does ({error}): {body[:200]!r}"
            ) from error

    def check(self, status: int, reply: bytes, path: str) -> None:
        """Raises EngineRefused or EngineUnavailable for an answer that is an error."""
        if status == 401:
            raise EngineRefused(f"engine {self.url} wants an API key; start it without --api-key, behind a firewall")
        if status >= 500:
            raise EngineUnavailable(f"engine {self.url}{path} answered {status}: {reply[:500]!r}")
        if status != 200:
            raise EngineRefused(f"engine {self.url}{path} answered {status}: {reply[:500]!r}")


async def asked(url: str, name: str, questions: Callable[[ProbedServer], Awaitable[T]]) -> T:
    """What the `questions` find out about the server at `url`; they have a bounded time."""
    url = url.rstrip("/")
    try:
        async with asyncio.timeout(_SECONDS), aiohttp.ClientSession() as session:
            return await questions(ProbedServer(url, session, name))
    except TimeoutError as error:
        raise EngineUnavailable(
            f"engine {url} did not answer within {_SECONDS:g} s; try again when it is less busy"
        ) from error


def logprobs_mode(hot: dict[int, float], cold: dict[int, float]) -> LogprobsMode | None:
    """Which kind the logprobs are that are told at temperature 1 (`hot`) and 0.5 (`cold`); None: they are logits.

    Halving the temperature doubles how far apart they lie; raw ones stay where they are.
    """
    # A server that tells no other tokens than the sampled one leaves it open; `raw` claims least: away from temperature
    # 1 such logprobs are recomputed.
    if not (hot and cold):
        return "raw"
    if sum(math.exp(logprob) for logprob in hot.values()) > _MASS:
        return None
    both = sorted((hot[token], cold[token]) for token in hot.keys() & cold.keys())
    spread_hot, spread_cold = (both[-1][i] - both[0][i] for i in (0, 1))
    return "processed" if spread_cold > 1.5 * spread_hot else "raw"


async def probe(url: str) -> LogprobsMode:
    """What the logprobs of the vLLM server at `url` are.

    Raises EngineUnavailable where it does not answer, or is paused, and EngineRefused where it lacks what is needed.
    """
    return await asked(url, "vLLM 0.32", _questions)


async def probe_context(url: str) -> int | None:
    """How many tokens prompt and answer may have together at the server at `url`; None where it does not say."""
    try:
        return await asked(url, "an engine", context_of)
    except (EngineUnavailable, EngineRefused):
        return None


async def context_of(server: ProbedServer) -> int | None:
    """What `/v1/models` says of it. Raises EngineUnavailable or EngineRefused."""
    status, answer = await server.ask("GET", MODELS)
    server.check(status, answer, MODELS)
    models = server.decoded(answer, _ProbeModels, MODELS).data
    return models[0].max_model_len if models else None


async def _questions(server: ProbedServer) -> LogprobsMode:
    lacking = [*await _lacks_dev_mode(server), *await _lacks_token_endpoint(server)]
    if lacking:
        raise EngineRefused(f"engine {server.url} lacks {' and '.join(lacking)}; {_HOW}")
    mode = logprobs_mode(await _top_logprobs(server, 1.0), await _top_logprobs(server, 0.5))
    if mode is None:
        raise EngineRefused(
            f"engine {server.url} gives logits as logprobs; start it with --logprobs-mode processed_logprobs or "
            "raw_logprobs"
        )
    return mode


async def _lacks_dev_mode(server: ProbedServer) -> list[str]:
    status, answer = await server.ask("GET", "/is_paused")
    if status == 404:
        return ["pause, resume and weight updates (VLLM_SERVER_DEV_MODE=1 in its environment)"]
    server.check(status, answer, "/is_paused")
    if server.decoded(answer, _Paused, "/is_paused").is_paused:
        raise EngineUnavailable(f"engine {server.url} is paused: it answers nothing until POST {server.url}/resume")
    return []


async def _lacks_token_endpoint(server: ProbedServer) -> list[str]:
    # Without any field: it is refused as such where the endpoint is there, and nothing is sampled.
    status, answer = await server.ask("POST", GENERATE, {})
    if status == 403:
        return ["the token endpoint (--enable-scale-out)"]
    if status == 404:
        raise EngineRefused(f"{server.url}{GENERATE} is not there: this is no vLLM server, or one older than 0.32")
    if status not in (400, 422):
        server.check(status, answer, GENERATE)
    return []


async def _top_logprobs(server: ProbedServer, temperature: float) -> dict[int, float]:
    """The likeliest tokens at the place behind one fixed token, and the logprobs that are told of them; none where the
    server refuses to."""
    parameters = {"max_tokens": 1, "temperature": temperature, "logprobs": TOP}
    status, answer = await server.ask("POST", GENERATE, {"token_ids": [0], "sampling_params": parameters})
    if status == 400:
        return {}
    server.check(status, answer, GENERATE)
    [choice] = server.decoded(answer, _ProbeAnswer, GENERATE).choices
    [position] = choice.logprobs.content
    return {entry.token_id: entry.logprob for entry in position.top_logprobs}
