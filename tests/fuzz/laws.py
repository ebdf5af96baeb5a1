"""What holds whatever a client sends and whatever an engine samples; `Attempt` plays a client and checks it.

No hang; no 5xx but the 503 of an engine that failed; errors in their dialect's shape; every answer that was read to its
end is recorded as delivered; every token that an engine handed over is in a record; nothing is logged as an error.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import socket
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import jsonschema_rs
import urllib3
from hypothesis import HealthCheck, settings

from lightning_rl_adapters.call import VersionRange
from lightning_rl_proxy.engines.base import (
    EngineFinish,
    EngineRefused,
    EngineTokens,
    EngineUnavailable,
    Load,
    TokenRequest,
)
from lightning_rl_proxy.engines.chat_backend import BackendAnswer
from lightning_rl_proxy.http import openapi
from lightning_rl_proxy.sampling import Sampling
from tests.proxy.conftest import MODEL, Served

SERVICE = "judge"
TIMEOUT = 10  # seconds that an answer may take before it counts as a hang
REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "500"))  # over all tests of this folder

SCHEMAS = {
    "/v1/chat/completions": ("ChatCompletion", "OpenAIError"),
    "/v1/completions": ("TextCompletion", "OpenAIError"),
    "/v1/responses": ("Response", "OpenAIError"),
    "/v1/messages": ("Message", "AnthropicError"),
    "/v1/messages/count_tokens": ("InputTokens", "AnthropicError"),
    "/v1/models": ("ModelList", "OpenAIError"),
}


def share(fraction: float) -> settings:
    """As many examples as this share of all requests. The few of `make test` are always the same ones."""
    return settings(
        max_examples=max(1, round(REQUESTS * fraction)),
        deadline=None,
        derandomize=REQUESTS <= 500 or "CI" in os.environ,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


class Plan(NamedTuple):
    """What an engine does with one generation: `ids`, `step` at a time, and how it ends.

    `end`: a finish reason; `fail` and `refuse` raise before the first token, `break` behind the last; `silent` ends
    without a word.
    """

    ids: list[int]
    step: int = 4
    end: str = "stop"
    logprobs: bool = True
    slow: bool = False


class PlannedEngine:
    """An engine that follows plans; without one it says nothing."""

    model = MODEL
    policy_version = 7
    abilities = frozenset({"min_p", "logit_bias", "json_schema", "frequency_penalty"})
    context = None

    def __init__(self, end_id: int) -> None:
        self.plans: deque[Plan] = deque()
        self.failures = 0
        self._end_id = end_id

    async def generate(self, request: TokenRequest) -> AsyncGenerator[EngineTokens | EngineFinish]:
        plan = self.plans.popleft() if self.plans else Plan([])
        if plan.end in ("fail", "break", "silent", "abort"):
            self.failures += 1
        if plan.end == "fail":
            raise EngineUnavailable("planned")
        if plan.end == "refuse":
            raise EngineRefused("planned")
        ids = [*plan.ids, self._end_id] if plan.end == "stop" else plan.ids
        size = plan.step if request.stream else max(len(ids), 1)
        for start in range(0, len(ids), size):
            if plan.slow:
                await asyncio.sleep(0.001)
            some = ids[start : start + size]
            yield EngineTokens(some, [-0.5] * len(some) if plan.logprobs else None)
        if plan.end == "break":
            raise EngineUnavailable("planned")
        if plan.end != "silent":
            stop = self._end_id if plan.end == "stop" else None
            yield EngineFinish(plan.end, stop, [VersionRange(7, 0, len(ids))] if ids else [])

    def logprob_kind(self, sampling: Sampling) -> str:
        return "sampled"

    async def check(self) -> int | None:
        return self.policy_version

    async def load(self) -> Load | None:
        return None

    async def close(self) -> None:
        pass


class PlannedService:
    """A chat backend that follows the engine's plans."""

    model = SERVICE

    def __init__(self, engine: PlannedEngine) -> None:
        self._engine = engine

    async def complete(self, body: dict[str, Any]) -> BackendAnswer:
        plan = self._engine.plans.popleft() if self._engine.plans else Plan([])
        if plan.end in ("fail", "break", "silent", "abort"):
            self._engine.failures += 1
            raise EngineUnavailable("planned")
        if plan.end == "refuse":
            raise EngineRefused("planned")
        call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{"}}
        message = [{"content": "ok"}, {"content": None, "tool_calls": [call]}, {"content": "", "reasoning": "hm"}]
        said = {"role": "assistant"} | message[plan.step % 3]
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "remote", "usage": None}
        choice = {"index": 0, "message": said, "finish_reason": plan.end}
        ids = plan.ids if plan.logprobs else None
        return BackendAnswer(body=answer | {"choices": [choice]}, prompt_ids=ids and [1], response_ids=ids)

    async def embed(self, body: dict[str, Any]) -> bytes:
        return b'{"object": "list", "data": []}'

    async def close(self) -> None:
        pass


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def told(self) -> Any:
        """The object that a whole answer is, or the last object of a stream."""
        return sse(self.body)[-1] if self.streamed else json.loads(self.body)


class Fuzzed:
    """A gateway under fuzz: one attempt at a time plays against it."""

    def __init__(self, served: Served, engine: PlannedEngine, log: list[logging.LogRecord]) -> None:
        self.served = served
        self.engine = engine
        self.requests = 0
        self.http = urllib3.PoolManager(maxsize=4, timeout=TIMEOUT, retries=False)
        self._log = log
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def attempt(self, *plans: Plan) -> Iterator["Attempt"]:
        """A new attempt, for which the engine has these plans. At the end its laws are checked."""
        engine, gateway, ledger = self.engine, self.served.gateway, self.served.ledger
        engine.plans, engine.failures = deque(plans), 0
        ledger.spans.clear()
        self._log.clear()
        before = gateway.router.received[MODEL]
        attempt = Attempt(self, f"r{next(self._numbers)}")
        try:
            yield attempt
        finally:
            self.served.seal(attempt.rollout_id, "a")
        calls = ledger.calls(attempt.rollout_id)
        recorded = {call.call_id: call.delivered for call in calls}
        assert len(recorded) == len(calls), "a call was recorded twice"
        for call_id in attempt.delivered:
            if call_id.startswith("the service's"):
                continue
            assert recorded.get(call_id), f"call {call_id} was answered, its record says {recorded.get(call_id)}"
        if not attempt.left:
            assert sum(recorded.values()) == sum(attempt.delivered.values()), "answered and delivered differ"
        received = gateway.router.received[MODEL] - before
        assert received == sum(call.sampled_tokens for call in calls if call.model == MODEL), (
            "tokens were lost or made up"
        )
        assert not self._log, [record.getMessage() for record in self._log]


class Attempt:
    """A client with one attempt's key. `delivered`: choices by the first call's id; `left`: it went away early once."""

    def __init__(self, fuzzed: Fuzzed, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.delivered: dict[str, int] = {}
        self.left = False
        self.key = fuzzed.served.key(rollout_id, "a")
        self._fuzzed = fuzzed

    def post(self, path: str, body: bytes, agent: str | None = None, **headers: str) -> Answer:
        """Send a request to its end and read its answer to the end, by the laws."""
        return self.request(
            "POST", self.url(path, agent), path, body, {"authorization": f"Bearer {self.key}"} | headers
        )

    def url(self, path: str, agent: str | None = None) -> str:
        return self._fuzzed.served.base_url(self.rollout_id, "a", agent).removesuffix("/v1") + path

    def request(self, method: str, url: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        self._fuzzed.requests += 1
        # On a connection that is kept, the test server's second packet would wait 40 ms for the first one's receipt.
        got = self._fuzzed.http.request(method, url, body=body, headers=headers | {"connection": "close"})
        answer = Answer(got.status, {k.lower(): v for k, v in got.headers.items()}, got.data)
        self.judge(path, answer)
        return answer

    def leave(self, path: str, body: bytes, promised: int, read: bool) -> None:
        """Send a request that promises a longer body (or not), read a little of its answer or nothing, and go."""
        self._fuzzed.requests += 1
        self.left = True
        with self._connected() as to:
            to.sendall(self._head(path, promised) + body)
            if read and promised <= len(body):
                to.recv(100)

    def meet_the_end(self, path: str, first: bytes, rest: bytes) -> None:
        """Send the first part of a request; the attempt is sealed, then the rest follows."""
        self._fuzzed.requests += 1
        self.left = True
        with self._connected() as to:
            to.sendall(self._head(path, len(first) + len(rest)) + first)
            self._fuzzed.served.seal(self.rollout_id, "a")
            with contextlib.suppress(ConnectionError):  # it may be refused before it is whole
                to.sendall(rest)
                while to.recv(1 << 16):
                    pass

    def raw(self, sent: bytes, patience: float) -> bytes:
        """Send bytes as they are; what came back before the other side closed or waited for more."""
        self._fuzzed.requests += 1
        got = b""
        with self._connected() as to, contextlib.suppress(ConnectionError, TimeoutError):
            to.settimeout(patience)
            to.sendall(sent)
            while more := to.recv(1 << 16):
                got += more
        return got

    def _head(self, path: str, length: int) -> bytes:
        lines = ("host: x", "connection: close", f"authorization: Bearer {self.key}", f"content-length: {length}")
        return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode()

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", urlsplit(self._fuzzed.served.url).port), TIMEOUT)

    def judge(self, path: str, answer: Answer) -> None:
        """The laws of one answer that was read to its end."""
        answered, refused = SCHEMAS.get(path, SCHEMAS["/v1/models"])
        if answer.status != 200:
            assert answer.status < 500 or (answer.status == 503 and self._fuzzed.engine.failures), answer
            check_error(refused, answer)
        elif answer.streamed:
            self._deliver(path, check_stream(path, answer))
        else:
            told = json.loads(answer.body)
            check_shape(answered, told)
            self._deliver(path, told)

    def _deliver(self, path: str, told: dict[str, Any] | None) -> None:
        if told is None or path not in SCHEMAS or "id" not in told:
            return
        ours = re.search("[0-9a-f]{32}", told["id"])
        name = ours[0] if ours else f"the service's {len(self.delivered)}"
        self.delivered[name] = len(told.get("choices", "1"))


def check_error(shape: str, answer: Answer) -> None:
    """An error says what is wrong, in its dialect's shape, and whether to try again."""
    check_shape(shape, json.loads(answer.body))
    retry = answer.headers["x-should-retry"]
    assert retry in ("true", "false")
    assert (retry == "true") == ("retry-after" in answer.headers)
    assert 1 <= int(answer.headers.get("retry-after", 1)) <= 60


def check_stream(path: str, answer: Answer) -> dict[str, Any] | None:
    """A stream ends as its dialect ends; what it told of, or None where it ended as an error."""
    events = sse(answer.body)
    last = events[-1]
    if last != "[DONE]" and (last.get("type") == "error" or ("error" in last and "type" not in last)):
        return None
    if path == "/v1/messages":
        assert last["type"] == "message_stop", last
        return dict(events[0]["message"])
    if path == "/v1/responses":
        assert last["type"] in ("response.completed", "response.incomplete"), last
        check_shape("Response", last["response"])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return dict(last["response"])
    assert last == "[DONE]", last
    ended = {c["index"] for event in events[:-1] for c in event["choices"] if c["finish_reason"] is not None}
    begun = {c["index"] for event in events[:-1] for c in event["choices"]}
    assert ended == begun
    return {"id": events[0]["id"], "choices": list(ended)}


def sse(body: bytes) -> list[Any]:
    """The data of server-sent events, pings aside."""
    assert body.endswith(b"\n\n")
    events = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        data = [line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: ")]
        if data and data != ['{"type":"ping"}']:
            events.append(data[0] if data == ["[DONE]"] else json.loads(data[0]))
    return events


def check_shape(name: str, told: Any) -> None:
    """Raises where an answer is not what the document says."""
    VALIDATORS[name].validate(told)


def _validator(name: str) -> Any:
    schemas = openapi.document()["components"]
    return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": schemas})


VALIDATORS = {name: _validator(name) for names in SCHEMAS.values() for name in names}
