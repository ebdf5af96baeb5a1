"""instructor: answers as objects, in one conversation."""

import sys

import instructor
from asked import QUESTIONS
from pydantic import BaseModel


class Report(BaseModel):
    """The weather in a city, and how many people live there."""

    city: str
    weather: str
    population: str


def openai(messages: list) -> Report:
    """One answer over Chat Completions, and it becomes history."""
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(), mode=instructor.Mode.TOOLS)
    report, completion = client.chat.completions.create_with_completion(
        model="policy", messages=messages, response_model=Report
    )
    answered = completion.choices[0].message
    noted = {"role": "tool", "tool_call_id": answered.tool_calls[0].id, "content": "noted"}
    messages += [answered.model_dump(), noted]
    return report


def anthropic(messages: list) -> Report:
    """The same over Messages."""
    from anthropic import Anthropic

    client = instructor.from_anthropic(Anthropic(), mode=instructor.Mode.ANTHROPIC_TOOLS)
    report, completion = client.messages.create_with_completion(
        model="policy", max_tokens=200, messages=messages, response_model=Report
    )
    [call] = [part for part in completion.content if part.type == "tool_use"]
    noted = {"type": "tool_result", "tool_use_id": call.id, "content": "noted"}
    messages += [
        {"role": "assistant", "content": [part.model_dump(exclude_none=True) for part in completion.content]},
        {"role": "user", "content": [noted]},
    ]
    return report


ask = {"chat": openai, "messages": anthropic}[sys.argv[1]]
conversation: list = []
for question in QUESTIONS:
    conversation.append({"role": "user", "content": question})
    found = ask(conversation)
    print(f"It is {found.weather} in {found.city}, and {found.population} people live there.")
