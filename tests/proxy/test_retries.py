"""Retries, with the real SDKs against a broken line: one stored delivered call per answer that an author saw.

A relay between SDK and gateway breaks one exchange after the other as it is told. Every generation says another text,
so a text names its sample.
"""

import asyncio
import contextlib
import json
import select
import socket
import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import urllib3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_rl_adapters import forest
from lightning_rl_adapters.call import Call
from lightning_rl_proxy.engines.base import EngineFinish, EngineTokens, EngineUnavailable, TokenRequest
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.proxy.conftest import MODEL, SECRET, MemoryLedger, ScriptedEngine, Served, listening
from tests.random_examples import examples

SDK_SECONDS = 1.0  # until an SDK gives a request up
FAILURES = (openai.OpenAIError, anthropic.AnthropicError)


class CountingEngine(ScriptedEngine):
    """Says a new text each time. `broken` generations fail after their first token; `slow` ones wait for `hold`."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        super().__init__(tokenizer)
        self.broken = 0
        self.slow = 0

    async def generate(self, request: TokenRequest) -> AsyncGenerator[EngineTokens | EngineFinish]:
        self.script.append(f"sample number {len(self.prompts)} of all")
        self.hold = asyncio.Event() if self.slow else None
        self.slow = max(0, self.slow - 1)
        broken, self.broken = self.broken > 0, max(0, self.broken - 1)
        parts = super().generate(request._replace(stream=request.stream or broken))
        try:
            async for part in parts:
                yield part
                if broken:
                    raise EngineUnavailable("it broke down in mid-answer")
                await asyncio.sleep(0.005 if request.stream else 0)  # so that a stream can be cut while it is sampled
        finally:
            await parts.aclose()


@dataclass(frozen=True)
class Fault:
    """What the relay does to one exchange.

    `status`: it answers itself with this status, and `should_retry` as that header. `reaches`: the request goes on to
    the gateway before. `passes`: so many parts of the answer come through (of a whole one halves, of a stream events),
    then the line is cut. `waits`: the gateway's whole answer is read, and nothing is said until the client leaves.
    """

    status: int = 0
    should_retry: str = ""
    reaches: bool = True
    passes: int = 0
    waits: bool = False


FAULTS = {
    "500": Fault(status=500, reaches=False),
    "502 and x-should-retry": Fault(status=502, should_retry="true", reaches=False),
    "502 in place of the answer": Fault(status=502),
    "cut before the request": Fault(reaches=False),
    "cut before the answer": Fault(),
    "cut in the answer": Fault(passes=1),
    "cut late in the answer": Fault(passes=4),
    "answer held back": Fault(waits=True),
}


class Relay:
    """Listens on the loopback, and relays each request to the gateway but for the `faults` that come first."""

    def __init__(self, gateway_port: int) -> None:
        self.faults: deque[Fault] = deque()
        self._gateway_port = gateway_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with closing(client), contextlib.suppress(ConnectionError):  # of clients that leave
            request = _request(client)
            if not request:
                return
            fault = self.faults.popleft() if self.faults else None
            with socket.create_connection(("127.0.0.1", self._gateway_port)) as gateway:
                if fault is None or fault.reaches:
                    gateway.sendall(request)
                if fault is None:
                    _copy(gateway, client)
                elif fault.status:
                    if fault.reaches:
                        _rest(gateway)
                    client.sendall(_refusal(fault))
                elif fault.waits:
                    _rest(gateway)
                    client.recv(1)  # until the client has had enough
                elif fault.reaches:
                    self._pass(gateway, client, fault.passes)

    def _pass(self, gateway: socket.socket, client: socket.socket, parts: int) -> None:
        """Let some of the answer through; nothing of it is asked for where nothing shall pass."""
        if not parts:
            gateway.settimeout(0.1)  # long enough for the request to arrive
            with contextlib.suppress(TimeoutError):
                gateway.recv(1, socket.MSG_PEEK)
            return
        answer = b""
        while answer.count(b"\n\n") < parts and (piece := gateway.recv(65536)):
            answer += piece
        if b"text/event-stream" not in answer:
            client.sendall(answer[: answer.index(b"\r\n\r\n") + 20])
            return
        end = 0
        for _ in range(parts):
            end = answer.find(b"\n\n", end) + 2
        client.sendall(answer[:end])


def _request(client: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(65536)
        if not piece:
            return b""
        data += piece
    head, body = data.split(b"\r\n\r\n", 1)
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    [length] = [int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")]
    while len(body) < length:
        body += client.recv(65536)
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + body


def _copy(gateway: socket.socket, client: socket.socket) -> None:
    """Pass an answer on until it ends, or its client leaves."""
    while client not in select.select([gateway, client], [], [])[0] and (piece := gateway.recv(65536)):
        client.sendall(piece)


def _rest(gateway: socket.socket) -> bytes:
    return b"".join(iter(lambda: gateway.recv(65536), b""))


def _refusal(fault: Fault) -> bytes:
    retry = f"x-should-retry: {fault.should_retry}\r\n" if fault.should_retry else ""
    return f"HTTP/1.1 {fault.status} No\r\ncontent-length: 0\r\nconnection: close\r\n{retry}\r\n".encode()


class Line:
    """A gateway behind a relay; `ask` says what the author of an agent sees of one call."""

    def __init__(self, served: Served, relay: Relay) -> None:
        self.served = served
        self.relay = relay
        self.engine: Any = served.engine

    def ask(self, sdk: str, question: str, *, stream: bool, retries: int = 4) -> str:
        return SDKS[sdk](self, question, stream, retries)

    def url(self, ending: str = "") -> str:
        return f"http://127.0.0.1:{self.relay.port}/rollout/r1/attempt/a1{ending}"

    def options(self, retries: int) -> dict[str, Any]:
        return {"api_key": self.served.key(), "max_retries": retries, "timeout": SDK_SECONDS}

    def calls(self) -> list[Call]:
        self.served.seal()
        return self.served.ledger.calls()

    def joined(self) -> int:
        return self.served.gateway.counters["joined_retries"]

    def release_when(self, holds: Callable[[], bool]) -> threading.Thread:
        """Let what the engine holds back go on, as soon as `holds`."""

        async def go_on() -> None:
            self.engine.hold.set()

        def watch() -> None:
            self.served.eventually(holds)
            self.served.run(go_on)

        thread = threading.Thread(target=watch)
        thread.start()
        return thread


def _openai(line: Line, question: str, stream: bool, retries: int) -> str:
    with openai.OpenAI(base_url=line.url("/v1"), **line.options(retries)) as sdk:
        asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": question}]}
        if stream:
            chunks = sdk.chat.completions.create(**asked, stream=True)
            return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        return str(sdk.chat.completions.create(**asked).choices[0].message.content)


def _openai_async(line: Line, question: str, stream: bool, retries: int) -> str:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=line.url("/v1"), **line.options(retries)) as sdk:
            asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": question}]}
            if stream:
                chunks = await sdk.chat.completions.create(**asked, stream=True)
                return "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])
            return str((await sdk.chat.completions.create(**asked)).choices[0].message.content)

    return asyncio.run(ask())


def _anthropic(line: Line, question: str, stream: bool, retries: int) -> str:
    with anthropic.Anthropic(base_url=line.url(), **line.options(retries)) as sdk:
        asked: Any = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": question}]}
        if stream:
            events = sdk.messages.create(**asked, stream=True)
            return "".join(getattr(event.delta, "text", "") for event in events if event.type == "content_block_delta")
        answer: Any = sdk.messages.create(**asked)
        return str(answer.content[0].text)


SDKS = {"openai": _openai, "openai async": _openai_async, "anthropic": _anthropic}


@pytest.fixture
def line(
    tokenizer: FastTokenizer, renderer: LibraryRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Line]:
    for module in (openai, anthropic):  # as they are, but for the seconds between two tries
        monkeypatch.setattr(module._base_client.BaseClient, "_calculate_retry_timeout", lambda *_: 0.02)
    ledger, engine, router = MemoryLedger(), CountingEngine(tokenizer), Router(MODEL)
    router.register(engine)
    gateway = Gateway(
        ledger=ledger, secret=SECRET, journal=tmp_path / "journal", renderer=renderer, router=router, grace_seconds=30
    )
    with listening(gateway) as (url, loop):
        relay = Relay(int(url.rsplit(":", 1)[1]))
        yield Line(Served(url, gateway, ledger, engine, loop), relay)
        relay.close()


def texts(line: Line, calls: list[Call]) -> list[str]:
    return [line.engine._tokenizer.decode(call.response_ids).removesuffix("<|im_end|>") for call in calls]


def check(line: Line, seen: list[str], *, unseen: int = 0) -> None:
    """Every answer seen is one delivered call, and besides there are at most `unseen` delivered ones; none is lost."""
    calls = line.calls()
    delivered = Counter(texts(line, [call for call in calls if call.delivered]))
    assert all(number == 1 for number in Counter(seen).values()), seen
    assert all(number == 1 for number in delivered.values()), delivered
    assert set(seen) <= set(delivered)
    assert len(delivered) <= len(seen) + unseen
    assert len({span.span_id for span in line.served.ledger.spans}) == len(line.served.ledger.spans)
    received = line.served.gateway.state()["models"][MODEL]["tokens_received"]
    assert received == sum(call.sampled_tokens for call in calls)
    assert len(list(forest.build([call for call in calls if call.delivered]).leaves())) == len(delivered)


both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
each_sdk = pytest.mark.parametrize("sdk", SDKS)


@each_sdk
@both
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_line_costs_no_second_sample(line: Line, sdk: str, stream: bool, fault: str) -> None:
    line.relay.faults.append(FAULTS[fault])
    try:
        seen, unseen = line.ask(sdk, "one", stream=stream), 0
    except Exception:  # noqa: BLE001 - of a stream that broke off, an SDK's or its HTTP client's; the author asks again
        assert stream
        assert FAULTS[fault].passes
        # The gateway had written all of it when the line was cut, so this is another sample, or it saw the cut.
        seen, unseen = line.ask(sdk, "one", stream=stream), 1
    check(line, [seen], unseen=unseen)


@each_sdk
@both
def test_a_retry_that_came_while_the_first_is_in_flight_gets_its_answer(line: Line, sdk: str, stream: bool) -> None:
    line.engine.slow = 1
    watching = line.release_when(lambda: line.joined() > 0)
    seen = line.ask(sdk, "one", stream=stream)
    watching.join(20)
    assert len(line.engine.prompts) == 1
    check(line, [seen])


@each_sdk
@both
@pytest.mark.parametrize("tokens", [0, 1], ids=["before it sampled", "after a token"])
def test_an_engine_that_fails_is_asked_anew_and_what_it_sampled_is_undelivered(
    line: Line, sdk: str, stream: bool, tokens: int
) -> None:
    earlier = line.ask(sdk, "one", stream=stream)
    if tokens:
        line.engine.broken = 1
    else:
        line.engine.fail = 1
    try:
        seen = line.ask(sdk, "one", stream=stream)
    except FAILURES:  # a stream that had begun tells its author, who asks again
        assert stream
        assert tokens
        seen = line.ask(sdk, "one", stream=stream)
    assert len(line.engine.prompts) == 3
    check(line, [earlier, seen])
    assert sum(not call.delivered for call in line.served.ledger.calls()) == tokens


def test_an_engine_that_fails_when_its_client_has_left_is_asked_anew_at_once(line: Line) -> None:
    line.engine.slow = line.engine.broken = 1
    with pytest.raises(openai.APITimeoutError):
        line.ask("openai", "one", stream=False, retries=0)
    line.release_when(lambda: followers(line) == [0]).join(20)
    line.served.eventually(lambda: line.served.gateway.counters["undelivered"] == 1)
    seen = line.ask("openai", "one", stream=False)
    assert line.served.gateway.counters["status_503"] == 0
    check(line, [seen])


@each_sdk
@both
def test_equal_requests_that_are_no_retries_are_samples_of_their_own(line: Line, sdk: str, stream: bool) -> None:
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda _: line.ask(sdk, "one", stream=stream), range(4)))
    assert len(line.engine.prompts) == 4
    check(line, seen)


@each_sdk
def test_an_error_that_forbids_a_retry_is_the_authors(line: Line, sdk: str) -> None:
    line.relay.faults.append(Fault(status=500, should_retry="false", reaches=False))
    with pytest.raises(FAILURES):
        line.ask(sdk, "one", stream=False)
    check(line, [])
    assert line.engine.prompts == []


def test_a_marked_retry_of_a_lost_answer_gets_the_same_answer_byte_by_byte(line: Line) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "one"}]})
    url, key = line.served.base_url() + "/chat/completions", {"authorization": f"Bearer {line.served.key()}"}
    first = urllib3.request("POST", url, body=body, headers=key, retries=False)
    again = urllib3.request("POST", url, body=body, headers=key | {"x-stainless-retry-count": "1"}, retries=False)
    assert first.data == again.data
    assert len(line.calls()) == 1


def test_a_marked_retry_whose_first_try_never_came_gets_the_equal_calls_answer(line: Line) -> None:
    """Here it cannot be told from the retry of an answer that was lost: law 5 joins it."""
    earlier = line.ask("openai", "one", stream=False)
    line.relay.faults.append(FAULTS["cut before the request"])
    assert line.ask("openai", "one", stream=False) == earlier
    assert len(line.calls()) == 1


PLANS = st.lists(
    st.tuples(st.sampled_from(sorted(SDKS)), st.booleans(), st.lists(st.sampled_from(sorted(FAULTS)), max_size=3)),
    max_size=4,
)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=PLANS)
def test_whatever_breaks_every_answer_seen_is_one_delivered_call(line: Line, plan: Any) -> None:
    begun = line.served.ledger.spans.copy()
    seen, unseen = [], 0
    for number, (sdk, stream, faults) in enumerate(plan):
        line.relay.faults.extend(FAULTS[fault] for fault in faults)
        while True:
            try:
                seen.append(line.ask(sdk, f"{len(begun)} {number}", stream=stream))
                break
            except Exception:  # noqa: BLE001 - a stream broke off: see above
                assert stream
                unseen += 1
    line.served.run(line.served.gateway._recorder.stored)
    calls = line.served.ledger.calls()[len(begun) :]
    delivered = Counter(texts(line, [call for call in calls if call.delivered]))
    assert set(seen) <= set(delivered)
    assert set(delivered.values()) <= {1}
    assert len(delivered) <= len(seen) + unseen


# Clients that come and go


def post(line: Line, seconds: float, *, retry: bool = False) -> bytes | None:
    """The answer, or None where the client had enough of waiting."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "one"}]})
    headers = {"authorization": f"Bearer {line.served.key()}"} | ({"x-stainless-retry-count": "1"} if retry else {})
    url = line.served.base_url() + "/chat/completions"
    try:
        return urllib3.request("POST", url, body=body, headers=headers, retries=False, timeout=seconds).data
    except urllib3.exceptions.ReadTimeoutError:
        return None


def followers(line: Line) -> list[int]:
    """How many clients wait for each answer."""
    attempts = line.served.gateway.attempts
    return [one.followers for attempt in attempts for equal in attempt.inflight.values() for one in equal]


def test_the_grace_time_counts_from_the_last_client_that_left(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[asyncio.Event] = []
    sleep = asyncio.sleep

    async def until_told(seconds: float) -> None:
        if seconds != line.served.gateway.patience.grace_seconds:
            return await sleep(seconds)
        ends.append(asyncio.Event())
        await ends[-1].wait()
        return None

    monkeypatch.setattr("lightning_rl_proxy.http.delivery.asyncio.sleep", until_told)

    async def end_first() -> None:
        ends[0].set()
        await sleep(0.05)

    async def end_last() -> None:
        ends[-1].set()

    line.engine.slow = 1
    for leaver in range(2):
        assert post(line, 0.2, retry=leaver > 0) is None
        line.served.eventually(lambda expected=leaver + 1: len(ends) == expected)  # type: ignore[misc]
    line.served.run(end_first)
    assert line.engine.aborted == 0
    line.served.run(end_last)
    line.served.eventually(lambda: line.engine.aborted == 1)
    line.served.eventually(lambda: followers(line) == [])


def test_a_first_client_that_leaves_takes_nothing_from_a_retry_that_joined_before(line: Line) -> None:
    line.served.gateway.patience.grace_seconds = 0.05
    line.engine.slow = 1
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, line, 1.0)
        line.served.eventually(lambda: len(line.engine.prompts) == 1)
        retried = pool.submit(post, line, 20, retry=True)
        line.served.eventually(lambda: line.joined() == 1)
        assert first.result(20) is None
        line.served.eventually(lambda: followers(line) == [1])
        threading.Event().wait(0.3)  # several grace times
        assert line.engine.aborted == 0
        line.release_when(lambda: True).join(20)
        assert retried.result(20) is not None
    [call] = line.calls()
    assert call.delivered


def test_what_is_aborted_is_not_joined_and_a_seal_still_waits_for_its_record(line: Line) -> None:
    line.served.gateway.patience.grace_seconds = 0
    line.engine.slow = 1
    assert post(line, 0.2) is None
    line.served.eventually(lambda: line.engine.aborted == 1)
    assert post(line, 20, retry=True) is not None
    assert len(line.engine.prompts) == 2
    [call] = line.calls()
    assert call.delivered


# Sealed while a stream is in flight

USER = [{"role": "user", "content": "one"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": USER},
    "/completions": {"prompt": "one"},
    "/responses": {"input": "one"},
    "/messages": {"messages": USER, "max_tokens": 64},
}
ENDS = ("[DONE]", "response.completed", "message_stop")


@pytest.mark.parametrize("path", DIALECTS)
def test_a_seal_ends_a_stream_with_an_error_event_and_what_comes_later_is_refused(line: Line, path: str) -> None:
    line.engine.steps = asyncio.Semaphore(2)
    key = {"authorization": f"Bearer {line.served.key()}"}
    body = {"model": MODEL, "stream": True, **DIALECTS[path]}
    with httpx.stream("POST", line.served.base_url() + path, json=body, headers=key) as answer:
        lines = answer.iter_lines()
        told = [next(lines)]
        line.served.seal()
        told += lines
    assert answer.status_code == 200
    assert "attempt a1 is closed" in next(said for said in reversed(told) if said)
    assert not [said for said in told if any(end in said for end in ENDS)]
    for stream in (True, False):
        late = httpx.post(line.served.base_url() + path, json=body | {"stream": stream}, headers=key)
        assert (late.status_code, late.headers["x-should-retry"]) == (409, "false")
    assert [call.delivered for call in line.served.ledger.calls()] == [False]
