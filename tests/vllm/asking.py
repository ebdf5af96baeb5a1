"""The gateway's engine client, asked in a test for one generation."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning_rl_proxy.engines.base import EngineFinish, EngineTokens, TokenRequest
from lightning_rl_proxy.engines.vllm import TokenEngine
from lightning_rl_proxy.sampling import Sampling
from tests.vllm.server import END, MODEL, Server

T = TypeVar("T")

PROMPT = [5, 60, 77, 130]
ENDLESS = {"logit_bias": {str(END): -100.0}}  # never ends its turn
REGISTERED = 3
LONG = 1800  # tokens: seconds


@dataclass
class Sampled:
    """A whole generation: its tokens, and those of each part."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    finish: EngineFinish | None = None

    def add(self, part: EngineTokens | EngineFinish) -> None:
        if isinstance(part, EngineFinish):
            self.finish = part
            return
        self.parts.append(len(part.token_ids))
        self.token_ids += part.token_ids
        if part.logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += part.logprobs

    @property
    def reason(self) -> str:
        assert self.finish is not None
        return self.finish.reason

    @property
    def versions(self) -> list[tuple[int, int, int]]:
        assert self.finish is not None
        return [(v.version, v.start, v.end) for v in self.finish.version_spans]


@asynccontextmanager
async def client(server: Server, stop: tuple[int, ...] = (END,), logprobs: Any = "raw") -> AsyncIterator[TokenEngine]:
    engine = TokenEngine(
        model=MODEL,
        kind="vllm",
        url=server.url,
        stop_token_ids=list(stop),
        policy_version=REGISTERED,
        logprobs=logprobs,
    )
    try:
        yield engine
    finally:
        await engine.close()


def with_client(server: Server, use: Callable[[TokenEngine], Coroutine[Any, Any, T]], **given: Any) -> T:
    """What `use` makes of a client."""

    async def work() -> T:
        async with client(server, **given) as engine:
            return await use(engine)

    return asyncio.run(work())


async def whole(
    engine: TokenEngine, prompt: list[int] | None = None, *, stream: bool = False, **sampling: Any
) -> Sampled:
    """One generation to its end."""
    asked = Sampling(**{"temperature": 1.0, "seed": 1, **sampling})
    sampled = Sampled()
    request = TokenRequest(prompt or PROMPT, asked, uuid.uuid4().hex, stream=stream)
    async for part in engine.generate(request):
        sampled.add(part)
    return sampled


def sample(
    server: Server,
    prompt: list[int] | None = None,
    *,
    stop: tuple[int, ...] = (END,),
    logprobs: Any = "raw",
    stream: bool = False,
    **sampling: Any,
) -> Sampled:
    """One generation of a new client."""
    return with_client(
        server, lambda engine: whole(engine, prompt, stream=stream, **sampling), stop=stop, logprobs=logprobs
    )
