"""Resources: published once under an id of their own, and never changed."""

from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from lightning_rl.store import schema
from lightning_rl.store.contract import Resources, ResourcesRequest, body_of, same_body
from lightning_rl.store.errors import Conflict, Invalid, NotFound
from lightning_rl.store.sql.transactions import Transactions, reads, writes
from lightning_rl_adapters.ids import new_id

LATEST = "latest"  # the name of the newest resources


class ResourceOperations(Transactions):
    """Publishing resources, and reading them."""

    @writes
    def publish(self, connection: sa.Connection, request: ResourcesRequest) -> Resources:
        """Keep resources under their id (one is made where they name none).

        Raises:
            Conflict: the id is there with other resources.
            Invalid: the id is `latest`, a resource is not JSON-able, or a prompt has no text.
        """
        resources_id = request.resources_id or new_id("s")
        if resources_id == LATEST:
            raise Invalid(f"resources cannot be named {LATEST!r}: that is the newest ones' name")
        for name, value in request.resources.items():
            _check(name, value)
        body = body_of(request.resources)
        table = schema.resources
        existing = self._resources(connection, resources_id)
        if existing is not None:
            if not same_body(body_of(existing.resources), body):
                raise Conflict(f"resources {resources_id} are there already with another body")
            return existing
        newest = connection.execute(sa.select(sa.func.max(table.c.version))).scalar_one_or_none()
        # Not into `_published`: it is published when the transaction has ended well.
        made = Resources(
            resources_id=resources_id,
            version=(newest or 0) + 1,
            created_at=self._clock(),
            resources=msgspec.json.decode(body),
        )
        connection.execute(sa.insert(table), msgspec.structs.asdict(made) | {"resources": body})
        return made

    @reads
    def resources(self, connection: sa.Connection, resources_id: str) -> Resources:
        """The resources of this id, or the newest ones for `latest`.

        Raises:
            NotFound: there are none.
        """
        actual_id: str | None = resources_id
        if resources_id == LATEST:
            actual_id = self._latest_resources_id(connection)
        resources = self._resources(connection, actual_id) if actual_id is not None else None
        if resources is None:
            raise NotFound(f"there are no resources {resources_id!r}; publish some first")
        return resources

    def _resources(self, connection: sa.Connection, resources_id: str) -> Resources | None:
        if resources_id not in self._published:
            table = schema.resources
            query = sa.select(table).where(table.c.resources_id == resources_id)
            row = connection.execute(query).one_or_none()
            if row is None:
                return None
            self._published[resources_id] = Resources(
                resources_id=resources_id,
                version=row.version,
                created_at=row.created_at,
                resources=msgspec.json.decode(row.resources),
            )
        return self._published[resources_id]

    def _latest_resources_id(self, connection: sa.Connection) -> str | None:
        table = schema.resources
        query = sa.select(table.c.resources_id).order_by(table.c.version.desc()).limit(1)
        return connection.execute(query).scalar_one_or_none()


def _check(name: str, value: Mapping[str, Any]) -> None:
    if value.get("type") != "prompt_template":
        return
    if not isinstance(value.get("template"), str) or value.get("engine", "f-string") not in ("f-string", "jinja"):
        raise Invalid(
            f"resource {name!r} is a prompt_template: it has a text, `template`, and an `engine`, f-string (where none "
            "is named) or jinja"
        )
