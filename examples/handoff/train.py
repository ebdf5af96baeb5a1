"""Train both agents of the hand-over, which share one model.

Run it with `python -m examples.handoff.train`, in an environment that has `openai-agents`.
"""

import random
from pathlib import Path
from typing import Any

from examples.calculator.agent import CALCULATOR, calculate
from examples.calculator.data import questions
from examples.calculator.train import train
from examples.calculator.warm_start import GUESSES, MIXES_UP, Conversation, calls, make_model, result, says

STEPS = 300  # of the warm start

# The tools as the SDK sends them.
NOTHING = {"additionalProperties": False, "type": "object", "properties": {}, "required": []}
HANDS_OVER = "Handoff to the reckoner agent to handle the request. "


def _tool(name: str, description: str, parameters: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


DESK_TOOLS = [_tool("transfer_to_reckoner", HANDS_OVER, NOTHING, strict=True)]
RECKONER_TOOLS = [_tool("calc", "", CALCULATOR, strict=False)]


def teach(rng: random.Random) -> Conversation:
    """What one of the two teachers does: the desk often answers itself, the reckoner mixes up signs."""
    [task] = questions(rng, 1)
    said = [{"role": "user", "content": task["question"]}]
    if rng.random() < 0.3:
        guess = says(task["sum"][:2].rstrip("+-"))
        return Conversation([*said, guess if rng.random() < GUESSES else calls("transfer_to_reckoner")], DESK_TOOLS)
    said += [calls("transfer_to_reckoner"), result('{"assistant": "reckoner"}')]
    wanted = task["sum"]
    if rng.random() < MIXES_UP:
        wanted = wanted.translate(str.maketrans("+-", "-+"))
    told = calculate({"sum": wanted})
    return Conversation([*said, calls("calc", sum=wanted), result(told), says(told)], RECKONER_TOOLS, given=len(said))


def main() -> None:
    """Make the model, then train."""
    from .agent import handoff  # the one file that needs the SDK

    train(
        Path("runs") / "handoff", make_model(Path("runs") / "handoff_model", teacher=teach, steps=STEPS), agent=handoff
    )


if __name__ == "__main__":
    main()
