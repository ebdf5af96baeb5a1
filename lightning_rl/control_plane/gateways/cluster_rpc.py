"""What one server does for all gateways of a store: it seals an attempt wherever its calls are, registers engines,
pauses and resumes everywhere, and adds up what each has counted.

Invariants: a pause is made when the calls of every live gateway are parked, or nowhere; and what is resumed goes on
everywhere. A gateway that does not answer is asked until its lease is over: from then on it answers nobody. Gateways
ask each other with a key that is made of the store's secret.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from lightning_rl.control_plane.gateways.engines import EngineInfo, EngineRequest, Engines
from lightning_rl.control_plane.gateways.gateway_control import GatewayDoor, PauseRequest, Pauses, ResumeRequest
from lightning_rl.control_plane.gateways.membership import Membership
from lightning_rl.store.contract import ErrorInfo, Finish, GatewayInfo, Owner
from lightning_rl.store.errors import Conflict, Invalid, StoreUnwritable
from lightning_rl_proxy.recording.ledger import AttemptTokens

T = TypeVar("T")

ASKED = "x-lightning-rl-gateway"  # the header that says which gateway is meant: a URL may lead to another one by now
_log = logging.getLogger(__name__)
_AGAIN_SECONDS = 0.5
_ANSWER_SECONDS = 60.0  # beyond what a request itself may take
_RECORDING_LOST = ErrorInfo(
    type="RecordingLost",
    message="the store did not take the attempt's calls in time, so they were given up",
    infrastructure=True,
)
_GATEWAY_GONE = ErrorInfo(
    type="ServerGone",
    message="the gateway that had the attempt is gone, and may have answered calls that the store lacks",
    infrastructure=True,
)


class ModelPause(msgspec.Struct, frozen=True, kw_only=True):
    """How a model stands at a gateway; `lease_seconds` is what is left of its pause's lease."""

    paused: bool
    policy_version: int
    lease_seconds: float | None = None


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed attempt. `lack`: why the store has not all of its calls. `failure`: what went wrong at the gateway with
    a call that was not answered later."""

    lack: ErrorInfo | None = None
    failure: str | None = None

    def verdict(self, finish: Finish) -> ErrorInfo | None:
        """Why the attempt has failed by infrastructure, whatever its worker says; None where the worker's word holds.

        An agent that failed after a failure of its gateway is not blamed, whatever it raised. Nor is a program that
        ended with an error and was judged all the same.
        """
        well = finish.status == "succeeded" and finish.error is None
        if self.lack is not None or self.failure is None or well:
            return self.lack
        error = finish.error or ErrorInfo(type="AgentFailed", message="the agent failed")
        if error.infrastructure:
            return None
        message = f"{error.message} (the gateway had failed with a call of this attempt: {self.failure})"
        return msgspec.structs.replace(error, message=message, infrastructure=True)


class EngineId(msgspec.Struct, frozen=True, kw_only=True):
    """The engine that is meant."""

    engine_id: str


class RolloutIds(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts that are meant."""

    rollout_ids: list[str]


def _received(tokens: AttemptTokens) -> int:
    return sum(tokens.received.values())


class Unanswered(Exception):
    """Another gateway did not answer, or could not do it; the message says why."""


def peer_key(secret: bytes) -> str:
    """The key with which the gateways of a store ask each other."""
    return hmac.digest(secret, b"lightning_rl gateways", "sha256").hex()


class Alone:
    """The one server of a store. `placed_as`: the URL that claims name for attempts of this gateway, `gateway_id` the
    name by which others know it, if there are any."""

    placed_as: str | None = None
    gateway_id = ""

    def __init__(self, gateway: GatewayDoor, pauses: Pauses, engines: Engines) -> None:
        self._gateway = gateway
        self._pauses = pauses
        self._engines = engines

    async def seal(self, rollout_id: str, attempt_id: str) -> Sealed:
        """Seal an attempt where its calls are: then all of them are stored, or it says why they are not."""
        return await self.seal_here(rollout_id, attempt_id)

    async def pause(self, request: PauseRequest) -> None:
        """See `Pauses`."""
        await self._pauses.pause(request)

    async def resume(self, request: ResumeRequest) -> None:
        """See `Pauses`."""
        await self._pauses.resume(request)

    async def register(self, request: EngineRequest) -> EngineInfo:
        """Register an engine. Raises as `Engines.register`."""
        return self.engine(await self._engines.register(request))

    async def remove_engine(self, engine_id: str) -> EngineInfo:
        """Take an engine out. Raises NotFound."""
        return await self._engines.remove(engine_id)

    def engines_of(self, model: str) -> list[EngineInfo]:
        """The token engines of a model that are registered here."""
        return self._engines.of(model)

    def is_deserted(self, model: str) -> bool:
        """Whether a model has token engines here, and all of them are away."""
        engines = [self.engine(info) for info in self.engines_of(model)]
        return bool(engines) and all(each.away for each in engines)

    async def tokens_of(self, rollout_ids: Sequence[str]) -> dict[str, AttemptTokens]:
        """What engines handed over for the attempts at these rollouts, by attempt id, as far as is remembered."""
        return self._gateway.tokens_of(rollout_ids)

    def engine(self, info: EngineInfo) -> EngineInfo:
        """A registered engine as it is now."""
        return self._engines.with_state(info, self._gateway.state()["engines"])

    def engine_requests(self) -> list[EngineRequest]:
        """What registers the token engines of this gateway at another one."""
        return self._engines.requests(self._gateway.state()["engines"])

    async def live(self) -> list[GatewayInfo]:
        """The gateways that share the store: none is known."""
        return []

    def is_meant(self, gateway_id: str) -> bool:
        """Whether that is this gateway."""
        return False

    async def adopt(self) -> None:
        """Take over from the others, having just joined: their token engines, which weights their models have, and what
        is paused."""

    async def close(self) -> None:
        """Free the connections."""

    def model_pauses(self) -> dict[str, ModelPause]:
        """How the models stand here, for a gateway that joins."""
        return {
            model: ModelPause(
                paused=bool(now["paused"]),
                policy_version=int(now["policy_version"]),
                lease_seconds=self._pauses.lease_left(model),
            )
            for model, now in self._gateway.state()["models"].items()
        }

    async def seal_here(self, rollout_id: str, attempt_id: str) -> Sealed:
        """Seal an attempt at this gateway."""
        await self._gateway.seal(rollout_id, attempt_id)
        lack = _RECORDING_LOST if self._gateway.is_lost(rollout_id, attempt_id) else None
        return Sealed(lack=lack, failure=self._gateway.failure_of(rollout_id, attempt_id))


class Peers(Alone):
    """One of several servers of a store."""

    def __init__(
        self, gateway: GatewayDoor, pauses: Pauses, engines: Engines, fleet: Membership, secret: bytes
    ) -> None:
        super().__init__(gateway, pauses, engines)
        self._fleet = fleet
        self.placed_as = fleet.url
        self.gateway_id = fleet.gateway_id
        self._headers = {"authorization": f"Bearer {peer_key(secret)}", "content-type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """See `Alone`."""
        if self._session is not None:
            await self._session.close()

    async def live(self) -> list[GatewayInfo]:
        """The gateways that live."""
        return await self._fleet.live()

    async def seal(self, rollout_id: str, attempt_id: str) -> Sealed:
        """See `Alone`. Raises StoreUnwritable while nobody can say whether the attempt's gateway still lives."""
        if self._fleet.sure and self._gateway.holds(rollout_id, attempt_id):
            return await self.seal_here(rollout_id, attempt_id)
        owner = await self._fleet.owner(attempt_id)
        if owner is not None and owner.left:
            owner = await self._fleet.take(rollout_id, attempt_id)  # or another gateway might, and go on with it
        if owner is None or owner.gateway_id == self._fleet.gateway_id:
            return await self.seal_here(rollout_id, attempt_id)
        if owner.gone and self._fleet.knows_who_is_gone:
            return Sealed(lack=_GATEWAY_GONE)
        try:
            sealed = await self._ask(owner, "seal", {"rollout_id": rollout_id, "attempt_id": attempt_id}, Sealed)
        except Unanswered as error:
            raise StoreUnwritable(
                f"attempt {attempt_id} is at the gateway {owner.url}, which did not seal it ({error}): ask again"
            ) from error
        await self._gateway.seal(rollout_id, attempt_id)
        return msgspec.structs.replace(
            sealed, failure=sealed.failure or self._gateway.failure_of(rollout_id, attempt_id)
        )

    async def pause(self, request: PauseRequest) -> None:
        """Park the requests of a model everywhere. Raises as `Pauses`, with nothing paused anywhere."""
        self._pauses.check(request.model)
        here = asyncio.create_task(self._pauses.pause(request))
        await asyncio.sleep(0)  # who joins from here on hears of it from us, and the others are in the list
        seconds, done = request.deadline_seconds, dict[str, Any]
        others = [self._patiently(each, "pause", request, done, seconds) for each in await self._others()]
        answers = await asyncio.gather(here, *others, return_exceptions=True)
        failures = [each for each in answers if isinstance(each, BaseException)]
        if failures:
            if not self._pauses.is_replaced(request):  # else somebody else's pause is there since
                await self.resume(ResumeRequest(model=request.model))
            raise Conflict("; ".join(map(str, failures)))

    async def resume(self, request: ResumeRequest) -> None:
        """Let parked requests go on everywhere, those of this gateway last. Raises as `Pauses`."""
        self._pauses.check(request.model)
        resumed_ids: set[str] = set()
        failures: list[BaseException] = []
        here = False
        while new := [each for each in await self._others() if each.gateway_id not in resumed_ids]:
            resumed_ids |= {each.gateway_id for each in new}
            failures += await self._resume_at(new, request)
            if not here:
                here = True
                await self._pauses.resume(request)
        if not here:
            await self._pauses.resume(request)
        if failures:
            raise Conflict("; ".join(map(str, failures)))

    async def _resume_at(self, others: list[GatewayInfo], request: ResumeRequest) -> list[BaseException]:
        calls = (self._patiently(each, "resume", request, dict[str, Any]) for each in others)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [each for each in answers if isinstance(each, BaseException)]

    async def adopt(self) -> None:
        """See `Alone`."""
        for other in self._fleet.others:
            with contextlib.suppress(Unanswered):  # gone, most likely; each of those that live knows it
                requests = await self._ask(other, "engines", {}, list[EngineRequest])
                for request in requests:
                    await self._adopt_engine(request)
                for model, pause in (await self._ask(other, "pauses", {}, dict[str, ModelPause])).items():
                    await self._adopt(model, pause, [each for each in requests if each.model == model])

    async def _adopt_engine(self, request: EngineRequest) -> None:
        try:
            await self._engines.register(request)
        except (Conflict, Invalid) as error:
            _log.warning("engine %s of model %s is not used here: %s", request.url, request.model, error)

    async def _adopt(self, model: str, pause: ModelPause, engines: list[EngineRequest]) -> None:
        here = self._gateway.state()["models"].get(model)
        if here is None:
            return
        if pause.policy_version > here["policy_version"]:
            outdated = {each.url for each in engines if each.url and each.policy_version < pause.policy_version}
            await self._gateway.resume(model, pause.policy_version, self._engines.names_at(outdated))
        if pause.paused:
            await self._pauses.pause(PauseRequest(model=model, mode="keep", lease_seconds=pause.lease_seconds))

    async def register(self, request: EngineRequest) -> EngineInfo:
        """Register an engine at every gateway. Raises as `Alone`, and Conflict where another gateway cannot use it."""
        info = await super().register(request)
        failures = await self._everywhere("engine", request)
        if failures:
            await self.remove_engine(info.engine_id)
            raise Conflict("; ".join(map(str, failures)))
        return info

    async def remove_engine(self, engine_id: str) -> EngineInfo:
        """Take an engine out at every gateway. Raises NotFound where this one has it not."""
        removed = await super().remove_engine(engine_id)
        await self._everywhere("remove_engine", EngineId(engine_id=engine_id))
        return removed

    async def tokens_of(self, rollout_ids: Sequence[str]) -> dict[str, AttemptTokens]:
        """See `Alone`: of all gateways that live. Whoever takes an attempt over counts on from what is recorded, so the
        highest count is its last owner's."""
        by_attempt = await super().tokens_of(rollout_ids)
        request = RolloutIds(rollout_ids=list(rollout_ids))
        answers = (self._patiently(each, "tokens", request, dict[str, AttemptTokens]) for each in await self._others())
        for answer in await asyncio.gather(*answers):
            for attempt_id, tokens in (answer or {}).items():
                by_attempt[attempt_id] = max(
                    by_attempt.get(attempt_id, tokens), tokens, key=lambda one: sum(one.received.values())
                )
        return by_attempt

    async def _everywhere(self, route: str, request: msgspec.Struct) -> list[BaseException]:
        """Ask every other gateway; what those answered that could not do it."""
        calls = (self._patiently(each, route, request, dict[str, Any]) for each in await self._others())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, BaseException)]

    def is_meant(self, gateway_id: str) -> bool:
        """See `Alone`."""
        return gateway_id == self._fleet.gateway_id

    async def _others(self) -> list[GatewayInfo]:
        return [each for each in await self._fleet.live() if each.gateway_id != self._fleet.gateway_id]

    async def _patiently(
        self, other: GatewayInfo, route: str, request: msgspec.Struct, answer: type[T], seconds: float = 0
    ) -> T | None:
        """Ask until the gateway answers; None where it is gone. Raises Unanswered where it cannot do it."""
        while True:
            try:
                return await self._ask(other, route, request, answer, seconds)
            except Unanswered as error:
                if isinstance(error.__cause__, aiohttp.ClientResponseError):
                    raise
            if other.gateway_id not in {each.gateway_id for each in await self._others()}:
                return None
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _ask(self, gateway: GatewayInfo | Owner, route: str, body: Any, answer: type[T], seconds: float = 0) -> T:
        """What another gateway answers. Raises Unanswered."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        url = gateway.url
        headers = self._headers | {ASKED: gateway.gateway_id}
        timeout = aiohttp.ClientTimeout(total=seconds + _ANSWER_SECONDS, sock_connect=5)
        try:
            async with self._session.post(
                f"{url}/api/v1/peers/{route}", data=msgspec.json.encode(body), headers=headers, timeout=timeout
            ) as response:
                data = await response.read()
                if response.status != 200:
                    raise Unanswered(f"{url} answered {response.status}: {data.decode(errors='replace')[:500]}") from (
                        aiohttp.ClientResponseError(response.request_info, (), status=response.status)
                    )
                return msgspec.json.decode(data, type=answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unanswered(f"{url}: {error or type(error).__name__}") from error
