"""Sums and differences of two numbers: `What is 37 + 22?`. Everything follows from a seed."""

import random

SIGNS = "+-"
SETS = {"train": (0, 256), "heldout": (1_000_000, 64)}  # name: (seed, how many)

Task = dict[str, str]


def make() -> dict[str, list[Task]]:
    """The tasks of each set: `question`, `sum` (what the calculator should be asked) and `answer`."""
    return {name: questions(random.Random(seed), count) for name, (seed, count) in SETS.items()}


def questions(rng: random.Random, count: int) -> list[Task]:
    """Draw `count` tasks."""
    return [_question(rng) for _ in range(count)]


def _question(rng: random.Random) -> Task:
    sign = rng.choice(SIGNS)
    right, left = sorted((rng.randint(1, 49), rng.randint(1, 49)))
    answer = left + right if sign == "+" else left - right
    return {"question": f"What is {left} {sign} {right}?", "sum": f"{left}{sign}{right}", "answer": str(answer)}
