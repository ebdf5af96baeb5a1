"""Two agents of OpenAI's Agents SDK: one is asked and hands the question over, the other has the calculator.

The hand-over is a tool that the SDK makes, `transfer_to_reckoner`. Each agent has a door of its own (`llm.for_agent`),
so that every recorded call carries its agent's name, by which rewards and training can tell them apart.
"""

from typing import Any

from agents import (  # type: ignore[import-not-found, unused-ignore]
    Agent,
    AgentsException,
    FunctionTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    Runner,
)

from examples.calculator.agent import CALCULATOR, MAX_TOKENS, calculate_json, reward
from lightning_rl import LLM, emit_exception, rollout

TURNS = 4


async def _calculate(context: RunContextWrapper[Any], arguments: str) -> str:
    return calculate_json(arguments)


def desk_and_reckoner(llm: LLM) -> Agent[Any]:
    """The agent that is asked; it can only hand over."""

    def model(name: str) -> OpenAIChatCompletionsModel:
        behind = llm.for_agent(name)
        client = behind.async_openai()
        return OpenAIChatCompletionsModel(model=behind.model, openai_client=client)

    settings = ModelSettings(max_tokens=MAX_TOKENS)
    tool = FunctionTool("calc", "", CALCULATOR, _calculate, strict_json_schema=False)
    reckoner = Agent(name="reckoner", model=model("reckoner"), tools=[tool], model_settings=settings)
    return Agent(name="desk", model=model("desk"), handoffs=[reckoner], model_settings=settings)


@rollout
async def handoff(task: dict[str, str], llm: LLM) -> float:
    """Answer `task["question"]`; what the model does wrong with its tools earns nothing."""
    quiet = RunConfig(tracing_disabled=True)  # the SDK would send its traces to OpenAI
    try:
        done = await Runner.run(desk_and_reckoner(llm), task["question"], max_turns=TURNS, run_config=quiet)
    except AgentsException as error:
        emit_exception(error)
        return 0.0
    return reward(task, str(done.final_output))
