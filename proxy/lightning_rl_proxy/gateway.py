"""The ASGI application: doors, keys, limits, errors, and the way of one call from request bytes to answer bytes.

The record of a call is in the journal before the last byte of its answer leaves. A call counts as delivered when its
answer was written before its client was seen to leave; only delivered calls are continued or trained.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
from prometheus_client import Histogram

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import to_span
from lightning_rl_proxy import address as addresses
from lightning_rl_proxy.address import Address, Door
from lightning_rl_proxy.dialects import chat_completions, completions, messages, responses
from lightning_rl_proxy.dialects.base import Dialect, decode
from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable
from lightning_rl_proxy.errors import GatewayError, closed
from lightning_rl_proxy.forest.incremental_decode import DecodedBody
from lightning_rl_proxy.http import baggage, openapi
from lightning_rl_proxy.http.attempt import LiveAttempt
from lightning_rl_proxy.http.call_handler import CallHandler
from lightning_rl_proxy.http.compressed import unpacked
from lightning_rl_proxy.http.inflight_request import InflightRequest
from lightning_rl_proxy.http.keys import KeyRefused, sent_key, verify_attempt_key
from lightning_rl_proxy.http.limits import RequestLimits, announced_bytes
from lightning_rl_proxy.recording.clock import Clock
from lightning_rl_proxy.recording.ledger import AttemptInfo, Ledger, NoNotes, Notes
from lightning_rl_proxy.recording.recorder import Recorder
from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.routing.load_balancer import ModelLoad
from lightning_rl_proxy.routing.router import Router

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# A server may put a future into a request's `extensions` that is done when the client has left. Without it a task waits
# for ASGI's word, one for each call.
GONE = "lightning_rl.gone"
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
_JSON = (b"content-type", b"application/json")
_NOT_FOUND = "not_found_error"
_DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
}
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 502: "api_error"}
_INFO_SECONDS = 1.0  # how long the ledger's word on an attempt is believed
_SEALED_REMEMBERED = 65536
_FAILURES_REMEMBERED = 65536  # attempts
_STARTING_SECONDS = 10.0  # an attempt that has not called by then is busy with something else
_log = logging.getLogger(__name__)


class GatewayLoad(NamedTuple):
    """How busy the models are that have token engines, and the attempts that make them so.

    `starting` attempts were opened moments ago and have not called yet; they, too, are among the `open_attempts`.
    """

    policy: str
    models: dict[str, ModelLoad]
    starting: int
    open_attempts: int


class Gateway:
    """The proxy. `secret` signs attempt keys, `renderer` speaks the policy's chat format (None: only chat backends).

    `grace_seconds`: how long a call whose client left runs on, waiting for a retry to join it. `ping_seconds`: how long
    a stream may be silent. `parked_seconds`: how long a call waits for a paused model until white space goes before its
    answer, so that its client waits on. `notes` are for a store that other gateways share.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        secret: bytes,
        journal: Path,
        renderer: Renderer | None,
        router: Router,
        grace_seconds: float = 10.0,
        ping_seconds: float = 10.0,
        parked_seconds: float = 20.0,
        limits: RequestLimits | None = None,
        notes: Notes | None = None,
    ) -> None:
        self.router = router
        self.limits = limits or RequestLimits()
        self.counters: Counter[str] = Counter()
        self._seconds = Histogram(
            "lightning_rl_call_seconds",
            "From a call's request to the last byte of its answer.",
            ["dialect", "streamed"],
            registry=None,
            buckets=_BUCKETS,
        )
        self.timings = [self._seconds]
        self._observe = lru_cache(lambda dialect, streamed: self._seconds.labels(dialect, streamed).observe)
        self._ledger = ledger
        self._secret = secret
        self._renderer = renderer
        self._clock = Clock()
        self._notes = notes or NoNotes()
        self._noted = notes is not None
        self._recorder = Recorder(journal, ledger, counters=self.counters, taken=self.settle)
        self._answerer = CallHandler(router, renderer, self.counters, self._recorder.record, self._clock)
        self._grace_seconds = grace_seconds
        self._ping_seconds = ping_seconds
        self._parked_seconds = parked_seconds
        self._attempts: dict[tuple[str, str], LiveAttempt] = {}
        self._asking: dict[tuple[str, str], asyncio.Task[AttemptInfo | None]] = {}  # of which the ledger is asked now
        self._earlier: dict[str, int] = {}  # tokens received by earlier processes, by model
        self._starting: dict[tuple[str, str], float] = {}  # since when, the oldest first
        # The ledger says that an attempt is closed a moment after it was sealed; in between, this does.
        self._sealed: dict[tuple[str, str], int] = {}  # the tokens that each was handed
        self._endings: dict[tuple[str, str], str] = {}  # of those of them whose late calls were refused
        # What was answered with a 5xx and not asked again with success since, by attempt and body.
        self._failures: dict[tuple[str, str], dict[bytes, str]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the journal (replaying what is left in it), and look after the engines from now on."""
        await self._recorder.start()
        self._watching = self._later(self.router.watch())

    async def stop(self) -> None:
        """Hand every record over, as far as the ledger takes them in time, and free the connections."""
        if self._watching is not None:
            self._watching.cancel()
        for attempt in list(self._attempts.values()):
            self._close(attempt)
        await self._recorder.stop()
        await self.router.close()

    def open(self, info: AttemptInfo) -> None:
        """Tell of an attempt that was opened just now, so that its first call need not ask the ledger."""
        address, now = Address(info.rollout_id, info.attempt_id), time.monotonic()
        name = (info.rollout_id, info.attempt_id)
        if name not in self._attempts:
            self._attempts[name] = LiveAttempt(address, info, now)
            self._starting[name] = now

    def held(self) -> list[tuple[str, str]]:
        """The open attempts, by rollout and attempt id."""
        return list(self._attempts)

    def holds(self, rollout_id: str, attempt_id: str) -> bool:
        """Whether that attempt is open here."""
        return (rollout_id, attempt_id) in self._attempts

    def idle_seconds(self, rollout_id: str, attempt_id: str) -> float | None:
        """How long ago the attempt's last call ended; 0 while one is in flight, None where none came in here."""
        attempt = self._attempts.get((rollout_id, attempt_id))
        if attempt is None or attempt.called_at is None:
            return None
        return 0.0 if attempt.in_flight else time.monotonic() - attempt.called_at

    def settle(self, attempts: Iterable[tuple[str, str]]) -> None:
        """Note of those of the attempts of which nothing is on its way that the store has all their calls."""
        if self._noted:
            self._notes.settle([name for name in attempts if not self._is_under_way(name)])

    def _is_under_way(self, name: tuple[str, str]) -> bool:
        if self._recorder.waits(*name):
            return True
        attempt = self._attempts.get(name)
        return attempt is not None and (attempt.in_flight > 0 or bool(attempt.unrecorded))

    async def seal(self, rollout_id: str, attempt_id: str) -> None:
        """End an attempt: later calls get 409, calls in flight are aborted, and on return its records are durable."""
        name = (rollout_id, attempt_id)
        self._sealed.setdefault(name, 0)
        if len(self._sealed) > _SEALED_REMEMBERED:
            del self._sealed[next(iter(self._sealed))]
        attempt = self._attempts.pop(name, None)
        if attempt is not None:
            cancelled = self._close(attempt)
            self._sealed[name] = attempt.tokens_received
            await asyncio.gather(*cancelled, return_exceptions=True)  # each records what it was handed
            self._sealed[name] = attempt.tokens_received
        self._has_begun(name)
        await self._recorder.stored()

    async def release(self, rollout_id: str, attempt_id: str) -> None:
        """The attempt is another gateway's now: abort what is in flight, and ask the ledger at its next call."""
        attempt = self._attempts.pop((rollout_id, attempt_id), None)
        if attempt is not None:
            await asyncio.gather(*self._close(attempt), return_exceptions=True)
        self._has_begun((rollout_id, attempt_id))

    @property
    def journal_damaged(self) -> bool:
        """Whether the journal of an earlier gateway could not be read whole, so that open attempts may lack calls."""
        return self._recorder.damaged

    def is_lost(self, rollout_id: str, attempt_id: str) -> bool:
        """Whether records of this attempt were given up, so that it has to fail as infrastructure does."""
        return self._recorder.is_lost(rollout_id, attempt_id)

    def failure_of(self, rollout_id: str, attempt_id: str) -> str | None:
        """What went wrong here with a call of this attempt, which got no answer when it was tried again, or was not
        tried again: an agent that failed then is not to blame. None where nothing did."""
        failures = self._failures.get((rollout_id, attempt_id))
        return next(reversed(failures.values())) if failures else None

    def interrupted(self, rollout_id: str, attempt_id: str, what: str) -> None:
        """Calls of this attempt may have found no gateway; `what` happened, for `failure_of`."""
        self._note_failure((rollout_id, attempt_id), b"", what)

    def _note_failure(self, name: tuple[str, str], body_key: bytes, what: str) -> None:
        self._failures.setdefault(name, {})[body_key] = what
        if len(self._failures) > _FAILURES_REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def _end_failure(self, name: tuple[str, str], body_key: bytes) -> None:
        failures = self._failures.get(name)
        if failures is not None:
            failures.pop(body_key, None)
            if not failures:
                del self._failures[name]

    def tokens_received(self, rollout_ids: Sequence[str]) -> dict[str, int]:
        """What engines handed over for these rollouts, as far as this process remembers their attempts."""
        wanted = set(rollout_ids)
        received: Counter[str] = Counter()
        for (rollout_id, _), tokens in self._sealed.items():
            if rollout_id in wanted:
                received[rollout_id] += tokens
        for (rollout_id, _), attempt in self._attempts.items():
            if rollout_id in wanted:
                received[rollout_id] += attempt.tokens_received
        return dict(received)

    def tokens_sealed(self, rollout_ids: Sequence[str]) -> dict[str, int]:
        """What engines handed over for the sealed attempts of these rollouts, and was not given up, as far as this
        process remembers. Together with `tokens_pending` of a state it is what no reader of the store may know yet."""
        wanted, lost = set(rollout_ids), self._recorder.tokens_lost
        sealed: Counter[str] = Counter()
        for name, tokens in self._sealed.items():
            if name[0] in wanted:
                sealed[name[0]] += tokens - lost.get(name, 0)
        return dict(sealed)

    def restore(self, received: dict[str, int], newest_ns: int = 0) -> None:
        """Begin the counts of received tokens, and the times of calls, where an earlier gateway's records end."""
        self._earlier = dict(received)
        self.router.restore(received)
        self._clock.begin_after(newest_ns)

    async def pause(self, model: str | None = None, drain_seconds: float = 0) -> None:
        """Let new calls of `model` (None: every model) wait; those in flight have `drain_seconds`, then they freeze.

        Raises EngineUnavailable or EngineRefused where an engine cannot freeze them.
        """
        await self.router.pause(model, drain_seconds)

    async def resume(self, model: str | None = None, policy_version: int | None = None) -> None:
        """Let frozen and waiting calls go on."""
        await self.router.resume(model, policy_version)

    async def detach(self, engine: str) -> None:
        """Send an engine no call more; `engine` is its name in `state`. Those in flight end. Raises KeyError."""
        await self.router.detach(engine)

    async def confirm_weights(self, engine: str, policy_version: int) -> None:
        """Believe that an engine has the model's current weights. Raises as `Router.confirm_weights`."""
        await self.router.confirm_weights(engine, policy_version)

    def state(self) -> dict[str, Any]:
        """Calls and tokens per model, each engine, open attempts, and counts of what went another way than straight.

        `append_only` says in which situations a chat template is proven to continue at token level; null where the
        renderer was made for the model. `tokens_lost` were sampled for records that were given up; no store will ever
        tell of them. `tokens_earlier`, per model, are those received that earlier processes recorded. Every call that
        this process recorded ends after `began_ns`, every earlier one before it.
        """
        lost = self._recorder.tokens_lost
        gone = sum(tokens for name, tokens in lost.items() if name not in self._attempts)  # open ones' are pending
        pending = gone + sum(attempt.tokens_received for attempt in self._attempts.values())
        return {
            "models": self.router.state(),
            "engines": self.router.engines(),
            "open_attempts": len(self._attempts),
            "began_ns": self._clock.began_ns,
            "tokens_pending": pending,
            "tokens_lost": lost.total(),
            "tokens_earlier": self._earlier,
            "counters": dict(self.counters),
            "append_only": None if self._renderer is None else self._renderer.append_only,
        } | self._recorder.state()

    def load(self) -> GatewayLoad:
        """How busy the engines are, and what is about to call them."""
        late = time.monotonic() - _STARTING_SECONDS
        while self._starting and self._starting[first := next(iter(self._starting))] < late:
            del self._starting[first]
        return GatewayLoad(self.router.policy, self.router.loads(), len(self._starting), len(self._attempts))

    def when_capacity_freed(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever `load` may have become less, and now and then."""
        self.router.capacity_freed = tell

    async def check(self) -> tuple[str | None, dict[str, str | None]]:
        """What is wrong with recording, and with each engine; None where nothing is."""
        return self._recorder.trouble(), await self.router.check()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway speaks HTTP, not {scope['type']!r}")
        if (scope["method"], scope["path"]) == ("GET", openapi.PATH):
            return await _respond(send, 200, openapi.encoded())
        door = addresses.parse(scope["path"])
        asked = "/v1/" + scope["path"].rpartition("/v1/")[2]
        dialect = _DIALECTS.get(asked.removesuffix("/count_tokens"), chat_completions)
        try:
            if door is None:
                raise GatewayError(404, f"there is nothing at {scope['path']}", kind=_NOT_FOUND)
            await self._answer(door, dialect, scope, receive, send)
        except GatewayError as error:
            self.counters[f"status_{error.status}"] += 1
            _tell_of_refusal(error, scope, None if door is None else door.address)
            await _respond(send, error.status, dialect.serialize_error(error), error.headers())

    async def _answer(self, door: Door, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        self.limits.check_head(scope)
        headers = dict(scope["headers"])
        address = self._authorised(door.address, headers)
        try:
            attempt = await self._open_attempt(address)
        except GatewayError as error:
            if error.status >= 500:
                self.interrupted(address.rollout_id, address.attempt_id, error.message)
            raise
        asked = (scope["method"], door.path)
        if asked == ("GET", "/v1/models"):
            await _respond(send, 200, self._models())
        elif scope["method"] == "GET" and door.path.startswith("/v1/models/"):
            await _respond(send, 200, self._models(door.path.removeprefix("/v1/models/")))
        elif asked == ("POST", "/v1/messages/count_tokens"):
            await _respond(send, 200, await self._count_tokens(await self._read(headers, receive)))
        elif asked == ("POST", "/v1/embeddings"):
            await _respond(send, 200, await self._embed(attempt, await self._read(headers, receive)))
        elif scope["method"] == "POST" and door.path in _DIALECTS:
            body = await self._read(headers, receive)
            agent = address.agent or (baggage.agent_of(scope["headers"]) if b"baggage" in headers else None)
            retry = headers.get(b"x-stainless-retry-count", b"0") not in (b"", b"0")
            await self._call(attempt, agent, dialect, body, scope, receive, send, retry=retry)
        else:
            raise GatewayError(
                404,
                f"{scope['method']} {door.path} is not served here; there are POST {', '.join(_DIALECTS)}, "
                "/v1/messages/count_tokens and /v1/embeddings, and GET /v1/models",
                kind=_NOT_FOUND,
            )

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """A request's body; one that is too long is refused before it is read, where it says so."""
        limits = self._limits_now()
        limits.check_body(announced_bytes(headers))
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise GatewayError(400, "the client left before its request was whole")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            limits.check_body(size)
            if not message.get("more_body"):
                body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
                encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
                if encoding == "identity":
                    return body
                return await asyncio.to_thread(unpacked, body, encoding, limits.body_bytes, limits.check_body)

    def _limits_now(self) -> RequestLimits:
        """The limits, with that of a body no larger than what the models' contexts may need: images are bounded by the
        limit alone, and so is what goes on to a chat backend."""
        context = self.router.longest_context()
        if context is None or self.router.has_backends or self._renderer is None or self._renderer.vision is not None:
            return self.limits
        return self.limits.for_context(context)

    def _said(self, attempt: LiveAttempt, dialect: Dialect, body: bytes) -> DecodedBody:
        if dialect is not chat_completions:
            return DecodedBody(body, self._fields(body))
        said = attempt.history.read(body)
        self.limits.check_messages(said.fields, before=len(said.read))
        return said

    def _fields(self, body: bytes) -> dict[str, Any]:
        fields = decode(body)
        self.limits.check_messages(fields)
        return fields

    async def _count_tokens(self, body: bytes) -> bytes:
        """How long a request's prompt is; no call, and so not recorded."""
        fields = self._fields(body)
        request = messages.parse_count(fields)
        model = self.router.resolve(request.model)
        if self._renderer is None or self.router.is_backend(model):
            raise GatewayError(400, f"model {model!r} is a chat service: its tokens cannot be counted here")
        return messages.count(await self._answerer.count_tokens(request, self._renderer, len(body)))

    async def _embed(self, attempt: LiveAttempt, body: bytes) -> bytes:
        fields, body_key = self._fields(body), _body_key("embeddings", None, body)
        model = fields.get("model")
        if not isinstance(model, str) or not self.router.is_backend(model):
            raise GatewayError(400, f"model {model!r} has no embeddings; name a chat backend that has", param="model")
        try:
            embedded = await self.router.embed(model, fields)
        except (EngineUnavailable, EngineRefused) as error:
            failure = _as_gateway_error(error)
            self._note_if_ours(attempt, body_key, failure)
            raise failure from error
        self._end_failure(attempt.name, body_key)
        return embedded

    def _authorised(self, asked: Address | None, headers: dict[bytes, bytes]) -> Address:
        """The address that the key opens, with the URL's agent tag. Raises GatewayError(401 or 403)."""
        try:
            opened = verify_attempt_key(self._secret, sent_key(headers))
        except KeyRefused as error:
            raise GatewayError(401, str(error), kind="authentication_error") from error
        if asked is None:
            return opened
        if (asked.rollout_id, asked.attempt_id) != (opened.rollout_id, opened.attempt_id):
            raise GatewayError(403, "this key opens another attempt than the URL names", kind="permission_error")
        return asked

    async def _open_attempt(self, address: Address) -> LiveAttempt:
        name = (address.rollout_id, address.attempt_id)
        self._notes.check()
        if name in self._sealed:
            raise await self._closed(name)
        if self._recorder.is_lost(*name):
            raise _unrecordable(address.attempt_id)
        attempt = self._attempts.get(name)
        now = time.monotonic()
        if attempt is None or (not self._ledger.tells_closings and now - attempt.checked_at > _INFO_SECONDS):
            info = await self._info(name)
            attempt = self._attempts.get(name)  # another request may have opened it meanwhile
            if info is None:
                raise GatewayError(
                    404, f"there is no attempt {address.attempt_id} of rollout {address.rollout_id}", kind=_NOT_FOUND
                )
            if not info.open:
                if attempt is not None:
                    self._close(self._attempts.pop(name))
                raise closed(address.attempt_id, info.ended)
            if name in self._sealed:
                raise await self._closed(name)
            if attempt is None:
                attempt = self._attempts[name] = LiveAttempt(address, info, now, self._renderer)
                if any(span.name == semconv.CALL_SPAN for span in info.spans):
                    self.interrupted(*name, "the gateway that had the attempt went away while it ran")
            attempt.checked_at = now
        return attempt

    async def _closed(self, name: tuple[str, str]) -> GatewayError:
        """The refusal of a call that came after its attempt was sealed: with how it ended, once the ledger knows."""
        if name not in self._endings:
            info = await self._info(name)
            if info is None or info.ended is None:
                return closed(name[1])
            self._endings[name] = info.ended
            if len(self._endings) > _SEALED_REMEMBERED:
                del self._endings[next(iter(self._endings))]
        return closed(name[1], self._endings[name])

    async def _info(self, name: tuple[str, str]) -> AttemptInfo | None:
        """What the ledger says of an attempt; who asks while it is being asked hears the same answer."""
        asked = self._asking.get(name)
        if asked is None:
            asked = self._asking[name] = asyncio.create_task(self._ask_ledger(name))
        return await asyncio.shield(asked)  # whose client leaves takes it from nobody

    async def _ask_ledger(self, name: tuple[str, str]) -> AttemptInfo | None:
        try:
            return await self._ledger.attempt(*name)
        finally:
            del self._asking[name]

    async def _call(
        self,
        attempt: LiveAttempt,
        agent: str | None,
        dialect: Dialect,
        body: bytes,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        retry: bool,
    ) -> None:
        if attempt.sealed:  # while the body came
            raise closed(attempt.address.attempt_id)
        body_key = _body_key(dialect.NAME, agent, body)
        inflight = attempt.joined(body_key, marked_as_retry=retry)
        if inflight is None:
            self.limits.check_calls(attempt.in_flight, attempt.address.attempt_id)
            inflight = InflightRequest(body_key)
            inflight.earlier = attempt.recorded.get(body_key, []) if retry else []
            try:
                work = self._answerer.work(attempt, agent, dialect, self._said(attempt, dialect, body), inflight)
            except EngineUnavailable as error:
                failure = _as_gateway_error(error)
                self._note_if_ours(attempt, body_key, failure)
                raise failure from error
            attempt.begin(inflight, asyncio.create_task(self._noting(work, attempt.address) if self._noted else work))
            self._has_begun(attempt.name)
        else:
            self.counters["joined_retries"] += 1
        told = scope.get("extensions", {}).get(GONE)
        gone = told or asyncio.create_task(_disconnected(receive))
        gone.add_done_callback(inflight.wake)
        try:
            await self._deliver(attempt, dialect, inflight, gone, send)
        finally:
            gone.remove_done_callback(inflight.wake)
            if gone is not told:
                gone.cancel()

    async def _noting(self, work: Coroutine[Any, Any, bytes], address: Address) -> bytes:
        """Do the work of an answer, which does not end before the store knows that it may lack the call."""
        noted = asyncio.create_task(self._notes.begin(address.rollout_id, address.attempt_id))
        try:
            last = await work
            await noted
        finally:
            noted.cancel()
        self._notes.check()
        return last

    async def _deliver(
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
                changed = await inflight.changed(self._ping_seconds)
                parked = parked + self._ping_seconds if self.router.is_paused(inflight.model) else 0.0
                if inflight.stream:
                    await reply.send(*([] if changed else [dialect.PING]))
                elif not changed and (reply.begun or parked >= self._parked_seconds):
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
            self.counters[f"status_{error.status}"] += 1
            # White space cannot be taken back: an answer that ends without being whole is one that SDKs ask for again.
            if inflight.stream:
                await reply.end(dialect.error_event(error))
        else:
            await reply.end(last)
            seconds = time.monotonic() - began
            self._observe(dialect.NAME, inflight.stream)(seconds)
            if _log.isEnabledFor(logging.DEBUG):
                _tell_of_answer(attempt.address, dialect, inflight, seconds)

    def _ended(self, attempt: LiveAttempt, inflight: InflightRequest) -> bytes:
        """The last bytes of an answer whose work is done; from here on it counts as delivered."""
        assert inflight.task is not None
        if inflight.task.cancelled() or attempt.sealed:
            raise closed(attempt.address.attempt_id)
        if (failure := inflight.task.exception()) is not None:
            self._record(attempt, inflight, delivered=False)  # of n answers, those that came
            attempt.forget(inflight)
            error = _as_gateway_error(failure)
            self._note_if_ours(attempt, inflight.body_key, error)
            raise error from failure
        last = inflight.task.result()
        self._end_failure(attempt.name, inflight.body_key)
        self._record(attempt, inflight, delivered=True)
        attempt.commit(inflight)
        return last

    def _note_if_ours(self, attempt: LiveAttempt, body_key: bytes, error: BaseException) -> None:
        """Remember an answer of 5xx, and for whom it was."""
        if not isinstance(error, GatewayError) or error.status >= 500:
            attempt.failed[body_key] += 1
            self._note_failure(attempt.name, body_key, str(error))

    def _record(self, attempt: LiveAttempt, inflight: InflightRequest, *, delivered: bool) -> None:
        if inflight.recorded:
            return
        inflight.recorded = True
        attempt.unrecorded.discard(inflight)
        for call, more in inflight.calls:
            kept = call if delivered else msgspec.structs.replace(call, delivered=False)
            self._recorder.record(to_span(kept, **more))
            self.counters["calls" if delivered else "undelivered"] += 1

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
        await asyncio.sleep(self._grace_seconds)
        inflight.grace = None  # from here on nothing joins it
        if inflight.task.cancel():
            await asyncio.gather(inflight.task, return_exceptions=True)
        elif not inflight.task.cancelled():
            inflight.task.exception()  # which nobody else asks for
        self._record(attempt, inflight, delivered=False)
        attempt.forget(inflight)

    def _close(self, attempt: LiveAttempt) -> list[asyncio.Task[bytes]]:
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

    def _has_begun(self, name: tuple[str, str]) -> None:
        """An attempt has called, or is over: no call is expected of it any more."""
        if self._starting.pop(name, None) is not None:
            self.router.capacity_freed()

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _models(self, one: str | None = None) -> bytes:
        """The models, or one of them, in words that OpenAI's and Anthropic's clients both read."""
        listed = [
            {
                "id": model,
                "object": "model",
                "created": 0,
                "owned_by": "lightning_rl",
                "type": "model",
                "display_name": model,
                "created_at": "1970-01-01T00:00:00Z",
            }
            for model in self.router.state()
        ]
        if one is None:
            ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
            return msgspec.json.encode({"object": "list", "data": listed, "has_more": False} | ends)
        for model in listed:
            if model["id"] == one:
                return msgspec.json.encode(model)
        raise GatewayError(404, f"there is no model {one!r}; there are {list(self.router.state())}", kind=_NOT_FOUND)


def _unrecordable(attempt_id: str) -> GatewayError:
    """The store is behind with so much that the calls of this attempt were given up."""
    return GatewayError(
        409,
        f"attempt {attempt_id} has failed: the store did not take its records in time; its rollout is retried",
        kind="conflict",
    )


def _body_key(api: str, agent: str | None, body: bytes) -> bytes:
    """What stands for a request. No secret: who makes two bodies collide confuses an attempt of its own."""
    digest = xxhash.xxh3_128(f"{api}\n{agent or ''}\n".encode())
    digest.update(body)
    return digest.digest()


def _end_grace(inflight: InflightRequest) -> None:
    if inflight.grace is not None:
        inflight.grace.cancel()
        inflight.grace = None


def _tell_of_refusal(error: GatewayError, scope: Scope, address: Address | None) -> None:
    _log.info(
        "refused: %s",
        error.message,
        extra={
            "facts": {
                "rollout_id": None if address is None else address.rollout_id,
                "attempt_id": None if address is None else address.attempt_id,
                "status": error.status,
                "path": scope["path"],
            }
        },
    )


def _tell_of_answer(address: Address, dialect: Dialect, inflight: InflightRequest, seconds: float) -> None:
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


def _as_gateway_error(error: BaseException) -> BaseException:
    if isinstance(error, EngineUnavailable):
        return GatewayError(503, str(error), kind="api_error", retry=True, retry_after=error.retry_after)
    if isinstance(error, EngineRefused):
        return GatewayError(error.status, str(error), kind=_KINDS.get(error.status, "invalid_request_error"))
    return error


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _respond(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [_JSON, (b"content-length", str(len(body)).encode()), *(headers or [])],
        }
    )
    await send({"type": "http.response.body", "body": body})


class _Reply:
    """One client's copy of an exchange's answer: whole, or as a stream that begins with the first piece."""

    def __init__(self, send: Send, inflight: InflightRequest) -> None:
        self.begun = False
        self._send = send
        self._exchange = inflight
        self._sent = 0

    async def send(self, *more: bytes) -> None:
        """Write the pieces that are there, and `more`."""
        pieces = self._exchange.pieces[self._sent :]
        self._sent += len(pieces)
        if body := b"".join([*pieces, *more]):
            await self._begin()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, last: bytes) -> None:
        """Write what is left, `last` at the end."""
        if not self.begun and not self._exchange.stream:
            return await _respond(self._send, 200, last, self._ids())
        await self._begin()
        body = b"".join([*self._exchange.pieces[self._sent :], last])
        return await self._send({"type": "http.response.body", "body": body})

    async def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            stream = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            headers = (stream if self._exchange.stream else [_JSON]) + self._ids()
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def _ids(self) -> list[tuple[bytes, bytes]]:
        """By which OpenAI's and Anthropic's clients name the request."""
        request_id = self._exchange.request_id.encode()
        return [(b"x-request-id", request_id), (b"request-id", request_id)]
