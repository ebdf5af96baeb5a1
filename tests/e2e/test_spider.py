"""Spider's files as questions for the SQL graph, judged on their test suites; and a step of training on them."""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from examples.sql_agent import spider
from examples.sql_agent.graph import sql_graph
from examples.sql_agent.spider import BrokenFolder, look, matches, read, schema_of, sets
from examples.sql_agent.train_graph import right
from lightning_rl.config import compose
from lightning_rl.telemetry.metrics.jsonl import read as metrics_of
from tests.e2e.test_examples import recorded
from tests.e2e.test_sql_graph import Scripted

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "examples" / "sql_agent" / "checkpoint"

SHOPS = "CREATE TABLE shops (\n\tid   INTEGER PRIMARY KEY,\n\n\tname TEXT,\n\tcity TEXT,\n\tsize INT\n)"
MUSEUMS = "CREATE TABLE museum (id INT, name TEXT, opened INT)", "CREATE TABLE visit (museum_id INT, visitor TEXT)"
SINGERS = "CREATE TABLE singer (id INT, name TEXT, country TEXT, age INT)"
QUESTIONS = {
    "train_spider.json": [
        ("shops", "How many shops are there?", "SELECT count(*) FROM shops"),
        ("shops", "Name the cities with shops.", "SELECT DISTINCT city FROM shops"),
        ("shops", "Name all shops, the largest first.", "SELECT name FROM shops ORDER BY size DESC"),
        ("museum", "When was each museum opened?", "SELECT name, opened FROM museum"),
        ("museum", "Who visited which museum?",
         "SELECT T2.visitor, T1.name FROM museum AS T1 JOIN visit AS T2 ON T1.id = T2.museum_id"),
        ("museum", "How many visits were there?", "SELECT count(*) FROM visit"),
    ],
    "train_others.json": [
        ("shops", "What is the mean size?", "SELECT avg(size) FROM shops"),
        ("museum", "Which museums opened after 1900?", "SELECT name FROM museum WHERE opened > 1900"),
    ],
    "dev.json": [
        ("singer", "How many singers are there?", "SELECT count(*) FROM singer"),
        ("singer", "Who is older than 30?", "SELECT name FROM singer WHERE age > 30"),
        ("singer", "How many singers has each country?", "SELECT country, count(*) FROM singer GROUP BY country"),
        ("singer", "Who is the oldest?", "SELECT name FROM singer ORDER BY age DESC LIMIT 1"),
    ],
}  # fmt: skip


def write_database(path: Path, tables: Sequence[str], **rows: Sequence[tuple[Any, ...]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        for table in tables:
            connection.execute(table)
        for table, values in rows.items():
            connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values[0]))})", values)
        connection.commit()


def write_folder(folder: Path) -> Path:
    """Three databases and 12 questions, laid out as Spider is; the database of dev has a test suite of three files."""
    shops = [(1, "Acme", "Rome", 5), (2, "Nova", "Rome", 9), (3, "Apex", "Oslo", 7)]
    museums, visits = [(1, "Prado", 1819), (2, "Tate", 1897), (3, "MoMA", 1929)], [(1, "Ann"), (1, "Ben"), (3, "Ann")]
    singers = [(1, "Ann", "Peru", 41), (2, "Ben", "Peru", 29), (3, "Cleo", "Mali", 35)]
    write_database(folder / "database/shops/shops.sqlite", [SHOPS], shops=shops)
    write_database(folder / "database/museum/museum.sqlite", MUSEUMS, museum=museums, visit=visits)
    write_database(folder / "database/singer/singer.sqlite", [SINGERS], singer=singers)
    suite = folder / "test_database/singer"
    write_database(suite / "singer.sqlite", [SINGERS], singer=singers)
    write_database(suite / "singer_1.sqlite", [SINGERS], singer=[*singers, (4, "Dan", "Mali", 30)])
    write_database(suite / "singer_2.sqlite", [SINGERS], singer=[(1, "Eve", "Togo", 80), (2, "Eve", "Peru", 8)])
    for name, questions in QUESTIONS.items():
        items = [{"db_id": db, "question": question, "query": gold} for db, question, gold in questions]
        (folder / name).write_text(json.dumps(items))
    return folder


def write_model(folder: Path) -> Path:
    """The tutorial's small model, told that it may read prompts as long as those for a real one."""
    shutil.copytree(CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("spider data%20?"))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "broken")


def test_a_question_is_read_with_its_database_and_how_that_was_made(folder: Path) -> None:
    found = read(folder)
    assert {name: len(tasks) for name, tasks in found.items()} == {"train": 6, "dev": 4}
    assert found["train"][1] == {
        "schema": "CREATE TABLE shops (\nid INTEGER PRIMARY KEY,\nname TEXT,\ncity TEXT,\nsize INT\n);",
        "question": "Name the cities with shops.",
        "database": str(folder / "database/shops/shops.sqlite"),
        "gold": "SELECT DISTINCT city FROM shops",
        "suite": str(folder / "database/shops"),
    }
    assert found["train"][3]["schema"] == "\n".join(f"{table};" for table in MUSEUMS)


def test_further_questions_are_read_where_they_are_asked_for(folder: Path) -> None:
    assert len(read(folder, others=True)["train"]) == 8


def test_dev_is_asked_and_judged_on_the_test_suite(folder: Path) -> None:
    for task in read(folder)["dev"]:
        assert task["database"] == str(folder / "test_database/singer/singer.sqlite")
        assert [path.name for path in spider.suite_of(task)] == ["singer.sqlite", "singer_1.sqlite", "singer_2.sqlite"]


def test_without_a_test_suite_dev_is_judged_on_its_database(broken: Path) -> None:
    shutil.rmtree(broken / "test_database")
    assert read(broken)["dev"][0]["suite"] == str(broken / "database/singer")


def test_several_files_in_a_databases_folder_are_a_test_suite_too(broken: Path) -> None:
    for path in (broken / "test_database/singer").glob("singer_*.sqlite"):
        shutil.move(path, broken / "database/singer")
    shutil.rmtree(broken / "test_database")
    assert len(spider.suite_of(read(broken)["dev"][0])) == 3


def test_what_is_held_out_is_drawn_from_dev_and_always_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spider, "VALIDATED", 3)
    found, dev = sets(folder), read(folder)["dev"]
    assert found == sets(folder)
    assert len(found["heldout"]) == 3
    assert sorted(task["question"] for task in [*found["heldout"], *found["tuning"]]) == sorted(
        task["question"] for task in dev
    )


@pytest.mark.parametrize("name", ["train_spider.json", "dev.json"])
def test_a_missing_file_is_named(broken: Path, name: str) -> None:
    (broken / name).unlink()
    with pytest.raises(BrokenFolder, match=f"{name} is not there: give the folder that Spider's archive unpacks to"):
        read(broken)


def test_broken_json_is_told_with_its_place(broken: Path) -> None:
    (broken / "dev.json").write_text('[\n{"db_id": "singer",\n "question" "?"}]')
    with pytest.raises(BrokenFolder, match=r"dev\.json cannot be read: .* line 3 column 13"):
        read(broken)


@pytest.mark.parametrize("text", ["{}", "[]", '{"questions": [1]}'])
def test_a_file_without_questions_is_refused(broken: Path, text: str) -> None:
    (broken / "dev.json").write_text(text)
    with pytest.raises(BrokenFolder, match=r"dev\.json should hold a list of questions"):
        read(broken)


@pytest.mark.parametrize("item", [{"db_id": "shops", "question": "?"}, {"db_id": "shops", "query": 3}, 7])
def test_a_question_that_lacks_something_is_named(broken: Path, item: Any) -> None:
    whole = {"db_id": "shops", "question": "?", "query": "SELECT 1"}
    (broken / "train_spider.json").write_text(json.dumps([whole, item]))
    with pytest.raises(BrokenFolder, match=r"train_spider\.json: item 1 has no text '(query|question)'"):
        read(broken)


def test_a_missing_database_is_named_with_the_question_that_needs_it(broken: Path) -> None:
    (broken / "database/museum/museum.sqlite").unlink()
    said = r"no database 'museum' for train_spider\.json, item 3: .*/museum/museum\.sqlite is not there"
    with pytest.raises(BrokenFolder, match=said):
        read(broken)


def test_a_file_that_is_no_database_is_named(broken: Path) -> None:
    path = broken / "database/museum/museum.sqlite"
    path.write_text("version https://git-lfs.github.com/spec/v1\n" * 100)
    with pytest.raises(BrokenFolder, match=r"museum\.sqlite cannot be read: file is not a database"):
        read(broken)
    path.write_bytes(b"")
    with pytest.raises(BrokenFolder, match=r"museum\.sqlite has no tables"):
        read(broken)


def test_a_long_schema_is_told_by_names_alone_and_a_longer_one_is_cut(tmp_path: Path) -> None:
    columns = ", ".join(f"column_{i} VARCHAR(255) NOT NULL" for i in range(20))
    write_database(tmp_path / "some.sqlite", [f"CREATE TABLE t{i} ({columns})" for i in range(10)])
    lines = schema_of(tmp_path / "some.sqlite").split("\n")
    assert len(lines) == 10
    assert lines[0] == f"t0({', '.join(f'column_{i}' for i in range(20))})"
    write_database(tmp_path / "more.sqlite", [f"CREATE TABLE t{i} ({columns})" for i in range(100)])
    *lines, last = schema_of(tmp_path / "more.sqlite").split("\n")
    assert 3900 < len("\n".join(lines)) <= spider.SCHEMA_CHARS
    assert last.endswith("more characters)")


def task(folder: Path, question: str) -> dict[str, str]:
    found = read(folder, others=True)
    return next(task for task in [*found["train"], *found["dev"]] if task["question"] == question)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_right_query_is_right(folder: Path, name: str) -> None:
    for _, question, gold in QUESTIONS[name]:
        assert matches(task(folder, question), gold)


@pytest.mark.parametrize(
    ("question", "query", "verdict"),
    [
        ("When was each museum opened?", "SELECT opened, name FROM museum ORDER BY name", True),
        ("When was each museum opened?", "SELECT name, opened, id FROM museum", False),
        ("When was each museum opened?", "SELECT name, opened FROM museum WHERE opened > = 1819", True),
        ("When was each museum opened?", "SELECT name, opened FROM museum UNION ALL SELECT 'Prado', 1819", False),
        ("Name the cities with shops.", "SELECT city FROM shops", True),
        ("Name the cities with shops.", "SELECT city FROM shops GROUP BY city", False),
        ("Name all shops, the largest first.", "SELECT name FROM shops", False),
        ("Name all shops, the largest first.", "SELECT name FROM shops ORDER BY -size;", True),
        ("How many shops are there?", "SELECT 3.0", True),
        ("How many shops are there?", "SELECT '3'", False),
        ("How many shops are there?", "SELECT", False),
        ("How many shops are there?", "", False),
        ("How many shops are there?", "SELECT 3; SELECT 3", False),
        ("Who is older than 30?", "SELECT name FROM singer WHERE age >= 30", False),  # one of the suite tells
        ("Who is older than 30?", "SELECT name FROM singer WHERE country != 'Peru' OR id = 1", False),
        ("How many singers are there?", "SELECT 3", False),
    ],
)
def test_a_query_is_judged_by_what_it_gives_on_every_database(
    folder: Path, question: str, query: str, verdict: bool
) -> None:
    assert matches(task(folder, question), query) is verdict
    assert right(task(folder, question), query) is verdict


@pytest.mark.parametrize(
    "query",
    ["DELETE FROM shops", "DROP TABLE shops", "ATTACH 'other.sqlite' AS other", "PRAGMA writable_schema = 1",
     "CREATE TABLE t AS SELECT 1", "VACUUM INTO 'copy.sqlite'"],
)  # fmt: skip
def test_a_query_can_change_nothing(folder: Path, query: str) -> None:
    one = task(folder, "How many shops are there?")
    before = Path(one["database"]).read_bytes()
    assert look(one["database"], query).startswith("error: ")
    assert not matches(one, query)
    assert Path(one["database"]).read_bytes() == before


def test_a_query_without_end_is_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spider, "STEPS", 1_000_000)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    one = task(folder, "How many shops are there?")
    assert look(one["database"], endless) == "error: interrupted"
    assert not matches(one, endless)


def test_a_right_query_that_fails_is_an_error_that_names_it(folder: Path) -> None:
    one = task(folder, "How many singers are there?") | {"gold": "SELECT nothing FROM singer"}
    with pytest.raises(ValueError, match=r"the right query fails on .*singer\.sqlite: 'SELECT nothing FROM singer'"):
        matches(one, "SELECT 1")


def test_texts_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    path = tmp_path / "one" / "one.sqlite"
    write_database(path, ["CREATE TABLE t (name TEXT)"])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO t VALUES (CAST(x'5a9f' AS TEXT))")
        connection.commit()
    assert look(str(path), "SELECT name FROM t") == "Z"
    assert matches({"database": str(path), "suite": str(path.parent), "gold": "SELECT name FROM t"}, "SELECT * FROM t")


def test_the_model_sees_errors_rows_and_where_they_were_cut(folder: Path) -> None:
    database = str(folder / "database/shops/shops.sqlite")
    assert look(database, "SELECT name, NULL, 1.5 FROM shops WHERE id < 3") == "Acme | NULL | 1.5\nNova | NULL | 1.5"
    assert look(database, "SELECT name FROM shops WHERE size > 100") == "no rows"
    assert look(database, "SELECT nation FROM shops") == "error: no such column: nation"
    assert look(database, "SELECT hex(zeroblob(3000))") == "0" * 2048 + "\n... (3952 more characters)"
    many = "SELECT 'twelve chars' FROM shops a, shops b, shops c, shops d, shops e, shops f"
    *rows, last = look(database, many).split("\n")
    assert set(rows) == {"twelve chars"}
    assert len(rows) == 157
    assert last == "... (7436 more characters)"


def test_the_graph_asks_a_model_as_the_prompts_say_until_it_accepts(folder: Path) -> None:
    one = task(folder, "How many singers has each country?")
    mended = f"Like this:\n```sql\n{one['gold']}\n```"
    script = ["```sql\nSELECT nation FROM singer\n```", "No such column.\nVERDICT: WRONG", mended, "VERDICT: CORRECT"]
    model = Scripted(script=script)
    state = sql_graph(model, spider.PROMPTS, look=look).invoke(one)
    assert right(one, state["query"])
    write, check, rewrite, last = (prompt for _, prompt in model.asked)
    assert [node for node, _ in model.asked] == ["write", "check", "rewrite", "check"]
    assert all(one["schema"] in prompt and one["question"] in prompt for _, prompt in model.asked)
    assert "```sql\nSELECT nation FROM singer\n```" in check
    assert "error: no such column: nation" in check
    assert "No such column.\nVERDICT: WRONG" in rewrite
    assert "Mali | 1\nPeru | 2" in last
    assert "```sql" in write


def test_the_settings_are_valid_and_train_the_nodes_that_write() -> None:
    config = compose(spider.CONFIG)
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert config.algorithm.train_agents == "write|rewrite"
    assert (
        config.data.max_prompt_length + config.data.max_response_length
        == config.actor_rollout_ref.rollout.max_model_len
    )


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.long
def test_the_folder_is_checked_by_a_command(folder: Path, broken: Path) -> None:
    assert run("examples.sql_agent.spider", folder).stdout == (
        "train: 6 questions on 2 databases, judged on 2 files\ndev: 4 questions on 1 databases, judged on 3 files\n"
    )
    with closing(sqlite3.connect(broken / "test_database/singer/singer_2.sqlite")) as connection:
        connection.execute("DROP TABLE singer")
    said = run("examples.sql_agent.spider", broken).stdout
    assert said.count("the right query fails on ") == 4
    (broken / "dev.json").unlink()
    done = run("examples.sql_agent.spider", broken)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "dev.json is not there" in done.stderr


def small_run(folder: Path, model: Path, run_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The tutorial's command, with few and short answers, in float32, in which engines and trainer agree closely.

    The model is right of nothing here, so an entropy bonus is what its weights are changed by.
    """
    few = [
        "data.train_batch_size=4",
        "data.max_response_length=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.rollout.dtype=float32",
    ]
    wanted = ["--spider", folder, "--model", model, "--run-dir", run_dir, "--steps", "1"]
    return run("examples.sql_agent.train_graph", *wanted, *more, *few)


def check_run(run_dir: Path) -> None:
    """One step was trained on all that was written and rewritten, and on nothing else."""
    rows = list(metrics_of(run_dir / "metrics.jsonl"))
    assert [row["step"] for row in rows if "val/reward" in row] == [0, 1]
    last = rows[-1]
    assert last["rollouts/agent_failed"] == 0
    assert last["actor/grad_norm"] > 0
    assert last["training/mismatch_kl"] < 1e-6
    sampled = Counter[tuple[str, str | None]]()
    for rollout, calls, _ in recorded(run_dir):
        for call in calls:
            sampled[rollout.mode, call.agent] += len(call.response_ids)
    assert set(sampled) == {(mode, node) for mode in ("train", "val") for node in ("write", "check", "rewrite")}
    assert last["tokens/trained"] == sampled["train", "write"] + sampled["train", "rewrite"]
    assert last["tokens/excluded/validation"] == sampled["val", "write"] + sampled["val", "rewrite"]
    assert last["tokens/excluded/not_selected"] == sampled["train", "check"] + sampled["val", "check"]


@pytest.mark.e2e
@pytest.mark.long
def test_a_step_is_trained_as_the_page_says(folder: Path, tmp_path: Path) -> None:
    done = small_run(folder, write_model(tmp_path / "model"), tmp_path / "run", "--engine", "embedded")
    assert done.returncode == 0, done.stdout + done.stderr
    check_run(tmp_path / "run")
    done = run("examples.sql_agent.report", tmp_path / "run", "--picture", tmp_path / "learning.png")
    assert done.returncode == 0, done.stderr
    assert "| `write\\|rewrite` | 0 | 0.000 | 0.000 |" in done.stdout
    assert (tmp_path / "learning.png").stat().st_size > 1000


@pytest.mark.long
@pytest.mark.e2e
def test_a_broken_folder_ends_the_command_with_what_to_do(tmp_path: Path) -> None:
    done = run("examples.sql_agent.train_graph", "--spider", tmp_path, "--engine", "embedded")
    assert done.returncode == 2
    assert "train_spider.json is not there: give the folder" in done.stderr
    assert "Traceback" not in done.stderr
