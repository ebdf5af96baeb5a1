"""The ASGI application: doors, keys, limits, errors, and the way of one call from request bytes to answer bytes.

The record of a call is in the journal before the last byte of its answer leaves. A call counts as delivered when its
answer was written before its client was seen to leave; only delivered calls are continued or trained.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import msgspec
import xxhash
from prometheus_client import Histogram

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
from lightning_rl_proxy.http.delivery import Delivery, Patience, as_gateway_error, respond
from lightning_rl_proxy.http.failures import CallFailures
from lightning_rl_proxy.http.housekeeping import Housekeeping
from lightning_rl_proxy.http.inflight_request import InflightRequest
from lightning_rl_proxy.http.keys import KeyRefused, sent_key, verify_attempt_key
from lightning_rl_proxy.http.limits import RequestLimits, announced_bytes
from lightning_rl_proxy.http.open_attempts import OpenAttempts
from lightning_rl_proxy.http.tokenizing import Tokenizing
from lightning_rl_proxy.recording.clock import Clock
from lightning_rl_proxy.recording.ledger import AttemptInfo, AttemptTokens, Ledger
from lightning_rl_proxy.recording.recorder import Recorder
from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.rendering.image_fetcher import ImageFetcher
from lightning_rl_proxy.routing.load_balancer import ModelLoad
from lightning_rl_proxy.routing.router import Router

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# A server may put a future into a request's `extensions` that is done when the client has left. Without it a task waits
# for ASGI's word, one for each call.
GONE = "lightning_rl.gone"
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
_NOT_FOUND = "not_found_error"
_DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
}
_POSTS = (*_DIALECTS, "/v1/messages/count_tokens", "/v1/embeddings")
# What clients get that ask a base URL whether somebody is there. It is the same for all, and needs no key.
_ROOT = msgspec.json.encode({"service": "lightning_rl gateway", "paths": [*_POSTS, "/v1/models"]})
_log = logging.getLogger(__name__)


class GatewayLoad(NamedTuple):
    """How busy the models are that have token engines, and the attempts that make them so.

    `starting` attempts were opened moments ago and have not called yet, by their policy (every policy is there); they,
    too, are among the `open_attempts`.
    """

    policy: str
    models: dict[str, ModelLoad]
    starting: dict[str, int]
    open_attempts: int


class Gateway:
    """The proxy. `secret` signs attempt keys, `renderer` speaks the policy's chat format (None: only chat backends).

    `grace_seconds`: how long a call whose client left runs on, waiting for a retry to join it. `ping_seconds`: how long
    a stream may be silent. `parked_seconds`: how long a call waits for a paused model until white space goes before its
    answer, so that its client waits on. `housekeeping` are rules beside those of `http/housekeeping.py`. So many
    `tokenizing_threads` take long prompts; None: one for each core of the machine.
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
        allowed_media_domains: Sequence[str] = (),
        housekeeping: Mapping[str, Sequence[str]] = MappingProxyType({}),
        tokenizing_threads: int | None = None,
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
        self._secret = secret
        self._renderer = renderer
        self._clock = Clock()
        self._recorder = Recorder(journal, ledger, counters=self.counters)
        self._image_fetcher = ImageFetcher(allowed_media_domains)
        self._tokenizing = (
            None if renderer is None else Tokenizing(renderer, router.longest_context, tokenizing_threads)
        )
        self._call_handler = CallHandler(
            router,
            self._tokenizing,
            self.counters,
            self._recorder.record,
            self._clock,
            self._image_fetcher,
            Housekeeping(housekeeping),
        )
        self._failures = CallFailures()
        self.patience = Patience(grace_seconds, ping_seconds, parked_seconds)
        self._delivery = Delivery(
            self._recorder, self._failures, self.counters, self.patience, router.is_paused, self._observe
        )
        self.attempts = OpenAttempts(
            ledger, self._recorder, self._delivery, self._failures, renderer, lambda: router.capacity_freed()
        )
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the journal (replaying what is left in it), and look after the engines from now on."""
        await self._recorder.start()
        self._watching = asyncio.create_task(self.router.watch())

    async def stop(self) -> None:
        """Hand every record over, as far as the ledger takes them in time, and free the connections."""
        if self._watching is not None:
            self._watching.cancel()
        aborted = [task for attempt in self.attempts for task in self._delivery.close(attempt)]
        await asyncio.gather(*aborted, return_exceptions=True)  # each records what it was handed
        await self._recorder.stop()
        await self.router.close()
        await self._image_fetcher.close()

    def open(self, info: AttemptInfo) -> None:
        """Tell of an attempt that was opened just now, so that its first call need not ask the ledger."""
        self.attempts.open(info)

    def held(self) -> list[tuple[str, str]]:
        """The open attempts, by rollout and attempt id."""
        return self.attempts.names()

    def holds(self, rollout_id: str, attempt_id: str) -> bool:
        """Whether that attempt is open here."""
        return (rollout_id, attempt_id) in self.attempts

    def idle_seconds(self, rollout_id: str, attempt_id: str) -> float | None:
        """How long ago the attempt's last call ended; 0 while one is in flight, None where none came in here."""
        return self.attempts.idle_seconds(rollout_id, attempt_id)

    async def seal(self, rollout_id: str, attempt_id: str) -> None:
        """End an attempt: later calls get 409, calls in flight are aborted, and on return its records are durable."""
        await self.attempts.seal(rollout_id, attempt_id)

    async def release(self, rollout_id: str, attempt_id: str) -> None:
        """The attempt is another gateway's now: abort what is in flight, and ask the ledger at its next call."""
        await self.attempts.release(rollout_id, attempt_id)

    def failure_of(self, rollout_id: str, attempt_id: str) -> str | None:
        """What went wrong here with a call of this attempt, which got no answer when it was tried again, or was not
        tried again: an agent that failed then is not to blame. None where nothing did."""
        return self._failures.of((rollout_id, attempt_id))

    def interrupted(self, rollout_id: str, attempt_id: str, problem: str) -> None:
        """Calls of this attempt may have found no gateway; `problem` happened, for `failure_of`."""
        self._failures.note((rollout_id, attempt_id), b"", problem)

    def tokens_of(self, rollout_ids: Sequence[str]) -> dict[str, AttemptTokens]:
        """What engines handed over for the attempts at these rollouts, by attempt id; those whose calls did not come in
        at this process, and those that it forgot, are left out."""
        return self.attempts.tokens_of(rollout_ids)

    @property
    def journal_damaged(self) -> bool:
        """Whether the journal of an earlier gateway could not be read whole, so that open attempts may lack calls."""
        return self._recorder.damaged

    def is_lost(self, rollout_id: str, attempt_id: str) -> bool:
        """Whether records of this attempt were given up, so that it has to fail as infrastructure does."""
        return self._recorder.is_lost(rollout_id, attempt_id)

    def now_ns(self) -> int:
        """Now, by the clock of recorded calls, since the epoch."""
        return self._clock()

    def restore(self, received: dict[str, int], newest_ns: int = 0) -> None:
        """Begin the counts of received tokens, and the times of calls, where an earlier gateway's records end."""
        self.router.restore(received)
        self._clock.begin_after(newest_ns)

    async def pause(self, model: str | None = None, drain_seconds: float = 0) -> None:
        """Let new calls of `model` (None: every model) wait; those in flight have `drain_seconds`, then they freeze.

        Raises EngineUnavailable or EngineRefused where an engine cannot freeze them.
        """
        await self.router.pause(model, drain_seconds)

    async def resume(
        self, model: str | None = None, policy_version: int | None = None, outdated: Collection[str] = ()
    ) -> None:
        """Let frozen and waiting calls go on. See `Router.resume`."""
        await self.router.resume(model, policy_version, outdated)

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
        tell of them.
        """
        return {
            "models": self.router.state(),
            "engines": self.router.engines(),
            "open_attempts": len(self.attempts),
            "tokens_pending": self.attempts.tokens_pending(),
            "tokens_lost": sum(lost.total() for lost in self._recorder.tokens_lost.values()),
            "counters": dict(self.counters),
            "append_only": None if self._renderer is None else self._renderer.append_only,
        } | self._recorder.state()

    def load(self) -> GatewayLoad:
        """How busy the engines are, and what is about to call them."""
        policy = self.router.policy
        return GatewayLoad(policy, self.router.loads(), self.attempts.starting(policy), len(self.attempts))

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
            return await respond(send, 200, openapi.encoded())
        shown = addresses.without_key(scope["path"])
        door = addresses.parse(scope["path"])
        api_path = "/v1/" + scope["path"].rpartition("/v1/")[2]
        dialect = _DIALECTS.get(api_path.removesuffix("/count_tokens"), chat_completions)
        try:
            if door is None:
                raise GatewayError(404, f"there is nothing at {shown}", kind=_NOT_FOUND)
            await self._answer(door, dialect, scope, receive, send)
        except (GatewayError, RecursionError) as raised:
            error = cast(GatewayError, as_gateway_error(raised))
            self.counters[f"status_{error.status}"] += 1
            _log_refusal(error, shown, None if door is None else door.address)
            await respond(send, error.status, dialect.serialize_error(error), error.headers())

    async def _answer(self, door: Door, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        self.limits.check_head(scope)
        headers = dict(scope["headers"])
        # Servers leave the body of an answer to HEAD out.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if (method, door.path) == ("GET", "/"):
            await respond(send, 200, _ROOT)
            return
        address = self._authorised(door, headers)
        try:
            attempt = await self.attempts.find(address)
        except GatewayError as error:
            if error.status >= 500:
                self.interrupted(address.rollout_id, address.attempt_id, error.message)
            raise
        route = (method, door.path)
        if route == ("GET", "/v1/models"):
            await respond(send, 200, self._models())
        elif method == "GET" and door.path.startswith("/v1/models/"):
            await respond(send, 200, self._models(door.path.removeprefix("/v1/models/")))
        elif route == ("POST", "/v1/messages/count_tokens"):
            await respond(
                send, 200, await self._count_tokens(attempt, address.agent, await self._read(headers, receive))
            )
        elif route == ("POST", "/v1/embeddings"):
            await respond(send, 200, await self._embed(attempt, await self._read(headers, receive)))
        elif method == "POST" and door.path in _DIALECTS:
            body = await self._read(headers, receive)
            agent = address.agent or (baggage.agent_of(scope["headers"]) if b"baggage" in headers else None)
            retry = headers.get(b"x-stainless-retry-count", b"0") not in (b"", b"0")
            inflight = self._begun(attempt, agent, dialect, body, retry=retry)
            await self._hand_over(attempt, dialect, inflight, scope, receive, send)
        else:
            raise GatewayError(
                404,
                f"{scope['method']} {door.path} is not served here; there are POST {', '.join(_POSTS)}, "
                "and GET /v1/models",
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

    def _decoded(self, attempt: LiveAttempt, dialect: Dialect, body: bytes) -> DecodedBody:
        if dialect is not chat_completions:
            return DecodedBody(body, self._fields(body))
        decoded = attempt.history.read(body)
        self.limits.check_messages(decoded.fields, before=len(decoded.read))
        return decoded

    def _fields(self, body: bytes) -> dict[str, Any]:
        fields = decode(body)
        self.limits.check_messages(fields)
        return fields

    async def _count_tokens(self, attempt: LiveAttempt, agent: str | None, body: bytes) -> bytes:
        """How long a request's prompt is; no call, and so not recorded."""
        fields = self._fields(body)
        request = messages.parse_count(fields)
        model = self._call_handler.model_of(attempt, agent, request.model)
        if self._tokenizing is None or self.router.is_backend(model):
            raise GatewayError(400, f"model {model!r} is a chat service: its tokens cannot be counted here")
        return messages.count(await self._call_handler.count_tokens(attempt, request, self._tokenizing, len(body)))

    async def _embed(self, attempt: LiveAttempt, body: bytes) -> bytes:
        fields, body_key = self._fields(body), _body_key("embeddings", None, body)
        model = fields.get("model")
        if not isinstance(model, str) or not self.router.is_backend(model):
            raise GatewayError(400, f"model {model!r} has no embeddings; name a chat backend that has", param="model")
        try:
            embedded = await self.router.embed(model, fields)
        except (EngineUnavailable, EngineRefused) as error:
            failure = as_gateway_error(error)
            self._delivery.note_if_ours(attempt, body_key, failure)
            raise failure from error
        self._failures.end(attempt.name, body_key)
        return embedded

    def _authorised(self, door: Door, headers: dict[bytes, bytes]) -> Address:
        """The address that the key opens, with the URL's agent tag. Raises GatewayError(401 or 403).

        A key in the URL comes before one in a header: SDKs cannot be told to send none, so there one is made up.
        """
        try:
            opened = verify_attempt_key(self._secret, door.key or sent_key(headers))
        except KeyRefused as error:
            raise GatewayError(401, str(error), kind="authentication_error") from error
        named = door.address
        if named is None:
            return opened._replace(agent=door.agent)
        if (named.rollout_id, named.attempt_id) != (opened.rollout_id, opened.attempt_id):
            raise GatewayError(403, "this key opens another attempt than the URL names", kind="permission_error")
        return named

    def _begun(
        self, attempt: LiveAttempt, agent: str | None, dialect: Dialect, body: bytes, *, retry: bool
    ) -> InflightRequest:
        """The request that is worked on from now on, or that a retry joins. Raises GatewayError."""
        if attempt.sealed:  # while the body came
            raise closed(attempt.address.attempt_id)
        body_key = _body_key(dialect.NAME, agent, body)
        inflight = attempt.joined(body_key, marked_as_retry=retry)
        if inflight is not None:
            self.counters["joined_retries"] += 1
            return inflight
        self.limits.check_calls(attempt.in_flight, attempt.address.attempt_id)
        # A first call counts as expected until an engine has it: its prompt may take long to make.
        begun = partial(self.attempts.has_begun, attempt.name)
        inflight = InflightRequest(body_key, begun)
        inflight.earlier = attempt.recorded.get(body_key, []) if retry else []
        try:
            work = self._call_handler.work(attempt, agent, dialect, self._decoded(attempt, dialect, body), inflight)
        except EngineUnavailable as error:
            failure = as_gateway_error(error)
            self._delivery.note_if_ours(attempt, body_key, failure)
            raise failure from error
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: begun())
        attempt.begin(inflight, task)
        return inflight

    async def _hand_over(
        self,
        attempt: LiveAttempt,
        dialect: Dialect,
        inflight: InflightRequest,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Deliver the answer to one client, until it leaves."""
        signalled = scope.get("extensions", {}).get(GONE)
        gone = signalled or asyncio.create_task(_disconnected(receive))
        gone.add_done_callback(inflight.wake)
        try:
            with inflight.reading():
                await self._delivery.deliver(attempt, dialect, inflight, gone, send)
        finally:
            gone.remove_done_callback(inflight.wake)
            if gone is not signalled:
                gone.cancel()

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


def _body_key(api: str, agent: str | None, body: bytes) -> bytes:
    """What stands for a request. No secret: who makes two bodies collide confuses an attempt of its own."""
    digest = xxhash.xxh3_128(f"{api}\n{agent or ''}\n".encode())
    digest.update(body)
    return digest.digest()


def _log_refusal(error: GatewayError, path: str, address: Address | None) -> None:
    _log.info(
        "refused: %s",
        error.message,
        extra={
            "facts": {
                "rollout_id": None if address is None else address.rollout_id,
                "attempt_id": None if address is None else address.attempt_id,
                "status": error.status,
                "path": path,
            }
        },
    )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
