"""The engines and chat backends that were registered with a gateway.

Invariants: an engine (model, kind, URL) is registered once; again with the same body it is the same engine. A key is
handed on and forgotten: nothing here keeps, shows or compares it.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

import msgspec

from lightning_rl.store.errors import Conflict


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What answers for `model` at `url`.

    `embedded` and `vllm` are token engines; `policy_version` is that of their weights now. `openai` and `litellm` are
    frozen chat backends: `remote_model` is the model's name there (by default `model`), `api_key` the service's key.
    `litellm` knows most URLs by itself.
    """

    model: str
    kind: Literal["embedded", "vllm", "openai", "litellm"]
    url: Annotated[str, msgspec.Meta(pattern=r"\Ahttps?://")] | None = None
    policy_version: int = 0
    remote_model: str | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.url is None and self.kind != "litellm":
            raise ValueError(f"an engine of kind {self.kind!r} needs its url")
        if self.is_backend and self.policy_version:
            raise ValueError(f"policy_version is for token engines; a model of kind {self.kind!r} is frozen")
        if not self.is_backend and (self.api_key is not None or self.remote_model is not None):
            raise ValueError(f"api_key and remote_model are for kinds 'openai' and 'litellm', not {self.kind!r}")

    def __repr__(self) -> str:
        return f"EngineRequest(model={self.model!r}, kind={self.kind!r}, url={self.url!r})"  # never the key

    @property
    def is_backend(self) -> bool:
        """Whether it is a chat backend."""
        return self.kind in ("openai", "litellm")


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A registered engine."""

    engine_id: str
    model: str
    kind: str
    url: str | None
    policy_version: int  # at registration; `GET /state` has the present one


class Engines:
    """`attach` makes a gateway use an engine."""

    def __init__(self, attach: Callable[[EngineRequest], Awaitable[None]]) -> None:
        self._attach = attach
        self._one_at_a_time = asyncio.Lock()
        self._known: dict[str, EngineInfo] = {}
        self._remote_models: dict[str, str | None] = {}

    async def register(self, request: EngineRequest) -> EngineInfo:
        """The engine, attached.

        Raises Conflict when it is there with another policy version or remote model, and what attaching raises.
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
        )
        known = self._known.get(engine_id)
        if known is None:
            await self._attach(request)
            self._known[engine_id] = info
            self._remote_models[engine_id] = request.remote_model
        elif known != info:
            raise Conflict(
                f"engine {request.url} of model {request.model!r} is registered with policy version "
                f"{known.policy_version}; POST /resume tells of new weights"
            )
        elif (asked := self._remote_models[engine_id]) != request.remote_model:
            raise Conflict(
                f"model {request.model!r} at {request.url or request.kind} is registered as {asked or request.model!r} "
                "there; register the other one under a name of its own"
            )
        return info

    def all(self) -> list[EngineInfo]:
        """All engines, oldest first."""
        return list(self._known.values())
