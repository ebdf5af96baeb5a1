"""The control plane: JSON (or MessagePack, where the client accepts it) over HTTP, every route in one table.

Invariants: no request does anything before its key was checked and its body decoded by type; every error says what is
wrong with which thing; a finished attempt is answered only when it and all its spans are durable.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_rl.control_plane.auth import Keys, Role
from lightning_rl.control_plane.gateways.admission import Admission
from lightning_rl.control_plane.gateways.cluster_rpc import ASKED, Alone, ModelPause, Sealed
from lightning_rl.control_plane.gateways.engines import EngineRequest, Engines
from lightning_rl.control_plane.gateways.gateway_control import GatewayDoor, PauseRequest, Pauses, ResumeRequest
from lightning_rl.control_plane.gateways.notifications import Notifications
from lightning_rl.control_plane.gateways.resolve import check_resources, resolve
from lightning_rl.control_plane.gateways.store_ledger import claimed_info
from lightning_rl.control_plane.limits import try_later
from lightning_rl.control_plane.requests import (
    AttemptsBody,
    ClaimBody,
    EndingsBody,
    EnqueueBody,
    PageQuery,
    RewardsBody,
    SealBody,
    TracesBody,
    TripletsQuery,
    WaitBody,
    WorkersBody,
)
from lightning_rl.control_plane.sweeper import Sweeper
from lightning_rl.store.contract import (
    Attempt,
    AttemptTrace,
    Claim,
    Finish,
    Log,
    Resources,
    ResourcesRequest,
    Rollout,
    RolloutDetail,
    RolloutRequest,
)
from lightning_rl.store.errors import Conflict, Invalid, NotFound, StoreError, StoreUnwritable
from lightning_rl.store.life_cycle import ENDED
from lightning_rl.store.rewards import returned_rewards
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl.trajectories import trace_views
from lightning_rl_proxy.http.keys import KeyRefused, verify_attempt_key
from lightning_rl_proxy.http.limits import RequestLimits

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Any]]

MSGPACK = "application/msgpack"
_CLAIMS_REMEMBERED = 1024
_ENDED_TOGETHER_SECONDS = 0.01  # more rollouts end meanwhile, and are told in one answer
_STATUS: dict[type[StoreError], tuple[int, str]] = {
    Invalid: (400, "invalid_request"),
    NotFound: (404, "not_found"),
    Conflict: (409, "conflict"),
    StoreUnwritable: (507, "store_unwritable"),
}
_log = logging.getLogger(__name__)


class ControlPlane:
    """The routes under /api/v1. `gateway_url` is where agents reach the gateway (no trailing slash)."""

    def __init__(
        self,
        *,
        store: SqlStore,
        sql: SqlThread,
        signals: Notifications,
        admission: Admission,
        gateway: GatewayDoor,
        pauses: Pauses,
        engines: Engines,
        sweeper: Sweeper,
        keys: Keys,
        gateway_url: str,
        together: Alone,
        limits: RequestLimits | None = None,
    ) -> None:
        self._store = store
        self._sql = sql
        self._signals = signals
        self._admission = admission
        self._answered: dict[str, None] = {}  # the latest claims, by id
        self._claims_waiting = 0
        self._gateway = gateway
        self._pauses = pauses
        self._engines = engines
        self._sweeper = sweeper
        self._keys = keys
        self._gateway_url = gateway_url.rstrip("/")
        self._together = together
        self._limits = limits or RequestLimits()

    def routes(self) -> list[Route]:
        """Every route, with who may use it."""
        rollout = "/rollouts/{rollout_id}"
        attempt = rollout + "/attempts/{attempt_id}"
        return [
            self._route("POST", "/rollouts/claim", self._claim, "runner"),
            self._route("POST", attempt + "/heartbeat", self._heartbeat, "runner", own=True),
            self._route("POST", attempt + "/rewards", self._add_rewards, "runner"),
            self._route("POST", attempt + "/finish", self._finish, "runner"),
            self._route("POST", attempt + "/log", self._add_log, "runner"),
            self._route("POST", "/attempts/heartbeat", self._heartbeats, "runner"),
            self._route("POST", "/attempts/finish", self._finish_many, "runner"),
            self._route("POST", "/workers/died", self._workers_died, "runner"),
            self._route("POST", "/rollouts", self._enqueue, status=201),
            self._route("GET", "/rollouts", self._page),
            self._route("POST", "/rollouts/start", self._start, status=201),
            self._route("POST", "/rollouts/wait", self._wait),
            self._route("POST", "/rollouts/spans", self._traces),
            self._route("GET", rollout, self._rollout),
            self._route("POST", rollout + "/cancel", self._cancel),
            self._route("GET", attempt + "/log", self._log),
            self._route("GET", attempt + "/spans", self._spans),
            self._route("GET", attempt + "/triplets", self._triplets),
            self._route("GET", attempt + "/rows", self._rows),
            self._route("POST", "/resources", self._publish, status=201),
            self._route("GET", "/resources/{resources_id}", self._resources),
            self._route("POST", "/engines", self._register, status=201),
            self._route("GET", "/engines", self._list_engines),
            self._route("DELETE", "/engines/{engine_id}", self._remove_engine),
            self._route("POST", "/pause", self._pause),
            self._route("POST", "/resume", self._resume),
            self._route("GET", "/gateways", self._list_gateways),
            self._route("POST", "/peers/seal", self._seal_here, "peer"),
            self._route("POST", "/peers/pause", self._pause_here, "peer"),
            self._route("POST", "/peers/resume", self._resume_here, "peer"),
            self._route("POST", "/peers/pauses", self._pauses_here, "peer"),
            self._route("GET", "/state", self._state),
            self._route("POST", "/state/tokens", self._tokens_received),
        ]

    def _route(
        self, method: str, path: str, handler: Handler, role: Role = "admin", status: int = 200, *, own: bool = False
    ) -> Route:
        """`own`: the key of the attempt that the path names opens it, too."""

        async def endpoint(request: Request) -> Response:
            refused = None if own and self._is_own(request) else self._refusal(request, role)
            if refused is not None:
                return refused
            try:
                answer = await handler(request)
            except StoreError as error:
                code, kind = _STATUS[type(error)]
                return error_response(code, kind, str(error))
            except msgspec.ValidationError as error:
                return error_response(400, "invalid_request", _where(request) + str(error))
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                return error_response(400, "invalid_request", f"{_where(request)}the body is no JSON: {error}")
            return encoded(request, status, answer)

        return Route("/api/v1" + path, endpoint, methods=[method])

    def _is_own(self, request: Request) -> bool:
        """Whether the key is that of the attempt which the path names."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        try:
            opened = verify_attempt_key(self._store.secret, key.strip() if scheme.lower() == "bearer" else "")
        except KeyRefused:
            return False
        return (opened.rollout_id, opened.attempt_id) == _place(request)

    def _refusal(self, request: Request, needed: Role) -> Response | None:
        role = self._keys.role(request.headers.get("authorization", ""))
        if role is None:
            return error_response(401, "unauthorized", "send an admin or a runner key as Authorization: Bearer")
        if role not in ("admin", needed):
            whose = "the admin key" if needed == "admin" else f"a {needed}'s key"
            return error_response(403, "forbidden", f"{request.method} {request.url.path} needs {whose}")
        asked = request.headers.get(ASKED)
        if needed == "peer" and (asked is None or not self._together.is_meant(asked)):
            return error_response(409, "conflict", f"gateway {asked} was meant, and this is another one")
        return None

    # Rollouts

    async def _enqueue(self, request: Request) -> dict[str, list[Rollout]]:
        body = await _decoded(request, EnqueueBody)
        made = await self._sql.run(self._store.enqueue, body.rollouts)
        self._signals.queued()
        return {"rollouts": made}

    async def _start(self, request: Request) -> Any:
        body = await _decoded(request, RolloutRequest)
        self._check_open_attempts()
        claim = await self._sql.run(self._store.start, body, "started by hand")
        return self._handed_out(claim)

    async def _page(self, request: Request) -> dict[str, Any]:
        query = msgspec.convert(dict(request.query_params), PageQuery, strict=False)
        page, cursor = await self._sql.run(self._store.page, **msgspec.structs.asdict(query))
        return {"rollouts": page, "cursor": cursor}

    async def _rollout(self, request: Request) -> RolloutDetail:
        return await self._sql.run(self._store.rollout, request.path_params["rollout_id"])

    async def _cancel(self, request: Request) -> Rollout:
        rollout_id = request.path_params["rollout_id"]
        rollout = await self._sql.run(self._store.cancel, rollout_id)
        if rollout.status == "cancelled" and rollout.attempt_id is not None:
            await self._gateway.seal(rollout_id, rollout.attempt_id)
        self._signals.ended([rollout_id])
        return rollout

    async def _wait(self, request: Request) -> dict[str, list[Rollout]]:
        body = await _decoded(request, WaitBody)
        with self._signals.next_ended(body.rollout_ids) as any_ended:
            ended = await self._sql.run(self._store.ended, body.rollout_ids)
            if not ended and body.wait_seconds:
                await asyncio.wait([any_ended], timeout=body.wait_seconds)
                await asyncio.sleep(_ENDED_TOGETHER_SECONDS)
                told = sorted(any_ended.result()) if any_ended.done() else []
                ended = await self._sql.run(self._store.ended, told or body.rollout_ids)
        return {"rollouts": ended}

    # A worker's requests

    def _check_open_attempts(self) -> None:
        """Raises HTTPException(429) where the server holds as many attempts as it may.

        A claim of several may go over the limit, by what it asks for.
        """
        there = self._gateway.load().open_attempts
        if there >= self._limits.open_attempts:
            raise try_later(f"{there} attempts are open here, and no more may be: wait until some have ended")

    def _handed_out(self, claim: Claim) -> Claim:
        """The claim as its worker gets it; the gateway hears of the attempt before the agent can call."""
        if claim.attempt.status == "running" and claim.gateway_url == self._together.placed_as:
            self._gateway.open(claimed_info(claim))
        return resolve(claim, self._gateway_url, self._store.secret)

    async def _claim(self, request: Request) -> dict[str, Any]:
        body = await _decoded(request, ClaimBody)
        self._claims_waiting += 1
        try:
            return await self._claimed(request, body)
        finally:
            self._claims_waiting -= 1

    async def _claimed(self, request: Request, body: ClaimBody) -> dict[str, Any]:
        """What there is to claim, as soon as there is something and room for it, or the time is up."""
        loop = asyncio.get_running_loop()
        end = loop.time() + body.wait_seconds
        while True:
            self._check_open_attempts()
            queued = self._signals.next_queued()
            # What was handed out already is asked for again where its answer was lost.
            let_in = body.claim_id in self._answered or self._admission.has_room()
            claims = await self._take(body) if let_in else []
            left = end - loop.time()
            if claims or left <= 0 or self._signals.closing:
                return {"claims": claims}
            if let_in:
                await asyncio.wait([queued], timeout=left)
            else:
                with self._signals.next_room() as turn:
                    await asyncio.wait([turn], timeout=left)
            # A worker that left while it waited must not be given a rollout.
            if await request.is_disconnected():
                self._admission.capacity_freed()  # its turn is another's
                return {"claims": []}

    async def _take(self, body: ClaimBody) -> list[Claim]:
        """Queued rollouts, if there are any, handed out. A claim of several may take more than there is room for."""
        with self._admission.handing_out(body.limit):
            found = await self._sql.run(
                self._store.claim, body.worker_id, agents=body.agents, limit=body.limit, claim_id=body.claim_id
            )
            if found and body.claim_id is not None:
                self._answered[body.claim_id] = None
                if len(self._answered) > _CLAIMS_REMEMBERED:
                    del self._answered[next(iter(self._answered))]
            return [self._handed_out(claim) for claim in found]

    async def _heartbeat(self, request: Request) -> dict[str, Any]:
        attempt = await self._sql.run(self._store.heartbeat, *_place(request))
        return {"attempt_id": attempt.attempt_id, "lease_expires_at": attempt.lease_expires_at}

    async def _heartbeats(self, request: Request) -> dict[str, Any]:
        body = await _decoded(request, AttemptsBody)
        return {"leases": await self._sql.run(self._store.heartbeats, body.attempts)}

    async def _add_rewards(self, request: Request) -> dict[str, Any]:
        body = await _decoded(request, RewardsBody)
        late = self._keys.role(request.headers.get("authorization", "")) == "admin"
        return {"rewards": await self._sql.run(self._store.add_rewards, *_place(request), body.rewards, late=late)}

    async def _finish(self, request: Request) -> Attempt:
        body = await _decoded(request, Finish)
        rollout_id, attempt_id = _place(request)
        returned_rewards(rollout_id, body)  # a refused finish must not seal the attempt
        lack = (await self._together.seal(rollout_id, attempt_id)).verdict(body)
        rollout, attempt = await self._sql.run(self._store.finish, rollout_id, attempt_id, body, lack)
        self._tell([rollout])
        _check_stored(body, rollout, attempt)
        return attempt

    async def _finish_many(self, request: Request) -> dict[str, Any]:
        endings = (await _decoded(request, EndingsBody)).attempts
        for ending in endings:
            returned_rewards(ending.rollout_id, ending.finish)
        sealed = await asyncio.gather(*(self._together.seal(one.rollout_id, one.attempt_id) for one in endings))
        lacks = [one.verdict(ending.finish) for one, ending in zip(sealed, endings, strict=True)]
        outcomes = await self._sql.run(self._store.finish_many, endings, lacks)
        self._tell(rollout for rollout, _ in outcomes)
        for ending, outcome in zip(endings, outcomes, strict=True):
            _check_stored(ending.finish, *outcome)
        return {"attempts": [attempt for _, attempt in outcomes]}

    def _tell(self, moved: Iterable[Rollout]) -> None:
        """Wake those who wait for what these rollouts became."""
        by_status = {rollout.rollout_id: rollout.status for rollout in moved}
        self._signals.ended(rollout_id for rollout_id, status in by_status.items() if status in ENDED)
        if "queued" in by_status.values():
            self._signals.queued()

    async def _add_log(self, request: Request) -> Log:
        log = await _decoded(request, Log)
        rollout_id, attempt_id = _place(request)
        await self._sql.run(self._store.attempt, rollout_id, attempt_id)
        await self._sql.run(self._store.add_spans, [trace_views.log_span(rollout_id, attempt_id, log)])
        return log

    async def _workers_died(self, request: Request) -> dict[str, Any]:
        body = await _decoded(request, WorkersBody)
        running = await self._sql.run(self._store.running, body.worker_ids, why="worker")
        return {"rollouts": await self._sweeper.end(running)}

    # What was recorded

    async def _traces(self, request: Request) -> Any:
        body = await _decoded(request, TracesBody)
        packed = msgspec.Raw(await self._sql.run(self._store.packed_traces, body.rollout_ids))
        if _wants_msgpack(request):
            return {"rollouts": packed}
        return {"rollouts": await asyncio.to_thread(trace_views.unpacked_traces, packed)}

    async def _spans(self, request: Request) -> dict[str, Any]:
        _, trace = await self._trace(request)
        spans = trace.spans if _wants_msgpack(request) else trace_views.spans_of(trace)
        return {"spans": spans, "rewards": trace.rewards}

    async def _triplets(self, request: Request) -> dict[str, Any]:
        query = msgspec.convert(dict(request.query_params), TripletsQuery)
        _, trace = await self._trace(request)
        if query.source == "otel":
            return await asyncio.to_thread(trace_views.triplets_of_otel, trace)
        return {"triplets": await asyncio.to_thread(trace_views.triplets_of, trace)}

    async def _rows(self, request: Request) -> dict[str, Any]:
        rollout, trace = await self._trace(request)
        return {"rows": await asyncio.to_thread(trace_views.rows_of, rollout, trace)}

    async def _log(self, request: Request) -> Log:
        _, trace = await self._trace(request)
        return trace_views.log_of(trace)

    async def _trace(self, request: Request) -> tuple[Rollout, AttemptTrace]:
        rollout_id, attempt_id = _place(request)
        found = (await self._sql.run(self._store.traces, [rollout_id])).get(rollout_id)
        for trace in found.attempts if found else ():
            if found and trace.attempt.attempt_id == attempt_id:
                return found.rollout, trace
        raise NotFound(f"there is no attempt {attempt_id} of rollout {rollout_id}")

    # Resources and engines

    async def _publish(self, request: Request) -> Resources:
        body = await _decoded(request, ResourcesRequest)
        check_resources(body)
        return await self._sql.run(self._store.publish, body)

    async def _resources(self, request: Request) -> Resources:
        return await self._sql.run(self._store.resources, request.path_params["resources_id"])

    async def _register(self, request: Request) -> Any:
        info = await self._engines.register(await _decoded(request, EngineRequest))
        return self._engines.told(info, self._gateway.state()["engines"])

    async def _list_engines(self, request: Request) -> dict[str, Any]:
        return {"engines": self._engines.all(self._gateway.state()["engines"])}

    async def _remove_engine(self, request: Request) -> Any:
        return await self._engines.remove(request.path_params["engine_id"])

    async def _pause(self, request: Request) -> dict[str, Any]:
        await self._together.pause(await _decoded(request, PauseRequest))
        return self._told()

    async def _resume(self, request: Request) -> dict[str, Any]:
        await self._together.resume(await _decoded(request, ResumeRequest))
        return self._told()

    # What another gateway of the store asks

    async def _list_gateways(self, request: Request) -> dict[str, Any]:
        return {"gateways": await self._together.live()}

    async def _seal_here(self, request: Request) -> Sealed:
        body = await _decoded(request, SealBody)
        return await self._together.seal_here(body.rollout_id, body.attempt_id)

    async def _pause_here(self, request: Request) -> dict[str, Any]:
        await self._pauses.pause(await _decoded(request, PauseRequest))
        return {}

    async def _resume_here(self, request: Request) -> dict[str, Any]:
        await self._pauses.resume(await _decoded(request, ResumeRequest))
        return {}

    async def _pauses_here(self, request: Request) -> dict[str, ModelPause]:
        return self._together.told()

    async def _tokens_received(self, request: Request) -> dict[str, Any]:
        body = await _decoded(request, TracesBody)
        return {
            "tokens_received": self._gateway.tokens_received(body.rollout_ids),
            "tokens_sealed": self._gateway.tokens_sealed(body.rollout_ids),
            "state": self._told(),
        }

    async def _state(self, request: Request) -> dict[str, Any]:
        return self._told()

    def _told(self) -> dict[str, Any]:
        claims = {"claims_held_back": self._signals.held_back, "claims_waiting": self._claims_waiting}
        return self._gateway.state() | claims | {"store_id": store_id(self._store.secret)}


def store_id(secret: bytes) -> str:
    """What tells a store from others in few letters; nothing of the secret can be told from it."""
    return hashlib.blake2b(secret, digest_size=3, person=b"store id").hexdigest()


def _check_stored(finish: Finish, rollout: Rollout, attempt: Attempt) -> None:
    """Raises Conflict where the attempt was stored as failed although its worker says that it has succeeded."""
    if finish.status == "succeeded" and attempt.status != "succeeded":
        why = "" if attempt.error is None else f": {attempt.error.type}: {attempt.error.message}"
        raise Conflict(
            f"attempt {attempt.attempt_id} of rollout {rollout.rollout_id} was stored as {attempt.status}, not as "
            f"succeeded{why}. Drop this result: the rollout is {rollout.status}"
        )


def error_response(status: int, kind: str, message: str) -> Response:
    """`{"error": {"type", "message"}}`."""
    body = msgspec.json.encode({"error": {"type": kind, "message": message}})
    return Response(body, status, media_type="application/json")


def encoded(request: Request, status: int, answer: Any) -> Response:
    """The answer in the form that the client accepts."""
    if _wants_msgpack(request):
        return Response(msgspec.msgpack.encode(answer), status, media_type=MSGPACK)
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


async def _decoded(request: Request, body: type[T]) -> T:
    return msgspec.json.decode(await request.body() or b"{}", type=body)


def _wants_msgpack(request: Request) -> bool:
    return request.headers.get("accept") == MSGPACK


def _place(request: Request) -> tuple[str, str]:
    return request.path_params["rollout_id"], request.path_params["attempt_id"]


def _where(request: Request) -> str:
    rollout_id = request.path_params.get("rollout_id")
    return f"rollout {rollout_id}: " if rollout_id else ""
