"""What the server tells of its connections."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import pytest
import uvicorn

from lightning_rl.server.protocol import protocol
from lightning_rl_proxy.gateway import GONE
from lightning_rl_proxy.limits import Limits


class App:
    """Answers to /now at once, and to nothing else; `read` is set when a body is whole, `left` when its client is gone.

    `begun` is set when it is about to wait for a body.
    """

    def __init__(self) -> None:
        self.begun, self.read, self.left = Event(), Event(), Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.set()
        while (await receive()).get("more_body"):
            pass
        self.read.set()
        gone = scope["extensions"][GONE]
        if scope["path"] == "/now":
            assert not gone.done()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await gone
            self.left.set()


@contextmanager
def serving(app: App) -> Iterator[tuple[str, int]]:
    """The address of a server that speaks our HTTP."""
    config = uvicorn.Config(app, http=protocol(Limits()), lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()


def ask(app: App, client: socket.socket, path: str, size: int) -> None:
    app.begun.clear()
    client.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), size))
    assert app.begun.wait(30)
    time.sleep(0.05)  # in which it comes to wait; a body that comes in one read is then the last that it asks for
    client.sendall(b"x" * size)


@pytest.mark.parametrize("size", [0, 10, 100_000], ids=["no body", "short", "a body that stops the reading"])
@pytest.mark.parametrize("before", [0, 2], ids=["first request", "later one"])
def test_the_application_hears_of_a_client_that_leaves(size: int, before: int) -> None:
    app = App()
    with serving(app) as address:
        with socket.create_connection(address) as client:
            for _ in range(before):
                ask(app, client, "/now", size)
                assert client.recv(4096).startswith(b"HTTP/1.1 200")
            app.read.clear()
            ask(app, client, "/never", size)
            assert app.read.wait(30)
            assert not app.left.is_set()
        assert app.left.wait(30)
