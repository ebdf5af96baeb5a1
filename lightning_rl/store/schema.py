"""The tables, and the opening of a database file that holds them.

Invariant: a store is opened only on a file whose schema version this code reads; the file then has this code's.
The partial unique index `one_running_attempt` makes the database itself refuse a second running
attempt of a rollout.
"""

import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from lightning_rl.store.errors import StoreUnwritable

SCHEMA_VERSION = "2"
READABLE = ("1", SCHEMA_VERSION)  # files of "1" hold spans as maps, which are read as they are
_UNWRITABLE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)

metadata = sa.MetaData()

meta = sa.Table("meta", metadata, sa.Column("key", sa.Text, primary_key=True), sa.Column("value", sa.Text))

rollouts = sa.Table(
    "rollouts",
    metadata,
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=True),  # order of the queue
    sa.Column("rollout_id", sa.Text, nullable=False, unique=True),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("mode", sa.Text, nullable=False),
    sa.Column("group_id", sa.Text),
    sa.Column("agent", sa.Text),
    sa.Column("resources_id", sa.Text),
    sa.Column("request", sa.LargeBinary, nullable=False),  # JSON of the RolloutRequest
    sa.Column("attempt_count", sa.Integer, nullable=False),
    sa.Column("attempt_id", sa.Text),  # the latest
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Index("rollouts_by_status", "status", "position"),
    sa.Index("rollouts_by_group", "group_id", "position", sqlite_where=sa.text("group_id IS NOT NULL")),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("attempt_id", sa.Text, primary_key=True),
    sa.Column("rollout_id", sa.Text, nullable=False),
    sa.Column("sequence", sa.Integer, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("worker_id", sa.Text, nullable=False),
    sa.Column("claim_id", sa.Text),
    sa.Column("claim_body", sa.LargeBinary),
    sa.Column("unresponsive_seconds", sa.Float, nullable=False),
    sa.Column("lease_expires_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("deadline_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("reward", sa.Float),
    sa.Column("rewards", sa.LargeBinary),  # JSON
    sa.Column("error", sa.LargeBinary),  # JSON of the ErrorInfo
    sa.Column("finish_body", sa.LargeBinary),
    sa.UniqueConstraint("rollout_id", "sequence"),
    sa.Index("one_running_attempt", "rollout_id", unique=True, sqlite_where=sa.text("status = 'running'")),
    sa.Index("attempts_by_claim", "claim_id", sqlite_where=sa.text("claim_id IS NOT NULL")),
)

spans = sa.Table(
    "spans",
    metadata,
    sa.Column("span_id", sa.Text, primary_key=True),
    sa.Column("rollout_id", sa.Text, nullable=False),
    sa.Column("attempt_id", sa.Text, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("record", sa.LargeBinary, nullable=False),  # a packed Span
    sa.Index("spans_by_attempt", "rollout_id", "attempt_id"),
)

rewards = sa.Table(
    "rewards",
    metadata,
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("rollout_id", sa.Text, nullable=False),
    sa.Column("attempt_id", sa.Text, nullable=False),
    sa.Column("reward_id", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("value", sa.Float, nullable=False),
    sa.Column("call_id", sa.Text),
    sa.UniqueConstraint("attempt_id", "reward_id"),
    sa.Index("rewards_by_rollout", "rollout_id"),
)

resources = sa.Table(
    "resources",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("resources_id", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("resources", sa.LargeBinary, nullable=False),  # JSON
)


def open_database(url: str) -> sa.Engine:
    """An engine on the SQLite database at `url`, its tables made where they are missing.

    Raises:
        ValueError: for another kind of database, a file that is none, or one with another schema version.
        StoreUnwritable: the file cannot be written.
    """
    if sa.make_url(url).get_backend_name() != "sqlite":
        raise ValueError(f"the store {url!r} is not SQLite; give sqlite:///path/to/file.db")
    engine = sa.create_engine(url, poolclass=sa.StaticPool, connect_args={"check_same_thread": False})
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin_immediate)
    try:
        with writing(url), engine.begin() as connection:
            metadata.create_all(connection)
            _check_version(connection, url)
    except sa.exc.DatabaseError as error:
        raise ValueError(f"the store {url} cannot be opened: {error.orig}; choose another file") from error
    return engine


@contextmanager
def writing(url: str) -> Iterator[None]:
    """Work on the database at `url`. Raises StoreUnwritable where the block failed since it cannot be written."""
    try:
        yield
    except sa.exc.OperationalError as error:
        if not isinstance(error.orig, sqlite3.Error) or error.orig.sqlite_errorcode & 0xFF not in _UNWRITABLE:
            raise
        raise StoreUnwritable(
            f"the store {sa.make_url(url).database} cannot be written ({error.orig}): free space, or make it "
            "writable; what was recorded waits in the journal"
        ) from error


def read_secret(connection: sa.Connection) -> bytes:
    """The secret that signs attempt keys; made on the first call, the same ever after."""
    made = sa.insert(meta).prefix_with("OR IGNORE")
    connection.execute(made, {"key": "secret", "value": secrets.token_hex(32)})
    return bytes.fromhex(_read(connection, "secret"))


def write_time(connection: sa.Connection, now: float) -> None:
    """Note when the database was last found to be writable."""
    made = sa.insert(meta).prefix_with("OR REPLACE")
    connection.execute(made, {"key": "written_at", "value": str(now)})


def _configure(driver_connection: Any, _record: object) -> None:
    # The driver must not begin transactions by itself: _begin_immediate does.
    driver_connection.isolation_level = None
    # Most spans of a turn weigh 2 to 4 kB: pages of 4 kB would stay half empty. It is for new files alone.
    # WAL with synchronous=NORMAL: an answered commit survives the death of any process.
    for pragma in ("page_size=8192", "journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=30000"):
        driver_connection.execute(f"PRAGMA {pragma}").close()


def _begin_immediate(connection: sa.Connection) -> None:
    # A transaction that reads first and writes later could otherwise fail half-way on a lock.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _check_version(connection: sa.Connection, url: str) -> None:
    made = sa.insert(meta).prefix_with("OR IGNORE")
    connection.execute(made, {"key": "schema_version", "value": SCHEMA_VERSION})
    found = _read(connection, "schema_version")
    if found not in READABLE:
        raise ValueError(
            f"the store {url} has schema version {found}, this program needs {SCHEMA_VERSION}: "
            "open it with the version that wrote it, or choose another file"
        )
    if found != SCHEMA_VERSION:
        connection.execute(sa.update(meta).where(meta.c.key == "schema_version").values(value=SCHEMA_VERSION))


def _read(connection: sa.Connection, key: str) -> str:
    return str(connection.execute(sa.select(meta.c.value).where(meta.c.key == key)).scalar_one())
