"""A gateway over a ledger in memory and an engine that says what the test scripts; the tokenizer is a real one."""

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lightning_rl.control_plane.protocol import protocol
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, VersionRange, calls_of
from lightning_rl_adapters.span import Packed, Span, unpack
from lightning_rl_proxy.address import Address, base_url
from lightning_rl_proxy.engines.base import EngineFinish, EngineTokens, EngineUnavailable, Load, TokenRequest
from lightning_rl_proxy.forest import incremental_decode, nodes
from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.http.keys import sign_attempt_key
from lightning_rl_proxy.recording.ledger import AttemptInfo
from lightning_rl_proxy.rendering.images import Shown
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.renderers import LibraryRenderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from lightning_rl_proxy.sampling import Sampling
from tests.servers import StoppableServer

TOKENIZER = Path(__file__).parents[2] / "examples" / "sql_agent" / "checkpoint"
ASGI = "any ASGI server"
EITHER_SERVER = pytest.mark.parametrize("served", ["our server", ASGI], indirect=True)
SECRET = b"a secret of the tests"
MODEL = "policy"
VERSION = 7  # of the engine's weights


@pytest.fixture
def all_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for long conversations alone is done for the short ones of the tests."""
    monkeypatch.setattr(nodes, "_LONG", 1)
    monkeypatch.setattr(incremental_decode, "_LONG", 1)


@pytest.fixture(params=["as it is", "all is long"])
def either_length(request: pytest.FixtureRequest) -> None:
    """A conversation as it is, and as if it were long."""
    if request.param == "all is long":
        request.getfixturevalue("all_is_long")


class MemoryLedger:
    """A ledger in memory; every attempt is open until it is put into `closed`."""

    tells_closings = False

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.closed: set[str] = set()
        self.mode = "train"
        self.sampling: dict[str, float | int] = {"temperature": 1.0, "max_tokens": 64}
        self.failures = 0
        self.policy: str | None = None  # of every attempt; None: the server's

    async def attempt(self, rollout_id: str, attempt_id: str) -> AttemptInfo | None:
        if rollout_id == "unknown":
            return None
        return AttemptInfo(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            mode=self.mode,
            open=attempt_id not in self.closed,
            sampling=self.sampling,
            seed_key=rollout_id,
            policy=self.policy,
        )

    async def add_spans(self, spans: Sequence[Packed]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the disk is busy")
        known = {span.span_id for span in self.spans}
        self.spans += [unpack(span.record) for span in spans if span.span_id not in known]

    def calls(self, rollout_id: str = "r1") -> list[Call]:
        return calls_of([span for span in self.spans if span.rollout_id == rollout_id])


class Script(NamedTuple):
    """The tokens of an answer, its end token the last unless it is `cut`."""

    ids: list[int]
    cut: bool


class ScriptedSampler:
    """Gives a script's tokens, each with its index as logprob; one at a time in a stream.

    With `--engine vllm` another one has its place, which lets a real server sample them (`tests/vllm/forced.py`).
    """

    def __init__(self, end: int) -> None:
        self._end = end
        self.policy_version = VERSION

    async def sample(self, script: Script, request: TokenRequest) -> AsyncGenerator[EngineTokens | EngineFinish]:
        ids, cut = script
        logprobs = [-0.25 * (i + 1) for i in range(len(ids))]
        size = 1 if request.stream else len(ids)
        for i in range(0, len(ids), size):
            yield EngineTokens(ids[i : i + size], logprobs[i : i + size])
        yield EngineFinish(
            "length" if cut else "stop", None if cut else self._end, [VersionRange(VERSION, 0, len(ids))]
        )

    def logprob_kind(self, sampling: Sampling) -> str:
        return "greedy" if sampling.temperature == 0 else "sampled"

    async def check(self) -> None:
        pass

    async def load(self) -> None:
        pass

    async def pause(self) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def close(self) -> None:
        pass


class ScriptedEngine:
    """Says the scripted answers in turn (then `ok`), each closed by the turn's end token; its `sampler` samples them.

    While `hold` is there, generations wait until it is set; `fail` makes the next ones fail. With `steps`, a part of an
    answer waits for a permit before it is given: each token of a stream. `logprobs` are those that were given, of each
    generation.
    """

    model = MODEL
    abilities = frozenset({"min_p", "images"})
    context: int | None = None
    sampler: ClassVar[Any] = ScriptedSampler

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._sampler = self.sampler(self._end)
        self.script: deque[str] = deque()
        self.prompts: list[list[int]] = []
        self.media: list[Sequence[Shown]] = []  # of each of them
        self.samplings: list[Sampling] = []
        self.logprobs: list[list[float]] = []
        self.hold: asyncio.Event | None = None
        self.fail = 0
        self.aborted = 0
        self.steps: asyncio.Semaphore | None = None
        self.frozen = False

    @property
    def policy_version(self) -> int:
        return int(self._sampler.policy_version)

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._sampler.policy_version = version

    async def check(self) -> int | None:
        told: int | None = await self._sampler.check()
        return told

    async def load(self) -> Load | None:
        told: Load | None = await self._sampler.load()
        return told

    async def pause(self) -> None:
        await self._sampler.pause()
        self.frozen = True

    async def resume(self) -> None:
        await self._sampler.resume()
        self.frozen = False

    async def generate(self, request: TokenRequest) -> AsyncGenerator[EngineTokens | EngineFinish]:
        assert request.encoded is None or msgspec.json.decode(request.encoded) == request.prompt
        self.prompts.append(request.prompt.copy())  # once it is answered, the list goes on
        self.media.append(request.media)
        self.samplings.append(request.sampling)
        script, hold = self._next(), self.hold
        if self.fail:
            self.fail -= 1
            raise EngineUnavailable("scripted failure")
        finish: EngineFinish | None = None
        sampled = self._sampler.sample(script, request)
        given: list[float] = []
        self.logprobs.append(given)
        try:
            async with aclosing(sampled) as parts:
                async for part in parts:
                    if hold is not None:
                        await hold.wait()
                    if isinstance(part, EngineFinish):
                        finish = part
                        break
                    for piece in _pieces(part) if self.steps is not None and request.stream else [part]:
                        if self.steps is not None:
                            await self.steps.acquire()
                        given += piece.logprobs or []
                        yield piece
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise
        if finish is not None:
            yield finish

    def logprob_kind(self, sampling: Sampling) -> str:
        return str(self._sampler.logprob_kind(sampling))

    async def close(self) -> None:
        await self._sampler.close()

    def _next(self) -> Script:
        text = self.script.popleft() if self.script else "ok"
        ids = self._tokenizer.encode(text)
        cut = text.endswith("...")  # as if max_tokens had been reached
        return Script(ids if cut else [*ids, self._end], cut)


def _pieces(part: EngineTokens) -> Iterator[EngineTokens]:
    """A part token by token: an engine gives more at once where its client is slow."""
    for i, token in enumerate(part.token_ids):
        yield EngineTokens([token], None if part.logprobs is None else part.logprobs[i : i + 1])


def calls_in(spans: Iterable[Span]) -> list[Span]:
    """Those of calls, without what is recorded once of an attempt, as its tools."""
    return [span for span in spans if span.name == semconv.CALL_SPAN]


class Served:
    """A gateway that listens on the loopback, and the parts that a test looks at."""

    def __init__(self, url: str, gateway: Gateway, ledger: MemoryLedger, engine: ScriptedEngine, loop: Any) -> None:
        self.url = url
        self.gateway = gateway
        self.ledger = ledger
        self.engine = engine
        self._loop = loop

    def base_url(self, rollout_id: str = "r1", attempt_id: str = "a1", agent: str | None = None) -> str:
        return base_url(self.url, Address(rollout_id, attempt_id, agent))

    def key(self, rollout_id: str = "r1", attempt_id: str = "a1", expires_in: float = 600) -> str:
        return sign_attempt_key(SECRET, rollout_id, attempt_id, int(time.time() + expires_in))

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run a coroutine on the gateway's own loop."""

        async def call() -> Any:
            return await work()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(30)

    def seal(self, rollout_id: str = "r1", attempt_id: str = "a1") -> None:
        self.run(lambda: self.gateway.seal(rollout_id, attempt_id))

    def eventually(self, what: Callable[[], bool]) -> None:
        """Wait until `what` holds."""
        deadline = time.monotonic() + 20
        while not what():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.005)


@pytest.fixture(scope="session")
def tokenizer() -> FastTokenizer:
    return FastTokenizer(TOKENIZER)


@pytest.fixture(scope="session")
def renderer() -> LibraryRenderer:
    return load_renderer(TOKENIZER, "qwen3", MODEL)


@pytest.fixture
def served(
    request: pytest.FixtureRequest, tokenizer: FastTokenizer, renderer: LibraryRenderer, tmp_path: Path
) -> Iterator[Served]:
    """A gateway behind our server; with the parameter `ASGI` behind any other."""
    ledger, engine, router = MemoryLedger(), ScriptedEngine(tokenizer), Router(MODEL)
    router.register(engine)
    gateway = Gateway(
        ledger=ledger,
        secret=SECRET,
        journal=tmp_path / "journal",
        renderer=renderer,
        router=router,
        grace_seconds=0.2,
    )
    with listening(gateway, ours=getattr(request, "param", None) != ASGI) as (url, loop):
        yield Served(url, gateway, ledger, engine, loop)


@contextmanager
def listening(gateway: Gateway, *, ours: bool = True) -> Iterator[tuple[str, Any]]:
    """Serve a gateway from a thread of its own, with the server's own HTTP or with plain uvicorn's."""
    http = protocol(gateway.limits) if ours else HttpToolsProtocol
    # With its protocol named, asyncio turns Nagle's algorithm off; else every answer waits 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        loops: list[asyncio.AbstractEventLoop] = []
        server = StoppableServer(uvicorn.Config(gateway, http=http, log_level="warning", lifespan="off"))

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await gateway.start()
            await server.serve(sockets=[listener])
            await gateway.stop()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert server.started_up.wait(20)
        try:
            yield f"http://127.0.0.1:{port}", loops[0]
        finally:
            server.stop()
            thread.join(20)
