"""The gateways of a store, and what they ask each other."""

import contextlib
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends

from lightning_rl.control_plane.gateways.cluster_rpc import EngineId, ModelPause, RolloutIds, Sealed
from lightning_rl.control_plane.gateways.engines import EngineInfo, EngineRequest
from lightning_rl.control_plane.gateways.gateway_control import PauseRequest, ResumeRequest
from lightning_rl.control_plane.routes.requests import SealBody
from lightning_rl.control_plane.routes.required_key import ADMIN, PEER
from lightning_rl.control_plane.routes.route import ApiRoute, JsonBody
from lightning_rl.control_plane.routes.services import Server
from lightning_rl.store.contract import GatewayInfo
from lightning_rl.store.errors import NotFound
from lightning_rl_proxy.recording.ledger import AttemptTokens

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
    return server.together.model_pauses()


@router.post("/peers/engines", dependencies=[PEER])
async def list_engines_here(server: Server) -> list[EngineRequest]:
    """What registers the token engines of this gateway at another one."""
    return server.together.engine_requests()


@router.post("/peers/engine", dependencies=[PEER])
async def register_engine_here(
    server: Server, body: Annotated[EngineRequest, Depends(JsonBody(EngineRequest))]
) -> EngineInfo:
    """Register an engine at this gateway."""
    return server.together.engine(await server.engines.register(body))


@router.post("/peers/remove_engine", dependencies=[PEER])
async def remove_engine_here(server: Server, body: Annotated[EngineId, Depends(JsonBody(EngineId))]) -> dict[str, Any]:
    """Take an engine out at this gateway, where it is there."""
    with contextlib.suppress(NotFound):
        await server.engines.remove(body.engine_id)
    return {}


@router.post("/peers/tokens", dependencies=[PEER])
async def count_tokens_here(
    server: Server, body: Annotated[RolloutIds, Depends(JsonBody(RolloutIds))]
) -> dict[str, AttemptTokens]:
    """What engines handed over for the attempts at these rollouts, as far as this gateway remembers."""
    return server.gateway.tokens_of(body.rollout_ids)
