"""Which engine or chat backend answers a call, and when: the least busy one of the model, unless the model is paused.

A model has engines or chat backends, never both. Counts every token at the moment an engine hands it over: these counts
are one side of the conservation law.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from lightning_rl_adapters.call import VersionRange
from lightning_rl_proxy.alarm import ALARMS
from lightning_rl_proxy.engines.base import Engine, EngineRefused, EngineUnavailable, Finish, Tokens
from lightning_rl_proxy.engines.chat_backend import ChatAnswer, ChatBackend
from lightning_rl_proxy.errors import UnknownModel
from lightning_rl_proxy.sampling import Sampling


class Generation:
    """What an engine has handed over of one answer, so far; `finish_reason` is None until it has ended."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] | None = []
        self.logprob_kind = "sampled"
        self.finish_reason: str | None = None
        self.versions: list[VersionRange] = []

    def add(self, tokens: Tokens, version: int) -> None:
        """Take some tokens more, sampled under `version` as far as is known now."""
        start = len(self.token_ids)
        self.token_ids += tokens.token_ids
        if self.logprobs is not None:
            if tokens.logprobs is None:
                self.logprobs = None
            else:
                self.logprobs += tokens.logprobs
        if self.versions and self.versions[-1].version == version:
            start = self.versions.pop().start
        if self.token_ids:
            self.versions.append(VersionRange(version, start, len(self.token_ids)))

    def end(self, finish: Finish) -> None:
        """Take the engine's word on how it ended, and on who sampled which token."""
        self.finish_reason = finish.reason
        self.versions = finish.version_spans

    def keep(self, n: int) -> None:
        """Drop what is behind the first `n` tokens."""
        self.token_ids = self.token_ids[:n]
        self.logprobs = None if self.logprobs is None else self.logprobs[:n]
        cut = (VersionRange(v.version, v.start, min(v.end, n)) for v in self.versions)
        self.versions = [v for v in cut if v.end > v.start]


class Router:
    """The engines and chat backends by model. Calls of a paused model wait.

    `unknown_model`: names that nothing serves mean the model `policy`, or are refused.
    """

    def __init__(self, policy: str, *, unknown_model: Literal["policy", "refuse"] = "policy") -> None:
        self.policy = policy
        self._refuses_unknown = unknown_model == "refuse"
        self.received: Counter[str] = Counter()
        self._engines: dict[str, list[Engine]] = {}
        self._backends: dict[str, list[ChatBackend]] = {}
        self._busy: Counter[int] = Counter()
        self._ended = asyncio.Event()  # set, and made anew, when a call ends
        self._paused: dict[str, asyncio.Event] = {}
        self._frozen: dict[str, list[Engine]] = {}

    def register(self, engine: Engine) -> None:
        """Add an engine for its model. Raises ValueError where chat backends serve a model of that name."""
        if engine.model in self._backends:
            raise ValueError(f"model {engine.model!r} is a chat backend's already; give the engine's another name")
        self._engines.setdefault(engine.model, []).append(engine)

    def register_backend(self, backend: ChatBackend) -> None:
        """Add a chat backend for its model. Raises ValueError where engines serve a model of that name."""
        if backend.model in self._engines:
            raise ValueError(f"model {backend.model!r} has token engines already; give the chat backend another name")
        self._backends.setdefault(backend.model, []).append(backend)

    def resolve(self, requested: str) -> str:
        """The model that a requested name means. Raises UnknownModel where unknown ones are refused."""
        if requested in self._engines or requested in self._backends:
            return requested
        if self._refuses_unknown and requested != self.policy:
            raise UnknownModel(requested, [*self._engines, *self._backends])
        return self.policy

    def is_backend(self, model: str) -> bool:
        """Whether chat backends answer for `model`."""
        return model in self._backends

    def lacking(self, model: str, sampling: Sampling) -> list[str]:
        """The names of the parameters that are set and that not every engine of `model` honours."""
        named = ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "json_schema")
        asked = {name for name in named if getattr(sampling, name) is not None}
        return sorted({name for engine in self._engines.get(model, ()) for name in asked - engine.abilities})

    async def generate(
        self,
        model: str,
        prompt: list[int],
        sampling: Sampling,
        generation: Generation,
        *,
        request_id: str,
        stream: bool = False,
    ) -> AsyncGenerator[Tokens]:
        """Sample one answer into `generation`, yielding the tokens that come; with `stream`, as they are sampled.

        Waits while the model is paused. Closing the generator aborts the engine's work. Raises EngineUnavailable,
        EngineRefused or PromptTooLong.
        """
        await self._not_paused(model)
        engine = self._least_busy(model)
        generation.logprob_kind = engine.logprob_kind(sampling)
        self._busy[id(engine)] += 1
        try:
            async with aclosing(engine.generate(prompt, sampling, request_id=request_id, stream=stream)) as parts:
                async for part in parts:
                    if isinstance(part, Finish):
                        generation.end(part)
                        break
                    self.received[model] += len(part.token_ids)
                    generation.add(part, engine.policy_version)
                    yield part
        finally:
            self._left(engine)
        if generation.finish_reason in (None, "abort"):
            raise EngineUnavailable(f"the engine of model {model!r} broke request {request_id} off")

    async def complete(self, model: str, body: dict[str, Any]) -> ChatAnswer:
        """One choice of a chat backend. Waits while the model is paused. Raises as `generate` does."""
        await self._not_paused(model)
        backend = min(self._backends[model], key=lambda backend: self._busy[id(backend)])
        self._busy[id(backend)] += 1
        try:
            return await backend.complete(body)
        finally:
            self._left(backend)

    async def embed(self, model: str, body: dict[str, Any]) -> bytes:
        """A chat backend's embeddings, as the service gave them. Raises as `generate` does."""
        return await self._backends[model][0].embed(body)

    def carry_on(self, received: dict[str, int]) -> None:
        """Count received tokens on from these, per model: those of earlier processes."""
        self.received.update(received)

    async def pause(self, model: str | None, drain_seconds: float = 0) -> None:
        """Let the new calls of `model` (None: of all) wait.

        Those in flight have `drain_seconds` to end; then they are frozen where they are, and go on at `resume`. Calls
        of chat backends end as they like. Raises EngineUnavailable or EngineRefused where an engine cannot be frozen.
        """
        gates = {name: self._paused.setdefault(name, asyncio.Event()) for name in self._named(model)}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                while any(self._in_flight(name) for name, gate in gates.items() if not gate.is_set()):
                    await self._ended.wait()
        for name, gate in gates.items():
            for engine in self._engines.get(name, ()):
                if self._busy[id(engine)] and not gate.is_set() and engine not in self._frozen.get(name, ()):
                    self._frozen.setdefault(name, []).append(engine)
                    await engine.pause()

    async def resume(self, model: str | None, policy_version: int | None) -> None:
        """Let frozen and waiting calls go on, under `policy_version` where one is given."""
        for name in self._named(model):
            for engine in self._engines.get(name, ()):
                if policy_version is not None:
                    engine.policy_version = policy_version
            if (gate := self._paused.pop(name, None)) is not None:
                gate.set()
            for engine in self._frozen.pop(name, ()):
                try:
                    await engine.resume()
                except (EngineUnavailable, EngineRefused) as error:
                    ALARMS.error("an engine of model %s did not go on after the pause: %s", name, error)

    def is_paused(self, model: str) -> bool:
        """Whether calls of `model` wait."""
        return model in self._paused

    def state(self) -> dict[str, dict[str, int | bool]]:
        """Per model: engines (or backends), calls in flight, tokens received, paused, policy version, trainable."""
        trainable: dict[str, dict[str, int | bool]] = {
            model: self._counts(model, engines)
            | {
                "tokens_received": self.received[model],
                "policy_version": max(engine.policy_version for engine in engines),
                "trainable": True,
            }
            for model, engines in self._engines.items()
        }
        return trainable | {
            model: self._counts(model, backends) | {"tokens_received": 0, "policy_version": 0, "trainable": False}
            for model, backends in self._backends.items()
        }

    async def check(self) -> dict[str, str | None]:
        """Per engine, or model of chat backends, what is wrong with it; None for what is well or cannot be asked."""
        engines = [(f"{model} {i}", each) for model, some in self._engines.items() for i, each in enumerate(some)]
        found = await asyncio.gather(*(engine.check() for _, engine in engines), return_exceptions=True)
        for error in found:
            if error is not None and not isinstance(error, EngineUnavailable):
                raise error
        told = {name: None if error is None else str(error) for (name, _), error in zip(engines, found, strict=True)}
        return told | dict.fromkeys(self._backends)

    async def close(self) -> None:
        """Free every engine's and backend's connections."""
        for engines in self._engines.values():
            for engine in engines:
                await engine.close()
        for backends in self._backends.values():
            for backend in backends:
                await backend.close()

    async def _not_paused(self, model: str) -> None:
        while (gate := self._paused.get(model)) is not None:
            await gate.wait()

    def _counts(self, model: str, served: Sequence[Engine | ChatBackend]) -> dict[str, int | bool]:
        return {
            "engines": len(served),
            "in_flight": sum(self._busy[id(each)] for each in served),
            "paused": model in self._paused,
        }

    def _in_flight(self, model: str) -> int:
        served: list[Engine | ChatBackend] = [*self._engines.get(model, ()), *self._backends.get(model, ())]
        return sum(self._busy[id(each)] for each in served)

    def _left(self, served: Engine | ChatBackend) -> None:
        self._busy[id(served)] -= 1
        self._ended.set()
        self._ended = asyncio.Event()

    def _named(self, model: str | None) -> list[str]:
        names = [*self._engines, *self._backends]
        if model is None:
            return names
        if model not in names:
            raise KeyError(f"no engine serves model {model!r}; there are {sorted(names)}")
        return [model]

    def _least_busy(self, model: str) -> Engine:
        engines = self._engines.get(model)
        if not engines:
            raise no_engine(model)
        return min(engines, key=lambda engine: self._busy[id(engine)])


def no_engine(model: str) -> EngineUnavailable:
    """Nothing answers for `model` (yet)."""
    return EngineUnavailable(f"no engine serves model {model!r}; register one with POST /api/v1/engines")
