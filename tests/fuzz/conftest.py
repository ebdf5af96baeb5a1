"""One gateway for all of the fuzzing in a process, with an engine that follows plans."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_rl_proxy.gateway import Gateway
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from lightning_rl_proxy.routing.router import Router
from tests.fuzz.laws import Fuzzed, PlannedEngine, PlannedService
from tests.proxy.conftest import MODEL, SECRET, TOKENIZER, MemoryLedger, Served, listening


class Errors(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.fuzz)


@pytest.fixture(scope="session")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    tokenizer = FastTokenizer(TOKENIZER)
    engine, router, ledger = PlannedEngine(tokenizer.convert_tokens_to_ids("<|im_end|>")), Router(MODEL), MemoryLedger()
    router.register(engine)
    router.register_backend(PlannedService(engine))
    gateway = Gateway(
        ledger=ledger,
        secret=SECRET,
        journal=tmp_path_factory.mktemp("fuzz") / "journal",
        renderer=load_renderer(TOKENIZER, "qwen3", MODEL),
        router=router,
        grace_seconds=0.05,
    )
    errors = Errors()
    with listening(gateway) as (url, loop):
        loggers = [logging.getLogger(name) for name in (None, "uvicorn")]  # uvicorn's does not hand on
        for logger in loggers:
            logger.addHandler(errors)
        yield Fuzzed(Served(url, gateway, ledger, engine, loop), engine, errors.records)  # type: ignore[arg-type]
        for logger in loggers:
            logger.removeHandler(errors)
