"""Two thousand open attempts, hundreds of slow streams, clients that never read: no error, and nobody else waits."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from lightning_rl.control_plane.launch import launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Claim, RolloutRequest
from tests.lightning_rl.control_plane.test_killed import sampled
from tests.lightning_rl.control_plane.test_process import policy_of

OPEN, STREAMS, MUTE, TOKENS = 2000, 300, 20, 15
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "stream": True}


async def slowly(request: object) -> StreamingResponse:
    async def events() -> AsyncIterator[bytes]:
        for token in [1] * TOKENS + [151645]:
            await asyncio.sleep(0.05)
            yield b"data: " + sampled([token]) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@pytest.fixture
def engine() -> Iterator[dict[str, str]]:
    app = Starlette(routes=[Route("/inference/v1/generate", slowly, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
        thread.start()
        yield {"model": "policy", "kind": "embedded", "url": f"http://127.0.0.1:{listening.getsockname()[1]}"}
        server.should_exit = True
        thread.join(20)


def mute(claim: Claim) -> socket.socket:
    """A client that asks for a stream and reads none of it."""
    llm = claim.resources["main_llm"]
    where, body = urlsplit(llm["base_url"]), json.dumps(ASKED)
    client = socket.create_connection((where.hostname or "", where.port or 0))
    head = f"POST {where.path}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {llm['api_key']}\r\n"
    client.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    return client


async def stream(session: aiohttp.ClientSession, claim: Claim) -> int:
    """How many pieces came, to the end."""
    llm = claim.resources["main_llm"]
    url, headers = f"{llm['base_url']}/chat/completions", {"authorization": f"Bearer {llm['api_key']}"}
    async with session.post(url, json=ASKED, headers=headers, raise_for_status=True) as answer:
        text = await answer.text()
    assert text.endswith("data: [DONE]\n\n"), text[-300:]
    return text.count('"delta":')


async def all_streams(url: str, claims: list[Claim]) -> list[int]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        asking = asyncio.gather(*(stream(session, claim) for claim in claims))
        while not asking.done():
            async with session.get(f"{url}/healthz", raise_for_status=True):
                await asyncio.sleep(0.05)
        return await asking


@pytest.mark.long
def test_many_attempts_slow_streams_and_clients_that_never_read(tmp_path, engine) -> None:
    policy = policy_of(engines=[engine])
    with launch(tmp_path, policy, admin_key="a", runner_key="r") as serving, ExitStack() as clients:
        store = HttpStore(serving.url, "a")
        store.enqueue([RolloutRequest(task=i) for i in range(OPEN)])
        claims = [claim for _ in range(OPEN // 500) for claim in store.claim("w", limit=500)]
        assert store.state()["open_attempts"] == len(claims) == OPEN
        for claim in claims[:MUTE]:
            clients.enter_context(mute(claim))
        pieces = asyncio.run(all_streams(serving.url, claims[MUTE : MUTE + STREAMS]))
        assert len(pieces) == STREAMS
        assert min(pieces) >= TOKENS
        for claim in claims[:MUTE]:
            store.cancel(claim.rollout.rollout_id)
        state = store.state()
        assert (state["models"]["policy"]["in_flight"], state["open_attempts"]) == (0, OPEN - MUTE)
        assert state["counters"]["calls"] >= STREAMS
        assert not [name for name in state["counters"] if name.startswith("status_5")]
