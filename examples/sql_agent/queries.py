"""A query is run, what it gave is shown, and two queries are compared by what they give.

Invariant: a query can read its own database and nothing else, and its work is bounded.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHOWN_ROWS = 2
STEPS = 1_000_000  # of SQLite's machine, about 20 ms: our queries need some hundred

Rows = list[tuple[Any, ...]]

READS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}


def run_sql(
    database: str,
    sql: str,
    *,
    steps: int = STEPS,
    value_bytes: int = 10_000,
    rows: int = 1000,
    text: Callable[[bytes], str] = str,
) -> Rows | str:
    """The rows that `sql` gives, or the text of its error. It may read, and only `database`.

    A query that takes more than `steps` of SQLite's machine, or makes a value of more than `value_bytes`, is an error;
    of more than `rows` rows the first are given. `text` reads the bytes of a text; the default takes UTF-8 alone, and
    other bytes are an error.
    """
    connection = sqlite3.connect(f"{Path(database).absolute().as_uri()}?mode=ro", uri=True)
    try:
        connection.text_factory = text
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, value_bytes)
        connection.set_progress_handler(lambda: 1, steps)  # the first call interrupts the query
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY)
        return connection.execute(sql).fetchmany(rows)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: not valid text
        return f"error: {error}"
    finally:
        connection.close()


def show(result: Rows | str) -> str:
    """What the model sees of a result: an error, `empty`, or the first rows."""
    if isinstance(result, str):
        return result[:60]
    if not result:
        return "empty"
    lines = [" ".join(_show_value(value) for value in row) for row in result[:SHOWN_ROWS]]
    return "\n".join([*lines, "..."] if len(result) > SHOWN_ROWS else lines)


def _show_value(value: Any) -> str:
    if value is None:
        return "NULL"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def same_answer(database: str, sql: str, gold: str) -> bool:
    """Whether both queries give the same rows, in the same order where `gold` asks for one."""
    expected, got = run_sql(database, gold), run_sql(database, sql)
    if isinstance(expected, str):
        raise ValueError(f"gold query fails on {database}: {gold!r}: {expected}")
    if isinstance(got, str):
        return False
    return got == expected if "ORDER BY" in gold else Counter(got) == Counter(expected)
