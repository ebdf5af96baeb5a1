"""The backends that the contract is tested on: a store in SQLite, one in PostgreSQL, and a client of the server before
each."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from lightning_rl.control_plane.app import create_app
from lightning_rl.control_plane.gateways.cluster_rpc import peer_key
from lightning_rl.control_plane.gateways.engine_registration import attacher
from lightning_rl.control_plane.gateways.membership import Membership
from lightning_rl.control_plane.gateways.server_info import ServerInfo
from lightning_rl.control_plane.gateways.store_ledger import StoreLedger
from lightning_rl.control_plane.routes.auth import Keys
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import (
    Attempt,
    AttemptTrace,
    Claim,
    Ending,
    Finish,
    Resources,
    ResourcesRequest,
    Reward,
    Rollout,
    RolloutRequest,
    RolloutTrace,
    WorkerInfo,
)
from lightning_rl.store.errors import NotFound
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.http.limits import RequestLimits
from lightning_rl_proxy.routing.router import Router
from tests.servers import StoppableServer

BACKENDS = ("sqlite", "postgres", "http-sqlite", "http-postgres")

# What no client may or need ask for over HTTP: whom the server does it for. Tests do it in the server's own store.
NOT_OVER_HTTP = {
    "add_packed": "the gateway: it records",
    "add_spans": "the server: it takes the spans that agents send",
    "attempt": "the gateway: it asks whether an attempt is open",
    "claimable": "the sweeper, every second: whether it wakes the claims that wait",
    "closed": "the sweeper, every second: what other servers have closed",
    "counts": "/metrics",
    "expire": "the sweeper, every second",
    "make_up": "the sweeper, after a time in which the store could not be written",
    "merge_counts": "the sweeper, every second",
    "openings": "the gateway: what it needs to know of an attempt that calls for the first time",
    "extend_leases": "the sweeper, of attempts whose calls renewed them",
    "overdue": "the sweeper, every second",
    "packed_traces": "the client's `traces`, which unpacks them",
    "postpone": "the sweeper, while the gateway is paused, or where the server stood still",
    "renew_leases": "the server, as it starts",
    "running": "the server, as it starts, and `workers_died`",
    "recorded_calls": "the server, as it starts",
    "shelve": "the server, as it starts",
    "remember_run": "the server: a run attaches",
    "enter_session": "the server: a run attaches",
    "forget_run": "the server: a run has left, or was given up",
    "remembered_runs": "the server, as it starts",
    "runs_elsewhere": "the server, twice a second: runs whose gateway is gone",
    "abandon_run": "the server: a run whose gateway is gone is given up",
    "shelve_abandoned": "the server: a run whose gateway is gone is given up",
    "statuses": "`POST /v1/traces`: whether the attempts of spans are open",
    "sweep": "the sweeper, every second",
}


class OverHttp:
    """A client of the server before `store`, with the store's own methods; of `NOT_OVER_HTTP`, the store's."""

    def __init__(self, url: str, store: SqlStore) -> None:
        self._store = store
        self._admin, self._runner = HttpStore(url, "admin"), HttpStore(url, "runner")

    def __getattr__(self, name: str) -> Any:
        if name not in NOT_OVER_HTTP:
            raise AttributeError(f"{name} is neither over HTTP nor in NOT_OVER_HTTP")
        return getattr(self._store, name)

    def close(self) -> None:
        self._admin.close()
        self._runner.close()

    def enqueue(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        return self._admin.enqueue(requests)

    def start(self, request: RolloutRequest, worker_id: str) -> Claim:
        return self._admin.start(request)  # whose worker is always "started by hand"

    def rollout(self, rollout_id: str) -> Rollout:
        return self._admin.rollout(rollout_id)

    def rollouts(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        return self._admin.find(rollout_ids)

    def page(self, *, limit: int = 100, cursor: str | None = None, **wanted: Any) -> tuple[list[Rollout], str | None]:
        if cursor is None:
            return list(self._admin.rollouts(page=limit, **wanted)), None  # every page
        query = f"/rollouts?limit={limit}&cursor={cursor}"
        answer = self._admin._call("GET", query, None, dict[str, Any])
        return msgspec.convert(answer["rollouts"], list[Rollout]), answer["cursor"]

    def ended(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        return self._admin.wait(rollout_ids, 0)

    def rewarded(self, after: int | None = None) -> tuple[list[str], int]:
        return self._admin.rewarded(after)

    def cancel(self, rollout_id: str) -> Rollout:
        return self._admin.cancel(rollout_id)

    def claim(self, worker_id: str, **fields: Any) -> list[Claim]:
        return self._runner.claim(worker_id, **fields)

    def heartbeat(self, rollout_id: str, attempt_id: str) -> Attempt:
        lease = self._runner.heartbeat(rollout_id, attempt_id)
        [attempt] = [each for each in self._admin.rollout(rollout_id).attempts if each.attempt_id == attempt_id]
        assert attempt.lease_expires_at == lease
        return attempt

    def heartbeats(self, places: Sequence[tuple[str, str]]) -> dict[str, float]:
        return self._runner.heartbeats(places)

    def workers(self) -> list[WorkerInfo]:
        return self._admin.workers()

    def add_rewards(
        self, rollout_id: str, attempt_id: str, rewards: Sequence[Reward], *, late: bool = False
    ) -> list[Reward]:
        client = self._admin if late else self._runner
        return client.add_rewards(rollout_id, attempt_id, rewards)

    def finish(self, rollout_id: str, attempt_id: str, finish: Finish) -> tuple[Rollout, Attempt]:
        attempt = self._runner.finish(rollout_id, attempt_id, finish)
        detail = self._admin.rollout(rollout_id)
        return Rollout(**{name: getattr(detail, name) for name in Rollout.__struct_fields__}), attempt

    def finish_many(self, endings: Sequence[Ending]) -> list[tuple[Rollout, Attempt]]:
        attempts = self._runner.finish_many(endings).attempts
        details = [self._admin.rollout(attempt.rollout_id) for attempt in attempts]
        rollouts = [Rollout(**{name: getattr(one, name) for name in Rollout.__struct_fields__}) for one in details]
        return list(zip(rollouts, attempts, strict=True))

    def spans(self, rollout_id: str, attempt_id: str) -> list[Any]:
        return self.trace(rollout_id, attempt_id).spans

    def trace(self, rollout_id: str, attempt_id: str) -> AttemptTrace:
        for trace in self.traces([rollout_id])[rollout_id].attempts:
            if trace.attempt.attempt_id == attempt_id:
                return trace
        raise NotFound(attempt_id)

    def traces(self, rollout_ids: Sequence[str]) -> dict[str, RolloutTrace]:
        return self._admin.traces(rollout_ids)

    def publish(self, request: ResourcesRequest) -> Resources:
        return self._admin.publish(request.resources, request.resources_id)

    def resources(self, resources_id: str) -> Resources:
        return self._admin.resources(resources_id)


@contextmanager
def served(
    store: SqlStore,
    folder: Path,
    *,
    sweep_seconds: float = 3600,
    fleet: Callable[[str], Membership] | None = None,
    engines: Sequence[Any] = (),
) -> Iterator[str]:
    """The URL of a server before `store`, with a gateway that has these engines; tests sweep by themselves. `fleet`
    makes it one of several, at its URL."""
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    sql = SqlThread()
    server = StoppableServer(uvicorn.Config(lambda: None, log_config=None, lifespan="on", ws="none"))

    async def serve() -> None:
        router, one = Router("m"), None if fleet is None else fleet(url)
        for engine in engines:
            router.register(engine)
        gateway = Gateway(
            ledger=StoreLedger(store, sql, one), secret=store.secret, journal=folder / "journal", renderer=None,
            router=router, limits=RequestLimits(),
        )  # fmt: skip
        keys = Keys(admin="admin", runner="runner", peer=peer_key(store.secret))
        app = create_app(
            store, gateway, sql=sql, keys=keys, gateway_url=url, attach_engine=attacher(router, None),
            sweep_seconds=sweep_seconds, fleet=one, info=ServerInfo(model="m"),
        )  # fmt: skip
        server.config.app = app
        releases.append(app.release)
        await server.serve(sockets=[listening])

    releases: list[Any] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert server.started_up.wait(60), "the server did not start"
        yield url
    finally:
        for release in releases:
            release()
        server.stop()
        thread.join()
        sql.close()
        listening.close()


@contextmanager
def opened(backend: str, url: str, folder: Path, clock: Any) -> Iterator[Any]:
    """The backend of this name over the database at `url`."""
    store = SqlStore(url, clock)
    try:
        if not backend.startswith("http-"):
            yield store
            return
        with served(store, folder) as address:
            client = OverHttp(address, store)
            yield client
            client.close()
    finally:
        store.close()
