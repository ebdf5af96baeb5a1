"""One gateway for all agents: each has an attempt of its own."""

from collections.abc import Iterator

import pytest

from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.proxy.conftest import MODEL, SECRET, TOKENIZER, MemoryLedger, Script, ScriptedEngine, Served, listening


class Engine(ScriptedEngine):
    """A scripted engine that answers prompts with `aside` in them as what they are: requests for a title."""

    aside = ""

    def _next(self) -> Script:
        if self.aside and self.aside in self._tokenizer.decode(self.prompts[-1]):
            return Script([*self._tokenizer.encode("A title"), self._end], cut=False)
        return super()._next()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    ledger, engine, router = MemoryLedger(), Engine(FastTokenizer(TOKENIZER)), Router(MODEL)
    router.register(engine)
    gateway = Gateway(
        ledger=ledger,
        secret=SECRET,
        journal=tmp_path_factory.mktemp("gateway") / "journal",
        renderer=load_renderer(TOKENIZER, "qwen3", MODEL),
        router=router,
        grace_seconds=0.2,
    )
    with listening(gateway) as (url, loop):
        yield Served(url, gateway, ledger, engine, loop)
