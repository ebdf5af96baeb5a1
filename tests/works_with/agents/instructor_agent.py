"""instructor: answers as objects, in one conversation; streamed, each answer as an object that fills up."""

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


def responses(messages: list) -> Report:
    """The same over Responses, where instructor takes no calls in the history: the answer becomes text."""
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(), mode=instructor.Mode.RESPONSES_TOOLS)
    report = client.responses.create(model="policy", input=messages, response_model=Report)
    messages.append({"role": "assistant", "content": report.model_dump_json()})
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


def streamed(messages: list) -> Report:
    """Over any of them: the objects of a stream say nothing of the call, so that the answer becomes history as text."""
    if api == "messages":
        from anthropic import Anthropic

        create = instructor.from_anthropic(Anthropic()).messages.create_partial
        settings = {"max_tokens": 200}
    else:
        from openai import OpenAI

        mode = instructor.Mode.RESPONSES_TOOLS if api == "responses" else instructor.Mode.TOOLS
        create, settings = instructor.from_openai(OpenAI(), mode=mode).chat.completions.create_partial, {}
    *_, report = create(model="policy", messages=messages, response_model=Report, **settings)
    messages.append({"role": "assistant", "content": report.model_dump_json()})
    return report


api = sys.argv[1]
ask = streamed if sys.argv[2] == "stream" else {"chat": openai, "responses": responses, "messages": anthropic}[api]
conversation: list = []
for question in QUESTIONS:
    conversation.append({"role": "user", "content": question})
    found = ask(conversation)
    print(f"It is {found.weather} in {found.city}, and {found.population} people live there.")
