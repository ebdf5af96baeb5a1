"""Which engine samples a call, and when: the least busy one of the model, unless the model is paused.

Counts every token at the moment an engine hands it over: these counts are one side of the conservation law.
"""

import asyncio
from collections import Counter
from typing import NamedTuple

from lightning_rl_adapters.call import VersionRange
from lightning_rl_proxy.engines.base import Engine, EngineUnavailable, Finish
from lightning_rl_proxy.sampling import Sampling


class Generation(NamedTuple):
    """A finished generation."""

    token_ids: list[int]
    logprobs: list[float] | None
    logprob_kind: str
    finish_reason: str
    versions: list[VersionRange]


class Router:
    """The engines by model. Calls of a paused model wait; `policy` is the model that unknown names go to."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.received: Counter[str] = Counter()
        self._engines: dict[str, list[Engine]] = {}
        self._busy: Counter[int] = Counter()
        self._paused: dict[str, asyncio.Event] = {}

    def register(self, engine: Engine) -> None:
        """Add an engine for its model."""
        self._engines.setdefault(engine.model, []).append(engine)

    def resolve(self, requested: str) -> str:
        """The model that a requested name means: a registered one, else the policy."""
        return requested if requested in self._engines else self.policy

    async def generate(self, model: str, prompt: list[int], sampling: Sampling, *, request_id: str) -> Generation:
        """Sample one answer. Waits while the model is paused. Raises EngineUnavailable or EngineRefused."""
        while (gate := self._paused.get(model)) is not None:
            await gate.wait()
        engine = self._least_busy(model)
        token_ids: list[int] = []
        logprobs: list[float] | None = []
        self._busy[id(engine)] += 1
        try:
            async for part in engine.generate(prompt, sampling, request_id=request_id):
                if isinstance(part, Finish):
                    return Generation(
                        token_ids, logprobs, engine.logprob_kind(sampling), part.reason, part.version_spans
                    )
                self.received[model] += len(part.token_ids)
                token_ids += part.token_ids
                logprobs = None if logprobs is None or part.logprobs is None else logprobs + part.logprobs
        finally:
            self._busy[id(engine)] -= 1
        raise EngineUnavailable(f"the engine of model {model!r} ended request {request_id} without a finish reason")

    def pause(self, model: str | None) -> None:
        """Let the new calls of `model` (None: of all) wait."""
        for name in self._named(model):
            self._paused.setdefault(name, asyncio.Event())

    def resume(self, model: str | None, policy_version: int | None) -> None:
        """Let waiting calls go on, under `policy_version` where one is given."""
        for name in self._named(model):
            for engine in self._engines[name]:
                if policy_version is not None:
                    engine.policy_version = policy_version
            if (gate := self._paused.pop(name, None)) is not None:
                gate.set()

    def state(self) -> dict[str, dict[str, int | bool]]:
        """Per model: engines, calls in flight, tokens received, paused, policy version."""
        return {
            model: {
                "engines": len(engines),
                "in_flight": sum(self._busy[id(engine)] for engine in engines),
                "tokens_received": self.received[model],
                "paused": model in self._paused,
                "policy_version": max(engine.policy_version for engine in engines),
            }
            for model, engines in self._engines.items()
        }

    async def close(self) -> None:
        """Free every engine's connections."""
        for engines in self._engines.values():
            for engine in engines:
                await engine.close()

    def _named(self, model: str | None) -> list[str]:
        if model is None:
            return list(self._engines)
        if model not in self._engines:
            raise KeyError(f"no engine serves model {model!r}; there are {sorted(self._engines)}")
        return [model]

    def _least_busy(self, model: str) -> Engine:
        engines = self._engines.get(model)
        if not engines:
            raise EngineUnavailable(f"no engine serves model {model!r}; register one with POST /api/v1/engines")
        return min(engines, key=lambda engine: self._busy[id(engine)])
