"""CAMEL's `ChatAgent`. Its own counter of tokens would load a tokenizer from the network; this one counts words."""

import os
import sys

from asked import INSTRUCTIONS, QUESTIONS, population, weather
from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter


class Words(BaseTokenCounter):
    """Words for tokens."""

    def count_tokens_from_messages(self, messages: list) -> int:
        """Of all messages."""
        return sum(len(str(message.get("content")).split()) for message in messages)

    def encode(self, text: str) -> list[int]:
        """A number for each word."""
        return list(range(len(text.split())))

    def decode(self, token_ids: list[int]) -> str:
        """Nothing needs it."""
        raise NotImplementedError


stream = sys.argv[2] == "stream"
platform, sdk, config = {
    "chat": (ModelPlatformType.OPENAI_COMPATIBLE_MODEL, "OPENAI", {}),
    "messages": (ModelPlatformType.ANTHROPIC, "ANTHROPIC", {"max_tokens": 200}),
}[sys.argv[1]]
model = ModelFactory.create(
    model_platform=platform,
    model_type="policy",
    url=os.environ[f"{sdk}_BASE_URL"],
    api_key=os.environ[f"{sdk}_API_KEY"],
    token_counter=Words(),
    model_config_dict={**config, "stream": stream},
)
agent = ChatAgent(
    INSTRUCTIONS, model=model, tools=[FunctionTool(weather), FunctionTool(population)], stream_accumulate=True
)
for question in QUESTIONS:
    answered = agent.step(question)
    *_, last = answered if stream else [answered]
    print(last.msgs[0].content)
