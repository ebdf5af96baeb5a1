"""Questions about small random SQLite databases, each with the SQL that answers it.

Everything follows from seeds: one seed makes one database of two tables and its questions. The
training, tuning and held-out sets take their seeds from ranges that do not overlap, so no set has
seen a database of another.

What a schema does not tell: whether a text column holds its values in lower or in UPPER case. Only
looking at a result tells, so an agent that writes SQL once and never looks is right at most about
four times in five. Every gold query answers with something other than nothing, 0 or NULL, so such
an answer is a reason to look again.
"""

import argparse
import json
import random
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOUNS = (
    "shops books films songs teams games ships trains planes cars bikes farms parks lakes towns "
    "banks clubs schools rooms beds lamps chairs phones pens cups plates hats shoes coats dogs"
)
NUMBERS = (
    "age size price weight height length width depth speed power "
    "score rank year cost rating stock points level volume distance"
)
WORDS = {
    "color": "red blue green black white",
    "city": "rome paris oslo lima cairo",
    "brand": "acme zeta nova apex orion",
    "shape": "round square flat long oval",
    "style": "modern classic plain rustic gothic",
    "material": "wood steel glass stone paper",
    "country": "spain kenya japan peru egypt",
    "status": "open closed busy idle lost",
    "grade": "gold silver bronze copper iron",
    "season": "spring summer autumn winter monsoon",
}

SETS = {  # name: (first seed, databases, questions of each database)
    "train": (0, 100, 18),
    "tuning": (1_000_000, 20, 10),
    "heldout": (2_000_000, 20, 10),
}
VERSION = "1"  # raise it when the same seed makes something else, so that old folders are rebuilt


@dataclass(frozen=True)
class Table:
    """A table: its name, its number and text columns, and its rows with `id` first."""

    name: str
    numbers: tuple[str, ...]
    words: tuple[str, ...]
    parent: str | None  # the table that its column `<parent>_id` points to
    rows: list[dict[str, Any]]

    def columns(self) -> list[str]:
        """All columns but `id`, in the order of the schema."""
        link = [f"{self.parent}_id"] if self.parent else []
        return [*link, *self.numbers, *self.words]


@dataclass(frozen=True)
class Database:
    """Two tables; the second points to the first. No column but `id` has the name of another."""

    parent: Table
    child: Table

    def schema(self) -> str:
        """What the agent is told: tables and columns, and nothing of what is in them."""
        return "; ".join(f"{t.name}: {' '.join(t.columns())}" for t in (self.parent, self.child))


@dataclass(frozen=True)
class Question:
    """A question in words, its kind, and the SQL that answers it on its database."""

    kind: str
    text: str
    gold: str


def make_database(rng: random.Random) -> Database:
    """Draw names, columns and rows. Numbers are 1 to 99 and differ within a column."""
    names = rng.sample(NOUNS.split(), 2)
    numbers = rng.sample(NUMBERS.split(), 4)
    words = rng.sample(list(WORDS), 3)
    parent = _make_table(rng, names[0], numbers[:2], words[:2], None, 6)
    child = _make_table(rng, names[1], numbers[2:], words[2:], parent, 9)
    return Database(parent, child)


def _make_table(
    rng: random.Random,
    name: str,
    numbers: list[str],
    words: list[str],
    parent: Table | None,
    length: int,
) -> Table:
    columns: dict[str, list[Any]] = {"id": list(range(1, length + 1))}
    if parent:
        columns[f"{parent.name}_id"] = [rng.randint(1, len(parent.rows)) for _ in range(length)]
    for column in numbers:
        columns[column] = rng.sample(range(1, 100), length)
    for column in words:
        case = rng.choice([str.lower, str.upper])
        values = rng.sample(WORDS[column].split(), 3)
        columns[column] = [case(rng.choice(values)) for _ in range(length)]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return Table(name, tuple(numbers), tuple(words), parent.name if parent else None, rows)


def fill(connection: sqlite3.Connection, database: Database) -> None:
    """Create the tables and rows of `database` in an empty SQLite database."""
    for table in (database.parent, database.child):
        columns = ", ".join(["id INTEGER PRIMARY KEY", *table.columns()])
        connection.execute(f"CREATE TABLE {table.name} ({columns})")
        marks = ", ".join("?" for _ in ["id", *table.columns()])
        rows = [tuple(row.values()) for row in table.rows]
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)
    connection.commit()


# The nine kinds of question. A value is asked for in lower case, and stands in the gold query as it
# stands in the table.

AGGREGATES = {"average": "avg", "total": "sum", "largest": "max", "smallest": "min"}


def _table(rng: random.Random, db: Database) -> Table:
    return rng.choice([db.parent, db.child])


def _where(rng: random.Random, rows: list[dict[str, Any]], words: tuple[str, ...]) -> list[str]:
    """Draw a text column and a value in it: how the question and how the query say it."""
    column = rng.choice(words)
    value = rng.choice(rows)[column]
    return [f"{column} {value.lower()}", f"{column}='{value}'"]


def _count(rng: random.Random, db: Database) -> tuple[str, str]:
    t = _table(rng, db)
    return f"How many {t.name} are there?", f"SELECT count(*) FROM {t.name}"


def _aggregate(rng: random.Random, db: Database) -> tuple[str, str]:
    t = _table(rng, db)
    word, function = rng.choice(list(AGGREGATES.items()))
    column = rng.choice(t.numbers)
    return f"What is the {word} {column} of {t.name}?", f"SELECT {function}({column}) FROM {t.name}"


def _count_compared(rng: random.Random, db: Database) -> tuple[str, str]:
    t = _table(rng, db)
    column = rng.choice(t.numbers)
    values = sorted(row[column] for row in t.rows)
    if rng.random() < 0.5:
        word, sign, limit = "over", ">", rng.choice(values[:-1])
    else:
        word, sign, limit = "under", "<", rng.choice(values[1:])
    return (
        f"How many {t.name} have {column} {word} {limit}?",
        f"SELECT count(*) FROM {t.name} WHERE {column}{sign}{limit}",
    )


def _count_where(rng: random.Random, db: Database) -> tuple[str, str]:
    t = _table(rng, db)
    said, condition = _where(rng, t.rows, t.words)
    return f"How many {t.name} have {said}?", f"SELECT count(*) FROM {t.name} WHERE {condition}"


def _list_where(rng: random.Random, db: Database) -> tuple[str, str]:
    t = _table(rng, db)
    column = rng.choice(t.numbers)
    said, condition = _where(rng, t.rows, t.words)
    return (
        f"List the {column} of {t.name} with {said}.",
        f"SELECT {column} FROM {t.name} WHERE {condition}",
    )


def _aggregate_where(rng: random.Random, db: Database) -> tuple[str, str]:
    t = _table(rng, db)
    word, function = rng.choice(list(AGGREGATES.items()))
    column = rng.choice(t.numbers)
    said, condition = _where(rng, t.rows, t.words)
    return (
        f"What is the {word} {column} of {t.name} with {said}?",
        f"SELECT {function}({column}) FROM {t.name} WHERE {condition}",
    )


def _group(rng: random.Random, db: Database) -> tuple[str, str]:
    t = _table(rng, db)
    column = rng.choice(t.words)
    return (
        f"How many {t.name} are there per {column}?",
        f"SELECT {column}, count(*) FROM {t.name} GROUP BY {column}",
    )


def _order(rng: random.Random, db: Database) -> tuple[str, str]:
    t = _table(rng, db)
    key = rng.choice(t.numbers)  # numbers differ within a column, so they give one order
    column = rng.choice([name for name in (*t.numbers, *t.words) if name != key])
    first, direction = rng.choice([("highest", "DESC"), ("lowest", "ASC")])
    return (
        f"List the {column} of {t.name} by {key}, {first} first.",
        f"SELECT {column} FROM {t.name} ORDER BY {key} {direction}",
    )


def _join(rng: random.Random, db: Database) -> tuple[str, str]:
    p, c = db.parent, db.child
    column = rng.choice(c.numbers)
    linked = {row[f"{p.name}_id"] for row in c.rows}
    said, condition = _where(rng, [row for row in p.rows if row["id"] in linked], p.words)
    return (
        f"List the {column} of {c.name} of {p.name} with {said}.",
        f"SELECT {column} FROM {c.name} JOIN {p.name} ON {p.name}_id={p.name}.id WHERE {condition}",
    )


KINDS: dict[str, Callable[[random.Random, Database], tuple[str, str]]] = {
    "count": _count,
    "aggregate": _aggregate,
    "count_compared": _count_compared,
    "count_where": _count_where,
    "list_where": _list_where,
    "aggregate_where": _aggregate_where,
    "group": _group,
    "order": _order,
    "join": _join,
}


def make_questions(rng: random.Random, database: Database, count: int) -> list[Question]:
    """Draw `count` questions with different texts, the kinds as even as can be."""
    found: dict[str, Question] = {}
    kinds: list[str] = []
    while len(found) < count:
        kinds = kinds or rng.sample(list(KINDS), len(KINDS))
        kind = kinds.pop()
        text, gold = KINDS[kind](rng, database)
        found.setdefault(text, Question(kind, text, gold))
    return list(found.values())


# Files


def make(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Make the three sets under `folder`, unless they are there, and return them.

    Returns `{"train": tasks, "tuning": tasks, "heldout": tasks}`. A task is `{"question", "schema",
    "database", "gold"}`, all text; `database` is the absolute path of an SQLite file.
    """
    folder = folder.resolve()
    stamp = folder / "complete.json"
    wanted = json.dumps({"version": VERSION, "folder": str(folder), "sets": SETS})
    if not (stamp.is_file() and stamp.read_text() == wanted):
        for name, seeds in SETS.items():
            write_set(folder, name, *seeds)
        stamp.write_text(wanted)  # last: a folder that was cut short has no stamp and is remade
    return {name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in SETS}


def write_set(folder: Path, name: str, first_seed: int, databases: int, questions: int) -> list[dict[str, Any]]:
    """Write `databases` databases, of the seeds from `first_seed` on, and their tasks."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    tasks = []
    for seed in range(first_seed, first_seed + databases):
        rng = random.Random(seed)
        database = make_database(rng)
        path = folder / name / f"{seed}.sqlite"
        path.unlink(missing_ok=True)
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA synchronous=OFF")
        fill(connection, database)
        connection.close()
        for question in make_questions(rng, database, questions):
            task = {
                "question": question.text,
                "schema": database.schema(),
                "database": str(path),
                "gold": question.gold,
            }
            tasks.append(task)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return tasks


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the three sets of questions.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "data")
    for name, tasks in make(parser.parse_args().folder).items():
        print(f"{name}: {len(tasks)} questions")
