"""Haystack's `Agent`."""

import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack_integrations.components.generators.anthropic import AnthropicChatGenerator

api, stream = sys.argv[1], sys.argv[2] == "stream"
generator = {
    "chat": OpenAIChatGenerator,
    "responses": OpenAIResponsesChatGenerator,
    "messages": AnthropicChatGenerator,
}[api]
agent = Agent(
    chat_generator=generator(model="policy", streaming_callback=(lambda chunk: None) if stream else None),
    system_prompt=INSTRUCTIONS,
    tools=[create_tool_from_function(weather), create_tool_from_function(population)],
)
messages: list[ChatMessage] = []
for question in QUESTIONS:
    _instructions, *messages = agent.run(messages=[*messages, ChatMessage.from_user(question)])["messages"]
    print(messages[-1].text)
