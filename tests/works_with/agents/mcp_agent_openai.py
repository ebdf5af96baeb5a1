"""mcp-agent's `Agent` with functions for tools."""

import asyncio
import os
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from mcp_agent.agents.agent import Agent
from mcp_agent.app import MCPApp
from mcp_agent.config import LoggerSettings, OpenAISettings, Settings
from mcp_agent.workflows.llm.augmented_llm_openai import OpenAIAugmentedLLM


async def main() -> None:
    """Two questions in one conversation."""
    assert sys.argv[1:3] == ["chat", "whole"]
    openai = OpenAISettings(
        api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"], default_model="policy"
    )
    app = MCPApp(name="asks", settings=Settings(openai=openai, logger=LoggerSettings(type="none")))
    async with app.run():
        agent = Agent(name="asks", instruction=INSTRUCTIONS, functions=[weather, population])
        async with agent:
            llm = await agent.attach_llm(OpenAIAugmentedLLM)
            for question in QUESTIONS:
                print((await llm.generate_str(question)).splitlines()[-1])


asyncio.run(main())
