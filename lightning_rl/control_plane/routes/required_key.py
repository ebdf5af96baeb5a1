"""The keys as dependencies of routes: a request without the right one is refused before anything else is done."""

from typing import Any

from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase

from lightning_rl.control_plane.gateways.cluster_rpc import ASKED
from lightning_rl.control_plane.routes.auth import Role
from lightning_rl.control_plane.routes.route import Refused
from lightning_rl.control_plane.routes.services import address_of, services
from lightning_rl_proxy.http.keys import KeyRefused, verify_attempt_key


class RoleKey(SecurityBase):
    """The key of this role, or the admin's."""

    def __init__(self, needed: Role) -> None:
        self.needed = needed
        self.scheme_name = f"{needed}_key"
        self.model = HTTPBearer(description=self.__doc__)

    async def __call__(self, request: Request) -> Role:
        """Whose key it is. Raises Refused."""
        server = await services(request)
        role = server.keys.role(request.headers.get("authorization", ""))
        if role not in ("admin", self.needed):
            server.refused_keys.add(f"{request.method} {request.url.path}", address_of(request))
        if role is None:
            raise Refused(401, "unauthorized", "send an admin or a runner key as Authorization: Bearer")
        if role not in ("admin", self.needed):
            key_name = "the admin key" if self.needed == "admin" else f"a {self.needed}'s key"
            raise Refused(403, "forbidden", f"{request.method} {request.url.path} needs {key_name}")
        return role


class PeerKey(RoleKey):
    """The key of another gateway of the store, which means this one."""

    def __init__(self) -> None:
        super().__init__("peer")

    async def __call__(self, request: Request) -> Role:
        """See `RoleKey`."""
        role = await super().__call__(request)
        gateway_id = request.headers.get(ASKED)
        if gateway_id is None or not (await services(request)).together.is_meant(gateway_id):
            raise Refused(409, "conflict", f"gateway {gateway_id} was meant, and this is another one")
        return role


class OwnKey(RoleKey):
    """A runner's key, or that of the attempt which the path names."""

    def __init__(self) -> None:
        super().__init__("runner")
        self.scheme_name = "runner_or_attempt_key"

    async def __call__(self, request: Request) -> Any:
        """Whose key it is; None: the attempt's. Raises Refused."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        secret = (await services(request)).store.secret
        try:
            opened = verify_attempt_key(secret, key.strip() if scheme.lower() == "bearer" else "")
        except KeyRefused:
            return await super().__call__(request)
        named = request.path_params["rollout_id"], request.path_params["attempt_id"]
        return None if (opened.rollout_id, opened.attempt_id) == named else await super().__call__(request)


ADMIN = Depends(RoleKey("admin"))
RUNNER = Depends(RoleKey("runner"))
PEER = Depends(PeerKey())
OWN = Depends(OwnKey())
