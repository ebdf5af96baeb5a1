"""OpenHands, by its SDK: its default agent with a terminal. Its models go by litellm."""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.event import MessageEvent
from openhands.tools.terminal import TerminalTool

QUESTIONS = ("Say what is in hello.txt.", "And in world.txt?")

api, stream = sys.argv[1], sys.argv[2] == "stream"
sdk, name = ("ANTHROPIC", "anthropic") if api == "messages" else ("OPENAI", "openai")
llm = LLM(
    model=f"{name}/policy", base_url=os.environ[f"{sdk}_BASE_URL"], api_key=os.environ[f"{sdk}_API_KEY"], stream=stream
)
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
conversation = Conversation(
    agent=agent, workspace=os.getcwd(), visualizer=None, token_callbacks=[lambda chunk: None] if stream else None
)
for question in QUESTIONS:
    conversation.send_message(question)
    conversation.run()
    said = [event for event in conversation.state.events if isinstance(event, MessageEvent) and event.source == "agent"]
    print(said[-1].llm_message.content[0].text)
