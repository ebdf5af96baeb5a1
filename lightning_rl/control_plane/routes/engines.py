"""Engines: registered, listed, taken out, paused and resumed; and what the gateway says of itself."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends

from lightning_rl.control_plane.gateways.engines import EngineInfo, EngineRequest
from lightning_rl.control_plane.gateways.gateway_control import PauseRequest, ResumeRequest
from lightning_rl.control_plane.routes.requests import RolloutsBody
from lightning_rl.control_plane.routes.required_key import ADMIN
from lightning_rl.control_plane.routes.route import ApiRoute, JsonBody
from lightning_rl.control_plane.routes.services import Server, Services
from lightning_rl_proxy.recording.ledger import AttemptTokens

router = APIRouter(prefix="/api/v1", tags=["engines"], route_class=ApiRoute)


class EnginesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The registered engines, oldest first."""

    engines: list[EngineInfo]


class TokensAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that engines handed over, by attempt id."""

    attempts: dict[str, AttemptTokens]


@router.post("/engines", status_code=201, dependencies=[ADMIN])
async def register_engine(
    server: Server, body: Annotated[EngineRequest, Depends(JsonBody(EngineRequest))]
) -> EngineInfo:
    """Register an engine at every gateway; again with the model's policy version, it is believed to have them."""
    return await server.together.register(body)


@router.get("/engines", dependencies=[ADMIN])
async def list_engines(server: Server) -> EnginesAnswer:
    """The registered engines, and how each is."""
    return EnginesAnswer(engines=server.engines.all(server.gateway.state()["engines"]))


@router.delete("/engines/{engine_id}", dependencies=[ADMIN])
async def remove_engine(server: Server, engine_id: str) -> EngineInfo:
    """Take an engine out at every gateway: it gets no new calls, and those in flight end."""
    return await server.together.remove_engine(engine_id)


@router.post("/pause", dependencies=[ADMIN])
async def pause_generation(
    server: Server, body: Annotated[PauseRequest, Depends(JsonBody(PauseRequest))]
) -> dict[str, Any]:
    """Park the calls of a model, or of all, at every gateway of the store; the state of the gateway on return."""
    await server.together.pause(body)
    return _state(server)


@router.post("/resume", dependencies=[ADMIN])
async def resume_generation(
    server: Server, body: Annotated[ResumeRequest, Depends(JsonBody(ResumeRequest))]
) -> dict[str, Any]:
    """Let parked calls go on, under `policy_version` where one is given.

    Engines at the URLs in `outdated` do not have these weights: they take no calls until they say that they have, or
    are registered again with that version.
    """
    await server.together.resume(body)
    return _state(server)


@router.get("/state", dependencies=[ADMIN])
async def get_state(server: Server) -> dict[str, Any]:
    """The gateway's state."""
    return _state(server)


@router.post("/state/tokens", dependencies=[ADMIN])
async def count_tokens_of_rollouts(
    server: Server, body: Annotated[RolloutsBody, Depends(JsonBody(RolloutsBody))]
) -> TokensAnswer:
    """What engines handed over for the attempts at these rollouts, as far as the gateways of the store remember."""
    return TokensAnswer(attempts=await server.together.tokens_of(body.rollout_ids))


def _state(server: Services) -> dict[str, Any]:
    claims = {"claims_held_back": server.signals.held_back, "claims_waiting": server.claims.waiting}
    return server.gateway.state() | claims
