"""mcp-agent's `Agent` with functions for tools; over Messages its client always streams."""

import asyncio
import os
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from mcp_agent.agents.agent import Agent
from mcp_agent.app import MCPApp
from mcp_agent.config import AnthropicSettings, LoggerSettings, OpenAISettings, Settings
from mcp_agent.workflows.llm.augmented_llm_anthropic import AnthropicAugmentedLLM
from mcp_agent.workflows.llm.augmented_llm_openai import OpenAIAugmentedLLM


async def main() -> None:
    """Two questions in one conversation."""
    env = os.environ
    openai = OpenAISettings(api_key=env["OPENAI_API_KEY"], base_url=env["OPENAI_BASE_URL"], default_model="policy")
    anthropic = AnthropicSettings(
        api_key=env["ANTHROPIC_API_KEY"], base_url=env["ANTHROPIC_BASE_URL"], default_model="policy"
    )
    settings = Settings(openai=openai, anthropic=anthropic, logger=LoggerSettings(type="none"))
    app = MCPApp(name="asks", settings=settings)
    async with app.run():
        agent = Agent(name="asks", instruction=INSTRUCTIONS, functions=[weather, population])
        async with agent:
            llm = await agent.attach_llm(AnthropicAugmentedLLM if sys.argv[1] == "messages" else OpenAIAugmentedLLM)
            for question in QUESTIONS:
                print((await llm.generate_str(question)).splitlines()[-1])


asyncio.run(main())
