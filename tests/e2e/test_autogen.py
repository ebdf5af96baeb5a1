"""AutoGen in the shape of Agent-lightning's calculator example: an assistant with a tool, its client at our URL."""

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as agl
from lightning_rl_adapters import credit, forest, rows
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer
from tests.e2e.test_agent_lightning_shapes import TASKS, trained
from tests.lightning_rl.langgraph.conftest import llm_of
from tests.proxy.conftest import TOKENIZER, Served, renderer, served, tokenizer

__all__ = ["renderer", "served", "tokenizer"]

IN_ITS_ENVIRONMENT = Path(sys.prefix).name == ".venv-agents"  # `make test-agents`, where it must be
pytestmark = [
    pytest.mark.agents,
    pytest.mark.smoke,
    pytest.mark.skipif(
        not IN_ITS_ENVIRONMENT and importlib.util.find_spec("autogen_agentchat") is None,
        reason="needs AutoGen: make test-agents",
    ),
]


def calculate(expression: str) -> str:
    """The value of a sum."""
    return str(sum(int(part) for part in expression.split("+")))


async def ask(question: str, llm: agl.LLM) -> str:
    """As the example asks: a client of the endpoint alone, and an assistant that looks at what its tool said."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import ModelFamily
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(
        model=llm.model,
        base_url=llm.endpoint,
        api_key="token-abc123",
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "family": ModelFamily.UNKNOWN,
            "structured_output": False,
        },
        temperature=llm.sampling_parameters.get("temperature", 0.7),
    )
    agent = AssistantAgent(
        name="calc",
        model_client=client,
        tools=[calculate],
        system_message="sum",  # the tutorial's model takes 512 tokens, of which AutoGen's own text is a hundred
        reflect_on_tool_use=True,
    )
    try:
        said: Any = await agent.run(task=question)
    finally:
        await client.close()
    return str(said.messages[-1].content)


@agl.rollout
async def calculator(task: dict[str, str], llm: agl.LLM) -> None:
    agl.emit_reward(float(task["result"] in await ask(task["question"], llm)))


def test_the_calculator_is_trained_for_a_step_and_recorded_whole(tmp_path: Path) -> None:
    found = trained(calculator, tmp_path / "run")
    assert len(found) == len(TASKS) * 2
    for rollout, calls in found:
        assert (rollout.status, rollout.error) == ("succeeded", None)
        assert rollout.reward in (0.0, 1.0)
        assert len(calls) >= 1
        assert all(call.logprobs is not None and len(call.logprobs) == len(call.response_ids) for call in calls)


def test_its_tool_is_called_and_what_it_says_of_the_result_is_a_row_of_its_own(served: Served) -> None:
    """AutoGen reflects on a result without its tools in the request: another prompt from its first token on."""
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "37+22"}}\n</tool_call>'
    served.engine.script.extend([call, "It is 59."])
    assert asyncio.run(ask("What is 37+22?", llm_of(served))) == "It is 59."
    served.seal()
    calls = served.ledger.calls()
    assert [call.parent_id for call in calls] == [None, None]
    built = forest.build(calls)
    cut = rows.cut(built, credit.final_values(built, 1.0))
    expected = [[*prompt, *call.response_ids] for prompt, call in zip(served.engine.prompts, calls, strict=True)]
    assert sorted(row.token_ids for row in cut) == sorted(expected)
    assert "59" in FastTokenizer(TOKENIZER).decode(served.engine.prompts[1])
