"""Images at http(s) URLs: fetched from hosts that are allowed, once an attempt, and recorded like any other."""

import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering import image_fetcher
from lightning_rl_proxy.rendering.image_fetcher import ImageFetcher
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests import seeing
from tests.proxy.conftest import MODEL, SECRET, MemoryLedger, ScriptedEngine, Served, listening
from tests.proxy.rendering.test_images import CAT, DOG, ask, placed, post, recorded, sha


class Host(ThreadingHTTPServer):
    """A server of images; `files` by path, and how often each was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, bytes, dict[str, str]]] = {}
        self.asked: Counter[str] = Counter()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        self.server.asked[self.path] += 1
        status, data, headers = self.server.files[self.path]
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as host:
        threading.Thread(target=host.serve_forever, args=(0.01,)).start()
        host.files["/cat.png"] = (200, CAT, {})
        yield host
        host.shutdown()


@pytest.fixture
def seen(host: Host, tmp_path: Path) -> Iterator[Served]:
    folder = seeing.make_folder(tmp_path / "model")
    ledger, engine, router = MemoryLedger(), ScriptedEngine(FastTokenizer(folder)), Router(MODEL)
    router.register(engine)
    gateway = Gateway(
        ledger=ledger,
        secret=SECRET,
        journal=tmp_path / "journal",
        renderer=load_renderer(folder, "auto", MODEL),
        router=router,
        allowed_media_domains=[host.url.removeprefix("http://")],
    )
    with listening(gateway) as (url, loop):
        yield Served(url, gateway, ledger, engine, loop)


def shown(url: str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}],
    }


def test_an_image_is_fetched_once_an_attempt_and_stays_what_it_was(seen: Served, host: Host) -> None:
    first = ask(seen, [shown(f"{host.url}/cat.png")])["choices"][0]["message"]
    host.files["/cat.png"] = (200, DOG, {})  # what is there now is another one
    ask(seen, [shown(f"{host.url}/cat.png"), first, {"role": "user", "content": "and?"}])
    assert host.asked == {"/cat.png": 1}
    assert [one.sha256 for one in placed(seen)] == [sha(CAT)]
    before, after = recorded(seen)
    assert after.parent_id == before.call_id
    assert host.url not in str(seen.ledger.spans)  # nor a signature that its URL may hold


def test_a_fetched_image_is_the_one_that_is_sent_whole(seen: Served, host: Host) -> None:
    first = ask(seen, [shown(f"{host.url}/cat.png")])["choices"][0]["message"]
    ask(seen, [shown(seeing.data_url(CAT)), first, {"role": "user", "content": "and?"}])
    before, after = recorded(seen)
    assert after.parent_id == before.call_id


@pytest.mark.parametrize("door", ["messages", "responses"])
def test_in_every_dialect(seen: Served, host: Host, door: str) -> None:
    url = f"{host.url}/cat.png"
    bodies: dict[str, Any] = {
        "messages": {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}],
        },
        "responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
    }
    post(seen, door, {"model": MODEL} | bodies[door])
    assert [one.sha256 for one in placed(seen)] == [sha(CAT)]


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        ((404, b"", {}), 400, "answered 404"),
        ((200, b"<html>", {"content-type": "image/png"}), 400, "no PNG"),
        ((302, b"", {"location": "http://169.254.169.254/latest"}), 400, "not followed"),
        ((500, b"", {}), 503, "answered 500"),
        ((200, CAT, {"content-length": "9999"}), 503, "cannot be fetched"),
        ((200, bytes(3000), {}), 400, "more than 2000 bytes"),
    ],
)
def test_what_cannot_be_fetched_says_why(
    seen: Served, host: Host, answer: Any, status: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_fetcher, "MOST_BYTES", 2000)
    host.files["/x"] = answer
    body = {"model": MODEL, "messages": [shown(f"{host.url}/x?signature=secret")]}
    host.files["/x?signature=secret"] = answer
    said = post(seen, "chat/completions", body, status)["error"]["message"]
    assert why in said
    assert "messages[0].content[0]" in said
    assert "secret" not in said
    assert seen.engine.prompts == []


@pytest.mark.parametrize(
    "url",
    [
        "https://images.example.com.evil.org/cat.png",
        "https://evil.org/images.example.com",
        "https://images.example.com@evil.org/cat.png",
        "https://me:password@images.example.com/cat.png",
        "https://images.example.com:8443/cat.png",
        "http://localhost/cat.png",
        "http://2130706433:8000/cat.png",
        "http://127.0.0.1/cat.png",
        "//images.example.com/cat.png",
        "https:///cat.png",
        "ftp://images.example.com/cat.png",
        "https://images.example.com\\@evil.org/cat.png",
    ],
)
def test_other_hosts_are_refused(url: str) -> None:
    with pytest.raises(GatewayError, match="where"):
        ImageFetcher(["images.example.com", "127.0.0.1:8000"]).check("where", url)


@pytest.mark.parametrize(
    "url",
    ["https://images.example.com/a?b=c", "http://IMAGES.example.com/", "http://127.0.0.1:8000/", "https://[::1]:9/x"],
)
def test_allowed_hosts_are_not(url: str) -> None:
    ImageFetcher(["Images.Example.com", "127.0.0.1:8000", "[::1]:9"]).check("where", url)


@pytest.mark.parametrize("word", ["https://images.example.com", "host/path", "*", "", "host:", "host:99999"])
def test_what_is_no_host_is_no_entry(word: str) -> None:
    with pytest.raises(ValueError, match="no host"):
        ImageFetcher([word])
