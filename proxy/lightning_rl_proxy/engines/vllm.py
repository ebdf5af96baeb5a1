"""vLLM's token wire (`POST /inference/v1/generate`), which the embedded engine speaks too.

Token in, token out: no text crosses this wire. Needs `--enable-scale-out` on a vLLM server. An answer comes whole, or
as server-sent events with some tokens each. Logprobs that are of no kind in `Call.logprob_kind` are not handed on.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from lightning_rl_adapters.call import VersionRange
from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable, Finish, Tokens
from lightning_rl_proxy.engines.probe import GENERATE, LogprobsMode
from lightning_rl_proxy.errors import PromptTooLong
from lightning_rl_proxy.sampling import Sampling

# What vLLM honours by the names of `Sampling`, but for json_schema, which is `structured_outputs` on its wire.
_ABILITIES = {
    "embedded": frozenset[str](),
    "vllm": frozenset(
        {"min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "json_schema"}
    ),
}
# How the embedded engine and vLLM say that a prompt does not fit.
_TOO_LONG = (
    re.compile(r"a prompt of (?P<prompt>\d+) tokens does not fit: max_model_len is (?P<limit>\d+)"),
    re.compile(r"prompt \(length (?P<prompt>\d+)\).*? longer than the maximum model length of (?P<limit>\d+)"),
)
_AGENTS_FAULT = (400, 413, 422)
_NO_LOGPROB = -9999.0  # which vLLM says where it has none
_CHECK_SECONDS = 2.0
_MAX_LINE = 2**24  # bytes; the longest event


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Version(msgspec.Struct):
    version: str | int | None
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Version] | None = None


class _Problem(msgspec.Struct):
    message: str
    code: int = 500  # as of HTTP


class _Generated(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Problem | None = None


class _Refused(msgspec.Struct):
    error: _Problem


_decoder = msgspec.json.Decoder(_Generated)


class TokenEngine:
    """One engine server. `kind` is `embedded` (its logprobs are of the effective temperature) or `vllm` (`logprobs`).

    A vLLM server labels its tokens with the policy version that it was told of last; what it sampled before is believed
    to be of the version that it was registered with.
    """

    def __init__(
        self,
        *,
        model: str,
        kind: str,
        url: str,
        stop_token_ids: list[int],
        policy_version: int,
        logprobs: LogprobsMode = "raw",
        connections: int = 1024,
    ) -> None:
        self.model = model
        self.kind = kind
        self.url = url.rstrip("/")
        self.policy_version = policy_version
        self.abilities = _ABILITIES[kind]
        self._logprobs = logprobs
        self._unlabelled = self._told = policy_version
        self._stop_token_ids = stop_token_ids
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self, prompt: list[int], sampling: Sampling, *, request_id: str, priority: int = 0, stream: bool = False
    ) -> AsyncGenerator[Tokens | Finish]:
        """See `Engine`. Leaving the iterator early closes the connection, which aborts the generation."""
        body: dict[str, Any] = {
            "token_ids": prompt,
            "sampling_params": self._parameters(sampling),
            "request_id": request_id,
        }
        if priority:
            body["priority"] = priority
        if stream:
            body["stream"] = True
        await self._tell_version()
        async with self._post(msgspec.json.encode(body)) as response:
            if not stream:
                [choice] = _decoder.decode(await response.read()).choices
                yield _tokens(choice)
                yield self._finish(choice, len(choice.token_ids))
                return
            sampled = 0
            async for choice in self._events(response):
                if choice.token_ids:
                    sampled += len(choice.token_ids)
                    yield _tokens(choice)
                if choice.finish_reason is not None:
                    yield self._finish(choice, sampled)

    async def check(self) -> None:
        """See `Engine`."""
        url = f"{self.url}/health"
        try:
            async with self._connected().get(url, timeout=aiohttp.ClientTimeout(total=_CHECK_SECONDS)) as response:
                status = response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(f"{url}: {error!r}") from error
        if status != 200:
            raise EngineUnavailable(f"{url} answered {status}")

    async def pause(self) -> None:
        """See `Engine`. A vLLM server has this route only with VLLM_SERVER_DEV_MODE=1."""
        await self._order("/pause?mode=keep")

    async def resume(self) -> None:
        """See `Engine`."""
        await self._tell_version()
        await self._order("/resume")

    def logprob_kind(self, sampling: Sampling) -> str:
        """See `Engine`: vLLM's default logprobs are before temperature, and so are raw unless temperature is 1."""
        if sampling.temperature == 0:
            return "greedy"
        tempered = self.kind == "embedded" or self._logprobs == "processed"
        return "sampled" if tempered or sampling.temperature == 1 else "raw"

    async def close(self) -> None:
        """See `Engine`."""
        if self._session is not None:
            await self._session.close()

    def _parameters(self, sampling: Sampling) -> dict[str, Any]:
        parameters: dict[str, Any] = msgspec.to_builtins(sampling)
        parameters.pop("stop", None)
        if self.kind == "vllm":
            parameters["detokenize"] = False
        if (json_schema := parameters.pop("json_schema", None)) is not None:
            parameters["structured_outputs"] = {"json": json_schema} if json_schema else {"json_object": True}
        # An absent max_tokens means 16 to the embedded engine; null the end of the context, as chat clients expect.
        return parameters | {
            "logprobs": 0 if self._has_logprobs(sampling) else None,
            "stop_token_ids": self._stop_token_ids,
            "max_tokens": sampling.max_tokens,
        }

    def _has_logprobs(self, sampling: Sampling) -> bool:
        """Whether a kind is known for its logprobs: a grammar's mask is in vLLM's raw ones too."""
        if self.kind == "embedded":
            return True
        if self._logprobs == "raw":
            return sampling.json_schema is None
        return not _reshaped(sampling)

    async def _tell_version(self) -> None:
        """Let a vLLM server label what it samples from now on, where the version is another than it was told."""
        version = self.policy_version
        if self.kind == "vllm" and version != self._told:
            await self._order("/update_weight_version", {"new_version": str(version)})
            self._told = version

    async def _order(self, path: str, body: Any = None) -> None:
        try:
            async with self._connected().post(self.url + path, json=body) as response:
                said = await response.read()
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"engine {self.url}{path}: {error!r}") from error
        if response.status == 404:
            raise EngineRefused(
                f"engine {self.url} has no {path}; start the vLLM server with VLLM_SERVER_DEV_MODE=1", status=502
            )
        if response.status != 200:
            raise EngineUnavailable(f"engine {self.url}{path} answered {response.status}: {said[:500]!r}")

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                headers={"content-type": "application/json"},
                read_bufsize=_MAX_LINE,
            )
        return self._session

    @asynccontextmanager
    async def _post(self, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, if the engine takes the request."""
        url = self.url + GENERATE
        try:
            async with self._connected().post(url, data=body) as response:
                if response.status != 200:
                    raise _refusal(url, response.status, await response.read())
                yield response
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"engine {url}: {error!r}") from error

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[_Choice]:
        """The choices of a stream's events."""
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = _decoder.decode(data)
            if event.error is not None:  # a request that vLLM refuses has its 400 here, below a status of 200
                raise _refusal(str(response.url), event.error.code, data)
            for choice in event.choices:
                yield choice

    def _finish(self, choice: _Choice, sampled: int) -> Finish:
        stop = choice.stop_reason
        if stop is None and choice.finish_reason == "stop" and choice.token_ids:
            stop = choice.token_ids[-1]  # the model's own end of text, which vLLM does not name
        stop = stop if isinstance(stop, int) else None
        return Finish(choice.finish_reason or "abort", stop, self._versions(choice, sampled))

    def _versions(self, choice: _Choice, sampled: int) -> list[VersionRange]:
        """Who sampled which token; an engine that does not say is believed to be at the version that we know."""
        if choice.weight_versions:
            return [
                VersionRange(self._number(v.version), v.start, v.end) for v in choice.weight_versions if v.end > v.start
            ]
        return [VersionRange(self.policy_version, 0, sampled)] if sampled else []

    def _number(self, version: str | int | None) -> int:
        text = str(version).removeprefix("v")
        return int(text) if text.isdigit() else self._unlabelled


def _tokens(choice: _Choice) -> Tokens:
    logprobs = None if choice.logprobs is None else [entry.logprob for entry in choice.logprobs.content]
    if logprobs is not None and any(logprob <= _NO_LOGPROB for logprob in logprobs):
        logprobs = None
    return Tokens(choice.token_ids, logprobs)


def _reshaped(sampling: Sampling) -> bool:
    """Whether more than the temperature lies between the logits and what is sampled from."""
    others = (
        sampling.min_p,
        sampling.frequency_penalty,
        sampling.presence_penalty,
        sampling.repetition_penalty not in (None, 1),
        sampling.logit_bias,
        sampling.json_schema is not None,
    )
    cut = sampling.top_p not in (None, 1) or sampling.top_k not in (None, -1, 0)
    return (cut and sampling.temperature != 0) or any(others)


def _refusal(url: str, status: int, raw: bytes) -> Exception:
    if status >= 500:
        return EngineUnavailable(f"engine {url} answered {status}: {raw[:500]!r}")
    said = _message(raw)
    for pattern in _TOO_LONG:
        if match := pattern.search(said):
            return PromptTooLong(int(match["prompt"]), int(match["limit"]))
    return EngineRefused(f"the engine answered {status}: {said}", status=400 if status in _AGENTS_FAULT else 502)


def _message(body: bytes) -> str:
    """What an engine's error says; the body itself where it is not the usual JSON."""
    try:
        return msgspec.json.decode(body, type=_Refused).error.message
    except msgspec.DecodeError:
        return body[:500].decode(errors="replace")
