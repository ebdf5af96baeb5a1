"""Rollouts: enqueued, claimed, waited for, cancelled."""

import asyncio
import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request

from lightning_rl.control_plane.routes.requests import (
    ClaimBody,
    EnqueueBody,
    PageQuery,
    RewardedQuery,
    RolloutsBody,
    WaitBody,
)
from lightning_rl.control_plane.routes.required_key import ADMIN, RUNNER
from lightning_rl.control_plane.routes.route import ApiRoute, JsonBody, UrlQuery
from lightning_rl.control_plane.routes.services import Server
from lightning_rl.store.answers import ClaimsAnswer, PageAnswer, RewardedAnswer, RolloutsAnswer
from lightning_rl.store.contract import Claim, Rollout, RolloutDetail, RolloutRequest

_LOOK_SECONDS = 0.005  # so soon it is seen that all have ended
router = APIRouter(prefix="/api/v1/rollouts", tags=["rollouts"], route_class=ApiRoute)


@router.post("/claim", dependencies=[RUNNER])
async def claim_rollouts(
    server: Server, request: Request, body: Annotated[ClaimBody, Depends(JsonBody(ClaimBody))]
) -> ClaimsAnswer:
    """Up to `limit` queued rollouts, as soon as there are any, or none when the time is up."""
    return ClaimsAnswer(claims=await server.claims.claim(body, request.is_disconnected))


@router.post("", status_code=201, dependencies=[ADMIN])
async def enqueue_rollouts(
    server: Server, body: Annotated[EnqueueBody, Depends(JsonBody(EnqueueBody))]
) -> RolloutsAnswer:
    """Enqueue rollouts; the same again are the same."""
    server.runs.check_attached([request.rollout_id for request in body.rollouts])
    made = await server.sql.run(server.store.enqueue, body.rollouts)
    server.signals.queued()
    return RolloutsAnswer(rollouts=made)


@router.get("", dependencies=[ADMIN])
async def list_rollouts(server: Server, query: Annotated[PageQuery, Depends(UrlQuery(PageQuery))]) -> PageAnswer:
    """A page of rollouts, in the order they were enqueued."""
    page, cursor = await server.sql.run(server.store.page, **msgspec.structs.asdict(query))
    return PageAnswer(rollouts=page, cursor=cursor)


@router.get("/rewarded", dependencies=[ADMIN])
async def list_rewarded(
    server: Server, query: Annotated[RewardedQuery, Depends(UrlQuery(RewardedQuery))]
) -> RewardedAnswer:
    """The rollouts that were given rewards after a position, which an earlier answer told; late ones, too."""
    rollout_ids, position = await server.sql.run(server.store.rewarded, query.after)
    return RewardedAnswer(rollout_ids=rollout_ids, position=position)


@router.post("/start", status_code=201, dependencies=[ADMIN])
async def start_rollout(server: Server, body: Annotated[RolloutRequest, Depends(JsonBody(RolloutRequest))]) -> Claim:
    """Enqueue one rollout and claim it at once."""
    server.claims.check_open_attempts()
    return server.claims.hand_out(await server.sql.run(server.store.start, body, "started by hand"))


@router.post("/wait", dependencies=[ADMIN])
async def wait_for_rollouts(server: Server, body: Annotated[WaitBody, Depends(JsonBody(WaitBody))]) -> RolloutsAnswer:
    """Those of the rollouts that have ended, as soon as any has, or none when the time is up.

    Others may end within `gather_seconds` behind the first: they are told with it, as soon as all have ended.
    """
    with server.signals.next_ended(body.rollout_ids) as later:
        ended = await server.sql.run(server.store.ended, body.rollout_ids)
        running = set(body.rollout_ids) - {rollout.rollout_id for rollout in ended}
        if body.wait_seconds and running:
            if not ended:
                await asyncio.wait([later], timeout=body.wait_seconds)
            until = time.monotonic() + (body.gather_seconds if ended or later.done() else 0)
            while (remaining := until - time.monotonic()) > 0 and not server.signals.closing:
                if later.done() and later.result() >= running:
                    break
                await asyncio.sleep(min(remaining, _LOOK_SECONDS))
            notified = sorted(running & later.result()) if later.done() else []
            if notified or not ended:
                ended += await server.sql.run(server.store.ended, notified or body.rollout_ids)
    return RolloutsAnswer(rollouts=ended)


@router.post("/find", dependencies=[ADMIN])
async def find_rollouts(
    server: Server, body: Annotated[RolloutsBody, Depends(JsonBody(RolloutsBody))]
) -> RolloutsAnswer:
    """The rollouts of these ids, in that order; unknown ids are left out."""
    return RolloutsAnswer(rollouts=await server.sql.run(server.store.rollouts, body.rollout_ids))


@router.get("/{rollout_id}", dependencies=[ADMIN])
async def get_rollout(server: Server, rollout_id: str) -> RolloutDetail:
    """The rollout with its attempts."""
    return await server.sql.run(server.store.rollout, rollout_id)


@router.post("/{rollout_id}/cancel", dependencies=[ADMIN])
async def cancel_rollout(server: Server, rollout_id: str) -> Rollout:
    """End the rollout as cancelled; one that has ended stays as it is."""
    rollout = await server.sql.run(server.store.cancel, rollout_id)
    if rollout.status == "cancelled" and rollout.attempt_id is not None:
        await server.gateway.seal(rollout_id, rollout.attempt_id)
    server.signals.ended([rollout_id])
    return rollout
