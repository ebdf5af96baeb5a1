"""The questions that `examples/sql_agent/data.py` makes."""

import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from examples.sql_agent.agent import run_sql, same_answer
from examples.sql_agent.data import KINDS, SETS, fill, make, make_database, make_questions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def sets(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return make(folder)


def test_the_sets_have_the_sizes_that_they_should(sets: dict[str, list[dict[str, Any]]]) -> None:
    assert {name: len(tasks) for name, tasks in sets.items()} == {
        "train": 1800,
        "tuning": 200,
        "heldout": 200,
    }
    for name, (_, databases, _) in SETS.items():
        assert len({task["database"] for task in sets[name]}) == databases


def test_the_same_seeds_make_the_same_data(sets: dict[str, list[dict[str, Any]]], folder: Path, tmp_path: Path) -> None:
    again = json.dumps(make(tmp_path)).replace(str(tmp_path), str(folder))
    assert json.loads(again) == sets
    for task in sets["heldout"]:
        copy = task["database"].replace(str(folder), str(tmp_path))
        assert Path(copy).read_bytes() == Path(task["database"]).read_bytes()


def test_a_complete_folder_is_left_alone_and_a_broken_one_remade(tmp_path: Path) -> None:
    sets = make(tmp_path)
    untouched = (tmp_path / "train.jsonl").stat().st_mtime_ns
    assert make(tmp_path) == sets
    assert (tmp_path / "train.jsonl").stat().st_mtime_ns == untouched
    (tmp_path / "complete.json").unlink()
    (tmp_path / "train.jsonl").write_text("")
    assert make(tmp_path) == sets


def test_no_set_has_a_database_of_another(sets: dict[str, list[dict[str, Any]]]) -> None:
    asked = {name: {(task["schema"], task["question"]) for task in tasks} for name, tasks in sets.items()}
    schemas = {name: {task["schema"] for task in tasks} for name, tasks in sets.items()}
    for first, second in (("train", "tuning"), ("train", "heldout"), ("tuning", "heldout")):
        assert not asked[first] & asked[second]
        assert not schemas[first] & schemas[second]


def test_every_gold_query_answers_with_something_to_see(
    sets: dict[str, list[dict[str, Any]]],
) -> None:
    for tasks in sets.values():
        for task in tasks:
            rows = run_sql(task["database"], task["gold"])
            assert isinstance(rows, list)
            assert rows not in ([], [(0,)], [(None,)]), task
            assert Path(task["database"]).is_absolute()


def test_the_case_of_values_is_in_the_table_alone(sets: dict[str, list[dict[str, Any]]]) -> None:
    asked = [task for task in sets["train"] if "'" in task["gold"]]
    upper = sum(task["gold"].split("'")[1].isupper() for task in asked) / len(asked)
    assert 0.4 < upper < 0.6
    for task in asked:
        value = task["gold"].split("'")[1]
        assert value.lower() in task["question"]
        other = task["gold"].replace(value, value.swapcase())
        assert run_sql(task["database"], other) in ([], [(0,)], [(None,)])
        assert not same_answer(task["database"], other, task["gold"])


def test_every_kind_is_asked_about_as_often_as_the_others() -> None:
    rng = random.Random(0)
    database = make_database(rng)
    questions = make_questions(rng, database, 18)
    assert len({question.text for question in questions}) == 18
    assert {question.kind for question in questions} == set(KINDS)
    connection = sqlite3.connect(":memory:")
    fill(connection, database)
    for question in questions:
        assert connection.execute(question.gold).fetchall()
    connection.close()
