"""AutoGen's `AssistantAgent`."""

import asyncio
import os
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient

stream = sys.argv[2] == "stream"
client = OpenAIChatCompletionClient(
    model="policy",
    base_url=os.environ["OPENAI_BASE_URL"],
    model_info={
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": ModelFamily.UNKNOWN,
        "structured_output": False,
    },
)
agent = AssistantAgent(
    "asked",
    client,
    tools=[weather, population],
    system_message=INSTRUCTIONS,
    max_tool_iterations=4,
    model_client_stream=stream,
)


async def main() -> None:
    for question in QUESTIONS:
        print((await agent.run(task=question)).messages[-1].content)
    await client.close()


asyncio.run(main())
