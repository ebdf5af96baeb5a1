"""What is over a limit is refused in its dialect's words, which say whether to try again, and costs nothing."""

import asyncio
import http.client
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_proxy.errors import GatewayError
from lightning_rl_proxy.http.limits import RequestLimits, announced_bytes, head_bytes
from tests.proxy.conftest import Served

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "policy", "messages": MESSAGES, "max_tokens": 8}
DOORS: dict[str, dict[str, Any]] = {
    "chat/completions": CHAT,
    "messages": CHAT,
    "messages/count_tokens": CHAT,
    "responses": {"model": "policy", "input": MESSAGES},
    "completions": {"model": "policy", "prompt": "hi"},
    "embeddings": {"model": "policy", "input": ["hi"]},
}
MANY = [path for path in DOORS if path != "completions"]
ANTHROPIC = ("messages", "messages/count_tokens")


def ask(served: Served, path: str, fields: dict[str, Any], **headers: str) -> httpx.Response:
    key = {"authorization": f"Bearer {served.key()}"}
    return httpx.post(f"{served.base_url()}/{path}", json=fields, headers=key | headers, timeout=30)


def refused(answer: httpx.Response, path: str, status: int, *, retry: bool = False) -> str:
    """The message of a refusal of that status, in the words of its dialect."""
    assert answer.status_code == status, answer.text
    assert answer.headers["x-should-retry"] == ("true" if retry else "false")
    assert ("retry-after" in answer.headers) == retry
    said = answer.json()
    assert (said.get("type") == "error") == (path in ANTHROPIC)
    message = said["error"]["message"]
    assert isinstance(message, str)
    return message


@pytest.fixture
def held(served: Served) -> Iterator[Served]:
    """A gateway whose engine answers nothing until the end of the test."""
    hold = asyncio.Event()
    served.engine.hold = hold
    yield served

    async def go_on() -> None:
        hold.set()

    served.run(go_on)


@pytest.mark.parametrize("path", DOORS)
def test_a_body_that_is_too_long_is_refused(served: Served, path: str) -> None:
    served.gateway.limits = RequestLimits(body_bytes=1000)
    fields = DOORS[path] | {"metadata": {"text": "x" * 1000}}
    assert "over 1000 bytes" in refused(ask(served, path, fields), path, 413)
    assert served.engine.prompts == []


def test_a_body_that_says_it_is_too_long_is_refused_before_it_comes(served: Served) -> None:
    place = urlsplit(f"{served.base_url()}/chat/completions")
    connection = http.client.HTTPConnection(place.netloc, timeout=30)
    connection.putrequest("POST", place.path)
    connection.putheader("authorization", f"Bearer {served.key()}")
    connection.putheader("content-length", str(2**50))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_does_not_say_how_long_it_is_is_read_up_to_the_limit(served: Served) -> None:
    served.gateway.limits = RequestLimits(body_bytes=10_000)

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    key = {"authorization": f"Bearer {served.key()}"}
    answer = httpx.post(f"{served.base_url()}/chat/completions", content=pieces(), headers=key)
    refused(answer, "chat/completions", 413)


@pytest.mark.parametrize("path", DOORS)
def test_headers_that_are_too_long_are_refused_before_the_key_is_looked_at(served: Served, path: str) -> None:
    served.gateway.limits = RequestLimits(header_bytes=2000)
    answer = ask(served, path, DOORS[path], authorization="Bearer no key", more="x" * 2000)
    assert "over 2000 bytes" in refused(answer, path, 431)
    assert ask(served, path, DOORS[path], authorization="Bearer no key").status_code == 401


@pytest.mark.parametrize("path", MANY)
def test_a_request_of_too_many_messages_is_refused(served: Served, path: str) -> None:
    served.gateway.limits = RequestLimits(messages=3)
    name = "input" if "input" in DOORS[path] else "messages"
    message = refused(ask(served, path, DOORS[path] | {name: DOORS[path][name] * 4}), path, 400)
    assert message == f"{name}: 4 of them, at most 3 are taken"
    assert served.engine.prompts == []


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses", "completions"])
def test_more_calls_than_an_attempt_may_have_in_flight_wait_outside(held: Served, path: str) -> None:
    held.gateway.limits = RequestLimits(calls_in_flight=2)
    answers: list[int] = []
    callers = [
        threading.Thread(target=lambda: answers.append(ask(held, path, DOORS[path]).status_code)) for _ in range(2)
    ]
    for caller in callers:
        caller.start()
    held.eventually(lambda: len(held.engine.prompts) == 2)
    assert "2 calls in flight" in refused(ask(held, path, DOORS[path]), path, 429, retry=True)
    other = {"authorization": f"Bearer {held.key('r1', 'a2')}"}
    assert httpx.get(held.base_url("r1", "a2") + "/models", headers=other).status_code == 200
    hold = held.engine.hold
    assert hold is not None

    async def go_on() -> None:
        hold.set()

    held.run(go_on)
    for caller in callers:
        caller.join(30)
    assert answers == [200, 200]
    assert ask(held, path, DOORS[path]).status_code == 200


def test_a_retry_joins_its_first_try_although_the_limit_is_reached(held: Served) -> None:
    held.gateway.limits = RequestLimits(calls_in_flight=1)
    answers: list[int] = []

    def call(**headers: str) -> threading.Thread:
        caller = threading.Thread(
            target=lambda: answers.append(ask(held, "chat/completions", CHAT, **headers).status_code)
        )
        caller.start()
        return caller

    first = call()
    held.eventually(lambda: len(held.engine.prompts) == 1)
    second = call(**{"x-stainless-retry-count": "1"})
    held.eventually(lambda: held.gateway.counters["joined_retries"] == 1)
    hold = held.engine.hold
    assert hold is not None

    async def go_on() -> None:
        hold.set()

    held.run(go_on)
    first.join(30)
    second.join(30)
    assert answers == [200, 200]


@given(st.integers(0, 50), st.integers(1, 50))
def test_a_limit_is_the_most_that_is_taken(size: int, limit: int) -> None:
    limits = RequestLimits(body_bytes=limit, messages=limit, header_bytes=limit, calls_in_flight=limit)
    checks = [
        (lambda: limits.check_body(size), size > limit),
        (lambda: limits.check_messages({"messages": [0] * size}), size > limit),
        (lambda: limits.check_messages({"messages": [0]}, before=size - 1), size > limit),
        (lambda: limits.check_head({"path": "x" * size, "headers": []}), size > limit),
        (lambda: limits.check_calls(size, "a"), size >= limit),
    ]
    for check, refuses in checks:
        if refuses:
            with pytest.raises(GatewayError):
                check()
        else:
            check()


def test_the_head_is_the_path_the_query_and_the_headers() -> None:
    scope = {"path": "/v1", "query_string": b"a=1", "headers": [(b"host", b"h"), (b"x", b"12")]}
    assert head_bytes(scope) == 3 + 3 + 5 + 3


@pytest.mark.parametrize(("said", "size"), [(b"12", 12), (b"", 0), (b"-1", 0), (b"1e9", 0), ("²".encode(), 0)])
def test_a_length_that_is_no_number_announces_nothing(said: bytes, size: int) -> None:
    assert announced_bytes({b"content-length": said}) == size
