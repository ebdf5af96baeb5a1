"""Atomic Agents' `BaseAgent`: its answers are objects, by instructor."""

import sys

import instructor
from asked import QUESTIONS
from atomic_agents.agents.base_agent import BaseAgent, BaseAgentConfig, BaseAgentInputSchema
from openai import OpenAI

assert sys.argv[1:3] == ["chat", "whole"]
agent = BaseAgent(BaseAgentConfig(client=instructor.from_openai(OpenAI()), model="policy"))
for question in QUESTIONS:
    print(agent.run(BaseAgentInputSchema(chat_message=question)).chat_message)
