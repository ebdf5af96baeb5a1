"""A small coding agent, run from a shell: `python mend.py "How many cars are there?"` in a folder with a report.

`data.sql` makes a database, and `report.sql` is to answer the question and does not. The agent asks a model for a
query, writes it to `report.sql`, runs it, shows the model what came, and goes on until the model says `done`. It reads
OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, needs nothing beside Python, and knows nothing of training.
"""

import json
import os
import sqlite3
import sys
import urllib.request
from pathlib import Path

TURNS = 3
MAX_TOKENS = 48  # of one answer
STEPS = 1_000_000  # of SQLite's machine, for one query
READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)


def ask(messages: list[dict[str, str]]) -> str:
    """The model's answer."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": MAX_TOKENS}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answered:
        return str(json.load(answered)["choices"][0]["message"]["content"])


def tables(database: sqlite3.Connection) -> str:
    """What the model is told of the database: tables and columns."""
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    columns = {name: [row[1] for row in database.execute(f"PRAGMA table_info({name})")] for name in names}
    return "; ".join(f"{name}: {' '.join(column for column in columns[name] if column != 'id')}" for name in names)


def outcome(database: sqlite3.Connection, query: str) -> str:
    """What the model is shown of a query: an error, `empty`, or the first rows."""
    try:
        rows = database.execute(query).fetchmany(3)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        return f"error: {error}"[:60]
    lines = [" ".join(shown(value) for value in row) for row in rows[:2]] or ["empty"]
    return "\n".join([*lines, "..."] if len(rows) > 2 else lines)


def shown(value: object) -> str:
    """A value of a row."""
    if value is None:
        return "NULL"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main(question: str) -> None:
    """Mend `report.sql` in this folder."""
    database = sqlite3.connect(":memory:")
    database.executescript(Path("data.sql").read_text())
    messages = [{"role": "user", "content": f"{tables(database)}\n{question}"}]
    database.set_progress_handler(lambda: 1, STEPS)
    database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY)
    for _ in range(TURNS):
        answer = ask(messages)
        print(f"> {answer}")
        if answer.strip() == "done":
            break
        Path("report.sql").write_text(answer)
        seen = outcome(database, answer)
        print(seen)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": seen}]


if __name__ == "__main__":
    main(sys.argv[1])
