"""An older store is upgraded whole or not at all, a newer one is refused, and a new one is what the revisions make.

What comes after this release's schema is made up here: revision 9 makes a table anew, revision 10 changes its rows.
"""

import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from lightning_rl.store import schema, upgrades
from lightning_rl.store.contract import Finish, Reward, RolloutRequest
from lightning_rl.store.databases import connect
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span, pack_ids
from tests.postgres import Cluster

HERE = Path(__file__).parent
MIGRATIONS = Path(upgrades.__file__).parent / "migrations"
LATER = {
    "v9_notes.py": """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "9", "8"
def upgrade():
    with op.batch_alter_table("rollouts", recreate="always" if op.get_bind().dialect.name == "sqlite" else "auto") as t:
        t.add_column(sa.Column("note", sa.Text))
    op.create_index("rollouts_by_note", "rollouts", ["note"])
""",
    "v10_filled.py": """
import time
from alembic import op
revision, down_revision = "10", "9"
def upgrade():
    op.execute("UPDATE rollouts SET note = rollout_id")
    with open({log!r}, "a") as log:
        log.write("10 ran\\\\n")
    time.sleep({seconds})
""",
}


def old_file(path: Path, version: str = "2") -> str:
    """The URL of a file that an earlier release left: one rollout ended, one running, one queued."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript((HERE / "version_2.sql").read_text())
        database.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (version,))
        if version == "1":
            for index in ("rollouts_by_group", "attempts_by_claim"):
                [(made,)] = database.execute("SELECT sql FROM sqlite_master WHERE name = ?", (index,)).fetchall()
                database.execute(f"DROP INDEX {index}")
                database.execute(made.replace("IS NOT NULL", "<> ''"))
        database.commit()
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", "postgres"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store with a rollout in it, of the oldest release that wrote to such a database."""
    if request.param == "sqlite":
        return old_file(tmp_path / "store.db")
    cluster: Cluster = request.getfixturevalue("cluster")
    url = cluster.url(cluster.database())
    with closing(SqlStore(url)) as store:
        store.start(RolloutRequest(task={"q": 1}, rollout_id="running"), "w")
    return url


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a later release's revisions, which are this program's for the test."""
    folder = later_folder(tmp_path, seconds=0)
    monkeypatch.setattr(upgrades, "MIGRATIONS", str(folder))
    monkeypatch.setattr(schema, "SCHEMA_VERSION", "10")
    monkeypatch.setattr(schema, "READABLE", (*schema.READABLE, "9", "10"))
    return folder


def later_folder(tmp_path: Path, *, seconds: float) -> Path:
    folder = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in LATER.items():
        filled = text.replace("{log!r}", repr(str(tmp_path / "ran"))).replace("{seconds}", str(seconds))
        (folder / "versions" / name).write_text(filled.replace("\\\\n", "\\n"))
    return folder


def everything(url: str) -> dict[str, Any]:
    """All rows of all tables, and how the tables are made."""
    database = connect(url)

    def read(connection: sa.Connection) -> dict[str, Any]:
        tables = sorted(sa.inspect(connection).get_table_names())
        rows = {table: connection.execute(sa.text(f"SELECT * FROM {table} ORDER BY 1")).all() for table in tables}
        return {"rows": rows, "made": made(connection)}

    try:
        return database.read(read)
    finally:
        database.close()


def made(connection: sa.Connection) -> dict[str, Any]:
    """Columns, keys and indexes of all tables."""
    look = sa.inspect(connection)
    found = {}
    for table in look.get_table_names():
        columns = [
            (each["name"], str(each["type"]), each["nullable"], each["default"]) for each in look.get_columns(table)
        ]
        indexes = []
        for each in look.get_indexes(table):
            rows = sorted(f"{name} {value}" for name, value in each.get("dialect_options", {}).items())
            indexes.append((each["name"], each["column_names"], bool(each["unique"]), rows))
        unique = sorted(each["column_names"] for each in look.get_unique_constraints(table))
        found[table] = (columns, look.get_pk_constraint(table)["constrained_columns"], sorted(indexes), unique)
    return found


def version(url: str) -> str:
    [(_, found)] = [row for row in everything(url)["rows"]["meta"] if row[0] == "schema_version"]
    return str(found)


@pytest.mark.parametrize("found", ["1", "2"])
def test_an_older_file_is_upgraded_with_all_that_is_in_it(tmp_path: Path, found: str) -> None:
    url = old_file(tmp_path / "store.db", found)
    with closing(SqlStore(url, lambda: 1001.0)) as store:
        assert store.secret == bytes.fromhex("5a" * 32)
        assert store.counts() == {"succeeded": 1, "running": 1, "queued": 1}
        ended = store.rollout("ended")
        assert (ended.reward, ended.group_id, ended.attempts[0].attempt_id) == (1.0, "g", "a-ended")
        assert store.resources("latest").version == 1
        assert [r.value for r in store.trace("running", "a-running").rewards] == [0.5]
        # The span of `ended` is one that the first releases wrote: a map, which is read as it is.
        for rollout in ("ended", "running"):
            [span] = store.spans(rollout, f"a-{rollout}")
            assert span.attributes[semconv.RESPONSE_IDS] == pack_ids([1, 2, 3])
        store.add_spans([Span(**{name: getattr(span, name) for name in Span.__struct_fields__} | {"span_id": "new"})])
        assert store.recorded_calls().tokens == {"m": 9}
        store.add_rewards("running", "a-running", [Reward(value=1.0, reward_id="w2")])
        store.finish("running", "a-running", Finish(status="succeeded"))
        assert [claim.rollout.rollout_id for claim in store.claim("w", limit=9)] == ["queued"]
    SqlStore(f"sqlite:///{tmp_path / 'new.db'}").close()
    assert everything(url)["made"] == everything(f"sqlite:///{tmp_path / 'new.db'}")["made"]
    assert version(url) == schema.SCHEMA_VERSION


def test_the_newest_revision_is_this_programs_schema_version() -> None:
    assert ScriptDirectory(str(MIGRATIONS)).get_heads() == [schema.SCHEMA_VERSION]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_new_store_has_the_tables_that_the_revisions_make(kind: str, request: Any, tmp_path: Path) -> None:
    """A new store is made without Alembic, since that is much faster: the two ways lead to the same."""
    urls = [f"sqlite:///{tmp_path / name}" for name in ("one.db", "two.db")]
    if kind == "postgres":
        cluster: Cluster = request.getfixturevalue("cluster")
        urls = [cluster.url(cluster.database()) for _ in range(2)]
    SqlStore(urls[0]).close()
    database = connect(urls[1])
    database.write(upgrades._upgrade)
    assert (
        database.read(lambda connection: compare_metadata(MigrationContext.configure(connection), schema.metadata))
        == []
    )
    database.close()
    assert everything(urls[0])["made"] == everything(urls[1])["made"]
    noted = [everything(url)["rows"]["alembic_version"] for url in urls]
    assert noted == [[(schema.SCHEMA_VERSION,)]] * 2


def test_a_newer_store_is_refused_by_both_versions_and_stays_as_it_is(url: str) -> None:
    SqlStore(url).close()
    database = connect(url)
    newer = sa.update(schema.meta).where(schema.meta.c.key == "schema_version")
    database.write(lambda connection: connection.execute(newer.values(value="99")))
    before = everything(url)
    try:
        with pytest.raises(ValueError, match=r"has schema version 99, this program needs 8 .* newer one") as refused:
            SqlStore(url)
        assert database.place in str(refused.value)
        assert everything(url) == before
    finally:
        database.write(lambda connection: connection.execute(newer.values(value=schema.SCHEMA_VERSION)))
        database.close()


def test_an_older_store_takes_every_revision_in_their_order(old: str, later: Path, tmp_path: Path) -> None:
    SqlStore(old).close()
    assert version(old) == "10"
    rows = everything(old)["rows"]
    assert rows["alembic_version"] == [("10",)]
    assert all(row.note == row.rollout_id for row in rows["rollouts"])
    SqlStore(old).close()
    assert (tmp_path / "ran").read_text() == "10 ran\n"


class Interrupted(Exception):
    """What stops an upgrade."""


@contextmanager
def failing_at(step: int) -> Iterator[list[str]]:
    """Every statement from the `step`th on fails before the database hears of it; those that were asked for."""
    asked: list[str] = []

    def fail(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        asked.append(statement)
        if len(asked) > step:
            raise Interrupted

    sa.event.listen(sa.Engine, "before_cursor_execute", fail)
    try:
        yield asked
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", fail)


def test_an_upgrade_that_is_interrupted_at_any_step_leaves_what_was_there(old: str, later: Path) -> None:
    before = everything(old)
    for step in range(1000):
        with failing_at(step) as asked:
            try:
                upgrades.open_database(old).close()
                break
            except Interrupted:
                pass
        assert everything(old) == before, f"after {asked}"
    assert step > 10
    assert any("UPDATE rollouts SET note" in statement for statement in asked)
    assert version(old) == "10"


_OPEN = """
import os, signal, sys
import sqlalchemy as sa
from lightning_rl.store import schema, upgrades
from lightning_rl.store.sql import SqlStore
url, upgrades.MIGRATIONS, at = sys.argv[1:]
schema.SCHEMA_VERSION, schema.READABLE = "10", (*schema.READABLE, "9", "10")
def die(connection, cursor, statement, *rest):
    if at and at in statement:
        os.kill(os.getpid(), signal.SIGKILL)
sa.event.listen(sa.Engine, "after_cursor_execute", die)
SqlStore(url).close()
print("opened")
"""


def opening(url: str, migrations: Path, die_after: str = "") -> "subprocess.Popen[str]":
    """A process that opens the store, and kills itself after the statement that holds `die_after`."""
    command = [sys.executable, "-c", _OPEN, url, str(migrations), die_after]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
@pytest.mark.parametrize("step", ["CREATE INDEX rollouts_by_note", "UPDATE meta"])
def test_a_process_that_is_killed_in_an_upgrade_leaves_what_was_there(old: str, tmp_path: Path, step: str) -> None:
    before = everything(old)
    migrations = later_folder(tmp_path, seconds=0)
    with opening(old, migrations, die_after=step) as dying:
        _, said = dying.communicate()
    assert dying.returncode == -signal.SIGKILL, said
    assert everything(old) == before
    with closing(SqlStore(old)) as store:  # this release still opens it
        assert store.rollout("running").status == "running"
    with opening(old, migrations) as process:
        assert process.communicate() == ("opened\n", "")
    assert version(old) == "10"


def test_of_two_processes_that_open_an_old_store_one_upgrades_it_and_the_other_waits(old: str, tmp_path: Path) -> None:
    migrations = later_folder(tmp_path, seconds=1)
    processes = [opening(old, migrations) for _ in range(2)]
    assert [process.communicate() for process in processes] == [("opened\n", "")] * 2
    assert (tmp_path / "ran").read_text() == "10 ran\n"


@pytest.mark.long
def test_of_two_processes_that_open_a_new_store_one_makes_it(request: Any, tmp_path: Path) -> None:
    cluster: Cluster = request.getfixturevalue("cluster")
    for url in (f"sqlite:///{tmp_path / 'new.db'}", cluster.url(cluster.database())):
        processes = [opening(url, MIGRATIONS) for _ in range(3)]
        assert [process.communicate() for process in processes] == [("opened\n", "")] * 3


@pytest.mark.long
def test_alembic_is_loaded_for_an_upgrade_alone(tmp_path: Path) -> None:
    script = (
        "import sys; from lightning_rl.store.sql import SqlStore; SqlStore(sys.argv[1]).close(); "
        "print('alembic' in sys.modules)"
    )
    old, new = old_file(tmp_path / "old.db"), f"sqlite:///{tmp_path / 'new.db'}"
    loaded = [
        subprocess.run([sys.executable, "-c", script, url], capture_output=True, text=True, check=True).stdout
        for url in (new, new, old, old)
    ]
    assert loaded == ["False\n", "False\n", "True\n", "False\n"]


def test_tables_of_something_else_are_left_alone(request: Any, tmp_path: Path) -> None:
    cluster: Cluster = request.getfixturevalue("cluster")
    for url in (f"sqlite:///{tmp_path / 'other.db'}", cluster.url(cluster.database())):
        database = connect(url)
        database.write(lambda connection: connection.execute(sa.text("CREATE TABLE spans (x INTEGER)")))
        database.close()
        before = everything(url)
        with pytest.raises(ValueError, match=re.escape("tables of something else (spans): give the store a database")):
            SqlStore(url)
        assert everything(url) == before
