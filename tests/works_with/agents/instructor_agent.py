"""instructor: answers as objects, two tools' worth of fields in each, in one conversation."""

import sys

import instructor
from asked import QUESTIONS
from openai import OpenAI
from pydantic import BaseModel


class Report(BaseModel):
    """The weather in a city, and how many people live there."""

    city: str
    weather: str
    population: str


assert sys.argv[1:3] == ["chat", "whole"]
client = instructor.from_openai(OpenAI(), mode=instructor.Mode.TOOLS)
messages: list = []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    report, completion = client.chat.completions.create_with_completion(
        model="policy", messages=messages, response_model=Report
    )
    answered = completion.choices[0].message
    messages += [answered.model_dump(), {"role": "tool", "tool_call_id": answered.tool_calls[0].id, "content": "noted"}]
    print(f"It is {report.weather} in {report.city}, and {report.population} people live there.")
