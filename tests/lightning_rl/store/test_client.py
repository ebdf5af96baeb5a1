"""What the client does where the server cannot answer; the rest of it is in `test_contract.py`."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lightning_rl.store.client import HttpStore
from lightning_rl.store.errors import Unreachable


class _Unable(BaseHTTPRequestHandler):
    """Answers nothing but 503, while the client is closed."""

    asked = 0
    store: HttpStore

    def do_GET(self) -> None:  # the standard library's name
        type(self).asked += 1
        self.store.close()
        self.send_response(503)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Unable) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_request_of_a_client_that_is_closed_is_not_made_again(url: str) -> None:
    """A program waits for the threads that make requests as it ends."""
    _Unable.store = HttpStore(url, "key")
    with pytest.raises(Unreachable, match="503"):
        _Unable.store.state()
    assert _Unable.asked == 1
