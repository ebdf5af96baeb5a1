"""What the client does where the server cannot answer; the rest of it is in `test_contract.py`."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lightning_rl.store import client
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Reward, RolloutRequest
from lightning_rl.store.errors import Conflict, ForeignAnswer, Invalid, NotFound, StoreUnwritable, Unreachable


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


class Scripted(ThreadingHTTPServer):
    """Gives its `answers` (status, body) one after the other, the last one for ever, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Scripted)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answers: list[tuple[int, Any]] = []
        self.paths: list[str] = []
        self.bodies: list[Any] = []


class _Scripted(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.paths.append(self.path)
        self.server.bodies.append(json.loads(asked or b"null"))
        status, answer = self.server.answers[0]
        del self.server.answers[: len(self.server.answers) > 1]
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("status", [502, 503, 504, 507])
def test_what_may_pass_is_asked_again(status: int, server: Scripted) -> None:
    server.answers = [(status, {}), (200, {"models": []})]
    store = HttpStore(f"{server.url}/", "key")
    assert (store.url, store.state()) == (server.url, {"models": []})
    assert server.paths == ["/api/v1/state"] * 2


def test_a_store_that_cannot_be_written_is_told_when_patience_is_over(server: Scripted) -> None:
    server.answers = [(507, {"error": {"message": "the disk is full"}})]
    with pytest.raises(StoreUnwritable, match="the disk is full"):
        HttpStore(server.url, "key", patience_seconds=0).state()
    closed = HttpStore(server.url, "key")
    closed.close()
    with pytest.raises(StoreUnwritable, match="the disk is full"):
        closed.state()
    assert len(server.paths) == 2


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (409, {"error": {"message": "it has ended"}}, Conflict, r"^it has ended \(409 at GET http"),
        (413, b"too large", Invalid, r"^'too large' is no answer of a lightning-rl server \(413"),
        (404, {"detail": "Not Found"}, NotFound, r"Not Found"),
        (500, {"error": None}, Unreachable, r"null"),
        (500, [1], Unreachable, r"^'\[1\]' is no answer .* \(500"),
        (
            418,
            b"<html>\n" + b"a teapot " * 999,
            Unreachable,
            r"^'<html>( a teapot){12} a tea?\.\.\.' is no answer",
        ),
        (500, b"x" * 999, Unreachable, r"^'x{120}\.\.\.' is no answer"),
        (200, b"<html>a teapot", ForeignAnswer, r"^'<html>a teapot' is no answer of a .* \(200 at GET http"),
        (200, [1], ForeignAnswer, r"^'\[1\]' is no answer of a lightning-rl server of this version: Expected `object`"),
    ],
)
def test_a_refusal_is_the_error_of_its_status_in_the_servers_words(
    status: int, body: Any, error: type[Exception], said: str, server: Scripted
) -> None:
    server.answers = [(status, body)]
    with pytest.raises(error, match=said):
        HttpStore(server.url, "key").state()


def test_what_could_be_made_twice_has_an_id_of_the_clients(server: Scripted) -> None:
    store = HttpStore(server.url, "key")
    server.answers = [(200, {"claims": [], "rewards": [], "rollouts": []})]
    store.enqueue([RolloutRequest(task=1)])
    store.claim("w")
    store.add_rewards("r", "a", [Reward(value=1.0), Reward(value=1.0, reward_id="given")])
    enqueued, claimed, rewarded = server.bodies
    assert enqueued["rollouts"][0]["rollout_id"]
    assert claimed["claim_id"]
    assert [bool(reward["reward_id"]) for reward in rewarded["rewards"]] == [True, True]
    assert rewarded["rewards"][1]["reward_id"] == "given"
    server.answers = [(500, {})]
    with pytest.raises(Unreachable):
        store.publish({"x": {}})
    assert server.bodies[-1]["resources_id"]


def test_much_is_asked_for_in_parts(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TRACES_AT_ONCE", 2)
    store = HttpStore(server.url, "key")
    server.answers = [(200, {"rollouts": []})]
    store.enqueue([RolloutRequest(task=number) for number in range(1001)])
    tasks = [[each["task"] for each in body["rollouts"]] for body in server.bodies]
    assert tasks == [list(range(1000)), [1000]]
    server.answers = [(200, {"rollouts": {}})]
    store.traces(["a", "b", "c"])
    assert [body["rollout_ids"] for body in server.bodies[2:]] == [["a", "b"], ["c"]]


def test_a_late_reward_that_is_refused_is_raised(server: Scripted) -> None:
    server.answers = [(409, {"error": {"message": "it does not count"}})]
    with pytest.raises(Conflict, match="it does not count"):
        HttpStore(server.url, "key").add_late_rewards({("r", "a"): [Reward(value=1.0)]})


def test_the_version_of_new_weights_is_told_where_calls_go_on(server: Scripted) -> None:
    server.answers = [(200, {})]
    HttpStore(server.url, "key").resume("m", 7, outdated=lambda: ["http://a"])
    assert server.bodies == [{"model": "m", "policy_version": 7, "outdated": ["http://a"]}]
