"""What SQLite and PostgreSQL do differently, and nothing else: how a transaction runs, what holds others off, which
errors mean what.

Invariant: the work of a transaction is done whole or not at all, and alone: on SQLite since nobody else writes
meanwhile, on PostgreSQL since whoever changes a rollout, or anything of it, holds the rollout first. Work may be done
again, so it changes nothing but the database.
"""

import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite

from lightning_rl.store import schema
from lightning_rl.store.errors import Invalid, StoreUnwritable

T = TypeVar("T")
Work = Callable[[sa.Connection], T]

SQLITE, POSTGRESQL = "sqlite", "postgresql"
_ROWS = 256  # of one statement
_LOCK_SECONDS = 30  # for which somebody waits for another
_PAUSE_SECONDS = 0.2  # at most, between two tries
_PATIENCE = {"connect_timeout": "10", "tcp_user_timeout": "30000"}  # with PostgreSQL, in s and ms: libpq's own units
_PASSWORDS = ("password", "sslpassword")  # in a URL's query
_URLS = "give sqlite:///path/to/file.db, or postgresql+psycopg://user@host/database"


class Database(Protocol):
    """An open database.

    `place` is its URL without a password. `shared`: other processes may change it beside this one. `remedy`: what to
    do where it cannot be opened.
    """

    engine: sa.Engine
    place: str
    shared: bool
    remedy: str

    def write(self, work: Work[T]) -> T:
        """What `work` returns, in a transaction that is durable on return.

        Raises:
            Invalid: it writes what the database cannot hold.
            StoreUnwritable: the database cannot be written, or not be reached.
        """
        ...

    def read(self, work: Work[T]) -> T:
        """What `work` returns, which sees one moment of the database. Raises StoreUnwritable."""
        ...

    def hold(self, connection: sa.Connection, rollout_ids: Sequence[str]) -> None:
        """Nobody else changes these rollouts until the transaction is over."""
        ...

    def hold_name(self, connection: sa.Connection, name: str) -> None:
        """Nobody else holds this name until the transaction is over."""
        ...

    def hold_table(self, connection: sa.Connection, table: sa.Table) -> None:
        """Nobody else adds or changes rows of this table until the transaction is over."""
        ...

    def insert_new(self, connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Insert rows of the same columns, the first of which is the table's key, with values as the driver takes them;
        those that are there stay as they are. The keys of those that were not."""
        ...

    def replace(self, table: sa.Table, key: str, value: str) -> sa.Insert:
        """An INSERT of the columns `key` and `value` that gives a row of this key a new value."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


def connect(url: str) -> Database:
    """The database at `url`, of whatever schema.

    Raises:
        ValueError: for no URL, another kind of database, or one whose driver is not installed.
    """
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise ValueError(f"the store {shown(url)!r} is no URL; {_URLS}") from None
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        return Sqlite(parsed)
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        return Postgres(parsed)
    raise ValueError(f"the store {shown(url)} is neither SQLite nor PostgreSQL; {_URLS}")


def shown(url: str) -> str:
    """The URL as it may be shown: without a password."""
    try:
        return _without_passwords(sa.make_url(url))
    except (sa.exc.ArgumentError, ValueError):
        return url.rpartition("@")[2]


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite store; None for another store, or what is no URL."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        return None
    return Path(parsed.database).resolve() if parsed.get_backend_name() == SQLITE and parsed.database else None


def _without_passwords(url: sa.URL) -> str:
    hidden = {key: "..." for key in url.query if key in _PASSWORDS}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def _first_line(error: sa.exc.DBAPIError) -> str:
    return str(error.orig).strip().partition("\n")[0]


def _held(place: str, error: sa.exc.DBAPIError) -> StoreUnwritable:
    return StoreUnwritable(
        f"the store {place} was held by another process for {_LOCK_SECONDS} s ({_first_line(error)}): wait until "
        "that has upgraded it, or end it"
    )


class Sqlite:
    """A file of one process: one connection, one transaction at a time.

    The connection goes on writing to a file that was deleted, where nobody will find it. So every transaction looks,
    before it begins and after it ends, whether the file at the path is still the one that was opened.
    """

    shared = False
    remedy = "choose another file"

    # Primary codes: https://www.sqlite.org/rescode.html
    _UNWRITABLE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
    _DAMAGED = (sqlite3.SQLITE_CORRUPT,)

    def __init__(self, url: sa.URL) -> None:
        self.place = url.render_as_string()
        self._file = url.database
        self._path = os.path.abspath(url.database) if url.database else None  # whoever changes the working directory
        self._lock = threading.Lock()
        self.engine = sa.create_engine(url, poolclass=sa.StaticPool, connect_args={"check_same_thread": False})
        event.listen(self.engine, "connect", _configure)
        event.listen(self.engine, "begin", _begin_immediate)
        self._connection: sa.Connection | None = None
        self._opened: list[tuple[int, int] | None] = []  # device and inode of the file and its log

    def write(self, work: Work[T]) -> T:
        """See `Database`."""
        with self._lock:
            try:
                if self._connection is None:  # connecting writes, too
                    self._connection = self.engine.connect()
                self._check_files()
                with self._connection.begin():
                    done = work(self._connection)
                self._opened = self._opened or self._files()
                self._check_files()
                return done
            except sa.exc.DatabaseError as error:  # a damaged file is no OperationalError
                raise self._refusal(error) from error

    read = write  # a transaction that read first and wrote later could fail half-way on a lock

    def hold(self, connection: sa.Connection, rollout_ids: Sequence[str]) -> None:
        """See `Database`: the transaction holds the whole file."""

    def hold_name(self, connection: sa.Connection, name: str) -> None:
        """See `Database`: the transaction holds the whole file."""

    def hold_table(self, connection: sa.Connection, table: sa.Table) -> None:
        """See `Database`: the transaction holds the whole file."""

    def insert_new(self, connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> list[str]:
        """See `Database`. Many rows in one statement: for each statement the driver gives Python's lock away, and then
        waits for the event loop to give it back, as that waits for the driver. (Older SQLites know no RETURNING.)"""
        new: list[str] = []
        for begin in range(0, len(rows), _ROWS):
            part = rows[begin : begin + _ROWS]
            key, row = next(iter(part[0])), f"({', '.join('?' * len(part[0]))})"
            keys = tuple(dict.fromkeys(one[key] for one in part))
            there = connection.exec_driver_sql(
                f"SELECT {key} FROM {table.name} WHERE {key} IN ({', '.join('?' * len(keys))})", keys
            )
            existing_keys = set(there.scalars())
            new += [each for each in keys if each not in existing_keys]
            connection.exec_driver_sql(
                f"INSERT INTO {table.name} ({', '.join(part[0])}) VALUES {', '.join([row] * len(part))} "
                "ON CONFLICT DO NOTHING",
                tuple(value for one in part for value in one.values()),
            )
        return new

    def replace(self, table: sa.Table, key: str, value: str) -> sa.Insert:
        """See `Database`."""
        made = sqlite.insert(table).values(key=key, value=value)
        return made.on_conflict_do_update(index_elements=["key"], set_={"value": value})

    def close(self) -> None:
        """See `Database`."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self.engine.dispose()

    def _files(self) -> list[tuple[int, int] | None]:
        return [_identity(f"{self._path}{suffix}") for suffix in ("", "-wal")] if self._path else []

    def _check_files(self) -> None:
        """Raises StoreUnwritable where the database was deleted, or another file lies in its place."""
        now = self._files()
        if not self._opened or now == self._opened:
            return
        file = f"{self._file}-wal" if now[0] == self._opened[0] else self._file
        change = "deleted" if now[0] is None or file != self._file else "exchanged for another file"
        raise StoreUnwritable(
            f"the store {self._file} is not the one that this server opened: {file} was {change}; nothing more is "
            "stored. Put the file back, or stop the server and start it again: calls that were not stored yet wait in "
            "its journal"
        )

    def _refusal(self, error: sa.exc.DatabaseError) -> Exception:
        code = error.orig.sqlite_errorcode & 0xFF if isinstance(error.orig, sqlite3.Error) else None
        if code == sqlite3.SQLITE_BUSY:
            return _held(str(self._file), error)
        if code in self._DAMAGED:
            return StoreUnwritable(
                f"the store {self._file} is damaged ({error.orig}): put a copy of it back, or save what can be read "
                f"with `sqlite3 {self._file} .recover`, and check the disk; what came since waits in the journal"
            )
        if code not in self._UNWRITABLE:
            return error
        return StoreUnwritable(
            f"the store {self._file} cannot be written ({error.orig}): free space, or make it writable; what was "
            "recorded waits in the journal"
        )


def _identity(file: str) -> tuple[int, int] | None:
    """The device and inode of a file; None where there is none."""
    try:
        stat = os.stat(file)
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino


def _configure(driver_connection: Any, _record: object) -> None:
    # The driver must not begin transactions by itself: _begin_immediate does.
    driver_connection.isolation_level = None
    # Most spans of a turn weigh 2 to 4 kB: pages of 4 kB would stay half empty. It is for new files alone.
    # WAL with synchronous=NORMAL: an answered commit survives the death of any process.
    # The indexes of a million rollouts are 64 MiB or so; what is not in the cache is copied from the system's.
    pragmas = {
        "page_size": 8192,
        "journal_mode": "WAL",
        "synchronous": "NORMAL",
        "busy_timeout": 1000 * _LOCK_SECONDS,
        "cache_size": -64 * 2**10,  # in KiB
    }
    for name, value in pragmas.items():
        _patiently_set(driver_connection, f"PRAGMA {name}={value}")


def _patiently_set(driver_connection: Any, pragma: str) -> None:
    # Of several processes that open a new file, one turns it into WAL; meanwhile SQLite refuses the others at once,
    # whatever the busy_timeout: https://www.sqlite.org/wal.html#sometimes_queries_return_sqlite_busy_in_wal_mode
    given_up_at = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            driver_connection.execute(pragma).close()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > given_up_at:
                raise
            time.sleep(random.uniform(0, _PAUSE_SECONDS))


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


class Postgres:
    """A database of many processes: READ COMMITTED, so that whoever waited for a rollout sees it as it was left.

    A transaction that got in another's way is done again, and so is one whose connection was lost before its commit.
    """

    shared = True
    remedy = "give the user rights on it, or the store a database of its own"

    # SQLSTATEs: https://www.postgresql.org/docs/current/errcodes-appendix.html
    _IN_THE_WAY = ("40001", "40P01", "23505")  # serialization_failure, deadlock_detected, unique_violation
    _LOCKED = "55P03"  # lock_not_available
    _READ_ONLY = "25006"
    _GONE = ("42P01", "3F000", "42501", "28000", "28P01")  # undefined table or schema, no privilege, not let in
    _TRIES = 12
    _HOLD = (
        sa.select(schema.rollouts.c.position)
        .where(schema.rollouts.c.rollout_id == sa.any_(sa.bindparam("ids", type_=postgresql.ARRAY(sa.Text))))
        .order_by(schema.rollouts.c.position)  # all in one order, or two would wait for each other
        .with_for_update()
    )
    _HOLD_NAME = sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")

    def __init__(self, url: sa.URL) -> None:
        self.place = _without_passwords(url)
        patient = url.set(drivername="postgresql+psycopg", query={**_PATIENCE, **url.query})
        try:
            self.engine = sa.create_engine(patient)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"the store {self.place} needs psycopg ({error}): pip install 'lightning-rl[postgres]'"
            ) from error
        event.listen(self.engine, "connect", _begin_session)
        self._reader = self.engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    def write(self, work: Work[T]) -> T:
        """See `Database`."""
        return self._patiently(self.engine, work)

    def read(self, work: Work[T]) -> T:
        """See `Database`."""
        return self._patiently(self._reader, work)

    def hold(self, connection: sa.Connection, rollout_ids: Sequence[str]) -> None:
        """See `Database`."""
        connection.execute(self._HOLD, {"ids": list(rollout_ids)})

    def hold_name(self, connection: sa.Connection, name: str) -> None:
        """See `Database`."""
        connection.execute(self._HOLD_NAME, {"name": name})

    def hold_table(self, connection: sa.Connection, table: sa.Table) -> None:
        """See `Database`."""
        connection.execute(sa.text(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE"))

    def insert_new(self, connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> list[str]:
        """See `Database`."""
        if not rows:
            return []
        [key] = table.primary_key.columns
        insert = postgresql.insert(table).on_conflict_do_nothing().returning(key)
        return list(connection.execute(insert, list(rows)).scalars())

    def replace(self, table: sa.Table, key: str, value: str) -> sa.Insert:
        """See `Database`."""
        made = postgresql.insert(table).values(key=key, value=value)
        return made.on_conflict_do_update(index_elements=["key"], set_={"value": value})

    def close(self) -> None:
        """See `Database`."""
        self.engine.dispose()

    def _patiently(self, engine: sa.Engine, work: Work[T]) -> T:
        tried = 0
        while True:
            tried += 1
            done = False
            try:
                with engine.begin() as connection:
                    answer = work(connection)
                    done = True
                return answer
            except sa.exc.DBAPIError as error:
                if self._again(error, tried, committing=done):
                    continue
                raise self._refusal(error, committing=done) from error

    def _again(self, error: sa.exc.DBAPIError, tried: int, *, committing: bool) -> bool:
        """Whether to do the work again, after a pause where somebody was in the way."""
        if _state(error) in self._IN_THE_WAY and tried < self._TRIES:
            time.sleep(random.uniform(0, _PAUSE_SECONDS))
            return True
        # The connection may have been cut while nobody used it; the next one is a new one.
        return error.connection_invalidated and not committing and tried == 1

    def _refusal(self, error: sa.exc.DBAPIError, *, committing: bool) -> Exception:
        text = _first_line(error)
        if isinstance(error, sa.exc.DataError):
            return Invalid(f"the store {self.place} cannot hold this ({text}): change it")
        if error.connection_invalidated and committing:
            return StoreUnwritable(
                f"the store {self.place} was lost while it wrote ({text}); whether it did is not known: ask again with "
                "the same ids, which does no harm"
            )
        if _state(error) in self._GONE:
            return StoreUnwritable(
                f"the store {self.place} cannot be used ({text}): {self.remedy}; where it was used before, put its "
                "tables back, or start the server again with new ones; what was recorded waits in the journal"
            )
        if _state(error) == self._LOCKED:
            return _held(self.place, error)
        if isinstance(error, sa.exc.OperationalError) and _state(error) is None:
            return StoreUnwritable(
                f"the store {self.place} cannot be reached ({text}): start PostgreSQL, or correct the URL; what was "
                "recorded waits in the journal"
            )
        if isinstance(error, sa.exc.OperationalError) or _state(error) == self._READ_ONLY:
            return StoreUnwritable(
                f"the store {self.place} cannot be written ({text}): see that PostgreSQL runs, has room and is not "
                "read-only; what was recorded waits in the journal"
            )
        return error


def _state(error: sa.exc.DBAPIError) -> str | None:
    """The SQLSTATE that the server gave, if it was the server that failed."""
    return getattr(error.orig, "sqlstate", None)


def _begin_session(driver_connection: Any, _record: object) -> None:
    # A process that stands still in mid-transaction holds the others off for no longer than this.
    with driver_connection.cursor() as cursor:
        cursor.execute(f"SET idle_in_transaction_session_timeout = '60s'; SET lock_timeout = '{_LOCK_SECONDS}s'")
    driver_connection.commit()
