"""Broken reports, as tasks: `python -m examples.repair.tasks FOLDER` writes `train.jsonl` and `heldout.jsonl`.

A task has a `prompt` (what the report is to answer), `files` (the database as SQL, and a report that answers another
question), and for its tests `expected` (the rows that are right) and `ordered` (whether their order counts).
"""

import json
import random
import sqlite3
import sys
from pathlib import Path
from typing import Any

from examples.sql_agent.data import Database, Question, fill, make_database, make_questions

SETS = {"train": (0, 60, 8), "heldout": (2_000_000, 8, 8)}  # first seed, databases, questions of each


def main(folder: Path) -> None:
    """Write the two files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (first, databases, questions) in SETS.items():
        tasks = [task for seed in range(first, first + databases) for task in of_database(seed, questions)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        print(f"{folder / name}.jsonl: {len(tasks)} broken reports")


def of_database(seed: int, questions: int) -> list[dict[str, Any]]:
    """The tasks of one database."""
    rng = random.Random(seed)
    database = make_database(rng)
    asked = make_questions(rng, database, questions)
    return [task(database, right, wrong) for right, wrong in zip(asked, asked[1:] + asked[:1], strict=True)]


def task(database: Database, right: Question, wrong: Question) -> dict[str, Any]:
    """The report of one question, with the query of another in it."""
    with sqlite3.connect(":memory:") as connection:
        fill(connection, database)
        rows = connection.execute(right.gold).fetchall()
        data = "\n".join(connection.iterdump())
    files = {"data.sql": data, "report.sql": wrong.gold}
    return {"prompt": right.text, "files": files, "expected": rows, "ordered": "ORDER BY" in right.gold}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
