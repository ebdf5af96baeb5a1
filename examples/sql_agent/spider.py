"""Spider (Yu and others, 2018) for the SQL graph: its files as questions, prompts for a real model, and settings.

    python -m examples.sql_agent.spider spider_data

reads a folder as it is distributed and runs every right query once. Questions are judged by the rules of `match.py`, on
every database of their test suite.

Invariant: what is wrong with the folder is said when it is read, with the file and the place in it.
"""

import argparse
import json
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from .graph import Prompts
from .match import asks_for_order, prepared, same_result
from .queries import run_sql

VALIDATED = 500  # of the 1,034 questions of dev.json
SCHEMA_CHARS = 4096
RESULT_CHARS = 2048
STEPS = 200_000_000  # of SQLite's machine, some seconds
VALUE_BYTES = 1_000_000
ROWS = 1_000_000  # of a right query's result

Task = dict[str, str]

PROMPTS = Prompts(
    write="""\
You answer questions about an SQLite database by writing one SQL query.

The database:
{schema}

Use only tables and columns that are listed there, each column with the table that has it. Select what the question \
asks for and nothing else.

Question: {question}

Answer with the query alone, in a block that begins with ```sql and ends with ```.""",
    check="""\
You review SQL queries for an SQLite database.

The database:
{schema}

Question: {question}

Query:
```sql
{query}
```

Its result:
{result}

Does the query answer the question? Think of errors in the result, results that are empty or cannot be meant, columns \
that were not asked for or are missing, wrong joins, conditions and groups, NULL, wrong types, rows that count twice, \
and the order and number of rows. Name each mistake in a line; do not write a corrected query. End with one of these \
lines:
VERDICT: CORRECT
VERDICT: WRONG""",
    rewrite="""\
You mend SQL queries for an SQLite database.

The database:
{schema}

Use only tables and columns that are listed there, each column with the table that has it.

Question: {question}

The query so far:
```sql
{query}
```

Its result:
{result}

What a reviewer said of it:
{feedback}

Write a query that answers the question, without these mistakes. Answer with the query alone, in a block that begins \
with ```sql and ends with ```.""",
    accepts="VERDICT: CORRECT",
)

# What Agent-lightning's tutorial trains with; docs/tutorials/spider.md says what differs and why.
CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 32, "max_prompt_length": 4096, "max_response_length": 2048},
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen2.5-Coder-1.5B-Instruct", "enable_gradient_checkpointing": True},
        "actor": {
            "ppo_mini_batch_size": 32,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
            "use_kl_loss": False,
            "entropy_coeff": 0,
            "optim": {"lr": 1e-6},
            "fsdp_config": {"dtype": "bfloat16", "param_offload": True, "optimizer_offload": True},
        },
        "rollout": {
            "name": "vllm",
            "n": 4,
            "temperature": 1.0,
            "dtype": "bfloat16",
            "max_model_len": 6144,
            "gpu_memory_utilization": 0.4,
            "val_kwargs": {"temperature": 1.0},
        },
    },
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "train_agents": "write|rewrite"},
    "trainer": {"val_before_train": True, "test_freq": 32, "save_freq": 64, "total_epochs": 2},
}


class BrokenFolder(ValueError):
    """A Spider folder lacks something, or a file in it is not what it should be."""


def read(folder: Path, *, others: bool = False) -> dict[str, list[Task]]:
    """The questions of a Spider folder: `{"train": tasks, "dev": tasks}`, in the order of its files.

    A task is `{"schema", "question", "database", "gold", "suite"}`, all text: `database` is the absolute path of the
    SQLite file that the agent works on, and `suite` that of the folder whose `.sqlite` files the answer is judged on.
    It is the database's own; questions of dev have it in `test_database/`, where that has one.

    Args:
        folder: has `train_spider.json`, `dev.json` and `database/{db_id}/{db_id}.sqlite`.
        others: train on the questions of `train_others.json` too.

    Raises BrokenFolder.
    """
    folder = folder.expanduser().resolve()
    schemas: dict[Path, str] = {}
    train = ["train_spider.json", *(["train_others.json"] if others else [])]
    return {
        "train": [task for name in train for task in _tasks(folder, name, ("database",), schemas)],
        "dev": _tasks(folder, "dev.json", ("test_database", "database"), schemas),
    }


def sets(folder: Path) -> dict[str, list[Task]]:
    """`read` as training takes it: `train`; 500 of dev, drawn at random but always the same, as `heldout`; the rest of
    it as `tuning`.
    """
    found = read(folder)
    dev = random.Random(0).sample(found["dev"], len(found["dev"]))
    return {"train": found["train"], "tuning": dev[VALIDATED:], "heldout": dev[:VALIDATED]}


def _tasks(folder: Path, name: str, places: Sequence[str], schemas: dict[Path, str]) -> list[Task]:
    tasks = []
    for number, item in enumerate(_items(folder / name)):
        for key in ("question", "query", "db_id"):
            if not isinstance(item, dict) or not isinstance(item.get(key), str):
                raise BrokenFolder(f"{folder / name}: item {number} has no text {key!r}")
        database = _database(folder, item["db_id"], places, f"{name}, item {number}")
        if database not in schemas:
            schemas[database] = schema_of(database)
        tasks.append(
            {
                "schema": schemas[database],
                "question": item["question"],
                "database": str(database),
                "gold": item["query"],
                "suite": str(database.parent),
            }
        )
    return tasks


def _items(path: Path) -> list[Any]:
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BrokenFolder(
            f"{path} is not there: give the folder that Spider's archive unpacks to, with train_spider.json, dev.json "
            "and database/"
        ) from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise BrokenFolder(f"{path} cannot be read: {error}") from error
    if not isinstance(items, list) or not items:
        raise BrokenFolder(f"{path} should hold a list of questions")
    return items


def _database(folder: Path, name: str, places: Sequence[str], asked_by: str) -> Path:
    paths = [folder / place / name / f"{name}.sqlite" for place in places]
    for path in paths:
        if path.is_file():
            return path
    raise BrokenFolder(f"no database {name!r} for {asked_by}: {paths[-1]} is not there")


def schema_of(database: Path) -> str:
    """The statements that made the tables, or, where they are longer than 4,096 characters, tables and columns alone.

    Raises BrokenFolder where the file is no SQLite database or has no tables.
    """
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            tables = connection.execute(
                "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
            ).fetchall()
            columns = {
                name: [column for (column,) in connection.execute("SELECT name FROM pragma_table_info(?)", (name,))]
                for name, _ in tables
            }
    except sqlite3.Error as error:
        raise BrokenFolder(f"{database} cannot be read: {error}") from error
    if not tables:
        raise BrokenFolder(f"{database} has no tables")
    whole = "\n".join(_tidy(sql) + ";" for _, sql in tables)
    if len(whole) <= SCHEMA_CHARS:
        return whole
    return _cut("\n".join(f"{name}({', '.join(names)})" for name, names in columns.items()), SCHEMA_CHARS)


def _tidy(sql: str) -> str:
    lines = (" ".join(line.split()) for line in sql.splitlines())
    return "\n".join(line for line in lines if line)


def _cut(text: str, length: int) -> str:
    """The text's first lines, or of a longer line its beginning, and how much is missing."""
    if len(text) <= length:
        return text
    kept = text[:length].rpartition("\n")[0] or text[:length]
    return f"{kept}\n... ({len(text) - len(kept)} more characters)"


def look(database: str, sql: str) -> str:
    """What the model sees of a query's result: its error, or its rows, a line each, up to 2,048 characters."""
    result = run_sql(database, sql, steps=STEPS, value_bytes=VALUE_BYTES, text=_text)
    if isinstance(result, str):
        return _cut(result, RESULT_CHARS)
    return _cut("\n".join(" | ".join(map(_shown, row)) for row in result), RESULT_CHARS) if result else "no rows"


def _shown(value: Any) -> str:
    return "NULL" if value is None else str(value)


def matches(task: Task, sql: str) -> bool:
    """Whether `sql` gives what the right query gives, on every database of the task's suite.

    Raises ValueError where the right query fails.
    """
    query, gold = prepared(sql), prepared(task["gold"])
    return all(_same_on(database, query, gold) for database in suite_of(task))


def suite_of(task: Task) -> list[Path]:
    """The databases that an answer is judged on, the task's own at first."""
    own = Path(task["database"])
    return [own, *sorted(path for path in Path(task["suite"]).glob("*.sqlite") if path != own)]


def _same_on(database: Path, query: str, gold: str) -> bool:
    expected = _run(database, gold, ROWS + 1)
    if isinstance(expected, str) or len(expected) > ROWS:
        fault = expected if isinstance(expected, str) else f"it gives more than {ROWS} rows"
        raise ValueError(f"the right query fails on {database}: {gold!r}: {fault}")
    got = _run(database, query, len(expected) + 1)
    return not isinstance(got, str) and same_result(expected, got, ordered=asks_for_order(gold))


def _run(database: Path, sql: str, rows: int) -> list[tuple[Any, ...]] | str:
    return run_sql(str(database), sql, steps=STEPS, value_bytes=VALUE_BYTES, rows=rows, text=_text)


def _text(raw: bytes) -> str:
    """A text without the bytes in it that are none, of which Spider's databases have some."""
    return raw.decode(errors="ignore")


def main() -> None:
    """Read a folder, run its right queries, and say what is in it and which of them fail."""
    parser = argparse.ArgumentParser(description="Read a Spider folder and run its right queries.")
    parser.add_argument("folder", type=Path)
    try:
        found = read(parser.parse_args().folder)
    except BrokenFolder as error:
        raise SystemExit(str(error)) from None
    for name, tasks in found.items():
        suites = {task["suite"]: len(suite_of(task)) for task in tasks}
        print(f"{name}: {len(tasks)} questions on {len(suites)} databases, judged on {sum(suites.values())} files")
        for task in tasks:
            try:
                right = matches(task, task["gold"])
            except ValueError as error:
                print(f"  {error}")
            else:
                if not right:
                    print(f"  the right query does not match itself on {task['database']}: {task['gold']!r}")


if __name__ == "__main__":
    main()
