"""LlamaIndex's `FunctionAgent`."""

import asyncio
import os
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike

url = os.environ["OPENAI_BASE_URL"]
llm = OpenAILike("policy", api_base=url, is_chat_model=True, is_function_calling_model=True, context_window=32768)


async def main() -> None:
    stream = sys.argv[2] == "stream"
    agent = FunctionAgent(tools=[weather, population], llm=llm, system_prompt=INSTRUCTIONS, streaming=stream)
    memory = ChatMemoryBuffer(token_limit=10_000, tokenizer_fn=str.split)
    for question in QUESTIONS:
        print(await agent.run(question, memory=memory))


asyncio.run(main())
