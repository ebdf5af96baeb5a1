"""CrewAI: an agent outside a crew, over its own client or litellm."""

import os
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from crewai import LLM, Agent
from crewai.tools import tool

api, stream = sys.argv[1], sys.argv[2] == "stream"
if api == "messages":
    llm = LLM(model="anthropic/claude-sonnet-4-5", base_url=os.environ["ANTHROPIC_BASE_URL"], stream=stream)
else:
    over = "responses" if api == "responses" else "completions"
    llm = LLM(model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], stream=stream, api=over)
agent = Agent(
    role="guide", goal=INSTRUCTIONS, backstory="You know cities.", llm=llm, tools=[tool(weather), tool(population)]
)
messages = []
for question in QUESTIONS:
    said = agent.kickoff([*messages, {"role": "user", "content": question}])
    messages = [message for message in said.messages if message["role"] != "system"]
    print(said.raw)
