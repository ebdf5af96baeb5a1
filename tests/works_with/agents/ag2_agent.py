"""AG2's agent."""

import asyncio
import os
import sys

from ag2 import Agent
from ag2.config import AnthropicConfig, OpenAIConfig, OpenAIResponsesConfig
from asked import INSTRUCTIONS, QUESTIONS, population, weather

kind, url = {
    "chat": (OpenAIConfig, os.environ["OPENAI_BASE_URL"]),
    "responses": (OpenAIResponsesConfig, os.environ["OPENAI_BASE_URL"]),
    "messages": (AnthropicConfig, os.environ["ANTHROPIC_BASE_URL"]),
}[sys.argv[1]]
config = kind(model="policy", base_url=url, streaming=sys.argv[2] == "stream")
agent = Agent("asked", prompt=INSTRUCTIONS, config=config, tools=[weather, population])


async def main() -> None:
    said = agent
    for question in QUESTIONS:
        said = await said.ask(question)
        print(said.body)


asyncio.run(main())
