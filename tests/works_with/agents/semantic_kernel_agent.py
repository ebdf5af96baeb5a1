"""Semantic Kernel's `ChatCompletionAgent`."""

import asyncio
import os
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

client = AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"])


class Cities:
    """The tools."""

    weather = staticmethod(kernel_function(weather))
    population = staticmethod(kernel_function(population))


async def main() -> None:
    service = OpenAIChatCompletion(ai_model_id="policy", async_client=client)
    agent = ChatCompletionAgent(service=service, name="asked", instructions=INSTRUCTIONS, plugins=[Cities()])
    thread = ChatHistoryAgentThread()
    for question in QUESTIONS:
        if sys.argv[2] == "stream":
            text = ""
            async for piece in agent.invoke_stream(question, thread=thread):
                text += str(piece.content)
            print(text)
        else:
            print((await agent.get_response(question, thread=thread)).content)


asyncio.run(main())
