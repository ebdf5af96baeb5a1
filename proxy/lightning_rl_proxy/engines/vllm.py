"""vLLM's token wire (`POST /inference/v1/generate`), which the embedded engine speaks too.

Token in, token out: no text crosses this wire. Needs `--enable-scale-out` on a vLLM server.
"""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from lightning_rl_adapters.call import VersionRange
from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable, Finish, Tokens
from lightning_rl_proxy.sampling import Sampling


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
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Version] | None = None


class _Generated(msgspec.Struct):
    choices: list[_Choice]


class _Problem(msgspec.Struct):
    message: str


class _Refused(msgspec.Struct):
    error: _Problem


_decoder = msgspec.json.Decoder(_Generated)


class TokenEngine:
    """One engine server. `kind` is `embedded` (its logprobs are of the effective temperature) or `vllm` (raw)."""

    def __init__(
        self,
        *,
        model: str,
        kind: str,
        url: str,
        stop_token_ids: list[int],
        policy_version: int,
        connections: int = 1024,
    ) -> None:
        self.model = model
        self.kind = kind
        self.url = url.rstrip("/")
        self.policy_version = policy_version
        self._stop_token_ids = stop_token_ids
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self, prompt: list[int], sampling: Sampling, *, request_id: str, priority: int = 0
    ) -> AsyncIterator[Tokens | Finish]:
        """See `Engine`. Leaving the iterator early closes the connection, which aborts the generation."""
        parameters: dict[str, Any] = msgspec.to_builtins(sampling)
        # An absent max_tokens means 16 on this wire; null means up to the context's end, as chat clients expect.
        parameters |= {"logprobs": 0, "stop_token_ids": self._stop_token_ids, "max_tokens": sampling.max_tokens}
        body: dict[str, Any] = {"token_ids": prompt, "sampling_params": parameters, "request_id": request_id}
        if priority:
            body["priority"] = priority
        answer = await self._post(msgspec.json.encode(body))
        [choice] = answer.choices
        logprobs = None if choice.logprobs is None else [entry.logprob for entry in choice.logprobs.content]
        yield Tokens(choice.token_ids, logprobs)
        stop = choice.stop_reason if isinstance(choice.stop_reason, int) else None
        yield Finish(choice.finish_reason, stop, self._versions(choice))

    def logprob_kind(self, sampling: Sampling) -> str:
        """See `Engine`: vLLM's default logprobs are before temperature, and so are raw unless temperature is 1."""
        if sampling.temperature == 0:
            return "greedy"
        return "sampled" if self.kind == "embedded" or sampling.temperature == 1 else "raw"

    async def close(self) -> None:
        """See `Engine`."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, body: bytes) -> _Generated:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                headers={"content-type": "application/json"},
            )
        url = f"{self.url}/inference/v1/generate"
        try:
            async with self._session.post(url, data=body) as response:
                raw = await response.read()
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"engine {url}: {error!r}") from error
        if response.status >= 500:
            raise EngineUnavailable(f"engine {url} answered {response.status}: {raw[:500]!r}")
        if response.status != 200:
            raise EngineRefused(f"the engine answered {response.status}: {_message(raw)}")
        return _decoder.decode(raw)

    def _versions(self, choice: _Choice) -> list[VersionRange]:
        """Who sampled which token; an engine that does not say is believed to be at its registered version."""
        if choice.weight_versions:
            return [
                VersionRange(self._number(v.version), v.start, v.end) for v in choice.weight_versions if v.end > v.start
            ]
        n = len(choice.token_ids)
        return [VersionRange(self.policy_version, 0, n)] if n else []

    def _number(self, version: str | int | None) -> int:
        text = str(version).removeprefix("v")
        return int(text) if text.isdigit() else self.policy_version


def _message(body: bytes) -> str:
    """What an engine's error says; the body itself where it is not the usual JSON."""
    try:
        return msgspec.json.decode(body, type=_Refused).error.message
    except msgspec.DecodeError:
        return body[:500].decode(errors="replace")
