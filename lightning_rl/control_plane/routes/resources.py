"""Resources: published once under an id, read by it or as the latest."""

from typing import Annotated

from fastapi import APIRouter, Depends

from lightning_rl.control_plane.gateways.resolve import check_resources
from lightning_rl.control_plane.routes.required_key import ADMIN
from lightning_rl.control_plane.routes.route import ApiRoute, JsonBody
from lightning_rl.control_plane.routes.services import Server
from lightning_rl.store.contract import Resources, ResourcesRequest

router = APIRouter(prefix="/api/v1/resources", tags=["resources"], route_class=ApiRoute)


@router.post("", status_code=201, dependencies=[ADMIN])
async def publish_resources(
    server: Server, body: Annotated[ResourcesRequest, Depends(JsonBody(ResourcesRequest))]
) -> Resources:
    """Publish resources by name; they are the latest from now on."""
    check_resources(body)
    return await server.sql.run(server.store.publish, body)


@router.get("/{resources_id}", dependencies=[ADMIN])
async def get_resources(server: Server, resources_id: str) -> Resources:
    """The resources of this id, or the `latest`."""
    return await server.sql.run(server.store.resources, resources_id)
