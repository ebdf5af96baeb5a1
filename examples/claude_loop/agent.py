"""An ordinary loop of Anthropic's SDK: `tool_use` comes, the tool runs, `tool_result` goes back, until there is none.

The task and the tool are the calculator's. What is another is the SDK, and so the API that the model is asked by.
"""

from typing import Any

from examples.calculator.agent import CALCULATOR, MAX_TOKENS, TURNS, calculate, reward
from lightning_rl import LLM, rollout

TOOLS: list[Any] = [{"name": "calc", "description": "", "input_schema": CALCULATOR}]


@rollout
def claude_loop(task: dict[str, str], llm: LLM) -> float:
    """Answer `task["question"]`; the reward is 1.0 where the last answer is the number."""
    client = llm.anthropic()
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(TURNS):
        answer = client.messages.create(model=llm.model, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS)
        if answer.stop_reason != "tool_use":
            return reward(task, "".join(block.text for block in answer.content if block.type == "text"))
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": calculate(block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    return 0.0
