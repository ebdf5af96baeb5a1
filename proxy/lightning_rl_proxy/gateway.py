"""The ASGI application: doors, keys, limits, errors, and the way of one call from request bytes to answer bytes.

The record of a call is in the journal before the last byte of its answer leaves. A call counts as delivered when its
answer was written before its client was seen to leave; only delivered calls are continued or trained.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, to_span
from lightning_rl_proxy import address as addresses
from lightning_rl_proxy import relay
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.attempt import Attempt, Exchange, Place, new_call_id
from lightning_rl_proxy.dialects import chat_completions
from lightning_rl_proxy.dialects.chat_completions import Relayed, Request
from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable
from lightning_rl_proxy.errors import GatewayError, closed
from lightning_rl_proxy.keys import KeyRefused, verify_attempt_key
from lightning_rl_proxy.ledger import AttemptInfo, Ledger
from lightning_rl_proxy.recorder import Recorder
from lightning_rl_proxy.rendering import Answer, Renderer
from lightning_rl_proxy.router import Router, no_engine
from lightning_rl_proxy.sampling import effective

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")

MAX_BODY = 64 * 2**20  # bytes
_JSON = (b"content-type", b"application/json")
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 502: "api_error"}
_INFO_SECONDS = 1.0  # how long the ledger's word on an attempt is believed
_SEALED_REMEMBERED = 65536
_log = logging.getLogger(__name__)


class Gateway:
    """The proxy. `secret` signs attempt keys, `renderer` speaks the policy's chat format (None: only chat backends).

    `grace_seconds`: how long a call whose client left runs on, waiting for a retry to join it.
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
    ) -> None:
        self.router = router
        self.counters: Counter[str] = Counter()
        self._ledger = ledger
        self._secret = secret
        self._renderer = renderer
        self._recorder = Recorder(journal, ledger, counters=self.counters)
        self._grace_seconds = grace_seconds
        self._attempts: dict[tuple[str, str], Attempt] = {}
        # The ledger says that an attempt is closed a moment after it was sealed; in between, this does.
        self._sealed: dict[tuple[str, str], None] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Open the journal (replaying what is left in it)."""
        await self._recorder.start()

    async def stop(self) -> None:
        """Hand every record over and free the connections."""
        for attempt in list(self._attempts.values()):
            self._close(attempt)
        await self._recorder.stop()
        await self.router.close()

    def open(self, info: AttemptInfo) -> None:
        """Tell of an attempt that was opened just now, so that its first call need not ask the ledger."""
        address = Address(info.rollout_id, info.attempt_id)
        self._attempts.setdefault((info.rollout_id, info.attempt_id), Attempt(address, info, time.monotonic()))

    async def seal(self, rollout_id: str, attempt_id: str) -> None:
        """End an attempt: later calls get 409, calls in flight are aborted, and on return its records are durable."""
        name = (rollout_id, attempt_id)
        self._sealed[name] = None
        if len(self._sealed) > _SEALED_REMEMBERED:
            del self._sealed[next(iter(self._sealed))]
        attempt = self._attempts.pop(name, None)
        if attempt is not None:
            self._close(attempt)
        await self._recorder.stored()

    def carry_on(self, received: dict[str, int]) -> None:
        """Begin the counts of received tokens where an earlier gateway's records end."""
        self.router.carry_on(received)

    async def pause(self, model: str | None = None) -> None:
        """Let new calls of `model` (None: every model) wait; those in flight go on."""
        self.router.pause(model)

    async def resume(self, model: str | None = None, policy_version: int | None = None) -> None:
        """Let waiting calls go on."""
        self.router.resume(model, policy_version)

    def state(self) -> dict[str, Any]:
        """Engines and tokens per model, open attempts, and counts of what went another way than straight."""
        return {
            "models": self.router.state(),
            "open_attempts": len(self._attempts),
            "tokens_pending": sum(attempt.tokens_received for attempt in self._attempts.values()),
            "counters": dict(self.counters),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway speaks HTTP, not {scope['type']!r}")
        try:
            await self._answer(scope, receive, send)
        except GatewayError as error:
            self.counters[f"status_{error.status}"] += 1
            await _respond(send, error.status, chat_completions.serialize_error(error), error.headers())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        door = addresses.parse(scope["path"])
        if door is None:
            raise GatewayError(404, f"there is nothing at {scope['path']}", kind="not_found_error")
        headers = dict(scope["headers"])
        address = self._authorised(door.address, headers)
        attempt = await self._open_attempt(address)
        method = scope["method"]
        if door.path == "/v1/models" and method == "GET":
            await _respond(send, 200, self._models())
        elif door.path == "/v1/chat/completions" and method == "POST":
            body = await _read(receive)
            await self._chat(attempt, address.agent, headers, body, receive, send)
        else:
            raise GatewayError(
                404, f"{method} {door.path} is not served here; there are /v1/chat/completions and /v1/models"
            )

    def _authorised(self, asked: Address | None, headers: dict[bytes, bytes]) -> Address:
        """The address that the key opens, with the URL's agent tag. Raises GatewayError(401 or 403)."""
        bearer = headers.get(b"authorization", b"").decode("latin-1")
        key = bearer.removeprefix("Bearer ").strip() or headers.get(b"x-api-key", b"").decode("latin-1")
        try:
            opened = verify_attempt_key(self._secret, key)
        except KeyRefused as error:
            raise GatewayError(401, str(error), kind="authentication_error") from error
        if asked is None:
            return opened
        if (asked.rollout_id, asked.attempt_id) != (opened.rollout_id, opened.attempt_id):
            raise GatewayError(403, "this key opens another attempt than the URL names", kind="permission_error")
        return asked

    async def _open_attempt(self, address: Address) -> Attempt:
        name = (address.rollout_id, address.attempt_id)
        if name in self._sealed:
            raise closed(address.attempt_id)
        attempt = self._attempts.get(name)
        now = time.monotonic()
        if attempt is None or now - attempt.checked_at > _INFO_SECONDS:
            info = await self._ledger.attempt(*name)
            attempt = self._attempts.get(name)  # another request may have opened it meanwhile
            if info is None:
                raise GatewayError(404, f"there is no attempt {address.attempt_id} of rollout {address.rollout_id}")
            if not info.open:
                if attempt is not None:
                    self._close(self._attempts.pop(name))
                raise closed(address.attempt_id)
            if name in self._sealed:
                raise closed(address.attempt_id)
            if attempt is None:
                attempt = self._attempts[name] = Attempt(address, info, now)
            attempt.checked_at = now
        return attempt

    async def _chat(
        self,
        attempt: Attempt,
        agent: str | None,
        headers: dict[bytes, bytes],
        body: bytes,
        receive: Receive,
        send: Send,
    ) -> None:
        retry = headers.get(b"x-stainless-retry-count", b"0") not in (b"", b"0")
        body_key = hashlib.blake2b((agent or "").encode() + b"\n" + body, digest_size=16).digest()
        exchange = attempt.joinable(body_key, marked_as_retry=retry)
        if exchange is None:
            exchange = Exchange(body_key)
            exchange.task = asyncio.create_task(self._work(attempt, agent, body, exchange))
            attempt.exchanges.setdefault(body_key, []).append(exchange)
        else:
            self.counters["joined_retries"] += 1
            exchange.client_gone = False
        await self._deliver(attempt, exchange, receive, send)

    async def _deliver(self, attempt: Attempt, exchange: Exchange, receive: Receive, send: Send) -> None:
        """Wait for the answer while watching the client; record it, then write it."""
        assert exchange.task is not None
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((exchange.task, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                exchange.client_gone = True
                self._later(self._abandon(attempt, exchange))
                return
        finally:
            gone.cancel()
        try:
            answer = exchange.task.result()
        except asyncio.CancelledError:
            raise closed(attempt.address.attempt_id) from None
        except (EngineUnavailable, EngineRefused, GatewayError) as error:
            self._record(exchange, delivered=False)  # of n answers, those that came
            self._forget(attempt, exchange)
            raise _as_gateway_error(error) from error
        if attempt.sealed:
            raise closed(attempt.address.attempt_id)
        self._record(exchange, delivered=True)
        attempt.commit(exchange)
        await _respond(send, 200, answer)

    def _work(self, attempt: Attempt, agent: str | None, body: bytes, exchange: Exchange) -> Coroutine[Any, Any, bytes]:
        """What answers a request: a chat backend or the token path. Raises GatewayError for a body that neither can."""
        fields = chat_completions.decode(body)
        requested = fields.get("model")
        model = self.router.resolve(requested if isinstance(requested, str) else "")
        if self.router.is_backend(model):
            return self._relay(attempt, agent, chat_completions.parse_relayed(fields), exchange, model)
        if self._renderer is None:
            raise _as_gateway_error(no_engine(model))
        return self._run(attempt, agent, chat_completions.parse(fields), exchange, model, self._renderer)

    async def _relay(
        self, attempt: Attempt, agent: str | None, request: Relayed, exchange: Exchange, model: str
    ) -> bytes:
        """Ask a chat backend for each choice; the response body."""
        first = attempt.take_numbers(request.n)
        place = attempt.find_turn(model, request.messages, request.tools)
        self._count_place(place)
        answers = await _each(
            self._ask(attempt, agent, request, exchange, place, model, first + index, index)
            for index in range(request.n)
        )
        return chat_completions.merge(answers)

    async def _ask(
        self,
        attempt: Attempt,
        agent: str | None,
        request: Relayed,
        exchange: Exchange,
        by_messages: Place,
        model: str,
        number: int,
        index: int,
    ) -> dict[str, Any]:
        # What an attempt publishes is about its policy: a judge beside it keeps the temperature that it was given.
        sent = request.body(attempt.info.sampling if model == self.router.policy else {}, index)
        call_id = new_call_id()
        start_ns = time.time_ns()
        answer = await self.router.complete(model, sent)
        # As in `_sample`, nothing waits from here to the end.
        place = relay.placed(by_messages, answer, request)
        if by_messages.fork is None:
            self._count_fork(place)
        call = relay.call_of(
            answer,
            place,
            attempt,
            sent,
            call_id=call_id,
            number=number,
            agent=agent,
            model=model,
            start_ns=start_ns,
            end_ns=time.time_ns(),
        )
        if answer.ignored_fields:
            self.counters["ignored_fields"] += len(answer.ignored_fields)
        exchange.calls.append((call, relay.attributes(answer, place, request, sent)))
        exchange.commits.append(
            attempt.answered(place, call, relay.message_of(answer), reasoned=relay.reasoned(answer))
        )
        return answer.body

    def _count_place(self, place: Place) -> None:
        self._count_fork(place)
        if place.echo_edited:
            self.counters["echo_edited"] += 1

    def _count_fork(self, place: Place) -> None:
        if place.fork is not None:
            self.counters[f"fork_{place.fork.cause}"] += 1

    async def _run(
        self,
        attempt: Attempt,
        agent: str | None,
        request: Request,
        exchange: Exchange,
        model: str,
        renderer: Renderer,
    ) -> bytes:
        """Sample the answers of a request; the response body."""
        first = attempt.take_numbers(request.n)
        place = attempt.find_place(model, request.messages, request.tools, renderer)
        self._count_place(place)
        answers = await _each(
            self._sample(attempt, agent, request, exchange, place, model, number, renderer)
            for number in range(first, first + request.n)
        )
        return chat_completions.serialize(
            exchange.calls[0][0].call_id,
            model,
            int(time.time()),
            answers,
            len(place.prompt_ids),
            request.logprobs,
        )

    async def _sample(
        self,
        attempt: Attempt,
        agent: str | None,
        request: Request,
        exchange: Exchange,
        place: Place,
        model: str,
        number: int,
        renderer: Renderer,
    ) -> Answer:
        sampling = effective(request.sampling, attempt.info.sampling, seed_key=attempt.info.seed_key, number=number)
        call_id = new_call_id()
        start_ns = time.time_ns()
        generation = await self.router.generate(model, place.prompt_ids, sampling, request_id=call_id)
        attempt.tokens_received += len(generation.token_ids)
        # From here to the end nothing waits, so what an engine handed over is never lost to a cancellation.
        call = Call(
            call_id=call_id,
            rollout_id=attempt.address.rollout_id,
            attempt_id=attempt.address.attempt_id,
            number=number,
            parent_id=None if place.parent is None else place.parent.call.call_id,
            agent=agent,
            model=model,
            prompt_ids=place.added_ids,
            response_ids=generation.token_ids,
            logprobs=generation.logprobs,
            logprob_kind=generation.logprob_kind,
            versions=generation.versions,
            temperature=sampling.temperature if sampling.temperature is not None else 1.0,
            finish_reason=generation.finish_reason,
            start_ns=start_ns,
            end_ns=time.time_ns(),
        )
        answer = renderer.parse(
            call_id, place.prompt_ids, call.response_ids, call.logprobs, call.finish_reason, request.tools
        )
        more: dict[str, Any] = {
            semconv.REQUEST_MODEL: request.model,
            semconv.DIALECT: "chat_completions",
            semconv.INPUT_TOKENS: len(place.prompt_ids),
            semconv.OUTPUT_TOKENS: len(call.response_ids),
            semconv.INPUT_MESSAGES: place.new_messages,
            semconv.OUTPUT_MESSAGES: [answer.message()],
            semconv.SAMPLING_REQUESTED: msgspec.to_builtins(request.sampling),
            semconv.SAMPLING_EFFECTIVE: msgspec.to_builtins(sampling),
        }
        more |= place.attributes()
        if request.ignored_fields:
            more[semconv.IGNORED_FIELDS] = request.ignored_fields
            self.counters["ignored_fields"] += len(request.ignored_fields)
        exchange.calls.append((call, more))
        exchange.commits.append(attempt.answered(place, call, answer.message(), reasoned=bool(answer.reasoning)))
        return answer

    def _record(self, exchange: Exchange, *, delivered: bool) -> None:
        if exchange.recorded:
            return
        exchange.recorded = True
        for call, more in exchange.calls:
            kept = call if delivered else msgspec.structs.replace(call, delivered=False)
            self._recorder.record(to_span(kept, **more))
            self.counters["calls" if delivered else "undelivered"] += 1

    async def _abandon(self, attempt: Attempt, exchange: Exchange) -> None:
        """The client left: give a retry some time to join, then abort and record what was sampled as undelivered."""
        assert exchange.task is not None
        await asyncio.sleep(self._grace_seconds)
        if exchange.client_gone:
            exchange.task.cancel()
            await asyncio.gather(exchange.task, return_exceptions=True)
            self._record(exchange, delivered=False)
            self._forget(attempt, exchange)

    def _close(self, attempt: Attempt) -> None:
        """Seal: abort what is in flight, and record what was sampled but never delivered."""
        attempt.sealed = True
        for exchanges in attempt.exchanges.values():
            for exchange in exchanges:
                if exchange.task is not None:
                    exchange.task.cancel()
                self._record(exchange, delivered=False)
        attempt.exchanges.clear()

    def _forget(self, attempt: Attempt, exchange: Exchange) -> None:
        kept = [other for other in attempt.exchanges.get(exchange.body_key, []) if other is not exchange]
        if kept:
            attempt.exchanges[exchange.body_key] = kept
        else:
            attempt.exchanges.pop(exchange.body_key, None)

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _models(self) -> bytes:
        data = [{"id": model, "object": "model", "owned_by": "lightning_rl"} for model in self.router.state()]
        return msgspec.json.encode({"object": "list", "data": data})


def _as_gateway_error(error: EngineUnavailable | EngineRefused | GatewayError) -> GatewayError:
    if isinstance(error, EngineUnavailable):
        return GatewayError(503, str(error), kind="api_error", retry=True, retry_after=error.retry_after)
    if isinstance(error, EngineRefused):
        return GatewayError(error.status, str(error), kind=_KINDS.get(error.status, "invalid_request_error"))
    return error


async def _each(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result, in order; the first failure is raised only when all have ended, so that none is lost."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for failed in (result for result in results if isinstance(result, BaseException)):
        raise failed
    return [result for result in results if not isinstance(result, BaseException)]


async def _read(receive: Receive) -> bytes:
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GatewayError(400, "the client left before its request was whole")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY:
            raise GatewayError(413, f"the request body is over {MAX_BODY} bytes")
        if not message.get("more_body"):
            return b"".join(chunks)


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
