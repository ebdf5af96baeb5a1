"""A teacher with bad habits, whose conversations the warm start copies.

A reinforcement learner needs a model that is right now and then, and that sometimes looks at a result and thinks
again. So this teacher knows the right query but slips, in one way for one kind of query. It mostly writes a text value
as the question does, in lower case. After a suspicious result it writes the right query more often than not. What is
left to learn is which of its own answers earn the reward.
"""

import random
import re
from collections.abc import Callable

# No slip turns the right query for one question into the right one for the opposite question (largest into smallest,
# say): a model that copies such slips hears no difference between the two, and has little to reinforce.
SLIPS = (  # (what the query has, what the teacher writes instead, how often); the first that fits
    (r" JOIN .* WHERE", " WHERE", 0.65),
    (r" GROUP BY .*", "", 0.65),
    (r" DESC$", "", 0.65),
    (r" ORDER BY .* ASC$", "", 0.45),
    (r">", ">=", 0.65),
    (r"<", "<=", 0.45),
    (r" WHERE .*'$", "", 0.4),
    (r"avg\(", "sum(", 0.65),
    (r"sum\(", "count(", 0.65),
    (r"max\(", "sum(", 0.45),
    (r"min\(", "sum(", 0.45),
    (r"count\(\*\)( FROM \w+)$", r"id\1", 0.4),
)
LOWER = 0.9  # how often a text value is first written in lower case; half the columns are in UPPER
RETRY = 0.6  # how often a suspicious result makes the teacher think again


def teacher(rng: random.Random, gold: str) -> Callable[[list[dict[str, str]]], str]:
    """Something that answers a chat as the teacher would who knows that `gold` is right."""

    def chat(messages: list[dict[str, str]]) -> str:
        if len(messages) == 1:
            return first_try(rng, gold)
        if suspicious(messages[-1]["content"]) and rng.random() < RETRY:
            return gold
        return "done"

    return chat


def first_try(rng: random.Random, gold: str) -> str:
    """What the teacher writes without having seen a result: it slips, and guesses the case of a text value."""
    return _slip(rng, _guess_case(rng, gold))


def suspicious(result: str) -> bool:
    """Whether a result is one that no right query gives."""
    return result in ("empty", "NULL", "0") or result.startswith("error")


def _guess_case(rng: random.Random, sql: str) -> str:
    case = str.lower if rng.random() < LOWER else str.upper
    return re.sub(r"'\w+'", lambda value: case(value[0]), sql)


def _slip(rng: random.Random, sql: str) -> str:
    for right, wrong, probability in SLIPS:
        if re.search(right, sql):
            return re.sub(right, wrong, sql) if rng.random() < probability else sql
    return sql
