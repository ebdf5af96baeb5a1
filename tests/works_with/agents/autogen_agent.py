"""AutoGen's `AssistantAgent`."""

import asyncio
import os
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.anthropic import AnthropicChatCompletionClient
from autogen_ext.models.openai import OpenAIChatCompletionClient

stream = sys.argv[2] == "stream"
info = ModelInfo(
    vision=False, function_calling=True, json_output=False, family=ModelFamily.UNKNOWN, structured_output=False
)
if sys.argv[1] == "messages":
    client = AnthropicChatCompletionClient(
        model="policy", base_url=os.environ["ANTHROPIC_BASE_URL"], api_key=os.environ["ANTHROPIC_API_KEY"],
        max_tokens=200, model_info=info,
    )  # fmt: skip
else:
    client = OpenAIChatCompletionClient(model="policy", base_url=os.environ["OPENAI_BASE_URL"], model_info=info)
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
