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

from lightning_rl.control_plane.protocol import protocol
from lightning_rl_proxy.gateway import GONE
from lightning_rl_proxy.http.limits import RequestLimits


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
def serving(app: App, limits: RequestLimits | None = None) -> Iterator[tuple[str, int]]:
    """The address of a server that speaks our HTTP."""
    http = protocol(limits or RequestLimits())
    config = uvicorn.Config(app, http=http, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
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


HEAD = b"POST /now HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n"


@pytest.mark.parametrize(
    ("said", "trickle"),
    [(b"", b""), (HEAD, b""), (HEAD, b"x: y\r\n"), (HEAD + b"\r\nhalf", b"")],
    ids=["nothing", "half a head", "a head that never ends", "half a body"],
)
def test_who_sends_nothing_more_holds_no_connection(said: bytes, trickle: bytes) -> None:
    with (
        serving(App(), RequestLimits(head_seconds=1, body_seconds=1)) as address,
        socket.create_connection(address) as client,
    ):
        client.sendall(said)
        client.settimeout(0.1)
        for _ in range(300):
            try:
                assert client.recv(100) == b""
                return
            except TimeoutError:
                client.sendall(trickle)
            except ConnectionError:
                return
        pytest.fail("it is still open")


def test_a_request_that_comes_slowly_is_answered() -> None:
    with (
        serving(App(), RequestLimits(head_seconds=1, body_seconds=1)) as address,
        socket.create_connection(address) as client,
    ):
        for _ in range(2):  # also behind another one on the same connection
            client.sendall(HEAD + b"\r\n")
            for byte in b"a body..":
                time.sleep(0.2)
                client.sendall(bytes([byte]))
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
            time.sleep(1.2)  # idle between requests, as clients that keep connections are
