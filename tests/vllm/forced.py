"""A real vLLM in the place of the tests' scripted engine: its client and server are real, and it samples the script.

`pytest --engine vllm` makes this a plugin of the session: one server for all tests, which `ScriptedEngine` has its
answers sampled by. What a test scripts that no engine does is marked `scripted`, with the reason, and keeps the
scripted one; the summary counts both.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_rl_proxy.engines.base import EngineFinish, EngineTokens, TokenRequest
from lightning_rl_proxy.engines.vllm import TokenEngine
from lightning_rl_proxy.sampling import Sampling
from tests.proxy.conftest import MODEL, VERSION, Script, ScriptedEngine, ScriptedSampler
from tests.vllm.server import Server


class ForcingServer(Server):
    """A server that samples the scripts of its requests."""

    def __init__(self, log: Path) -> None:
        super().__init__(log, "--logits-processors", "forced_tokens:ForcedTokens")

    def reset(self) -> None:
        """Be as at the start: nothing in flight, neither paused nor labelled."""
        self.abort_all()
        self._order("/resume", b"{}")
        self.forget_version()


class _Told(Sampling, frozen=True, kw_only=True):
    """Sampling parameters, and the tokens that shall come."""

    script: list[int]


class ForcedVllm(TokenEngine):
    """The gateway's own client of vLLM, which tells the server beside all else which tokens to sample."""

    def __init__(self, server: ForcingServer, asked: Counter[str], end: int) -> None:
        super().__init__(
            model=MODEL, kind="vllm", url=server.url, stop_token_ids=[end], policy_version=VERSION, logprobs="raw"
        )
        self._asked = asked

    async def sample(self, script: Script, request: TokenRequest) -> AsyncGenerator[EngineTokens | EngineFinish]:
        """See `ScriptedSampler`."""
        self._asked["generations"] += 1
        sampling = request.sampling
        told = _Told(**msgspec.structs.asdict(sampling) | {"max_tokens": _limit(script, sampling)}, script=script.ids)
        async with aclosing(self.generate(request._replace(sampling=told))) as parts:
            async for part in parts:
                yield part

    def _parameters(self, sampling: Sampling) -> dict[str, Any]:
        parameters = super()._parameters(sampling)
        return parameters | {"extra_args": {"script": parameters.pop("script")}}


def _limit(script: Script, sampling: Sampling) -> int | None:
    """`max_tokens`: a script that is cut is one that reached it, and every other one has room."""
    if script.cut:
        return len(script.ids)
    return None if sampling.max_tokens is None else max(sampling.max_tokens, len(script.ids))


class ForcedSession:
    """The plugin: a server while tests run, and at the end how many asked it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()
        self._server: ForcingServer | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Outside of every test, whose time it would count for."""
        if session.config.option.collectonly or not session.items:
            return (yield)
        with self._serving() as server, pytest.MonkeyPatch.context() as patch:
            patch.setattr(ScriptedEngine, "sampler", partial(ForcedVllm, server, self._asked))
            return (yield)

    @pytest.fixture(autouse=True)
    def _forced_engine(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """The engine that a test's marks ask for; it is left as it was found, neither paused nor labelled."""
        marked = request.node.get_closest_marker("scripted") is not None
        if marked:
            monkeypatch.setattr(ScriptedEngine, "sampler", ScriptedSampler)
        before = self._asked["generations"]
        yield
        asked = self._asked["generations"] - before
        self._tests["scripted" if marked else "vllm" if asked else "none"] += 1
        if not marked and self._server is not None:
            self._server.reset()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        tests, asked = self._tests, self._asked["generations"]
        terminalreporter.write_line(
            f"engine vllm: {tests['vllm']} tests sampled on the server ({asked} generations), "
            f"{tests['scripted']} kept the scripted engine by their mark, {tests['none']} asked no engine; "
            f"its log is {self._folder / 'vllm.log'}"
        )

    @contextmanager
    def _serving(self) -> Iterator[ForcingServer]:
        self._server = server = ForcingServer(self._folder / "vllm.log")
        try:
            yield server
        finally:
            server.stop()
