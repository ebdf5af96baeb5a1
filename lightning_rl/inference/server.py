"""The embedded engine over HTTP, in vLLM's token wire format, in a thread of its own.

Invariant: per step of a batch the engine's thread wakes the server's event loop at most once, whatever the
number of requests; and a request whose client is gone is aborted.
"""

import asyncio
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lightning_rl.inference import wire
from lightning_rl.inference.engine import EmbeddedEngine, EngineStopped, PauseMode
from lightning_rl.inference.sequence import Event, Output, Token

PAUSE_MODES: dict[str, PauseMode] = {"keep": "keep", "wait": "wait", "abort": "abort"}


class _GenerateCall:
    """One HTTP request in flight: its choices' events in, an answer or a stream out."""

    def __init__(self, request_id: str, body: wire.GenerateRequest) -> None:
        self.request_id = request_id
        self.stream = body.stream
        self.logprobs = body.sampling_params.logprobs is not None
        self.outputs: list[Output | None] = [None] * body.sampling_params.n
        self.open = body.sampling_params.n
        self.done: asyncio.Future[list[Output]] = asyncio.get_running_loop().create_future()
        self.chunks: asyncio.Queue[wire.GenerateResponse | None] = asyncio.Queue()
        self._held: dict[int, wire.WireChoice] = {}
        self._versions: dict[int, int] = {}

    def take(self, index: int, event: Event) -> None:
        if isinstance(event, Token):
            self._release(index)
            tells_version = self._versions.get(index) != event.version
            self._held[index] = wire.piece(index, event, logprobs=self.logprobs, tells_version=tells_version)
            self._versions[index] = event.version
        elif isinstance(event, Output):
            if self.stream:
                empty = wire.WireChoice(index, [], None)
                self._held[index] = wire.finish(self._held.get(index, empty), event)
                self._release(index)
            self.outputs[index] = event
            self._end_one()
        elif not self.done.done():
            self.done.set_exception(event.error)
            self.chunks.put_nowait(None)

    def release(self) -> None:
        """Send what a step has given: an answer that ended with it has ended by now."""
        for index in list(self._held):
            self._release(index)

    def _release(self, index: int) -> None:
        if held := self._held.pop(index, None):
            self.chunks.put_nowait(wire.GenerateResponse(self.request_id, [held]))

    def _end_one(self) -> None:
        self.open -= 1
        if not self.open and not self.done.done():
            self.done.set_result([output for output in self.outputs if output is not None])
            self.chunks.put_nowait(None)


class EngineServer:
    """Serves `engine` at `url` between `start` and `stop`; does not start or stop the engine.

    Args:
        engine: must be started before requests come.
        host: the address to bind to.
        port: 0 takes a free one; `port` says which, once started.
        adapter: that of the engine's adapters which answers here; 0: its model without one.
    """

    def __init__(self, engine: EmbeddedEngine, host: str = "127.0.0.1", port: int = 0, *, adapter: int = 0) -> None:
        self.engine = engine
        self.adapter = adapter
        self.host = host
        self.port = port
        self._calls: dict[str, _GenerateCall] = {}
        self._loop_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._outbox = self._from_engine  # one object: the engine groups events by outbox
        self.app = Starlette(
            routes=[
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/pause", self._pause, methods=["POST"]),
                Route("/resume", self._resume, methods=["POST"]),
                Route("/is_paused", self._is_paused),
            ]
        )

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Bind and begin to serve; returns when requests are taken. Raises OSError if it cannot."""
        listener = socket.create_server((self.host, self.port))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self.app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
        )
        ready: Future[asyncio.AbstractEventLoop] = Future()
        self._server = _HttpServer(config, ready, self._forget_loop)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="engine-server", daemon=True)
        self._thread.start()
        self._loop = ready.result(timeout=60)

    def stop(self) -> None:
        """Abort what is in flight, close the connections, end the thread."""
        if self._server is None or self._thread is None:
            return
        with self._loop_lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._abort_all)
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> "EngineServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # The engine's threads, one at a time.

    def _from_engine(self, events: list[Event]) -> None:
        with self._loop_lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._dispatch, events)

    # The server's thread.

    def _dispatch(self, events: list[Event]) -> None:
        calls = []
        for event in events:
            request_id, _, index = event.request_id.rpartition("/")
            if call := self._calls.get(request_id):
                call.take(int(index), event)
                calls.append(call)
        for call in calls:
            call.release()

    def _forget_loop(self) -> None:
        with self._loop_lock:
            self._loop = None

    def _abort_all(self) -> None:
        for call in self._calls.values():
            self._abort(call)

    def _abort(self, call: _GenerateCall) -> None:
        for index, output in enumerate(call.outputs):
            if output is None:
                self.engine.abort(wire.engine_id(call.request_id, index))

    async def _generate(self, request: Request) -> Response:
        try:
            body = wire.decode_request(await request.body())
            call = self._open(body)
        except ValueError as error:
            return _error(400, str(error))
        except EngineStopped as error:
            return _error(503, str(error))
        watch = asyncio.create_task(self._watch(request, call))
        if body.stream:
            return StreamingResponse(self._chunks(call, watch), media_type="text/event-stream")
        try:
            outputs = await call.done
        except EngineStopped as error:
            return _error(503, str(error))
        finally:
            self._close(call, watch)
        choices = [wire.choice(index, output, logprobs=call.logprobs) for index, output in enumerate(outputs)]
        answer = wire.GenerateResponse(call.request_id, choices, wire.usage(outputs))
        return _json(answer)

    def _open(self, body: wire.GenerateRequest) -> _GenerateCall:
        request_id = body.request_id or uuid.uuid4().hex
        if request_id in self._calls:
            raise ValueError(f"request_id {request_id!r} is already in flight")
        call = _GenerateCall(request_id, body)
        requests = wire.engine_requests(body, request_id, self.adapter)
        self._calls[request_id] = call
        try:
            self.engine.post(requests, self._outbox, stream=body.stream)
        except (ValueError, EngineStopped):
            del self._calls[request_id]
            raise
        return call

    def _close(self, call: _GenerateCall, watch: "asyncio.Task[None]") -> None:
        watch.cancel()
        self._calls.pop(call.request_id, None)
        if call.open:
            self._abort(call)

    async def _watch(self, request: Request, call: _GenerateCall) -> None:
        """Abort the call when its client goes away."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._abort(call)

    async def _chunks(self, call: _GenerateCall, watch: "asyncio.Task[None]") -> AsyncIterator[bytes]:
        try:
            while chunk := await call.chunks.get():
                yield _sse(chunk)
            try:
                outputs = await call.done
            except EngineStopped as error:
                yield _sse(_error_body(503, str(error)))
                return
            yield _sse(wire.GenerateResponse(call.request_id, [], wire.usage(outputs)))
            yield b"data: [DONE]\n\n"
        finally:
            self._close(call, watch)

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.engine.running else 503)

    async def _models(self, request: Request) -> Response:
        engine = self.engine
        model = {
            "id": engine.name,
            "object": "model",
            "max_model_len": engine.max_model_len,
            "max_num_seqs": engine.max_num_seqs,
            "waiting": max(0, engine.in_flight - engine.max_num_seqs),  # for a place among them
            "policy_version": engine.version(self.adapter),
            "logprobs_mode": "scaled_logprobs",  # after temperature, before top-k and top-p
        }
        return _json({"object": "list", "data": [model]})

    async def _pause(self, request: Request) -> Response:
        name = request.query_params.get("mode", "abort")
        if name not in PAUSE_MODES:
            return _error(400, f"mode must be one of {', '.join(PAUSE_MODES)}, got {name!r}")
        try:
            await asyncio.to_thread(self.engine.pause, PAUSE_MODES[name], self.adapter)
        except EngineStopped as error:
            return _error(503, str(error))
        return _json({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        try:
            await asyncio.to_thread(self.engine.resume, self.adapter)
        except EngineStopped as error:
            return _error(503, str(error))
        return _json({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Response:
        return _json({"is_paused": self.engine.paused(self.adapter)})


class _HttpServer(uvicorn.Server):
    """A uvicorn server that says when it serves, on which loop, and when it no longer does."""

    def __init__(
        self,
        config: uvicorn.Config,
        ready: "Future[asyncio.AbstractEventLoop]",
        closed: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._closed = closed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set_result(asyncio.get_running_loop())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._closed()


def _json(body: object, status: int = 200) -> Response:
    return Response(wire.encode(body), status, media_type="application/json")


def _sse(body: object) -> bytes:
    return b"data: " + wire.encode(body) + b"\n\n"


def _error(status: int, message: str) -> Response:
    return _json(_error_body(status, message), status)


def _error_body(status: int, message: str) -> wire.ErrorResponse:
    kind = "BadRequestError" if status == 400 else "ServiceUnavailableError"
    return wire.ErrorResponse(wire.WireError(message, kind, status))
