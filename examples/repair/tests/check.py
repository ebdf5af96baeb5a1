"""The tests of a repair: `report.sql` gives the rows that are expected, on the task's own data and not on what is left
of it. The exit status is the verdict."""

import json
import os
import sqlite3
import sys
from collections import Counter
from pathlib import Path

task = json.loads(Path(os.environ["LIGHTNING_RL_TASK"]).read_text())
database = sqlite3.connect(":memory:")
database.executescript(task["files"]["data.sql"])
database.set_progress_handler(lambda: 1, 1_000_000)
database.set_authorizer(
    lambda action, *_: action not in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
)
try:
    rows = database.execute(Path("report.sql").read_text()).fetchmany(1000)
except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
    sys.exit(f"report.sql: {error}")
expected = [tuple(row) for row in task["expected"]]
if rows != expected if task["ordered"] else Counter(rows) != Counter(expected):
    sys.exit(f"report.sql gives {rows[:3]}, and {expected[:3]} is right")
