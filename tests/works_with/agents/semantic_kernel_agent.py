"""Semantic Kernel's `ChatCompletionAgent`, and `OpenAIResponsesAgent` over Responses."""

import asyncio
import os
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from openai import AsyncOpenAI
from semantic_kernel.agents import (
    ChatCompletionAgent,
    ChatHistoryAgentThread,
    OpenAIResponsesAgent,
    ResponsesAgentThread,
)
from semantic_kernel.connectors.ai.anthropic import AnthropicChatCompletion
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

client = AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"])


class Cities:
    """The tools."""

    weather = staticmethod(kernel_function(weather))
    population = staticmethod(kernel_function(population))


async def main() -> None:
    common = {"name": "asked", "instructions": INSTRUCTIONS, "plugins": [Cities()]}
    if sys.argv[1] == "responses":
        agent = OpenAIResponsesAgent(ai_model_id="policy", client=client, store_enabled=False, **common)
        thread = ResponsesAgentThread(client=client, enable_store=False)
    elif sys.argv[1] == "messages":
        agent, thread = (
            ChatCompletionAgent(service=AnthropicChatCompletion("policy"), **common),
            ChatHistoryAgentThread(),
        )
    else:
        service = OpenAIChatCompletion(ai_model_id="policy", async_client=client)
        agent, thread = ChatCompletionAgent(service=service, **common), ChatHistoryAgentThread()
    for question in QUESTIONS:
        if sys.argv[2] == "stream":
            text = ""
            async for piece in agent.invoke_stream(question, thread=thread):
                text += str(piece.content)
            print(text)
        else:
            print((await agent.get_response(question, thread=thread)).content)


asyncio.run(main())
