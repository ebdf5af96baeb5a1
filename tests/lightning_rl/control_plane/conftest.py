import asyncio
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import urllib3
import uvicorn

from lightning_rl.control_plane.app import create_app
from lightning_rl.control_plane.gateways.server_info import ServerInfo
from lightning_rl.control_plane.routes.auth import Keys
from lightning_rl.store.client import HttpStore
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.sql_thread import SqlThread
from lightning_rl_adapters.call import Call, VersionRange, to_span
from lightning_rl_proxy.gateway import GatewayLoad
from lightning_rl_proxy.routing.load_balancer import ModelLoad
from tests.servers import StoppableServer


class FakeGateway:
    """Notes what the control plane asks of it; sealing stores the spans that are still on their way."""

    def __init__(self, store: SqlStore) -> None:
        self.store = store
        self.asked: list[Any] = []
        self.on_their_way: list[Any] = []
        self.in_flight = 0
        self.paused = False
        self.refuses: Exception | None = None
        self.recording: str | None = None
        self.journal_damaged = False
        self.idle: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.engines: dict[str, str | None] = {"m 0": None}
        self.told: dict[str, dict[str, Any]] = {}
        self.timings: list[Any] = []
        self.opened: list[tuple[str, str]] = []
        self.lost: set[str] = set()
        self.model = ModelLoad(engines=1, calls=0, waiting=0, capacity=None)
        self.starting = 0
        self.open_attempts = 2
        self.capacity_freed = lambda: None

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"gateway"})

    async def start(self) -> None:
        self.asked.append("start")
        self.loop = asyncio.get_running_loop()

    async def stop(self) -> None:
        self.asked.append("stop")

    def open(self, info) -> None:
        self.opened.append((info.rollout_id, info.attempt_id))

    async def seal(self, rollout_id: str, attempt_id: str) -> None:
        self.asked.append(("seal", rollout_id, attempt_id))
        self.store.add_spans(self.on_their_way)

    def failure_of(self, rollout_id: str, attempt_id: str) -> str | None:
        return self.failures.get(attempt_id)

    def interrupted(self, rollout_id: str, attempt_id: str, what: str) -> None:
        self.failures[attempt_id] = what

    def idle_seconds(self, rollout_id: str, attempt_id: str) -> float | None:
        return self.idle.get(attempt_id)

    def is_lost(self, rollout_id: str, attempt_id: str) -> bool:
        return attempt_id in self.lost

    def tokens_of(self, rollout_ids):
        return {}

    def now_ns(self) -> int:
        return time.time_ns()

    def restore(self, received, newest_ns=0) -> None:
        self.asked.append(("carry_on", received))

    async def pause(self, model=None, drain_seconds=0) -> None:
        self.asked.append(("pause", model, drain_seconds))
        self.paused = True
        if self.refuses is not None:
            raise self.refuses

    async def resume(self, model=None, policy_version=None, outdated=()) -> None:
        self.asked.append(("resume", model, policy_version, *outdated))
        self.paused = False

    async def detach(self, engine: str) -> None:
        self.asked.append(("detach", engine))

    async def confirm_weights(self, engine: str, policy_version: int) -> None:
        self.asked.append(("vouch", engine, policy_version))
        if policy_version != 3:
            raise ValueError(f"model 'm' is at policy version 3, not {policy_version}")
        if self.refuses is not None:
            raise self.refuses

    def load(self) -> GatewayLoad:
        return GatewayLoad("m", {"m": self.model}, {"m": self.starting}, self.open_attempts)

    def when_capacity_freed(self, tell) -> None:
        self.capacity_freed = tell

    def eased_in_its_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.capacity_freed)

    def state(self) -> dict[str, Any]:
        model = {"in_flight": self.in_flight, "paused": self.paused, "tokens_received": 7, "engines": 1}
        return {
            "models": {
                "m": model | {"policy_version": 3, "waiting": self.model.waiting, "capacity": self.model.capacity}
            },
            "counters": {"calls": 5}, "open_attempts": self.open_attempts,
            "tokens_pending": 4, "records_waiting": 1, "journal_bytes": 100, "engines": self.told,
        }  # fmt: skip

    async def check(self):
        return self.recording, self.engines


@dataclass
class Served:
    """A control plane with a fake gateway, answering on the loopback."""

    url: str
    store: SqlStore
    gateway: FakeGateway
    release: Callable[[], None]  # let every long poll answer, as a server that stops
    pool: urllib3.PoolManager = field(default_factory=lambda: urllib3.PoolManager(maxsize=8))
    attached: list[Any] = field(default_factory=list)

    def client(self, key: str = "admin") -> HttpStore:
        return HttpStore(self.url, key)

    def call(self, method: str, path: str, body: Any = None, key: str | None = "admin"):
        """(status, JSON) of a raw request."""
        content = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        answer = self.pool.request(method, self.url + path, body=content, headers=headers, retries=False)
        return answer.status, msgspec.json.decode(answer.data)


@pytest.fixture
def served(tmp_path):
    store = SqlStore(f"sqlite:///{tmp_path / 'run.db'}")
    gateway = FakeGateway(store)
    attached: list[Any] = []
    sql = SqlThread()
    config = uvicorn.Config(lambda: None, log_config=None, lifespan="on", ws="none")

    async def attach(request: Any) -> str:
        attached.append(request)
        return f"{request.model} {len([each for each in attached if each.model == request.model]) - 1}"

    async def serve() -> None:
        url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        app = create_app(
            store,
            gateway,
            sql=sql,
            keys=Keys(admin="admin", runner="runner"),
            gateway_url=url,
            attach_engine=attach,
            sweep_seconds=0.02,
            info=ServerInfo(model="m"),
        )
        server.config.app = app
        served.append(app)
        await server.serve(sockets=sockets)

    sockets = [socket.create_server(("127.0.0.1", 0))]
    served: list[Any] = []
    server = StoppableServer(config)
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert server.started_up.wait(20)
    yield Served(
        f"http://127.0.0.1:{sockets[0].getsockname()[1]}", store, gateway, attached=attached, release=served[0].release
    )
    served[0].release()
    server.stop()
    thread.join()
    sql.close()
    store.close()


@pytest.fixture
def call_span():
    """A span of one call: prompt (1, 2), response (3, 4)."""

    def make(rollout_id: str, attempt_id: str, number: int = 0, parent_id: str | None = None):
        return to_span(
            Call(
                call_id=f"{attempt_id}-c{number}",
                rollout_id=rollout_id,
                attempt_id=attempt_id,
                number=number,
                parent_id=parent_id,
                model="m",
                prompt_ids=[1, 2],
                response_ids=[3, 4],
                logprobs=[-0.5, -0.25],
                versions=[VersionRange(7, 0, 2)],
                temperature=1.0,
                finish_reason="stop",
            )
        )

    return make


@pytest.fixture
def eventually():
    """Wait until a condition holds, for at most 20 s."""

    def wait(holds) -> None:
        end = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < end, "it did not come to hold"
            time.sleep(0.005)

    return wait
