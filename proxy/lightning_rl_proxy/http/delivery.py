"""An answer on its way to its clients: handed on as it comes, recorded before its last bytes, or given up.

A call counts as delivered when its answer was written before its client was seen to leave; only delivered calls are
continued or trained.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

import msgspec

from lightning_rl_adapters.call import to_span
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.dialects.base import Dialect
from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable
from lightning_rl_proxy.errors import GatewayError, closed
from lightning_rl_proxy.http.attempt import LiveAttempt
from lightning_rl_proxy.http.failures import CallFailures
from lightning_rl_proxy.http.inflight_request import InflightRequest
from lightning_rl_proxy.recording.recorder import Recorder

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = (b"content-type", b"application/json")
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 502: "api_error"}
_log = logging.getLogger("lightning_rl_proxy.gateway")


class Patience:
    """How long is waited, in seconds.

    `grace_seconds`: a call whose client left runs on. `ping_seconds`: a stream may be silent. `parked_seconds`: a call
    waits for a paused model until white space goes before its answer.
    """

    def __init__(self, grace_seconds: float, ping_seconds: float, parked_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.ping_seconds = ping_seconds
        self.parked_seconds = parked_seconds


class Delivery:
    """Delivers the answers of one gateway. `observe(dialect, streamed)` gives what takes an answer's seconds."""

    def __init__(
        self,
        recorder: Recorder,
        failures: CallFailures,
        counters: Counter[str],
        patience: Patience,
        is_paused: Callable[[str], bool],
        observe: Callable[[str, bool], Callable[[float], None]],
    ) -> None:
        self._recorder = recorder
        self._failures = failures
        self._counters = counters
        self._patience = patience
        self._is_paused = is_paused
        self._observe = observe
        self._background: set[asyncio.Task[None]] = set()

    async def deliver(
        self,
        attempt: LiveAttempt,
        dialect: Dialect,
        inflight: InflightRequest,
        gone: "asyncio.Future[None]",
        send: Send,
    ) -> None:
        """Hand the answer on as it comes, until the client is gone; before its last bytes, record it."""
        assert inflight.task is not None
        began = time.monotonic()
        self._follow(inflight)
        reply = _Reply(send, inflight)
        try:
            parked = 0.0
            while not inflight.task.done() and not gone.done():
                changed = await inflight.changed(self._patience.ping_seconds)
                parked = parked + self._patience.ping_seconds if self._is_paused(inflight.model) else 0.0
                if inflight.stream:
                    await reply.send(*([] if changed else [dialect.PING]))
                elif not changed and (reply.begun or parked >= self._patience.parked_seconds):
                    await reply.send(b" ")
            if gone.done():
                return
        finally:
            self._leave(attempt, inflight, before_its_end=gone.done())
        try:
            last = self._ended(attempt, inflight)
        except GatewayError as error:
            if not reply.begun:
                raise
            self._counters[f"status_{error.status}"] += 1
            # White space cannot be taken back: an answer that ends without being whole is one that SDKs ask for again.
            if inflight.stream:
                await reply.end(dialect.error_event(error))
        else:
            await reply.end(last)
            seconds = time.monotonic() - began
            self._observe(dialect.NAME, inflight.stream)(seconds)
            if _log.isEnabledFor(logging.DEBUG):
                _log_answer(attempt.address, dialect, inflight, seconds)

    def close(self, attempt: LiveAttempt) -> list[asyncio.Task[bytes]]:
        """Seal: abort what is in flight, and record what was sampled but never delivered. Gives what it aborted."""
        attempt.sealed = True
        aborted = []
        for inflight in (inflight for equal in attempt.inflight.values() for inflight in equal):
            if inflight.task is not None and inflight.task.cancel():
                aborted.append(inflight.task)
            _end_grace(inflight)
            self._record(attempt, inflight, delivered=False)
        attempt.inflight.clear()
        return aborted

    def note_if_ours(self, attempt: LiveAttempt, body_key: bytes, error: BaseException) -> None:
        """Remember an answer of 5xx, and for whom it was."""
        if not isinstance(error, GatewayError) or error.status >= 500:
            attempt.failed[body_key] += 1
            self._failures.note(attempt.name, body_key, str(error))

    def _ended(self, attempt: LiveAttempt, inflight: InflightRequest) -> bytes:
        """The last bytes of an answer whose work is done; from here on it counts as delivered."""
        assert inflight.task is not None
        if inflight.task.cancelled() or attempt.sealed:
            raise closed(attempt.address.attempt_id)
        if (failure := inflight.task.exception()) is not None:
            self._record(attempt, inflight, delivered=False)  # of n answers, those that came
            attempt.forget(inflight)
            error = as_gateway_error(failure)
            self.note_if_ours(attempt, inflight.body_key, error)
            raise error from failure
        last = inflight.task.result()
        self._failures.end(attempt.name, inflight.body_key)
        self._record(attempt, inflight, delivered=True)
        attempt.commit(inflight)
        return last

    def _record(self, attempt: LiveAttempt, inflight: InflightRequest, *, delivered: bool) -> None:
        if inflight.recorded:
            return
        inflight.recorded = True
        for call, more in inflight.calls:
            marked_call = call if delivered else msgspec.structs.replace(call, delivered=False)
            self._recorder.record(to_span(marked_call, **more))
            self._counters["calls" if delivered else "undelivered"] += 1

    def _follow(self, inflight: InflightRequest) -> None:
        inflight.followers += 1
        inflight.client_gone = False
        _end_grace(inflight)

    def _leave(self, attempt: LiveAttempt, inflight: InflightRequest, *, before_its_end: bool) -> None:
        """One client waits no longer. What its last one did not wait for has the grace time from now on."""
        inflight.followers -= 1
        if before_its_end and not inflight.followers and not inflight.recorded:
            inflight.client_gone = True
            inflight.grace = self._later(self._abandon(attempt, inflight))

    async def _abandon(self, attempt: LiveAttempt, inflight: InflightRequest) -> None:
        """The clients left: give a retry some time to join, then abort and record what was sampled as undelivered."""
        assert inflight.task is not None
        await asyncio.sleep(self._patience.grace_seconds)
        inflight.grace = None  # from here on nothing joins it
        if inflight.task.cancel():
            await asyncio.gather(inflight.task, return_exceptions=True)
        elif not inflight.task.cancelled():
            inflight.task.exception()  # which nobody else asks for
        self._record(attempt, inflight, delivered=False)
        attempt.forget(inflight)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def as_gateway_error(error: BaseException) -> BaseException:
    """What a client is told of an engine's error, and of a request that cannot be read; another error as it is."""
    if isinstance(error, RecursionError):
        return GatewayError(400, "a message, a tool or its arguments are nested too deep")
    if isinstance(error, EngineUnavailable):
        return GatewayError(503, str(error), kind="api_error", retry=True, retry_after=error.retry_after)
    if isinstance(error, EngineRefused):
        return GatewayError(error.status, str(error), kind=_KINDS.get(error.status, "invalid_request_error"))
    return error


async def respond(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Answer whole, as JSON."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [JSON, (b"content-length", str(len(body)).encode()), *(headers or [])],
        }
    )
    await send({"type": "http.response.body", "body": body})


def _end_grace(inflight: InflightRequest) -> None:
    if inflight.grace is not None:
        inflight.grace.cancel()
        inflight.grace = None


def _log_answer(address: Address, dialect: Dialect, inflight: InflightRequest, seconds: float) -> None:
    for call, _ in inflight.calls:
        _log.debug(
            "answered",
            extra={
                "facts": {
                    "rollout_id": address.rollout_id,
                    "attempt_id": address.attempt_id,
                    "call_id": call.call_id,
                    "request_id": inflight.request_id,
                    "dialect": dialect.NAME,
                    "model": call.model,
                    "finish_reason": call.finish_reason,
                    "sampled_tokens": call.sampled_tokens,
                    "seconds": f"{seconds:.3f}",
                }
            },
        )


class _Reply:
    """One client's copy of an exchange's answer: whole, or as a stream that begins with the first piece."""

    def __init__(self, send: Send, inflight: InflightRequest) -> None:
        self.begun = False
        self._send = send
        self._exchange = inflight
        self._sent = 0

    async def send(self, *more: bytes) -> None:
        """Write the pieces that are there, and `more`."""
        pieces = self._exchange.pieces(self._sent)
        self._sent += len(pieces)
        if body := b"".join([*pieces, *more]):
            await self._begin()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, last: bytes) -> None:
        """Write what is left, `last` at the end."""
        if not self.begun and not self._exchange.stream:
            return await respond(self._send, 200, last, self._ids())
        await self._begin()
        body = b"".join([*self._exchange.pieces(self._sent), last])
        return await self._send({"type": "http.response.body", "body": body})

    async def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            stream = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            headers = (stream if self._exchange.stream else [JSON]) + self._ids()
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def _ids(self) -> list[tuple[bytes, bytes]]:
        """By which OpenAI's and Anthropic's clients name the request."""
        request_id = self._exchange.request_id.encode()
        return [(b"x-request-id", request_id), (b"request-id", request_id)]
