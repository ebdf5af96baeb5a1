"""What a vLLM server is able to do, asked once when it is registered.

A server that lacks what the gateway needs is refused then, by the name of the missing flag, and not at some later call.
"""

import asyncio
import math
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable

T = TypeVar("T")

GENERATE = "/inference/v1/generate"
_SECONDS = 45.0  # for all questions; an engine that was never asked before may still compile
_TOP = 5  # logprobs by which the kind is told
_MASS = 1.001  # what probabilities add up to, at most
_HOW = "start it as: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out"


# `raw` are log softmax(logits), `processed` are of what was sampled from: after penalties, temperature and truncation.
LogprobsMode = Literal["raw", "processed"]


class _Entry(msgspec.Struct):
    token_id: int
    logprob: float


class _Position(msgspec.Struct):
    top_logprobs: list[_Entry]


class _Logprobs(msgspec.Struct):
    content: list[_Position]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Paused(msgspec.Struct):
    is_paused: bool


async def probe(url: str) -> LogprobsMode:
    """What the logprobs of the vLLM server at `url` are.

    Raises EngineUnavailable where it does not answer, or is paused, and EngineRefused where it lacks what is needed.
    """
    server = _Server(url.rstrip("/"))
    try:
        async with asyncio.timeout(_SECONDS), aiohttp.ClientSession() as session:
            return await _probe(server, session)
    except TimeoutError as error:
        raise EngineUnavailable(
            f"engine {server.url} did not answer within {_SECONDS:g} s; try again when it is less busy"
        ) from error


async def _probe(server: "_Server", session: aiohttp.ClientSession) -> LogprobsMode:
    lacking = [*await server.lacks_dev_mode(session), *await server.lacks_token_endpoint(session)]
    if lacking:
        raise EngineRefused(f"engine {server.url} lacks {' and '.join(lacking)}; {_HOW}")
    hot, cold = [await server.top_logprobs(session, temperature) for temperature in (1.0, 0.5)]
    # A server that tells no other tokens than the sampled one leaves it open; `raw` claims least: away from temperature
    # 1 such logprobs are recomputed.
    return _kind(server.url, hot, cold) if hot and cold else "raw"


class _Server:
    """The questions."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def lacks_dev_mode(self, session: aiohttp.ClientSession) -> list[str]:
        status, said = await self._ask(session, "GET", "/is_paused")
        if status == 404:
            return ["pause, resume and weight updates (VLLM_SERVER_DEV_MODE=1 in its environment)"]
        self._check(status, said, "/is_paused")
        if self._decoded(said, _Paused, "/is_paused").is_paused:
            raise EngineUnavailable(f"engine {self.url} is paused: it answers nothing until POST {self.url}/resume")
        return []

    async def lacks_token_endpoint(self, session: aiohttp.ClientSession) -> list[str]:
        # Without any field: it is refused as such where the endpoint is there, and nothing is sampled.
        status, said = await self._ask(session, "POST", GENERATE, {})
        if status == 403:
            return ["the token endpoint (--enable-scale-out)"]
        if status == 404:
            raise EngineRefused(f"{self.url}{GENERATE} is not there: this is no vLLM server, or one older than 0.32")
        if status not in (400, 422):
            self._check(status, said, GENERATE)
        return []

    async def top_logprobs(self, session: aiohttp.ClientSession, temperature: float) -> dict[int, float]:
        """The likeliest tokens at the place behind one fixed token, and the logprobs that are told of them; none where
        the server refuses to."""
        parameters = {"max_tokens": 1, "temperature": temperature, "logprobs": _TOP}
        body = {"token_ids": [0], "sampling_params": parameters}
        status, said = await self._ask(session, "POST", GENERATE, body)
        if status == 400:
            return {}
        self._check(status, said, GENERATE)
        [choice] = self._decoded(said, _Answer, GENERATE).choices
        [position] = choice.logprobs.content
        return {entry.token_id: entry.logprob for entry in position.top_logprobs}

    async def _ask(self, session: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        try:
            async with session.request(method, self.url + path, json=body) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"engine {self.url} cannot be reached: {error}; start it first") from error

    def _decoded(self, said: bytes, expected: type[T], path: str) -> T:
        try:
            return msgspec.json.decode(said, type=expected)
        except msgspec.DecodeError as error:
            raise EngineRefused(
                f"{self.url}{path} does not answer as vLLM 0.32 does ({error}): {said[:200]!r}"
            ) from error

    def _check(self, status: int, said: bytes, path: str) -> None:
        if status == 401:
            raise EngineRefused(f"engine {self.url} wants an API key; start it without --api-key, behind a firewall")
        if status >= 500:
            raise EngineUnavailable(f"engine {self.url}{path} answered {status}: {said[:500]!r}")
        if status != 200:
            raise EngineRefused(f"engine {self.url}{path} answered {status}: {said[:500]!r}")


def _kind(url: str, hot: dict[int, float], cold: dict[int, float]) -> LogprobsMode:
    """Which kind the logprobs are that are told at temperature 1 (`hot`) and 0.5 (`cold`).

    Halving the temperature doubles how far apart they lie; raw ones stay where they are.
    """
    if sum(math.exp(logprob) for logprob in hot.values()) > _MASS:
        raise EngineRefused(
            f"engine {url} gives logits as logprobs; start it with --logprobs-mode processed_logprobs or raw_logprobs"
        )
    both = sorted((hot[token], cold[token]) for token in hot.keys() & cold.keys())
    spread_hot, spread_cold = (both[-1][i] - both[0][i] for i in (0, 1))
    return "processed" if spread_cold > 1.5 * spread_hot else "raw"
