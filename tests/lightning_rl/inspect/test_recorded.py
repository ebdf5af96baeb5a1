"""`lightning-rl explain` on the folder of a run: found, read without a trace, one clear line where it cannot be."""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from lightning_rl.cli import app
from lightning_rl.config import compose, to_yaml
from lightning_rl.errors import Explained
from lightning_rl.inspect import recorded
from lightning_rl.inspect.export import export
from lightning_rl.store.contract import RolloutRequest
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters import semconv
from tests.adapters.words import say
from tests.lightning_rl.inspect.runs import record

BRANCHED = [say(1, "a", "b"), say(2, "c", "d", after=1), say(3, "c", "e", after=1), say(4, "f", "g")]
LINEAR = [say(1, "a", "b"), say(2, "c", "d", after=1)]
CAUSE = {4: {semconv.FORK_CAUSE: "edited_text"}}


def fill(run_dir: Path) -> SqlStore:
    run_dir.mkdir(parents=True)
    store = SqlStore(f"sqlite:///{run_dir / 'store.db'}")
    record(store, "train-1-0", LINEAR)
    record(store, "train-1-1", BRANCHED, CAUSE)
    record(store, "val-2-0", BRANCHED)
    return store


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "one"
    fill(folder).close()
    return folder


@pytest.fixture
def going_on(tmp_path: Path) -> Iterator[Path]:
    with closing(fill(tmp_path / "live")):
        yield tmp_path / "live"


def explain(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def refusal(*arguments: str) -> str:
    with pytest.raises(Explained) as told:
        explain(*arguments)
    assert "\n" not in str(told.value)
    return str(told.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith("-shm")}


@pytest.mark.parametrize("name", ["train-1-1", "1-1"])
def test_a_rollout_is_drawn_by_its_id_or_a_part_that_is_its_own(run_dir: Path, name: str) -> None:
    printed = explain(name)
    assert printed.startswith("rollout train-1-1: succeeded, train, reward 1\n")
    assert "call 4 begins anew: edited_text" in printed
    assert "calls 2 and 3 continue call 1: 2 samples of one prompt" in printed
    assert "calls 1 [3]" in printed


def test_a_beginning_that_is_its_own_is_enough(run_dir: Path) -> None:
    assert explain("val").startswith("rollout val-2-0:")


def test_json_says_the_same(run_dir: Path) -> None:
    view = json.loads(explain("train-1-1", "--json"))
    [attempt] = view["attempts"]
    assert [call["continues"] for call in attempt["calls"]] == [None, 1, 1, None]
    assert [fork["cause"] for fork in attempt["forks"]] == [None, "edited_text"]
    assert attempt["rows"][1]["calls"] == [{"number": 1, "part": "context"}, {"number": 3, "part": "trained"}]
    assert view["task"] == {"q": "train-1-1"}


def test_without_a_rollout_the_forks_of_the_run_are_counted(run_dir: Path) -> None:
    printed = explain()
    assert "3 rollouts, 10 calls" in printed
    assert "1  calls began anew: edited_text" in printed
    assert "2  calls continue one that an earlier call continues too" in printed
    assert printed.index("train-1-1  branches 1, edited_text 1") < printed.index("val-2-0  branches 1")
    assert "train-1-0" not in printed
    counted = json.loads(explain("--json"))
    assert (counted["causes"], counted["branches"]) == ({"edited_text": 1}, 2)
    assert counted["most"]["val-2-0"] == {"branches": 1}


def test_more_spans_than_one_batch_are_counted(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    with closing(SqlStore(f"sqlite:///{tmp_path / 'many' / 'store.db'}")) as store:
        record(store, "r", [say(number, "a", "b") for number in range(1, 600)])
    assert "1 rollouts, 599 calls" in explain("--run-dir", str(tmp_path / "many"))


def test_the_newest_run_with_a_store_is_read(run_dir: Path) -> None:
    newer = run_dir.parent / "two"
    newer.mkdir()
    with closing(SqlStore(f"sqlite:///{newer / 'store.db'}")) as store:
        record(store, "other", LINEAR)
    os.utime(run_dir / "store.db", (1, 1))
    (run_dir.parent / "three").mkdir()  # the newest folder, and no run
    assert str(newer) in explain()
    os.utime(newer / "store.db", (0, 0))
    assert str(run_dir) in explain()


def test_of_two_runs_the_one_still_written_to_is_the_newest(tmp_path: Path) -> None:
    """What a run writes goes to the WAL first."""
    names = {"older/store.db": 1, "newer/store.db": 2, "older/store.db-wal": 3}
    for name, written_at in names.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (written_at, written_at))
    assert recorded.newest_run(tmp_path) == tmp_path / "older"


def test_a_run_of_a_named_project_lies_one_folder_deeper_and_is_found(tmp_path: Path) -> None:
    (tmp_path / "project" / "run").mkdir(parents=True)
    (tmp_path / "project" / "run" / "store.db").touch()
    assert recorded.newest_run(tmp_path) == tmp_path / "project" / "run"


def test_the_rows_are_those_that_the_runs_own_keys_cut(run_dir: Path) -> None:
    assert "left out" not in explain("train-1-1")
    keys = {"data": {"max_prompt_length": 1, "max_response_length": 2}, "algorithm": {"train_agents": "helper"}}
    (run_dir / "config.yaml").write_text(to_yaml(compose(keys)))
    printed = explain("train-1-1")
    assert "left out: overlong" in printed
    assert "left out: not_selected" in printed


def test_reading_leaves_no_trace(run_dir: Path) -> None:
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in run_dir.iterdir()}
    explain("train-1-1")
    explain()
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in run_dir.iterdir()} == before


def test_a_run_that_is_going_on_is_read_beside_its_writer(going_on: Path) -> None:
    """The records are still in the WAL; the writer goes on, and what it adds is seen next time."""
    assert (going_on / "store.db-wal").stat().st_size > 0
    before = contents(going_on)
    assert "3 rollouts, 10 calls" in explain("--run-dir", str(going_on))
    assert contents(going_on) == before
    with closing(SqlStore(f"sqlite:///{going_on / 'store.db'}")) as store, recorded.opened(going_on) as reading:
        assert recorded.forks(reading, going_on).calls == 10
        record(store, "late", LINEAR)
        assert recorded.forks(reading, going_on).calls == 10, "one moment of the store"
    assert "4 rollouts, 12 calls" in explain("--run-dir", str(going_on))


def test_a_store_is_opened_for_reading_only(going_on: Path) -> None:
    with recorded.opened(going_on) as connection, pytest.raises(Exception, match="readonly"):
        connection.exec_driver_sql("DELETE FROM spans")


def test_the_store_of_a_server_that_has_ended_is_read_by_its_file(run_dir: Path) -> None:
    store = (run_dir / "store.db").rename(run_dir / "run.db")
    assert "name a run's folder, or run.db in it, a server's store" in refusal("train-1-1", "--run-dir", str(run_dir))
    assert "rollout train-1-1: " in explain("train-1-1", "--run-dir", str(store))
    assert "there is no rollout" in refusal("x" * 300, "--run-dir", str(store))
    with pytest.raises(Explained, match=r"run\.db is a file of the run"):
        export(store, "rollouts", "jsonl", store)


def test_a_folder_in_the_place_of_a_rollout_is_told_where_it_goes(run_dir: Path) -> None:
    done = CliRunner().invoke(app, ["explain", str(run_dir)])
    assert done.exit_code == 2
    assert "name it with --run-dir" in " ".join(done.output.replace("│", " ").split())


def test_what_is_not_there_is_one_line(run_dir: Path, tmp_path: Path) -> None:
    assert refusal("train-1-9") == "there is no rollout 'train-1-9' in this run; near are train-1-1, train-1-0"
    assert "there is no rollout 'xyz' in this run; `lightning-rl explain` alone lists" in refusal("xyz")
    assert refusal("train") == "'train' names several rollouts, train-1-0, train-1-1: give more of the one you mean"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty holds no run: there is no store.db in it; name a run's folder" in refusal("--run-dir", str(empty))
    (empty / "store.db").touch()
    assert "store.db is empty: no run has begun in this folder; name another" in refusal("--run-dir", str(empty))
    (empty / "store.db").unlink()
    assert "gone holds no run" in refusal("--run-dir", str(tmp_path / "gone"))
    assert list(empty.iterdir()) == []
    assert not (tmp_path / "gone").exists()


def test_without_any_run_the_option_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal() == f"there is no run in {tmp_path / 'runs'}: name its folder with --run-dir"


def test_a_store_that_is_none_or_of_another_version_is_named(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "store.db").write_text("no database at all, but long enough to look at")
    assert "cannot be read: file is not a database" in refusal("--run-dir", str(tmp_path / "text"))
    with closing(sqlite3.connect(run_dir / "store.db")) as database:
        database.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
        database.commit()
    assert "has schema version 99, this program reads 8" in refusal("train-1-1")


def test_a_damaged_store_whose_error_is_no_text_is_named(run_dir: Path) -> None:
    """SQLite names the damaged part of the schema as it finds it."""
    file = run_dir / "store.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    file.write_bytes(file.read_bytes().replace(b"CREATE INDEX ", b"CREATE \xff\xffDEX "))
    assert f"{file} cannot be read, it is damaged: " in refusal("train-1-1")


def test_a_damaged_rollout_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    with closing(SqlStore(f"sqlite:///{tmp_path / 'bad' / 'store.db'}")) as store:
        record(store, "r", [msgspec.structs.replace(LINEAR[1], parent_id="nobody")])
    told = refusal("r", "--run-dir", str(tmp_path / "bad"))
    assert told.startswith(f"rollout r of {tmp_path / 'bad'} is damaged: call r-c2 continues r-nobody")


def test_a_rollout_is_found_without_what_tells_its_run(run_dir: Path) -> None:
    with closing(SqlStore(f"sqlite:///{run_dir / 'store.db'}")) as store:
        store.enqueue([RolloutRequest(task=1, rollout_id=f"train-3-1{k}.4f2a1c") for k in ("", "0")])
    with recorded.opened(run_dir) as connection:
        assert recorded.find(connection, "train-3-1") == "train-3-1.4f2a1c"
        assert recorded.find(connection, "3-10.4f2a1c") == "train-3-10.4f2a1c"


def test_who_looks_again_and_again_has_one_engine(run_dir: Path) -> None:
    """One for each look was collected at some time, and a Ctrl-C in that moment was lost."""
    with recorded.opened(run_dir) as first, recorded.opened(run_dir) as second:
        assert first is not second
        assert first.engine is second.engine
