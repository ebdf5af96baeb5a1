"""Atomic Agents' `BaseAgent`: its answers are objects, by instructor."""

import asyncio
import sys

import instructor
from asked import QUESTIONS
from atomic_agents.agents.base_agent import BaseAgent, BaseAgentConfig, BaseAgentInputSchema
from openai import AsyncOpenAI, OpenAI

stream = sys.argv[2] == "stream"
client = instructor.from_openai(AsyncOpenAI() if stream else OpenAI())
agent = BaseAgent(BaseAgentConfig(client=client, model="policy"))


async def streamed(asked: BaseAgentInputSchema) -> str:
    """The last state of an answer that fills up."""
    async for answer in agent.run_async(asked):
        said = answer.chat_message
    return said


async def main() -> None:
    """Two questions in one conversation, in one event loop: the client keeps its connection."""
    for question in QUESTIONS:
        asked = BaseAgentInputSchema(chat_message=question)
        print(await streamed(asked) if stream else agent.run(asked).chat_message)


asyncio.run(main())
