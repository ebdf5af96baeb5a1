"""An ordinary agent with one tool: a model is asked for a sum, and may call the calculator on its way.

Nothing here knows of training but the last function, which gives the agent the model behind a URL and rewards it. The
tool call is OpenAI's own: `tools` in the request, `tool_calls` in the answer, a message of role `tool` behind it.
"""

import json
import operator
import re
from typing import Any

from lightning_rl import LLM, rollout

TURNS = 3
MAX_TOKENS = 64  # of one answer; a call of the calculator takes about 35
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALCULATOR = {
    "type": "object",
    "properties": {"sum": {"type": "string"}},
    "required": ["sum"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "calc", "description": "", "parameters": CALCULATOR}},
]


def calculate(arguments: Any) -> str:
    """What the calculator says to the arguments of a call, which a model wrote: a number, or an error."""
    asked = arguments.get("sum") if isinstance(arguments, dict) else None
    found = re.fullmatch(r"(\d{1,6})([-+*])(\d{1,6})", asked) if isinstance(asked, str) else None
    if found is None:
        return "error"
    left, sign, right = found.groups()
    return str(OPERATORS[sign](int(left), int(right)))


def calculate_json(arguments: str) -> str:
    """The same of arguments as OpenAI's API has them: JSON, as far as the model wrote any."""
    try:
        return calculate(json.loads(arguments))
    except json.JSONDecodeError:
        return "error"


def reward(task: dict[str, str], answer: str) -> float:
    """1.0 where the last answer is the number, and nothing else."""
    return float(answer.strip() == task["answer"])


@rollout
def calculator_agent(task: dict[str, str], llm: LLM) -> float:
    """Answer `task["question"]`, with as many calls of the calculator as fit in three turns."""
    client = llm.openai()
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(TURNS):
        answer = client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS)
        said = answer.choices[0].message
        if not said.tool_calls:
            return reward(task, said.content or "")
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            if call.type == "function":
                result = calculate_json(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
