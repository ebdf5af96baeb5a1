"""The gateway of the proxy's tests, and an attempt's `llm` on it."""

from collections.abc import Callable

import pytest

from lightning_rl.agents.resources import LLM
from lightning_rl_adapters import credit, forest, rows
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.rows import Row
from tests.proxy.conftest import MODEL, Served, renderer, served, tokenizer

__all__ = ["renderer", "served", "tokenizer"]

CALL = '<tool_call>\n{{"name": "{name}", "arguments": {{"what": "{what}"}}}}\n</tool_call>'


def calls_tool(name: str, *whats: str) -> str:
    """What the model says to call a tool, once for each argument."""
    return "\n".join(CALL.format(name=name, what=what) for what in whats)


def llm_of(served: Served, rollout_id: str = "r1", attempt_id: str = "a1") -> LLM:
    base_url = served.base_url(rollout_id, attempt_id)
    root = base_url.removesuffix("/v1")
    return LLM(MODEL, base_url, served.key(rollout_id, attempt_id), anthropic_base_url=root)


@pytest.fixture
def llm(served: Served) -> LLM:
    return llm_of(served)


Recorded = Callable[[], tuple[list[Call], list[Row]]]


@pytest.fixture
def recorded(served: Served) -> Recorded:
    """Seals the attempt: its calls, and the rows of reward 1."""

    def read() -> tuple[list[Call], list[Row]]:
        served.seal()
        calls = served.ledger.calls()
        built = forest.build(calls)
        return calls, rows.cut(built, credit.final_values(built, 1.0))

    return read
