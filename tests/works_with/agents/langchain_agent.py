"""LangChain: an agent with tools by `create_agent`."""

import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from langchain.agents import create_agent
from langchain.chat_models import init_chat_model

api, stream = sys.argv[1], sys.argv[2] == "stream"
if api == "messages":
    model = init_chat_model("anthropic:policy", max_tokens=200, streaming=stream)
else:
    model = init_chat_model("openai:policy", use_responses_api=api == "responses", streaming=stream)
agent = create_agent(model, [weather, population], system_prompt=INSTRUCTIONS)
messages = []
for question in QUESTIONS:
    messages = agent.invoke({"messages": [*messages, ("user", question)]})["messages"]
    print(messages[-1].text)
