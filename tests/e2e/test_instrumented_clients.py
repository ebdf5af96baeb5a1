"""OpenTelemetry's instrumentation of HTTP clients: an SDK that knows nothing of agents sends who acts."""

import importlib.util
import sys
from pathlib import Path

import openai
import pytest
from opentelemetry import baggage, context

from tests.lightning_rl.langgraph.conftest import llm_of
from tests.proxy.conftest import Served, renderer, served, tokenizer

__all__ = ["renderer", "served", "tokenizer"]

pytestmark = [
    pytest.mark.agents,
    pytest.mark.smoke,
    pytest.mark.skipif(
        Path(sys.prefix).name != ".venv-agents"  # `make test-agents`, where it must be
        and importlib.util.find_spec("opentelemetry.instrumentation.httpx") is None,
        reason="needs opentelemetry-instrumentation-httpx: make test-agents",
    ),
]


def test_an_instrumented_client_names_the_agent(served: Served) -> None:
    from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor

    llm = llm_of(served)
    HTTPXClientInstrumentor().instrument()
    try:
        sdk = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0)
        for agent in ("planner", "writer"):
            token = context.attach(baggage.set_baggage("lightning_rl.agent", agent))
            sdk.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": agent}])
            context.detach(token)
    finally:
        HTTPXClientInstrumentor().uninstrument()
    served.seal()
    assert [call.agent for call in served.ledger.calls()] == ["planner", "writer"]
