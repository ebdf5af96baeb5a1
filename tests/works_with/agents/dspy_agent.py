"""DSPy's `ReAct`: each step is a prompt of its own, made of fields."""

import os
import sys

import dspy
from asked import QUESTIONS, population, weather

api, stream = sys.argv[1], sys.argv[2] == "stream"
if api == "messages":
    lm = dspy.LM("anthropic/policy", api_base=os.environ["ANTHROPIC_BASE_URL"], cache=False)
else:
    kind = "responses" if api == "responses" else "chat"
    lm = dspy.LM("openai/policy", api_base=os.environ["OPENAI_BASE_URL"], cache=False, model_type=kind)
dspy.configure(lm=lm)
agent = dspy.ReAct("question, history: dspy.History -> answer", tools=[weather, population])
if stream:
    agent = dspy.streamify(agent, async_streaming=False)
past = []
for question in QUESTIONS:
    said = agent(question=question, history=dspy.History(messages=past))
    if stream:
        *_, said = said
    past.append({"question": question, "answer": said.answer})
    print(said.answer)
