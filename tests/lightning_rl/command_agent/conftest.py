"""The proxy tests' gateway, an attempt's `llm` on it, and what runs an agent on a task."""

from tests.lightning_rl.langgraph.conftest import Recorded, llm, recorded
from tests.lightning_rl.loops.conftest import Run, run
from tests.proxy.conftest import renderer, served, tokenizer

__all__ = ["Recorded", "Run", "llm", "recorded", "renderer", "run", "served", "tokenizer"]
