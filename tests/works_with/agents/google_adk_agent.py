"""Google's ADK, by litellm; over Messages by its own client."""

import asyncio
import os
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.anthropic_llm import AnthropicLlm
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

if sys.argv[1] == "messages":
    model = AnthropicLlm(model="policy")
else:
    model = LiteLlm(model="openai/policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = LlmAgent(name="asked", model=model, instruction=INSTRUCTIONS, tools=[weather, population])


async def main() -> None:
    runner = InMemoryRunner(agent, app_name="asked")
    session = await runner.session_service.create_session(app_name="asked", user_id="user")
    config = RunConfig(streaming_mode=StreamingMode.SSE if sys.argv[2] == "stream" else StreamingMode.NONE)
    for question in QUESTIONS:
        message = types.Content(role="user", parts=[types.Part(text=question)])
        events = runner.run_async(user_id="user", session_id=session.id, new_message=message, run_config=config)
        async for event in events:
            if event.is_final_response() and event.content:
                print("".join(part.text or "" for part in event.content.parts))


asyncio.run(main())
