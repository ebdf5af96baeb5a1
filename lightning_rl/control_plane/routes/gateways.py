"""The gateways of a store, and what they ask each other."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends

from lightning_rl.control_plane.gateways.cluster_rpc import ModelPause, Sealed
from lightning_rl.control_plane.gateways.gateway_control import PauseRequest, ResumeRequest
from lightning_rl.control_plane.routes.requests import SealBody
from lightning_rl.control_plane.routes.required_key import ADMIN, PEER
from lightning_rl.control_plane.routes.route import ApiRoute, JsonBody
from lightning_rl.control_plane.routes.services import Server
from lightning_rl.store.contract import GatewayInfo

router = APIRouter(prefix="/api/v1", tags=["gateways"], route_class=ApiRoute)


class GatewaysAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The gateways that live."""

    gateways: list[GatewayInfo]


@router.get("/gateways", dependencies=[ADMIN])
async def list_gateways(server: Server) -> GatewaysAnswer:
    """The gateways that share the store and live; none where there is only one."""
    return GatewaysAnswer(gateways=await server.together.live())


@router.post("/peers/seal", dependencies=[PEER])
async def seal_here(server: Server, body: Annotated[SealBody, Depends(JsonBody(SealBody))]) -> Sealed:
    """Seal an attempt at this gateway."""
    return await server.together.seal_here(body.rollout_id, body.attempt_id)


@router.post("/peers/pause", dependencies=[PEER])
async def pause_here(server: Server, body: Annotated[PauseRequest, Depends(JsonBody(PauseRequest))]) -> dict[str, Any]:
    """Park the calls of a model at this gateway."""
    await server.pauses.pause(body)
    return {}


@router.post("/peers/resume", dependencies=[PEER])
async def resume_here(
    server: Server, body: Annotated[ResumeRequest, Depends(JsonBody(ResumeRequest))]
) -> dict[str, Any]:
    """Let parked calls go on at this gateway."""
    await server.pauses.resume(body)
    return {}


@router.post("/peers/pauses", dependencies=[PEER])
async def list_pauses_here(server: Server) -> dict[str, ModelPause]:
    """How the models stand at this gateway."""
    return server.together.told()
