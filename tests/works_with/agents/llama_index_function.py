"""LlamaIndex's `FunctionAgent`."""

import asyncio
import os
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.anthropic import Anthropic
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 32768}
if sys.argv[1] == "messages":  # it knows the context of Anthropic's models alone; the gateway takes any name
    llm = Anthropic("claude-sonnet-4-5", max_tokens=200)
else:
    client = OpenAILikeResponses if sys.argv[1] == "responses" else OpenAILike
    llm = client("policy", api_base=os.environ["OPENAI_BASE_URL"], **kind)


async def main() -> None:
    stream = sys.argv[2] == "stream"
    agent = FunctionAgent(tools=[weather, population], llm=llm, system_prompt=INSTRUCTIONS, streaming=stream)
    memory = ChatMemoryBuffer(token_limit=10_000, tokenizer_fn=str.split)
    for question in QUESTIONS:
        print(await agent.run(question, memory=memory))


asyncio.run(main())
