"""smolagents: the agent that calls tools as functions, `final_answer` the last."""

import os
import sys

from asked import QUESTIONS, population, weather
from smolagents import LiteLLMModel, OpenAIModel, ToolCallingAgent, tool

for function in (weather, population):
    function.__doc__ = f"{function.__doc__}\n\nArgs:\n    city: The name of the city."
stream = sys.argv[2] == "stream"
if sys.argv[1] == "messages":
    model = LiteLLMModel("anthropic/policy", api_base=os.environ["ANTHROPIC_BASE_URL"])
else:
    model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent([tool(weather), tool(population)], model, stream_outputs=stream, verbosity_level=0)
for number, question in enumerate(QUESTIONS):
    print(agent.run(question, reset=not number))
