"""Small corpora: who lives in which town, and what each town is known for. Everything follows from a seed.

Some questions take two searches: `What is made where lena is?` is answered by the document on lena, which names a town,
and the one on that town. Towns and what they are known for differ from corpus to corpus, so nothing but a search tells.
"""

import functools
import random
from typing import Any, NamedTuple

NAMES = [
    "anna",
    "ben",
    "clara",
    "david",
    "emma",
    "felix",
    "greta",
    "hugo",
    "ida",
    "jonas",
    "leo",
    "mia",
    "noah",
    "olga",
]
TOWNS = ["rome", "paris", "oslo", "lima", "cairo"]
MADE = ["shoes", "coats", "hats", "lamps", "chairs"]
SETS = {"train": (0, 256), "heldout": (1_000_000, 64)}  # name: (first seed, corpora, with one question each)

Task = dict[str, Any]


class Corpus(NamedTuple):
    """Documents, and the questions that they answer."""

    documents: list[str]
    tasks: list[Task]


@functools.lru_cache(maxsize=64)
def make_corpus(seed: int) -> Corpus:
    """The corpus of a seed: a document for every person and every town, and two questions for every person."""
    rng = random.Random(seed)
    made = dict(zip(TOWNS, rng.sample(MADE, len(TOWNS)), strict=True))
    home = {name: rng.choice(TOWNS) for name in NAMES}
    documents = [f"{name} lives in {town}" for name, town in home.items()]
    documents += [f"{town} is known for {thing}" for town, thing in made.items()]
    where = [(f"Where is {name}?", town) for name, town in home.items()]
    what = [(f"What is made where {name} is?", made[town]) for name, town in home.items()]
    tasks = [{"question": question, "answer": answer, "corpus": seed} for question, answer in where + what]
    return Corpus(documents, tasks)


def make() -> dict[str, list[Task]]:
    """The tasks of each set: `question`, `answer`, and the seed of the `corpus` to be searched."""
    return {
        name: [random.Random(seed).choice(make_corpus(seed).tasks) for seed in range(first, first + count)]
        for name, (first, count) in SETS.items()
    }
