"""The engines and chat backends that were registered with a gateway.

Invariants: an engine (model, kind, URL) is registered once, until it is taken out; again with the same body it is the
same engine, and again with the model's present policy version somebody says that it has those weights. A key is handed
on and forgotten: nothing here keeps, shows or compares it. A chat backend's newest key holds.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Annotated, Any, Literal, Protocol

import msgspec

from lightning_rl.store.errors import Conflict, NotFound
from lightning_rl_proxy.engines.base import EngineUnavailable

_BACKENDS = ("openai", "litellm")  # the kinds of chat backends


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What answers for `model` at `url`.

    `embedded`, `vllm` and `sglang` are token engines; `policy_version` is that of their weights now. `openai` and
    `litellm` are frozen chat backends: `remote_model` is the model's name there (by default `model`), `api_key` the
    service's key. `litellm` knows most URLs by itself. With `adapter` a vLLM server samples the model as a LoRA
    adapter, each version of which is loaded there as `model@version`.
    """

    model: str
    kind: Literal["embedded", "vllm", "sglang", "openai", "litellm"]
    url: Annotated[str, msgspec.Meta(pattern=r"\Ahttps?://")] | None = None
    policy_version: int = 0
    remote_model: str | None = None
    api_key: str | None = None
    adapter: bool = False

    def __post_init__(self) -> None:
        if self.url is None and self.kind != "litellm":
            raise ValueError(f"an engine of kind {self.kind!r} needs its url")
        if self.is_backend and self.policy_version:
            raise ValueError(f"policy_version is for token engines; a model of kind {self.kind!r} is frozen")
        if not self.is_backend and (self.api_key is not None or self.remote_model is not None):
            raise ValueError(f"api_key and remote_model are for kinds 'openai' and 'litellm', not {self.kind!r}")
        if self.adapter and self.kind != "vllm":
            raise ValueError(f"adapter is for engines of kind 'vllm', not {self.kind!r}")

    def __repr__(self) -> str:
        return f"EngineRequest(model={self.model!r}, kind={self.kind!r}, url={self.url!r})"  # never the key

    @property
    def is_backend(self) -> bool:
        """Whether it is a chat backend."""
        return self.kind in _BACKENDS


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A registered engine. `away` says why it takes no calls; null where it does."""

    engine_id: str
    model: str
    kind: str
    url: str | None
    policy_version: int  # of its weights now, as far as is known
    away: str | None = None
    in_flight: int = 0
    adapter: bool = False


class EngineDoor(Protocol):
    """What is done to engines that a gateway uses, by the names that it gave them."""

    async def detach(self, engine: str) -> None:
        """Send it no call more; those in flight end."""
        ...

    async def confirm_weights(self, engine: str, policy_version: int) -> None:
        """Believe that it has the model's weights of that version.

        Raises ValueError where the model's version is another, and EngineUnavailable where it cannot be believed.
        """
        ...


class Engines:
    """`attach` makes the gateway behind `door` use an engine, and says by which name it knows it."""

    def __init__(self, attach: Callable[[EngineRequest], Awaitable[str]], door: EngineDoor) -> None:
        self._attach = attach
        self._door = door
        self._one_at_a_time = asyncio.Lock()
        self._engines: dict[str, EngineInfo] = {}
        self._remote_models: dict[str, str | None] = {}
        self._names: dict[str, str] = {}  # by which the gateway knows them

    async def register(self, request: EngineRequest) -> EngineInfo:
        """The engine, attached. Where it is there already, the gateway hears that it has the weights of a version.

        Raises Conflict when it is there with another policy version than the model's or another remote model, or does
        not have that version, and what attaching raises.
        """
        async with self._one_at_a_time:
            return await self._register(request)

    async def _register(self, request: EngineRequest) -> EngineInfo:
        place = f"{request.model}\n{request.kind}\n{request.url}"
        engine_id = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
        info = EngineInfo(
            engine_id=engine_id,
            model=request.model,
            kind=request.kind,
            url=request.url,
            policy_version=request.policy_version,
            adapter=request.adapter,
        )
        existing_info = self._engines.get(engine_id)
        if existing_info is None:
            self._names[engine_id] = await self._attach(request)
            self._engines[engine_id] = info
            self._remote_models[engine_id] = request.remote_model
        elif (alias := self._remote_models[engine_id]) != request.remote_model:
            raise Conflict(
                f"model {request.model!r} at {request.url or request.kind} is registered as {alias or request.model!r} "
                "there; register the other one under a name of its own"
            )
        elif not request.is_backend:
            await self._confirm_weights(request, existing_info)
        elif request.api_key is not None:
            former = self._names[engine_id]
            self._names[engine_id] = await self._attach(request)
            await self._door.detach(former)  # its calls in flight end
        return info

    async def _confirm_weights(self, request: EngineRequest, info: EngineInfo) -> None:
        try:
            await self._door.confirm_weights(self._names[info.engine_id], request.policy_version)
        except ValueError as error:
            if request.policy_version != info.policy_version:  # else it is the first registration again, come twice
                raise Conflict(f"engine {request.url}: {error}; POST /resume tells of new weights") from error
        except EngineUnavailable as error:
            raise Conflict(f"engine {request.url} does not have the weights: {error}") from error

    def of(self, model: str) -> list[EngineInfo]:
        """The token engines of a model."""
        return [info for info in self._engines.values() if info.model == model and info.kind not in _BACKENDS]

    def names_at(self, urls: Collection[str]) -> set[str]:
        """By which the gateway knows the engines at these URLs; what is no engine's has none."""
        return {self._names[info.engine_id] for info in self._engines.values() if info.url in urls}

    def requests(self, now: Mapping[str, Mapping[str, Any]]) -> list[EngineRequest]:
        """What registers the token engines as they are `now` at another gateway."""
        infos = (self.with_state(info, now) for info in self._engines.values() if info.kind not in _BACKENDS)
        return [
            msgspec.convert(
                {name: getattr(each, name) for name in ("model", "kind", "url", "policy_version", "adapter")},
                EngineRequest,
            )
            for each in infos
        ]

    async def remove(self, engine_id: str) -> EngineInfo:
        """Take an engine out; it may be registered again. Raises NotFound."""
        async with self._one_at_a_time:
            if engine_id not in self._engines:
                raise NotFound(f"there is no engine {engine_id!r}; there are {sorted(self._engines)}")
            await self._door.detach(self._names.pop(engine_id))
            del self._remote_models[engine_id]
            return self._engines.pop(engine_id)

    def all(self, now: Mapping[str, Mapping[str, Any]]) -> list[EngineInfo]:
        """All engines, oldest first; `now` is how each is, by the gateway's names."""
        return [self.with_state(info, now) for info in self._engines.values()]

    def with_state(self, info: EngineInfo, now: Mapping[str, Mapping[str, Any]]) -> EngineInfo:
        """An engine as it is `now`."""
        return msgspec.structs.replace(info, **now.get(self._names[info.engine_id], {}))
