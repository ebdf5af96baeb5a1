"""Word problems in the manner of GSM8K: two or three steps of arithmetic. Everything follows from a seed.

`Anna has 3 bags of 4 pens, buys 5 and loses 2. How many pens?` Each step is one call of one tool, and takes the result
of the one before it.

    python -m examples.gsm8k.problems

writes the tasks that the config names.
"""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from .tools import PIECES

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo"]
THINGS = ["pens", "cups", "eggs", "hats", "nuts"]
SETS = {"train": (0, 512), "heldout": (1_000_000, 64)}  # name: (seed, how many)
THREE_STEPS = 0.3  # how many of them have a third step


class Step(NamedTuple):
    """One call of a tool, and the number that it gives."""

    tool: str
    arguments: dict[str, Any]
    result: int


class Problem(NamedTuple):
    """A question, and the steps to its answer, which is the last one's result."""

    question: str
    steps: list[Step]

    @property
    def answer(self) -> int:
        return self.steps[-1].result


def problem(rng: random.Random) -> Problem:
    """Draw one."""
    thing = rng.choice(THINGS)
    begins, first = rng.choice([_bags, _unit])(rng, thing)
    told, steps = [begins], [first]
    for buys in rng.sample([True, False], 2 if rng.random() < THREE_STEPS else 1):
        words, step = _change(rng, steps[-1].result, buys=buys)
        told.append(words)
        steps.append(step)
    said = " and ".join(filter(None, [", ".join(told[:-1]), told[-1]]))
    return Problem(f"{rng.choice(NAMES)} {said}. How many {thing}?", steps)


def _bags(rng: random.Random, thing: str) -> tuple[str, Step]:
    bags, each = rng.randint(2, 9), rng.randint(2, 9)
    return f"has {bags} bags of {each} {thing}", Step("calculator", {"sum": f"{bags}*{each}"}, bags * each)


def _unit(rng: random.Random, thing: str) -> tuple[str, Step]:
    amount, unit = rng.randint(2, 9), rng.choice(list(PIECES))
    return f"has {amount} {unit} {thing}", Step("pieces", {"amount": amount, "unit": unit}, amount * PIECES[unit])


def _change(rng: random.Random, have: int, *, buys: bool) -> tuple[str, Step]:
    count = rng.randint(2, 9) if buys else rng.randint(1, min(9, have - 1))
    told = f"buys {count}" if buys else f"loses {count}"
    asked = f"{have}+{count}" if buys else f"{have}-{count}"
    return told, Step("calculator", {"sum": asked}, have + count if buys else have - count)


def task(made: Problem) -> dict[str, Any]:
    """The problem as a row of verl's files; the calculator is created with the results that it pays for."""
    results = [step.result for step in made.steps if step.tool == "calculator"]
    return {
        "data_source": "word_problems",
        "prompt": [{"role": "user", "content": made.question}],
        "reward_model": {"style": "rule", "ground_truth": str(made.answer)},
        "extra_info": {"tools_kwargs": {"calculator": {"create_kwargs": {"results": results}}}},
    }


def write(folder: Path) -> None:
    """The tasks of each set, as JSON lines in `folder`: `train.jsonl` and `heldout.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (seed, count) in SETS.items():
        rng = random.Random(seed)
        lines = [json.dumps(task(problem(rng))) + "\n" for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    write(Path("runs") / "gsm8k")
