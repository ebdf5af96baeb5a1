"""Strands Agents; it always streams."""

import os
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

if sys.argv[1] == "messages":
    model = AnthropicModel(model_id="policy", max_tokens=200)
else:
    kind = OpenAIResponsesModel if sys.argv[1] == "responses" else OpenAIModel
    model = kind(model_id="policy", client_args={"base_url": os.environ["OPENAI_BASE_URL"]})
agent = Agent(model=model, system_prompt=INSTRUCTIONS, tools=[tool(weather), tool(population)], callback_handler=None)
for question in QUESTIONS:
    print(agent(question))
