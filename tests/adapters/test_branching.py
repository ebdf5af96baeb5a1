"""Layer x situation: what each shape of conversation becomes in the forest, in credit, in rows and in triplets.

Tokens are words; in a row, what is trained is in brackets, and the reason of a row that is left out in parentheses.
"""

from dataclasses import dataclass

import pytest

from lightning_rl_adapters import credit, forest, rows
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.rows import Row
from lightning_rl_adapters.triplet import triplets
from tests.adapters.words import drawn, say, trained, words

REWARD = 0.5


@dataclass(frozen=True)
class Situation:
    """Calls, and what they must become; `forest` has one path of call numbers per leaf, `credit` one list of the words
    that carry the reward per row."""

    name: str
    calls: list[Call]
    forest: list[list[int]]
    credit: list[list[str]]
    rows: list[str]
    triplets: list[tuple[str, str]]
    max_tokens: int | None = None


SITUATIONS = [
    Situation(
        "linear",
        [say(1, "how many", "count them"), say(2, "three", "three then", after=1), say(3, "sure?", "yes", after=2)],
        forest=[[1, 2, 3]],
        credit=[["them", "then", "yes"]],
        rows=["how many [count them] three [three then] sure? [yes]"],
        triplets=[
            ("how many", "count them"),
            ("how many count them three", "three then"),
            ("how many count them three three then sure?", "yes"),
        ],
    ),
    Situation(
        "fan-out then continue the first",
        [
            say(1, "plan", "split"),
            say(2, "left", "went", after=1),
            say(3, "right", "ran", after=1),
            say(4, "and?", "found", after=2),
        ],
        forest=[[1, 2, 4], [1, 3]],
        credit=[["split", "went", "found"], ["ran"]],
        rows=["plan [split] left [went] and? [found]", "plan split right [ran]"],
        triplets=[
            ("plan", "split"),
            ("plan split left", "went"),
            ("plan split right", "ran"),
            ("plan split left went and?", "found"),
        ],
    ),
    Situation(
        "interleaved sub-agents",
        [
            say(1, "chief begin", "ask both"),
            say(2, "reader begin", "reading", agent="reader"),
            say(3, "writer begin", "writing", agent="writer"),
            say(4, "next", "page", after=2, agent="reader"),
            say(5, "next", "line", after=3, agent="writer"),
            say(6, "results", "done", after=1),
        ],
        forest=[[1, 6], [2, 4], [3, 5]],
        credit=[["both", "done"], ["reading", "page"], ["writing", "line"]],
        rows=[
            "chief begin [ask both] results [done]",
            "reader begin [reading] next [page]",
            "writer begin [writing] next [line]",
        ],
        triplets=[
            ("chief begin", "ask both"),
            ("reader begin", "reading"),
            ("writer begin", "writing"),
            ("reader begin reading next", "page"),
            ("writer begin writing next", "line"),
            ("chief begin ask both results", "done"),
        ],
    ),
    Situation(
        "best-of-n",
        [
            say(1, "think", "hm"),
            say(2, "answer", "four", after=1),
            say(3, "answer", "five", after=1),
            say(4, "answer", "four", after=1),  # equal to call 2, and another sample
        ],
        forest=[[1, 2], [1, 3], [1, 4]],
        credit=[["hm", "four"], ["five"], ["four"]],
        rows=["think [hm] answer [four]", "think hm answer [five]", "think hm answer [four]"],
        triplets=[
            ("think", "hm"),
            ("think hm answer", "four"),
            ("think hm answer", "five"),
            ("think hm answer", "four"),
        ],
    ),
    Situation(
        "backtracking",
        [
            say(1, "maze", "enter"),
            say(2, "fork", "left", after=1),
            say(3, "wall", "stuck", after=2),
            say(4, "fork no left", "right", after=1),
            say(5, "door", "out", after=4),
        ],
        forest=[[1, 2, 3], [1, 4, 5]],
        credit=[["enter", "left", "stuck"], ["right", "out"]],
        rows=["maze [enter] fork [left] wall [stuck]", "maze enter fork no left [right] door [out]"],
        triplets=[
            ("maze", "enter"),
            ("maze enter fork", "left"),
            ("maze enter fork left wall", "stuck"),
            ("maze enter fork no left", "right"),
            ("maze enter fork no left right door", "out"),
        ],
    ),
    Situation(
        "compaction",
        [
            say(1, "long task", "step one"),
            say(2, "go on", "step two", after=1),
            say(3, "long task so far two steps", "step three"),
            say(4, "go on", "end", after=3),
        ],
        forest=[[1, 2], [3, 4]],
        credit=[["one", "two"], ["three", "end"]],
        rows=["long task [step one] go on [step two]", "long task so far two steps [step three] go on [end]"],
        triplets=[
            ("long task", "step one"),
            ("long task step one go on", "step two"),
            ("long task so far two steps", "step three"),
            ("long task so far two steps step three go on", "end"),
        ],
    ),
    Situation(
        "title call in the middle",
        [say(1, "hello", "hi"), say(2, "title of hello", "Greeting"), say(3, "how are", "fine", after=1)],
        forest=[[1, 3], [2]],
        credit=[["hi", "fine"], ["Greeting"]],
        rows=["hello [hi] how are [fine]", "title of hello [Greeting]"],
        triplets=[("hello", "hi"), ("title of hello", "Greeting"), ("hello hi how are", "fine")],
    ),
    Situation(
        "fifty parallel",
        [say(1, "all", "start"), *(say(i, f"part{i}", f"done{i}", after=1) for i in range(2, 52))],
        forest=[[1, i] for i in range(2, 52)],
        credit=[["start", "done2"], *([f"done{i}"] for i in range(3, 52))],
        rows=["all [start] part2 [done2]", *(f"all start part{i} [done{i}]" for i in range(3, 52))],
        triplets=[("all", "start"), *((f"all start part{i}", f"done{i}") for i in range(2, 52))],
    ),
    Situation(
        "undelivered branch",
        [say(1, "ask", "well"), say(2, "more", "cut off", after=1, delivered=False), say(3, "more", "whole", after=1)],
        forest=[[1, 2], [1, 3]],
        credit=[["well"], ["whole"]],
        rows=["ask [well] more cut off", "ask well more [whole]"],
        triplets=[("ask", "well"), ("ask well more", "cut off"), ("ask well more", "whole")],
    ),
    Situation(
        "overlong branch",
        [say(1, "ask", "well"), say(2, "more", "and on and on", after=1), say(3, "more", "short", after=1)],
        forest=[[1, 2], [1, 3]],
        credit=[["on"], ["well", "short"]],
        rows=["ask well more [and on and on] (overlong)", "ask [well] more [short]"],
        triplets=[("ask", "well"), ("ask well more", "and on and on"), ("ask well more", "short")],
        max_tokens=6,
    ),
]

each = pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name.replace(" ", "-"))


def cut(situation: Situation) -> list[Row]:
    built = forest.build(situation.calls)
    return rows.cut(built, credit.final_values(built, REWARD), max_tokens=situation.max_tokens)


@each
def test_forest(situation: Situation) -> None:
    leaves = forest.build(situation.calls).leaves()
    paths = [[node.call.number + 1 for node in leaf.path()] for leaf in leaves]
    assert paths == situation.forest, drawn(situation.calls)


@each
def test_credit(situation: Situation) -> None:
    """The final reward reaches every call once, on its last sampled token."""
    built = forest.build(situation.calls)
    expected = {call.call_id: REWARD for call in situation.calls}
    assert credit.final_values(built, REWARD) == expected, drawn(situation.calls)
    carrying = [
        [words([token]) for token, reward in zip(row.token_ids, row.rewards, strict=True) if reward == REWARD]
        for row in cut(situation)
    ]
    assert carrying == situation.credit, drawn(situation.calls)


@each
def test_rows(situation: Situation) -> None:
    assert [trained(row) for row in cut(situation)] == situation.rows, drawn(situation.calls)


@each
def test_triplets(situation: Situation) -> None:
    built = forest.build(situation.calls)
    found = triplets(built, credit.final_values(built, REWARD))
    said = [(words(one.prompt_token_ids), words(one.response_token_ids)) for one in found]
    assert said == situation.triplets, drawn(situation.calls)
    assert {one.reward for one in found} == {REWARD}


def test_a_failing_test_prints_the_tree() -> None:
    [fanned] = [situation for situation in SITUATIONS if situation.name.startswith("fan-out")]
    assert [line.split("|")[-1].strip() for line in drawn(fanned.calls).splitlines()[2:]] == [
        "plan → [split]",
        "left → [went]",
        "and? → [found]",
        "right → [ran]",
    ]
