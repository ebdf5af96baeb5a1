"""LlamaIndex's `ReActAgent`, which writes calls as text."""

import asyncio
import os
import sys

from asked import QUESTIONS, population, weather
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike

url = os.environ["OPENAI_BASE_URL"]
llm = OpenAILike("policy", api_base=url, is_chat_model=True, context_window=32768)


async def main() -> None:
    agent = ReActAgent(tools=[weather, population], llm=llm, streaming=sys.argv[2] == "stream")
    memory = ChatMemoryBuffer(token_limit=10_000, tokenizer_fn=str.split)
    for question in QUESTIONS:
        print(await agent.run(question, memory=memory))


asyncio.run(main())
