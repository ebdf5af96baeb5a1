"""DSPy's `ReAct`: each step is a prompt of its own, made of fields."""

import os

import dspy
from asked import QUESTIONS, population, weather

dspy.configure(lm=dspy.LM("openai/policy", api_base=os.environ["OPENAI_BASE_URL"], cache=False))
agent = dspy.ReAct("question, history: dspy.History -> answer", tools=[weather, population])
past = []
for question in QUESTIONS:
    said = agent(question=question, history=dspy.History(messages=past))
    past.append({"question": question, "answer": said.answer})
    print(said.answer)
