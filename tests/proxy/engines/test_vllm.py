"""What the token wire says: an agent that sets no limit may answer up to the end of the context."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from lightning_rl_proxy.engines.base import EngineRefused, Finish, Tokens
from lightning_rl_proxy.engines.vllm import TokenEngine
from lightning_rl_proxy.sampling import Sampling


class Wire(HTTPServer):
    """Keeps what it was asked, and answers `answer` with `status`."""

    asked: dict[str, Any]
    status = 200
    answer: Any = b'{"choices": [{"token_ids": [1, 2], "finish_reason": "stop"}]}'


class Handler(BaseHTTPRequestHandler):
    server: Wire

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = self.server.answer if isinstance(self.server.answer, bytes) else json.dumps(self.server.answer).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def wire() -> Iterator[Wire]:
    with Wire(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def sample(wire: Wire, **sampling: Any) -> list[Tokens | Finish]:
    async def ask() -> list[Tokens | Finish]:
        url = f"http://127.0.0.1:{wire.server_port}"
        engine = TokenEngine(model="m", kind="vllm", url=url, stop_token_ids=[9], policy_version=3)
        try:
            return [part async for part in engine.generate([5], Sampling(**sampling), request_id="r")]
        finally:
            await engine.close()

    return asyncio.run(ask())


def test_no_limit_is_said_as_null_since_an_absent_one_means_16_tokens(wire: Wire) -> None:
    sample(wire)
    assert wire.asked["sampling_params"]["max_tokens"] is None
    sample(wire, max_tokens=7)
    assert wire.asked["sampling_params"]["max_tokens"] == 7


def test_tokens_go_in_and_come_out(wire: Wire) -> None:
    tokens, finish = sample(wire)
    assert wire.asked["token_ids"] == [5]
    assert wire.asked["sampling_params"]["stop_token_ids"] == [9]
    assert tokens == Tokens([1, 2], None)
    assert isinstance(finish, Finish)
    assert [(r.version, r.start, r.end) for r in finish.version_spans] == [(3, 0, 2)]


@pytest.mark.parametrize("answer", [{"error": {"message": "too long"}}, b"too long"])
def test_a_refusal_says_what_the_engine_said(wire: Wire, answer: Any) -> None:
    wire.status, wire.answer = 400, answer
    with pytest.raises(EngineRefused, match="the engine answered 400: too long"):
        sample(wire)
