"""OpenAI's Agents SDK, over Responses, Chat Completions, or Messages by litellm."""

import asyncio
import os
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from asked import INSTRUCTIONS, QUESTIONS, population, weather
from openai import AsyncOpenAI

api, stream = sys.argv[1], sys.argv[2] == "stream"
set_tracing_disabled(disabled=True)
if api == "messages":
    from agents.extensions.models.litellm_model import LitellmModel

    key = os.environ["ANTHROPIC_API_KEY"]
    model = LitellmModel("anthropic/policy", base_url=os.environ["ANTHROPIC_BASE_URL"], api_key=key)
elif api == "responses":
    model = OpenAIResponsesModel("policy", AsyncOpenAI())
else:
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI())


async def main() -> None:
    tools = [function_tool(weather), function_tool(population)]
    agent, session = Agent("asked", INSTRUCTIONS, tools=tools, model=model), SQLiteSession("1")
    for question in QUESTIONS:
        if stream:
            run = Runner.run_streamed(agent, question, session=session)
            async for _ in run.stream_events():
                pass
        else:
            run = await Runner.run(agent, question, session=session)
        print(run.final_output)


asyncio.run(main())
