"""One engine server over HTTP: its connections, its answers and events, and its refusals in the gateway's words.

What a server's tokens mean is the business of its own module; nothing here knows of sampling.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable
from lightning_rl_proxy.engines.client import Client, HttpRequest, HttpResponse, NoAnswer
from lightning_rl_proxy.errors import PromptTooLong

# How the embedded engine, vLLM and SGLang (before and after it has queued it) say that a prompt does not fit.
_TOO_LONG = (
    re.compile(r"a prompt of (?P<prompt>\d+) tokens does not fit: max_model_len is (?P<limit>\d+)"),
    re.compile(r"prompt \(length (?P<prompt>\d+)\).*? longer than the maximum model length of (?P<limit>\d+)"),
    re.compile(r"The input \((?P<prompt>\d+) tokens\) is longer than the model's context length \((?P<limit>\d+)"),
    re.compile(r"Input length \((?P<prompt>\d+) tokens\) exceeds the maximum allowed length \((?P<limit>\d+) tokens"),
)
_AGENTS_FAULT = (400, 413, 422)
_NOT_NOW = (408, 425, 429)  # of a proxy that stands before an engine: the same request may be answered soon
_CHECK_SECONDS = 2.0
_REST_SECONDS = 0.5  # after the last event; it is mostly there already
_ORDERS = 16  # connections for orders and checks
# Less than servers wait (vLLM's and other uvicorns 5 s): what is sent as they hang up is lost.
_IDLE_SECONDS = 2.0


class Problem(msgspec.Struct):
    """What an event says instead of tokens; `code` is as of HTTP, if it is a number."""

    message: str
    code: int | str | None = None

    @property
    def status(self) -> int:
        """As of HTTP."""
        return self.code if isinstance(self.code, int) else 500


class _Refused(msgspec.Struct):
    """SGLang has a text as `error`, an object, or none and a `message` instead; vLLM an object."""

    error: Problem | str | None = None
    message: str | None = None


class EngineConnection:
    """The connections to the server at `url`."""

    def __init__(self, url: str) -> None:
        self._client = Client(url, idle_seconds=_IDLE_SECONDS)
        # Of their own: a pause must not wait in line for a connection behind generations that take minutes.
        self._orders = Client(url, connections=_ORDERS, idle_seconds=_IDLE_SECONDS)
        self.url = self._client.url

    def post(self, path: str, body: Any) -> "_Taken":
        """The answer to `body`: a context whose value is the `HttpResponse`, if the server takes it. Entering it raises
        EngineUnavailable, EngineRefused or PromptTooLong."""
        return _Taken(self._client, "POST", path, msgspec.json.encode(body))

    async def order(self, path: str, body: Any = None, *, needs: str, seconds: float | None = None) -> None:
        """Tell the server to do something, once more where the connection was cut: twice does what once does. `needs`
        says what a server lacks that has no such `path`.

        Raises EngineUnavailable where it does not, and EngineRefused where it cannot.
        """
        sent = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(seconds):
                try:
                    status, answer = await _answer(self._orders.post(path, sent))
                except NoAnswer:
                    status, answer = await _answer(self._orders.post(path, sent))
        except TimeoutError as error:
            raise EngineUnavailable(f"engine {self.url}{path} does not answer in {seconds} s") from error
        if status == 404:
            raise EngineRefused(f"engine {self.url} has no {path}; {needs}", status=502)
        if status != 200:
            raise EngineUnavailable(f"engine {self.url}{path} answered {status}: {answer[:500]!r}")

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of the answer at `path`, which comes soon. Raises EngineUnavailable where none comes."""
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                return await _answer(self._orders.get(path))
        except TimeoutError as error:
            raise EngineUnavailable(f"engine {self.url}{path} does not answer in {_CHECK_SECONDS} s") from error

    async def close(self) -> None:
        """Free the connections."""
        await self._client.close()
        await self._orders.close()


class _Taken(HttpRequest):
    """A request that the server does not refuse."""

    async def __aenter__(self) -> HttpResponse:
        response = await super().__aenter__()
        if response.status == 200:
            return response
        try:
            raise refusal(response.url, response.status, await response.read())
        finally:
            response.close()


async def _answer(request: HttpRequest) -> tuple[int, bytes]:
    async with request as response:
        return response.status, await response.read()


async def events(response: HttpResponse) -> AsyncIterator[bytes]:
    """The data of a stream's events, up to its end. Raises NoAnswer where it is cut off."""
    async for line in response.lines():
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield data


async def finish(response: HttpResponse) -> None:
    """Read what still comes behind the last event, so that its connection can be used again."""
    with contextlib.suppress(TimeoutError, NoAnswer):
        async with asyncio.timeout(_REST_SECONDS):
            await response.read()


def refusal(url: str, status: int, raw: bytes) -> Exception:
    """The error that an answer with `status` is; `raw` is its body."""
    if status >= 500 or status in _NOT_NOW:
        return EngineUnavailable(f"engine {url} answered {status}: {raw[:500]!r}")
    message = _message(raw)
    for pattern in _TOO_LONG:
        if match := pattern.search(message):
            return PromptTooLong(int(match["prompt"]), int(match["limit"]))
    return EngineRefused(f"the engine answered {status}: {message}", status=400 if status in _AGENTS_FAULT else 502)


def _message(body: bytes) -> str:
    """What an engine's error says; the body itself where it is not the usual JSON."""
    otherwise = body[:500].decode(errors="replace")
    try:
        refused = msgspec.json.decode(body, type=_Refused)
    except msgspec.DecodeError:
        return otherwise
    error = refused.message if refused.error is None else refused.error
    return error.message if isinstance(error, Problem) else error or otherwise
