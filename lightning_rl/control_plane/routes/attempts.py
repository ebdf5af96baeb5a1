"""What a worker says of the attempts that it runs: they live, they were rewarded, they ended.

Invariant: a finished attempt is answered only when it and all its spans are durable.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends

from lightning_rl.control_plane.routes.auth import Role
from lightning_rl.control_plane.routes.requests import AttemptsBody, EndingsBody, LogsBody, RewardsBody
from lightning_rl.control_plane.routes.required_key import OWN, RUNNER
from lightning_rl.control_plane.routes.route import ApiRoute, JsonBody
from lightning_rl.control_plane.routes.services import Server, Services
from lightning_rl.store.answers import AttemptsAnswer, LeaseAnswer, LeasesAnswer, LogsAnswer, RewardsAnswer
from lightning_rl.store.contract import Attempt, AttemptLog, Finish, Log, Rollout
from lightning_rl.store.errors import Conflict, NotFound
from lightning_rl.store.rewards import returned_rewards
from lightning_rl.trajectories import trace_views

_ATTEMPT = "/rollouts/{rollout_id}/attempts/{attempt_id}"
router = APIRouter(prefix="/api/v1", tags=["attempts"], route_class=ApiRoute)


@router.post(f"{_ATTEMPT}/heartbeat", dependencies=[OWN])
async def renew_lease(server: Server, rollout_id: str, attempt_id: str) -> LeaseAnswer:
    """Renew the attempt's lease; 409 when it is no longer the caller's."""
    attempt = await server.sql.run(server.store.heartbeat, rollout_id, attempt_id)
    return LeaseAnswer(attempt_id=attempt.attempt_id, lease_expires_at=attempt.lease_expires_at)


@router.post(f"{_ATTEMPT}/rewards")
async def add_rewards(
    server: Server,
    rollout_id: str,
    attempt_id: str,
    role: Annotated[Role, RUNNER],
    body: Annotated[RewardsBody, Depends(JsonBody(RewardsBody))],
) -> RewardsAnswer:
    """Give the attempt rewards; with the admin key also one that has ended and counts."""
    late = role == "admin"
    return RewardsAnswer(
        rewards=await server.sql.run(server.store.add_rewards, rollout_id, attempt_id, body.rewards, late=late)
    )


@router.post(f"{_ATTEMPT}/finish", dependencies=[RUNNER])
async def finish_attempt(
    server: Server, rollout_id: str, attempt_id: str, body: Annotated[Finish, Depends(JsonBody(Finish))]
) -> Attempt:
    """End the attempt; it and its spans are durable when this is answered."""
    returned_rewards(rollout_id, body)  # a refused finish must not seal the attempt
    lack = (await server.together.seal(rollout_id, attempt_id)).verdict(body)
    rollout, attempt = await server.sql.run(server.store.finish, rollout_id, attempt_id, body, lack)
    server.notify([rollout])
    _check_stored(body, rollout, attempt)
    return attempt


@router.post(f"{_ATTEMPT}/log", dependencies=[RUNNER])
async def add_log(server: Server, rollout_id: str, attempt_id: str, log: Annotated[Log, Depends(JsonBody(Log))]) -> Log:
    """Keep what the attempt printed; its first log stays."""
    await _keep(server, [AttemptLog(rollout_id=rollout_id, attempt_id=attempt_id, log=log)])
    return log


@router.post("/attempts/logs", dependencies=[RUNNER])
async def add_logs(server: Server, body: Annotated[LogsBody, Depends(JsonBody(LogsBody))]) -> LogsAnswer:
    """Keep what many attempts printed, all of them or none; the first log of an attempt stays."""
    await _keep(server, body.attempts)
    return LogsAnswer(kept=len(body.attempts))


async def _keep(server: Services, logs: Sequence[AttemptLog]) -> None:
    places = [(one.rollout_id, one.attempt_id) for one in logs]
    statuses = await server.sql.run(server.store.statuses, places)
    for rollout_id, attempt_id in places:
        if (rollout_id, attempt_id) not in statuses:
            raise NotFound(f"there is no attempt {attempt_id} of rollout {rollout_id}")
    spans = [trace_views.log_span(one.rollout_id, one.attempt_id, one.log) for one in logs]
    await server.sql.run(server.store.add_spans, spans)


@router.post("/attempts/heartbeat", dependencies=[RUNNER])
async def renew_leases(server: Server, body: Annotated[AttemptsBody, Depends(JsonBody(AttemptsBody))]) -> LeasesAnswer:
    """Renew the leases of many attempts; those that are no longer the caller's are left out."""
    return LeasesAnswer(leases=await server.sql.run(server.store.heartbeats, body.attempts))


@router.post("/attempts/finish", dependencies=[RUNNER])
async def finish_attempts(
    server: Server, body: Annotated[EndingsBody, Depends(JsonBody(EndingsBody))]
) -> AttemptsAnswer:
    """End many attempts, all of them or none."""
    endings = body.attempts
    for ending in endings:
        returned_rewards(ending.rollout_id, ending.finish)
    sealed = await asyncio.gather(*(server.together.seal(one.rollout_id, one.attempt_id) for one in endings))
    lacks = [one.verdict(ending.finish) for one, ending in zip(sealed, endings, strict=True)]
    outcomes = await server.sql.run(server.store.finish_many, endings, lacks)
    server.notify(rollout for rollout, _ in outcomes)
    for ending, outcome in zip(endings, outcomes, strict=True):
        _check_stored(ending.finish, *outcome)
    again = [rollout.rollout_id for rollout, _ in outcomes if rollout.ended_at is None]
    return AttemptsAnswer(attempts=[attempt for _, attempt in outcomes], again=again)


def _check_stored(finish: Finish, rollout: Rollout, attempt: Attempt) -> None:
    """Raises Conflict where the attempt was stored as failed although its worker says that it has succeeded."""
    if finish.status == "succeeded" and attempt.status != "succeeded":
        why = "" if attempt.error is None else f": {attempt.error.type}: {attempt.error.message}"
        raise Conflict(
            f"attempt {attempt.attempt_id} of rollout {rollout.rollout_id} was stored as {attempt.status}, not as "
            f"succeeded{why}. Drop this result: the rollout is {rollout.status}"
        )
