"""Which engine or chat backend answers a call, and when: as `balance` says, unless the model is paused.

A model has engines or chat backends, never both. Counts every token at the moment an engine hands it over: these counts
are one side of the conservation law. A call moves to another engine only while it has no token, so that none is counted
twice.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from typing import Any, Literal

from lightning_rl_adapters.call import VersionRange
from lightning_rl_proxy.engines.base import Engine, EngineFinish, EngineTokens, EngineUnavailable, TokenRequest
from lightning_rl_proxy.engines.chat_backend import BackendAnswer, ChatBackend
from lightning_rl_proxy.errors import UnknownModel
from lightning_rl_proxy.rendering.images import Shown
from lightning_rl_proxy.routing.engine_health import EngineHealth
from lightning_rl_proxy.routing.load_balancer import EnginePool, ModelLoad, Pool, Replica
from lightning_rl_proxy.sampling import SPECIFIC, Sampling

_log = logging.getLogger(__name__)


class Generation:
    """What an engine has handed over of one answer, so far; `finish_reason` is None until it has ended.

    `asked_ns` and `ended_ns` (monotonic) are when the engine was asked, and when it had ended; 0 before.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] | None = []
        self.logprob_kind = "sampled"
        self.finish_reason: str | None = None
        self.versions: list[VersionRange] = []
        self.served_by: Engine | None = None  # which has its KV cache
        self.asked_ns = self.ended_ns = 0

    def begin(self, engine: Engine, sampling: Sampling) -> None:
        """Expect all of it from `engine`; what another one ended without a token is forgotten."""
        self.served_by = engine
        self.asked_ns = time.monotonic_ns()
        self.logprobs = []
        self.logprob_kind = engine.logprob_kind(sampling)
        self.finish_reason = None

    def add(self, tokens: EngineTokens, version: int) -> None:
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

    def end(self, finish: EngineFinish) -> None:
        """Take the engine's word on how it ended, and on who sampled which token."""
        self.ended_ns = time.monotonic_ns()
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

    `unknown_model`: names that nothing serves mean the policy of their attempt, by default `policy`, or are refused.
    """

    def __init__(self, policy: str, *, unknown_model: Literal["policy", "refuse"] = "policy") -> None:
        self.policy = policy
        self._refuses_unknown = unknown_model == "refuse"
        self.received: Counter[str] = Counter()
        self._engines: dict[str, EnginePool[Engine]] = {}
        self._backends: dict[str, Pool[ChatBackend]] = {}
        self._registered: Counter[str] = Counter()
        self._ended: asyncio.Event | None = None  # for those who wait until a call ends
        self._paused: dict[str, asyncio.Event] = {}
        self._paused_at: dict[str, float] = {}  # by the monotonic clock
        self._pauses: Counter[str] = Counter()  # how often each model was paused
        # Of each model, while its engines are told to freeze or to go on: what comes meanwhile is told after that.
        self._ordering: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._parked: Counter[str] = Counter()  # calls that wait for the end of a pause
        self._calls: Counter[str] = Counter()  # calls of token engines, also those that wait here
        self.capacity_freed: Callable[[], None] = lambda: None  # called where the engines may bear more than before
        self._watch = EngineHealth(self._engines.values(), lambda: self.capacity_freed())
        self._leaving: set[asyncio.Task[None]] = set()

    def register(self, engine: Engine) -> str:
        """Add an engine for its model; the name that it has here: the model's, and how many were registered before it.

        Raises ValueError where chat backends serve a model of that name.
        """
        problem = "is a chat backend's already; give the engine's another name"
        _check_free(engine.model, self._backends.get(engine.model), problem)
        self._backends.pop(engine.model, None)
        return self._engines.setdefault(engine.model, EnginePool(engine.model)).add(engine, self._name(engine.model))

    def register_backend(self, backend: ChatBackend) -> str:
        """Add a chat backend for its model, as `register` does. Raises ValueError where engines serve that model."""
        problem = "has token engines already; give the chat backend another name"
        _check_free(backend.model, self._engines.get(backend.model), problem)
        self._engines.pop(backend.model, None)
        return self._backends.setdefault(backend.model, Pool(backend.model)).add(backend, self._name(backend.model))

    async def detach(self, name: str) -> None:
        """Take an engine or chat backend out: it gets no call more, and is let go when those in flight have ended.

        Its model stays known, with its counts. Raises KeyError.
        """
        pool = self._pool(name.rpartition(" ")[0])
        replica = pool.find(name)
        pool.replicas.remove(replica)
        task = asyncio.create_task(self._release(pool.model, replica))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def confirm_weights(self, name: str, policy_version: int) -> None:
        """Believe that an engine has the model's current weights, as somebody says who knows.

        Raises KeyError, ValueError where `policy_version` is not the model's, and EngineUnavailable where the model is
        paused, or the engine does not answer, or says otherwise itself.
        """
        pool = self._engines[name.rpartition(" ")[0]]
        replica = pool.find(name)
        if policy_version != pool.version:
            raise ValueError(f"model {pool.model!r} is at policy version {pool.version}, not {policy_version}")
        if pool.away(replica) is None:
            return
        async with self._ordering[pool.model]:
            if self.is_paused(pool.model):
                raise EngineUnavailable(f"model {pool.model!r} is paused; register engine {name} again when it goes on")
            await self._watch.confirm_weights(pool, replica)

    def resolve(self, requested: str, policy: str | None = None) -> str:
        """The model that a requested name means; `policy` is the attempt's, where it is another than the server's.

        Raises UnknownModel where unknown names are refused.
        """
        policy = policy or self.policy
        if requested in self._engines or requested in self._backends:
            return requested
        if self._refuses_unknown and requested != policy:
            raise UnknownModel(requested, [*self._engines, *self._backends])
        return policy

    @property
    def has_backends(self) -> bool:
        """Whether chat backends answer for any model."""
        return bool(self._backends)

    def is_backend(self, model: str) -> bool:
        """Whether chat backends answer for `model`."""
        return model in self._backends

    def longest_context(self) -> int | None:
        """How many tokens a prompt may have at the most patient engine; None where one does not say."""
        contexts = [each.engine.context for pool in self._engines.values() for each in pool.replicas]
        return max((each for each in contexts if each is not None), default=None) if None not in contexts else None

    def lacking(self, model: str, sampling: Sampling, media: Sequence[Shown] = ()) -> list[str]:
        """The names of the parameters that are set and that not every engine of `model` honours; `images` is one."""
        needed = {name for name in SPECIFIC if getattr(sampling, name) is not None} | ({"images"} if media else set())
        if not needed or model not in self._engines:
            return []
        return sorted({name for each in self._engines[model].replicas for name in needed - each.engine.abilities})

    async def generate(
        self,
        model: str,
        request: TokenRequest,
        generation: Generation,
        *,
        home: Engine | None = None,
        take: Callable[[EngineTokens], bool] = lambda _: True,
    ) -> None:
        """Sample one answer into `generation`.

        `take` is given the tokens that come, and says whether more are wanted; where not, or on cancellation, the
        engine's work is aborted. `home` is the engine that has the conversation so far in its cache; None for a new
        one. Waits while the model is paused. An engine that fails before it gave a token, or is silent for long while
        another one is well, is left for another one, each once. Raises EngineUnavailable, EngineRefused or
        PromptTooLong.
        """
        tried: list[Replica[Engine]] = []
        self._calls[model] += 1
        try:
            while True:
                pool, replica = await self._take(model, home, tried)
                engine, known_by, epoch = replica.engine, replica.reported, replica.epoch
                generation.begin(engine, request.sampling)
                tried.append(replica)
                failure: EngineUnavailable | None = None
                first = asyncio.timeout(None)  # over where the engine stays silent before its first token
                replica.without_token.add(first)
                try:
                    async with first, aclosing(engine.generate(request)) as parts:
                        async for part in parts:
                            if isinstance(part, EngineFinish):
                                generation.end(part)
                                continue
                            if part.token_ids:
                                replica.without_token.discard(first)
                            self.received[model] += len(part.token_ids)
                            generation.add(part, engine.policy_version if part.version is None else part.version)
                            if not take(part):
                                return
                except EngineUnavailable as error:
                    self._watch.lost(pool, replica, str(error))
                    failure = error
                except TimeoutError:
                    if not first.expired():
                        raise
                    failure = EngineUnavailable(pool.away(replica) or f"engine {replica.name} was away")
                finally:
                    replica.without_token.discard(first)
                    self._left(replica)
                if failure is None and generation.finish_reason not in (None, "abort"):
                    if generation.versions and epoch == replica.epoch:
                        self._watch.sampled_with(pool, replica, generation.versions[-1].version, known_by)
                    return
                failure = failure or EngineUnavailable(
                    f"the engine of model {model!r} broke request {request.request_id} off"
                )
                if generation.token_ids or all(each in tried for each in pool.well()):
                    raise failure
                _log.warning(
                    "request %s goes on to another engine than %s: %s", request.request_id, replica.name, failure
                )
        finally:
            self._calls[model] -= 1
            self.capacity_freed()

    async def complete(self, model: str, body: dict[str, Any]) -> BackendAnswer:
        """One choice of a chat backend. Waits while the model is paused. Raises as `generate` does."""
        await self._not_paused(model)
        pool = self._backends[model]
        if not pool.replicas:
            raise no_engine(model)
        replica = pool.take(pool.replicas)
        try:
            return await replica.engine.complete(body)
        finally:
            self._left(replica)

    async def embed(self, model: str, body: dict[str, Any]) -> bytes:
        """A chat backend's embeddings, as the service gave them. Raises as `generate` does."""
        if not self._backends[model].replicas:
            raise no_engine(model)
        return await self._backends[model].replicas[0].engine.embed(body)

    def restore(self, received: dict[str, int]) -> None:
        """Count received tokens on from these, per model: those of earlier processes."""
        self.received.update(received)

    async def pause(self, model: str | None, drain_seconds: float = 0) -> None:
        """Let the new calls of `model` (None: of all) wait.

        Those in flight have `drain_seconds` to end; then they are frozen where they are, and go on at `resume`. Calls
        of chat backends end as they like. An engine that does not answer is away then, while another one of its model
        is well. Raises EngineUnavailable or EngineRefused where an engine cannot be frozen.
        """
        gates = {name: self._paused.setdefault(name, asyncio.Event()) for name in self._named(model)}
        for name in gates:
            self._pauses[name] += 1
            self._paused_at.setdefault(name, time.monotonic())
        for name in gates:
            if name in self._engines:
                async with self._ordering[name]:
                    await self._watch.expect_pause(self._engines[name])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                while any(self._pool(name).in_flight for name, gate in gates.items() if not gate.is_set()):
                    await self._until_one_ends()
        for name, gate in gates.items():
            if name in self._engines:
                async with self._ordering[name]:
                    await self._watch.freeze(self._engines[name], gate)

    async def resume(self, model: str | None, policy_version: int | None, outdated: Collection[str] = ()) -> None:
        """Let frozen and waiting calls go on, under `policy_version` where one is given.

        Whoever gives one says that every engine has these weights that answered since the pause began, except those
        that `outdated` names. The version is the model's as soon as each of those goes on; the others stay away until
        they have it too. A pause that comes while engines are told to go on holds.
        """
        pauses_before = {name: self._pauses[name] for name in sorted(self._named(model))}
        async with contextlib.AsyncExitStack() as ordering:
            for name in pauses_before:
                await ordering.enter_async_context(self._ordering[name])
            for name, pauses in pauses_before.items():
                if (pool := self._engines.get(name)) is not None:
                    await self._watch.go_on(pool, policy_version, paused=self.is_paused(name), outdated=outdated)
                if self._pauses[name] == pauses:
                    self._paused_at.pop(name, None)
                    if (gate := self._paused.pop(name, None)) is not None:
                        gate.set()

    def is_paused(self, model: str) -> bool:
        """Whether calls of `model` wait."""
        return model in self._paused

    def state(self) -> dict[str, dict[str, int | float | bool | None]]:
        """Per model: engines (or backends), calls in flight, parked by a pause, tokens received, paused (and for how
        long), policy version, trainable.

        And of token engines, what waits in their queues, and how many calls they bear at once.
        """
        trainable: dict[str, dict[str, int | float | bool | None]] = {
            model: self._counts(pool)
            | {"tokens_received": self.received[model], "policy_version": pool.version, "trainable": True}
            | {"waiting": load.waiting, "capacity": load.capacity}
            for (model, pool), load in zip(self._engines.items(), self.loads().values(), strict=True)
        }
        frozen: dict[str, int | float | bool | None]
        frozen = {"tokens_received": 0, "policy_version": 0, "trainable": False, "waiting": 0, "capacity": None}
        return trainable | {model: self._counts(pool) | frozen for model, pool in self._backends.items()}

    def engines(self) -> dict[str, dict[str, Any]]:
        """Per engine or chat backend: why it is away (None: it is well), its calls in flight, its policy version."""
        engines = {
            each.name: _state_of(each, pool.away(each), each.engine.policy_version)
            for pool in self._engines.values()
            for each in pool.replicas
        }
        return engines | {each.name: _state_of(each) for pool in self._backends.values() for each in pool.replicas}

    def loads(self) -> dict[str, ModelLoad]:
        """How busy each model is that has token engines."""
        return {model: pool.busy(self._calls[model]) for model, pool in self._engines.items()}

    async def check(self) -> dict[str, str | None]:
        """Per engine, or model of chat backends, what is wrong with it; None for what is well or cannot be asked."""
        checked = [(pool, replica) for pool in self._engines.values() for replica in pool.replicas]
        troubles = await asyncio.gather(*(self._watch.check(pool, replica) for pool, replica in checked))
        by_name = {replica.name: trouble for (_, replica), trouble in zip(checked, troubles, strict=True)}
        return by_name | dict.fromkeys(model for model, pool in self._backends.items() if pool.replicas)

    async def watch(self) -> None:
        """Look after the engines until cancelled, so that those that are away come back."""
        await self._watch.run()

    async def close(self) -> None:
        """Free every engine's and backend's connections."""
        self._watch.close()
        for task in self._leaving:
            task.cancel()
        pools: list[Pool[Any]] = [*self._engines.values(), *self._backends.values()]
        for replica in (each for pool in pools for each in pool.replicas):
            await replica.engine.close()

    async def _not_paused(self, model: str) -> None:
        while (gate := self._paused.get(model)) is not None:
            self._parked[model] += 1
            try:
                await gate.wait()
            finally:
                self._parked[model] -= 1

    async def _take(
        self, model: str, home: Engine | None, tried: list[Replica[Engine]]
    ) -> tuple[EnginePool[Engine], Replica[Engine]]:
        """The engine that a call goes to. While all are away they are asked once more, so that none is missed."""
        await self._not_paused(model)
        pool = self._engines.get(model)
        if pool is None or not pool.replicas:
            raise no_engine(model)
        well = pool.well()
        if not tried and not well:
            await asyncio.gather(*(self._watch.check(pool, replica) for replica in pool.replicas))
            await self._not_paused(model)
            well = pool.well()
        able = [replica for replica in well if replica not in tried]
        able = able or [replica for replica in pool.worth_a_try() if replica not in tried]
        if not able:
            raise EngineUnavailable("; ".join(filter(None, map(pool.away, pool.replicas))) or str(no_engine(model)))
        return pool, pool.take(able, home)

    async def _release(self, model: str, replica: Replica[Any]) -> None:
        async with self._ordering[model]:
            pass  # whoever was telling it to freeze has done so, and nobody tells it anything more
        await self._watch.release(replica)
        while replica.in_flight:
            await self._until_one_ends()
        await replica.engine.close()

    async def _until_one_ends(self) -> None:
        self._ended = self._ended or asyncio.Event()
        await self._ended.wait()

    def _name(self, model: str) -> str:
        self._registered[model] += 1
        return f"{model} {self._registered[model] - 1}"

    def _counts(self, pool: Pool[Any]) -> dict[str, int | float | bool | None]:
        paused_at = self._paused_at.get(pool.model)
        return {
            "engines": len(pool.replicas),
            "in_flight": pool.in_flight,
            "parked": self._parked[pool.model],
            "paused": pool.model in self._paused,
            "paused_seconds": None if paused_at is None else time.monotonic() - paused_at,
        }

    def _pool(self, model: str) -> Pool[Any]:
        return self._engines[model] if model in self._engines else self._backends[model]

    def _left(self, replica: Replica[Any]) -> None:
        replica.in_flight -= 1
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def _named(self, model: str | None) -> list[str]:
        names = [*self._engines, *self._backends]
        if model is None:
            return names
        if model not in names:
            raise KeyError(f"no engine serves model {model!r}; there are {sorted(names)}")
        return [model]


def _check_free(model: str, other: Pool[Any] | None, problem: str) -> None:
    """Raises ValueError that names the `problem` where engines of the `other` kind have a model's name."""
    if other is not None and other.replicas:
        raise ValueError(f"model {model!r} {problem}")


def _state_of(replica: Replica[Any], away: str | None = None, policy_version: int = 0) -> dict[str, Any]:
    return {"away": away, "in_flight": replica.in_flight, "policy_version": policy_version}


def no_engine(model: str) -> EngineUnavailable:
    """Nothing answers for `model` (yet)."""
    return EngineUnavailable(f"no engine serves model {model!r}; register one with POST /api/v1/engines")
