"""Training runs: they attach to the server, say that they live, and detach; and what the server is."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends

from lightning_rl.control_plane.gateways.runs import RunInfo, RunRequest, RunSession
from lightning_rl.control_plane.gateways.server_info import ServerInfo
from lightning_rl.control_plane.routes.required_key import ADMIN
from lightning_rl.control_plane.routes.route import ApiRoute, JsonBody
from lightning_rl.control_plane.routes.services import Server

router = APIRouter(prefix="/api/v1", tags=["runs"], route_class=ApiRoute)


class RunAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The run that was meant."""

    run_id: str


@router.get("/server", dependencies=[ADMIN])
async def get_server(server: Server) -> ServerInfo:
    """Version and model of the server, and how it writes chats."""
    return server.info


@router.post("/runs/{run_id}/begin", dependencies=[ADMIN])
async def begin_run(server: Server, run_id: str, body: Annotated[RunRequest, Depends(JsonBody(RunRequest))]) -> RunInfo:
    """Attach a run: what an earlier trainer of it left running is lost, and what it left queued waits."""
    return await server.runs.begin(run_id, body)


@router.post("/runs/{run_id}/heartbeat", dependencies=[ADMIN])
async def renew_run(
    server: Server, run_id: str, body: Annotated[RunSession, Depends(JsonBody(RunSession))]
) -> RunAnswer:
    """Renew the lease of a run; 409 where it is not attached any more, or is by another session."""
    await server.runs.heartbeat(run_id, body.session)
    return RunAnswer(run_id=run_id)


@router.post("/runs/{run_id}/end", dependencies=[ADMIN])
async def end_run(server: Server, run_id: str, body: Annotated[RunSession, Depends(JsonBody(RunSession))]) -> RunAnswer:
    """Detach a run: its engines are out, and nothing of it is handed to runners; 409 where another session has it."""
    await server.runs.end(run_id, body.session)
    return RunAnswer(run_id=run_id)
