"""What the gateway's own HTTP client for engines saves: the same gateway with a general client in its place, in turns.

    python benchmarks/engine_client.py [--rounds 5] [--calls 2000]

The gateway is the real server of `gateway.py`, with its instant engine and bare relay; only the client by which it asks
the engine differs: ours, aiohttp's, and pyreqwest's where that is installed (`pip install pyreqwest`; nothing else
needs it). The three take turns. The table has medians, and the ratios to ours within a round, lowest to highest.
"""

import argparse
import importlib.util
import itertools
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))  # also where a server imports this file by its name

from gateway import MODEL, TOKENIZER, Measured, end_attempts, measure, open_attempts, role

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane import launch as server
from lightning_rl.processes.child import Child
from lightning_rl.store.client import HttpStore
from lightning_rl_proxy.engines import client as ours

CHOSEN = "BENCHMARK_ENGINE_CLIENT"
HEADERS = {"content-type": "application/json", "accept": "*/*"}


class GeneralClient:
    """The interface of `engines/client.py`'s `Client`, for the calls of this benchmark: whole answers over HTTP."""

    def __init__(self, url: str, *, connections: int = 1024, idle_seconds: float = 2.0) -> None:
        self.url = url.rstrip("/")
        self._connections = connections
        self._idle_seconds = idle_seconds
        self._opened: Any = None

    def get(self, path: str) -> "GeneralRequest":
        """As `Client.get`."""
        return GeneralRequest(self, "GET", path, b"")

    def post(self, path: str, body: bytes) -> "GeneralRequest":
        """As `Client.post`."""
        return GeneralRequest(self, "POST", path, body)

    async def ask(self, method: str, url: str, body: bytes) -> Any:
        """The status of an answer, and what reads its body."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close every connection."""
        if self._opened is not None:
            await self._opened.close()


class AiohttpClient(GeneralClient):
    """Over aiohttp, with its C parser."""

    async def ask(self, method: str, url: str, body: bytes) -> Any:
        """See `GeneralClient`."""
        if self._opened is None:
            connector = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=self._idle_seconds)
            self._opened = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
            )
        try:
            answer = await self._opened.request(method, url, data=body, headers=HEADERS)
        except aiohttp.ClientError as error:
            raise ours.NoAnswer(f"engine {url} is not reached: {error!r}") from error
        return answer.status, answer.read


class PyreqwestClient(GeneralClient):
    """Over pyreqwest, which is Rust's reqwest."""

    async def ask(self, method: str, url: str, body: bytes) -> Any:
        """See `GeneralClient`."""
        from pyreqwest.client import ClientBuilder
        from pyreqwest.exceptions import RequestError

        if self._opened is None:
            self._opened = ClientBuilder().max_connections(self._connections).http1_only().no_proxy().build()
        request = self._opened.request(method, url).headers(HEADERS).body_bytes(body).build()
        try:
            answer = await request.send()
        except RequestError as error:
            raise ours.NoAnswer(f"engine {url} is not reached: {error!r}") from error
        return answer.status, answer.bytes


class GeneralResponse:
    """The interface of `Response`, for whole answers."""

    def __init__(self, url: str, status: int, read: Callable[[], Any]) -> None:
        self.url = url
        self.status = status
        self._read = read

    async def read(self) -> bytes:
        """The whole body."""
        return bytes(await self._read())

    def close(self) -> None:
        """Nothing: every answer here is read."""


class GeneralRequest:
    """The interface of `Request`."""

    def __init__(self, client: GeneralClient, method: str, path: str, body: bytes) -> None:
        self._sent = client, method, path, body

    async def __aenter__(self) -> GeneralResponse:
        client, method, path, body = self._sent
        url = client.url + path
        return GeneralResponse(url, *await client.ask(method, url, body))

    async def __aexit__(self, *_failure: object) -> None:
        return


CLIENTS: dict[str, type[GeneralClient]] = {"aiohttp": AiohttpClient, "pyreqwest": PyreqwestClient}


@contextmanager
def gateway_with(client: str, folder: Path, engine_url: str) -> Iterator[tuple[HttpStore, int]]:
    """A server whose gateway asks engines by that client: a client of its control plane, and its process id."""
    folder.mkdir()
    engine = {"model": MODEL, "kind": "embedded", "url": engine_url, "policy_version": 0}
    endpoint = Endpoint(model=MODEL, tokenizer=str(TOKENIZER), renderer="qwen3", engines=[engine])
    os.environ |= {CHOSEN: client, "PYTHONPATH": os.pathsep.join(sys.path)}
    server.Child = lambda _module, **more: Child("engine_client", **more)  # type: ignore[assignment,misc,attr-defined]
    with server.launch(folder, endpoint, admin_key="admin", runner_key="runner") as serving:
        yield HttpStore(serving.url, "admin"), serving.pid


def serve_with(client: str) -> None:
    """Be the server, with another client in place of ours; `engines/http.py` takes its names when it is imported."""
    if client in CLIENTS:
        assert "lightning_rl_proxy.engines.http" not in sys.modules
        ours.Client, ours.HttpRequest = CLIENTS[client], GeneralRequest  # type: ignore[assignment,misc]
        ours.HttpResponse = GeneralResponse  # type: ignore[assignment,misc]
    runpy.run_module("lightning_rl.control_plane.process", run_name="__main__")


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="calls of a round with 16 clients; 1 client: a quarter")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    names = ["ours", *(name for name in CLIENTS if importlib.util.find_spec(name))]
    number = itertools.count()
    with ExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        script = str(Path(__file__).with_name("gateway.py"))
        engine_url, _ = parts.enter_context(role("--role", "engine", script=script))
        database = str(folder / "relay.db")
        of_relay = ("--role", "relay", "--engine-url", engine_url, "--database", database)
        relay_url, relay_pid = parts.enter_context(role(*of_relay, script=script))
        servers = {name: parts.enter_context(gateway_with(name, folder / name, engine_url)) for name in names}
        print("| clients | client for engines | calls/s | CPU ms per call | calls/s, to ours | CPU, to ours |")
        print("|---|---|---|---|---|---|")
        for clients in (1, 16):
            calls = arguments.calls if clients > 1 else arguments.calls // 4
            rounds: dict[str, list[Measured]] = {name: [] for name in [*names, "bare relay"]}
            for number_of_round in range(arguments.rounds + 1):
                turn = number_of_round % len(names)
                for name in names[turn:] + names[:turn]:
                    store, pid = servers[name]
                    attempts = open_attempts(store, calls)
                    rounds[name].append(measure(attempts, clients, pid, number))
                    end_attempts(store, attempts)
                rounds["bare relay"].append(measure([(f"{relay_url}/v1", "none")] * calls, clients, relay_pid, number))
            for name, measured in rounds.items():
                pairs = list(zip(measured, rounds["ours"], strict=True))[1:]  # without the warm-up
                rates, cpus = [a.rate / b.rate for a, b in pairs], [a.cpu / b.cpu for a, b in pairs]
                middle = Measured(*map(median, zip(*measured[1:], strict=True)))
                to_ours = " | ".join(
                    f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" for ratios in (rates, cpus)
                )
                print(f"| {clients} | {name} | {middle.rate:.0f} | {middle.cpu:.3f} | {to_ours} |", flush=True)


if __name__ == "__main__":
    if CHOSEN in os.environ:
        serve_with(os.environ.pop(CHOSEN))
    else:
        main()
