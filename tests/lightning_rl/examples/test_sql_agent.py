"""The agent in `examples/sql_agent/agent.py`, played through with scripted answers."""

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from examples.sql_agent.agent import Message, run_sql, same_answer, show, solve


@pytest.fixture
def database(tmp_path: Path) -> str:
    path = tmp_path / "shops.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE shops (id INTEGER PRIMARY KEY, size, city)")
    rows = [(1, 5, "ROME"), (2, 5, "ROME"), (3, 7, "OSLO")]
    connection.executemany("INSERT INTO shops VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()
    return str(path)


@pytest.fixture
def task(database: str) -> dict[str, str]:
    return {
        "question": "How many shops have city rome?",
        "schema": "shops: size city",
        "database": database,
        "gold": "SELECT count(*) FROM shops WHERE city='ROME'",
    }


def scripted(answers: Iterable[str]) -> Callable[[list[Message]], str]:
    left = iter(answers)
    return lambda _messages: next(left)


def test_right_at_once_and_accepted_earns_one(task: dict[str, str]) -> None:
    reward, messages = solve(task, scripted([task["gold"], "done"]))
    assert reward == 1.0
    assert [m["content"] for m in messages] == [
        "shops: size city\nHow many shops have city rome?",
        "SELECT count(*) FROM shops WHERE city='ROME'",
        "2",
        "done",
    ]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2


@pytest.mark.parametrize(
    ("first", "seen"),
    [
        ("SELECT count(*) FROM shop", "error: no such table: shop"),
        ("SELECT count(*) FROM shops WHERE city='rome'", "0"),
        ("SELECT size FROM shops WHERE city='rome'", "empty"),
        ("SELECT sum(size) FROM shops WHERE city='rome'", "NULL"),
    ],
)
def test_seeing_a_bad_result_and_rewriting_earns_one(task: dict[str, str], first: str, seen: str) -> None:
    reward, messages = solve(task, scripted([first, task["gold"], "done"]))
    assert messages[2]["content"] == seen
    assert reward == 1.0


def test_the_last_sql_counts(task: dict[str, str]) -> None:
    assert solve(task, scripted([task["gold"], "SELECT 1", "done"]))[0] == 0.0


def test_an_agent_that_never_accepts_stops_after_three_turns(task: dict[str, str]) -> None:
    reward, messages = solve(task, scripted([task["gold"]] * 3))
    assert reward == 1.0
    assert sum(m["role"] == "assistant" for m in messages) == 3


def test_wrong_sql_and_no_sql_earn_nothing(task: dict[str, str]) -> None:
    assert solve(task, scripted(["SELECT 3", "done"]))[0] == 0.0
    assert solve(task, scripted(["done"]))[0] == 0.0
    assert solve(task, scripted(["", "done"]))[0] == 0.0


def test_answers_are_compared_as_multisets_unless_the_question_asks_for_an_order(
    database: str,
) -> None:
    up, down = (f"SELECT size FROM shops ORDER BY id {way}" for way in ("ASC", "DESC"))
    unordered = "SELECT size FROM shops"
    assert same_answer(database, down, unordered)
    assert not same_answer(database, down, "SELECT size FROM shops ORDER BY id")
    assert same_answer(database, up, "SELECT size FROM shops ORDER BY id")
    assert not same_answer(database, "SELECT DISTINCT size FROM shops", unordered)
    assert not same_answer(database, "SELECT lower(city) FROM shops", "SELECT city FROM shops")


def test_a_gold_query_that_fails_is_an_error_and_not_a_reward(database: str) -> None:
    with pytest.raises(ValueError, match="gold query fails"):
        same_answer(database, "SELECT 1", "SELECT 1 FROM nowhere")


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE shops",
        "DELETE FROM shops",
        "INSERT INTO shops VALUES (9, 9, 'x')",
        "CREATE TABLE other (a)",
        "CREATE TEMP TABLE other (a)",
        "ATTACH 'OTHER' AS other",
        "VACUUM INTO 'OTHER'",
        "PRAGMA query_only=0",
        "SELECT 1; DROP TABLE shops",
        "SELECT load_extension('OTHER')",
        "SELECT zeroblob(1000000000)",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT sum(i) FROM n",
        "not SQL at all",
        "SELECT '\ud800'",
        "SELECT '\0'",
        "SELECT CAST(x'ff' AS TEXT)",
    ],
)
def test_no_sql_can_write_run_away_or_crash(tmp_path: Path, database: str, sql: str) -> None:
    before = Path(database).read_bytes()
    result = run_sql(database, sql.replace("OTHER", str(tmp_path / "other")))
    assert isinstance(result, str)
    assert result.startswith("error: ")
    assert Path(database).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["shops.sqlite"]


def test_what_the_model_sees_is_short() -> None:
    assert show([(1, "a")]) == "1 a"
    assert show([(1.25,), (None,), (3,)]) == "1.2\nNULL\n..."
    assert len(show("error: " + "x" * 500)) == 60
