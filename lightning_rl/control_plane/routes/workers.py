"""The workers: which run attempts, and which have died."""

from typing import Annotated

from fastapi import APIRouter, Depends

from lightning_rl.control_plane.routes.requests import WorkersBody
from lightning_rl.control_plane.routes.required_key import ADMIN, RUNNER
from lightning_rl.control_plane.routes.route import ApiRoute, JsonBody
from lightning_rl.control_plane.routes.services import Server
from lightning_rl.store.answers import RolloutsAnswer, WorkersAnswer

router = APIRouter(prefix="/api/v1/workers", tags=["workers"], route_class=ApiRoute)


@router.post("/died", dependencies=[RUNNER])
async def end_attempts_of_workers(
    server: Server, body: Annotated[WorkersBody, Depends(JsonBody(WorkersBody))]
) -> RolloutsAnswer:
    """These workers' process is gone: their attempts are lost now."""
    running = await server.sql.run(server.store.running, body.worker_ids, why="worker")
    return RolloutsAnswer(rollouts=await server.end(running))


@router.get("", dependencies=[ADMIN])
async def list_workers(server: Server) -> WorkersAnswer:
    """The workers that run attempts now, with these attempts."""
    return WorkersAnswer(workers=await server.sql.run(server.store.workers))
