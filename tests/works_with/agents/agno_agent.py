"""Agno, over three APIs; it keeps the conversation in a database of its own."""

import os
import sys

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIChat, OpenAIResponses
from asked import INSTRUCTIONS, QUESTIONS, population, weather

api, stream = sys.argv[1], sys.argv[2] == "stream"
if api == "messages":
    model = Claude(id="policy", max_tokens=200)
else:
    model = (OpenAIResponses if api == "responses" else OpenAIChat)(id="policy", base_url=os.environ["OPENAI_BASE_URL"])
agent = Agent(
    model=model, instructions=INSTRUCTIONS, tools=[weather, population], db=InMemoryDb(), add_history_to_context=True
)
for question in QUESTIONS:
    if stream:
        print("".join(event.content or "" for event in agent.run(question, stream=True) if event.event == "RunContent"))
    else:
        print(agent.run(question).content)
