"""Train the agent with the search: a tiny warm start on a teacher's searches, then the calculator's hyperparameters.

Run it with `python -m examples.search.train`.
"""

import random
from pathlib import Path

from examples.calculator.train import train
from examples.calculator.warm_start import SEED, Conversation, calls, make_model, result, says

from .agent import TOOLS, best, search_agent
from .corpus import make, make_corpus

STEPS = 250  # of the warm start
GUESSES = 0.3  # how often the teacher answers a question of two searches after the first


def teach(rng: random.Random) -> Conversation:
    """One conversation of the teacher, over a corpus that no set has."""
    corpus = make_corpus(SEED + rng.randrange(1000))
    task = rng.choice(corpus.tasks)
    name = task["question"].rstrip("?").split()[-1 if task["question"].startswith("Where") else -2]
    found = best(name, corpus.documents)
    said = [{"role": "user", "content": task["question"]}, calls("find", q=name), result(found)]
    town = found.split()[-1]
    if task["question"].startswith("What") and rng.random() >= GUESSES:
        found = best(f"{town} known", corpus.documents)
        said += [calls("find", q=f"{town} known"), result(found)]
    return Conversation([*said, says(found.split()[-1])], TOOLS)


if __name__ == "__main__":
    start = make_model(Path("runs") / "search_model", teacher=teach, steps=STEPS)
    train(Path("runs") / "search", start, agent=search_agent, tasks=make())
