"""The engines that were registered with a gateway.

Invariant: an engine (model, kind, URL) is registered once; again with the same body it is the same engine.
"""

import hashlib
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from lightning_rl.store.errors import Conflict


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine that samples `model` at `url`; `policy_version` is that of its weights now."""

    model: str
    kind: Literal["embedded", "vllm"]
    url: Annotated[str, msgspec.Meta(pattern=r"\Ahttps?://")]
    policy_version: int = 0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A registered engine."""

    engine_id: str
    model: str
    kind: str
    url: str
    policy_version: int  # at registration; `GET /state` has the present one


class Engines:
    """`attach` makes a gateway use an engine."""

    def __init__(self, attach: Callable[[EngineRequest], None]) -> None:
        self._attach = attach
        self._known: dict[str, EngineInfo] = {}

    def register(self, request: EngineRequest) -> EngineInfo:
        """The engine, attached. Raises Conflict when it is there with another policy version."""
        place = f"{request.model}\n{request.kind}\n{request.url}"
        engine_id = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
        info = EngineInfo(engine_id=engine_id, **msgspec.structs.asdict(request))
        known = self._known.get(engine_id)
        if known is None:
            self._attach(request)
            self._known[engine_id] = info
        elif known != info:
            raise Conflict(
                f"engine {request.url} of model {request.model!r} is registered with policy version "
                f"{known.policy_version}; POST /resume tells of new weights"
            )
        return info

    def all(self) -> list[EngineInfo]:
        """All engines, oldest first."""
        return list(self._known.values())
