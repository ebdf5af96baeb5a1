"""What was recorded in attempts, as spans, triplets, rows and logs."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse

from lightning_rl.control_plane.routes.requests import RolloutsBody, TripletsQuery
from lightning_rl.control_plane.routes.required_key import ADMIN
from lightning_rl.control_plane.routes.route import ApiRoute, JsonBody, UrlQuery, wants_msgpack
from lightning_rl.control_plane.routes.services import Server, Services
from lightning_rl.store.answers import TracesAnswer
from lightning_rl.store.contract import AttemptTrace, Log, Reward, Rollout
from lightning_rl.store.errors import NotFound
from lightning_rl.trajectories import trace_views
from lightning_rl_adapters.conventions import ConventionDiagnosis
from lightning_rl_adapters.rows import Row
from lightning_rl_adapters.span import Span
from lightning_rl_adapters.triplet import Triplet

_ATTEMPT = "/{rollout_id}/attempts/{attempt_id}"
_PIECE = 2**18  # bytes of an answer that is sent in pieces
router = APIRouter(prefix="/api/v1/rollouts", tags=["traces"], route_class=ApiRoute)


class SpansAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded in an attempt; in JSON, token ids and logprobs are lists of numbers."""

    spans: list[Span]
    rewards: list[Reward]


class TripletsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One triplet per call. `diagnoses`: what the agent's own spans lack, where they are the source."""

    triplets: list[Triplet]
    diagnoses: list[ConventionDiagnosis] | msgspec.UnsetType = msgspec.UNSET


class RowsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One row per leaf."""

    rows: list[Row]


@router.post("/spans", dependencies=[ADMIN])
async def list_traces(
    server: Server, request: Request, body: Annotated[RolloutsBody, Depends(JsonBody(RolloutsBody))]
) -> TracesAnswer:
    """Everything recorded in these rollouts, all attempts; unknown ids are left out."""
    # As the store packed them: a client that accepts MessagePack unpacks them by itself.
    traces: Any = msgspec.Raw(await server.sql.run(server.store.packed_traces, body.rollout_ids))
    if not wants_msgpack(request):
        traces = await asyncio.to_thread(trace_views.unpacked_traces, traces)
    return TracesAnswer(rollouts=traces)


@router.get(f"{_ATTEMPT}/log", dependencies=[ADMIN])
async def get_log(server: Server, rollout_id: str, attempt_id: str) -> Log:
    """What the attempt printed, and its traceback."""
    _, trace = await _trace(server, rollout_id, attempt_id)
    return trace_views.log_of(trace)


@router.get(f"{_ATTEMPT}/spans", dependencies=[ADMIN])
async def list_spans(server: Server, request: Request, rollout_id: str, attempt_id: str) -> SpansAnswer:
    """The attempt's spans and rewards."""
    _, trace = await _trace(server, rollout_id, attempt_id)
    spans: Any = trace.spans if wants_msgpack(request) else trace_views.spans_of(trace)
    return SpansAnswer(spans=spans, rewards=trace.rewards)


@router.get(f"{_ATTEMPT}/triplets", dependencies=[ADMIN])
async def list_triplets(
    server: Server,
    request: Request,
    rollout_id: str,
    attempt_id: str,
    query: Annotated[TripletsQuery, Depends(UrlQuery(TripletsQuery))],
) -> TripletsAnswer:
    """The attempt's calls as prompt, response and reward."""
    _, trace = await _trace(server, rollout_id, attempt_id)
    if query.source == "otel":
        return TripletsAnswer(**await asyncio.to_thread(trace_views.triplets_of_otel, trace))
    triplets = await asyncio.to_thread(trace_views.triplets_of, trace)
    if wants_msgpack(request):
        return TripletsAnswer(triplets=await asyncio.to_thread(list, triplets))
    # They have a conversation's tokens once for each turn: hundreds of MB, of which nobody is to wait for all.
    return StreamingResponse(_as_json(triplets), media_type="application/json")  # type: ignore[return-value]


@router.get(f"{_ATTEMPT}/rows", dependencies=[ADMIN])
async def list_rows(server: Server, rollout_id: str, attempt_id: str) -> RowsAnswer:
    """The attempt as it is trained; what is not says why."""
    rollout, trace = await _trace(server, rollout_id, attempt_id)
    return RowsAnswer(rows=await asyncio.to_thread(trace_views.rows_of, rollout, trace))


def _as_json(triplets: Iterable[Triplet]) -> Iterator[bytes]:
    """A `TripletsAnswer`, piece by piece."""
    piece = bytearray(b'{"triplets":[')
    for number, triplet in enumerate(triplets):
        piece += b"," if number else b""
        piece += msgspec.json.encode(triplet)
        if len(piece) > _PIECE:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece + b"]}")


async def _trace(server: Services, rollout_id: str, attempt_id: str) -> tuple[Rollout, AttemptTrace]:
    rollout_trace = (await server.sql.run(server.store.traces, [rollout_id])).get(rollout_id)
    for trace in rollout_trace.attempts if rollout_trace else ():
        if rollout_trace and trace.attempt.attempt_id == attempt_id:
            return rollout_trace.rollout, trace
    raise NotFound(f"there is no attempt {attempt_id} of rollout {rollout_id}")
