"""What the control plane needs of a gateway, and the pauses it makes there.

Invariant: a pause that has a lease ends with it, whoever asked for it and whatever became of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from prometheus_client.registry import Collector

from lightning_rl.control_plane.gateways.admission import LoadDoor
from lightning_rl.control_plane.gateways.engines import EngineDoor, Engines
from lightning_rl.store.errors import Conflict, NotFound
from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable
from lightning_rl_proxy.recording.alerts import ALARMS
from lightning_rl_proxy.recording.ledger import AttemptInfo, AttemptTokens

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class GatewayDoor(EngineDoor, LoadDoor, Protocol):
    """The gateway as the control plane sees it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every path that is not the control plane's."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def open(self, info: AttemptInfo) -> None:
        """An attempt was opened just now."""
        ...

    def held(self) -> Sequence[tuple[str, str]]:
        """The attempts whose door is open here."""
        ...

    def holds(self, rollout_id: str, attempt_id: str) -> bool:
        """Whether that attempt's door is open here."""
        ...

    def idle_seconds(self, rollout_id: str, attempt_id: str) -> float | None:
        """How long ago the attempt's last call ended; 0 while one is in flight, None where none came in here."""
        ...

    async def release(self, rollout_id: str, attempt_id: str) -> None:
        """The attempt is another gateway's now."""
        ...

    async def seal(self, rollout_id: str, attempt_id: str) -> None:
        """On return the attempt's door is shut and all its spans are in the store."""
        ...

    @property
    def journal_damaged(self) -> bool:
        """Whether the journal of an earlier gateway could not be read whole."""
        ...

    def is_lost(self, rollout_id: str, attempt_id: str) -> bool:
        """Whether records of the attempt were given up, so that it fails as infrastructure does."""
        ...

    def failure_of(self, rollout_id: str, attempt_id: str) -> str | None:
        """What went wrong at the gateway with a call of the attempt that was not answered later."""
        ...

    def interrupted(self, rollout_id: str, attempt_id: str, what: str) -> None:
        """Calls of the attempt may have found no gateway."""
        ...

    def tokens_of(self, rollout_ids: Sequence[str]) -> dict[str, AttemptTokens]:
        """What engines handed over for the attempts at these rollouts, by attempt id, as far as is remembered."""
        ...

    def now_ns(self) -> int:
        """Now, by the clock of recorded calls, since the epoch."""
        ...

    def restore(self, received: dict[str, int], newest_ns: int = 0) -> None:
        """Tokens that earlier processes received, per model, and when their last call ended."""
        ...

    async def pause(self, model: str | None = None, drain_seconds: float = 0) -> None:
        """New calls wait; those in flight have `drain_seconds` to end, then they freeze until `resume`.

        Raises EngineUnavailable or EngineRefused where an engine cannot freeze them.
        """
        ...

    async def resume(
        self, model: str | None = None, policy_version: int | None = None, outdated: Collection[str] = ()
    ) -> None:
        """Calls go on, with weights of `policy_version`, which the engines named in `outdated` do not have."""
        ...

    async def check(self) -> tuple[str | None, dict[str, str | None]]:
        """What is wrong with recording, and with each engine; None where nothing is."""
        ...

    @property
    def timings(self) -> Sequence[Collector]:
        """What measures itself."""
        ...

    def state(self) -> dict[str, Any]:
        """`{"models": {name: {"in_flight", "paused", ...}}, ...}`."""
        ...


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`drain`: generations in flight may end until the deadline, then they freeze as they do at once with `keep`."""

    model: str | None = None
    mode: Literal["drain", "keep"] = "drain"
    deadline_seconds: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    lease_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`policy_version`: of the weights that sample from now on. `outdated`: URLs of engines that do not have them."""

    model: str | None = None
    policy_version: int | None = None
    outdated: list[str] = []


class Pauses:
    """The pauses of one gateway."""

    def __init__(self, gateway: GatewayDoor, engines: Engines) -> None:
        self._gateway = gateway
        self._engines = engines
        self._leases: dict[str | None, asyncio.Task[None]] = {}
        self._ends: dict[str | None, float] = {}  # of the leases, by the loop's clock
        self._latest: dict[str | None, PauseRequest] = {}  # of what is paused

    async def pause(self, request: PauseRequest) -> None:
        """Park the requests of a model.

        Raises NotFound for a model that no engine serves, and Conflict, with nothing paused, where one cannot freeze.
        """
        self.check(request.model)
        self._end_lease(request.model)
        self._latest[request.model] = request
        if request.lease_seconds is not None:
            self._ends[request.model] = asyncio.get_running_loop().time() + request.lease_seconds
            lease = self._expire(request.model, request.lease_seconds)
            self._leases[request.model] = asyncio.create_task(lease)
        try:
            await self._gateway.pause(request.model, request.deadline_seconds if request.mode == "drain" else 0)
        except (EngineUnavailable, EngineRefused) as error:
            if not self.is_replaced(request):  # else somebody else's pause is there since
                await self.resume(ResumeRequest(model=request.model))
            raise Conflict(str(error)) from error

    async def resume(self, request: ResumeRequest) -> None:
        """Let parked requests go on. Raises NotFound for a model that no engine serves."""
        self.check(request.model)
        for model in {*self._leases, *self._latest} if request.model is None else [request.model]:
            self._end_lease(model)
            self._latest.pop(model, None)
        outdated = self._engines.names_at(request.outdated)
        await self._gateway.resume(request.model, request.policy_version, outdated)

    def holds(self, request: PauseRequest) -> bool:
        """Whether that is what its model is paused by."""
        return self._latest.get(request.model) is request

    def is_replaced(self, request: PauseRequest) -> bool:
        """Whether another pause of its model has come since."""
        latest = self._latest.get(request.model)
        return latest is not None and latest is not request

    def is_paused(self, model: str) -> bool:
        """Whether calls of the model wait; not where nothing ever served it."""
        now = self._gateway.state()["models"].get(model)
        return now is not None and bool(now["paused"])

    def any_paused(self) -> bool:
        """Whether any model is paused now."""
        return any(model["paused"] for model in self._gateway.state()["models"].values())

    def lease_left(self, model: str) -> float | None:
        """Seconds until the lease of the model's pause is over; None where it has none."""
        ends = [self._ends[name] for name in (model, None) if name in self._leases]
        return max(min(ends) - asyncio.get_running_loop().time(), 0.1) if ends else None

    def close(self) -> None:
        """Forget all leases."""
        for model in list(self._leases):
            self._end_lease(model)

    def check(self, model: str | None) -> None:
        """Raises NotFound for a model that no engine serves."""
        models = self._gateway.state()["models"]
        if model is not None and model not in models:
            raise NotFound(f"no engine serves model {model!r}; there are {sorted(models)}")

    async def _expire(self, model: str | None, seconds: float) -> None:
        await asyncio.sleep(seconds)
        ALARMS.error(
            "the pause of %s was not ended within its lease of %g s: requests go on with the old weights",
            model or "all models",
            seconds,
        )
        del self._leases[model]
        self._latest.pop(model, None)
        for name in self._gateway.state()["models"] if model is None else [model]:
            if name not in self._latest:  # one that was paused by its own name stays so
                await self._gateway.resume(name)

    def _end_lease(self, model: str | None) -> None:
        lease = self._leases.pop(model, None)
        if lease is not None:
            lease.cancel()
