"""Pydantic AI, over three APIs."""

import asyncio
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from pydantic_ai import Agent

api, stream = sys.argv[1], sys.argv[2] == "stream"
model = {"chat": "openai-chat:policy", "responses": "openai-responses:policy", "messages": "anthropic:policy"}[api]
agent = Agent(model, instructions=INSTRUCTIONS, tools=[weather, population])


async def watch(_context, events) -> None:
    async for _ in events:
        pass


async def main() -> None:
    history = None
    for question in QUESTIONS:
        run = await agent.run(question, message_history=history, event_stream_handler=watch if stream else None)
        print(run.output)
        history = run.all_messages()


asyncio.run(main())
