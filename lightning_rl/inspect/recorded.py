"""A run's rollouts, read while it is going on or after: from the store in its folder, or, where it attached to a
server, from a copy of what the store there holds of it.

Invariant: the store's file is opened to be read only; nothing here makes or changes a file in the folder, but SQLite
itself makes its `-shm` index anew where a WAL lies without one. A run that is going on writes beside us (the WAL), and
what we read is one moment of it. A copy lies in the temporary folder for as long as it is read.
"""

import difflib
import functools
import os
import signal
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec
import sqlalchemy as sa

from lightning_rl.errors import Explained
from lightning_rl.processes.service_keys import ADMIN_KEY
from lightning_rl.store import queries, schema
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import RolloutTrace
from lightning_rl.store.copied import copy_run
from lightning_rl.store.errors import NotAllowed, StoreError
from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import unpacked

STORE = "store.db"
SERVER_URL, RUN_ID = "server.url", "run.id"  # where the server of a run is, or was; what ends the ids of its rollouts
_NEAR = 20_000  # newest rollout ids among which near ones are sought
_RECORDS = sa.text("SELECT rowid, record FROM spans WHERE rowid > :after ORDER BY rowid LIMIT 256")


class NotRecorded(Explained):
    """What was asked for is in no store that this program reads."""


class RunForks(msgspec.Struct, frozen=True, kw_only=True):
    """The forks of a run: calls that began anew, by cause, `branches` of calls continued more than once, and the
    rollouts with the most of both, most first."""

    run_dir: str
    rollouts: int
    calls: int
    causes: dict[str, int]
    branches: int
    most: dict[str, dict[str, int]]


class _ForkAttributes(msgspec.Struct):
    cause: str | None = msgspec.field(name=semconv.FORK_CAUSE, default=None)
    parent: str | None = msgspec.field(name=semconv.PARENT, default=None)


class Named(msgspec.Struct):
    """A part of a span's record, which says what the span is."""

    name: str
    rollout_id: str


C = TypeVar("C", bound=Named)
S = TypeVar("S", bound=HttpStore)


class _Place(Named):
    """Of a call only what tells its place."""

    attributes: _ForkAttributes


_PLACE = msgspec.msgpack.Decoder(_Place)


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run folder below `runs` that was written to last. Raises NotRecorded where there is none."""
    dirs = {file.parent for name in (STORE, SERVER_URL) for file in runs.rglob(name)}  # project_name: a folder between
    if not dirs:
        raise NotRecorded(f"there is no run in {runs.resolve()}: name its folder with --run-dir")
    return max(dirs, key=_written)


def is_attached(run_dir: Path) -> bool:
    """Whether this is the folder of a run whose rollouts are in the store of a server that it attached to."""
    return not (run_dir / STORE).is_file() and (run_dir / SERVER_URL).is_file()


@contextmanager
def opened(run_dir: Path) -> Iterator[sa.Connection]:
    """The run's store as it stands now, for reading; of a server's own, `run_dir` is the store's file. Raises
    NotRecorded where there is none that can be read."""
    with ExitStack() as close:
        store = run_dir if run_dir.is_file() else run_dir / STORE
        if is_attached(run_dir):
            store = Path(close.enter_context(TemporaryDirectory(prefix="lightning-rl-"))) / STORE
            with servers(run_dir, HttpStore) as stores:
                copy_run(stores, (run_dir / RUN_ID).read_text(encoding="utf-8").strip(), store)
        if not store.is_file():
            others = [file.name for file in sorted(run_dir.glob("*.db"))[:1]]
            of_server = f", or {others[0]} in it, a server's store" if others else ""
            raise NotRecorded(
                f"{run_dir.resolve()} holds no run: there is no {STORE} in it; name a run's folder{of_server}"
            )
        if not (store.stat().st_size or _wal(store).exists()):
            raise NotRecorded(f"{store.resolve()} is empty: no run has begun in this folder; name another")
        yield close.enter_context(_reading(store))


@contextmanager
def copied(stores: Sequence[HttpStore], run_id: str | None) -> Iterator[sa.Connection]:
    """What servers have of a run (None: of all), copied, for reading. Raises what the servers' calls raise."""
    with TemporaryDirectory(prefix="lightning-rl-") as folder:
        store = Path(folder) / STORE
        copy_run(stores, run_id, store)
        with _reading(store) as connection:
            yield connection


@functools.lru_cache(maxsize=8)
def _engine(store: Path) -> sa.Engine:
    """Kept, so that who looks at a store again and again leaves none to be collected: a Ctrl-C that comes in that
    moment is lost."""
    return sa.create_engine("sqlite://", creator=lambda: _connect(store), poolclass=sa.NullPool)


@contextmanager
def _reading(store: Path) -> Iterator[sa.Connection]:
    with ExitStack() as close:
        try:
            with _interrupts_wait():
                connection = _engine(store).connect()
                close.callback(_close, connection)
            connection.exec_driver_sql("BEGIN")
            _check_version(connection, store)
            yield connection
        except sa.exc.DatabaseError as error:
            raise NotRecorded(f"the store {store.resolve()} cannot be read: {error.orig}") from error
        except UnicodeDecodeError as error:  # SQLite checks no text
            raise NotRecorded(f"the store {store.resolve()} cannot be read, it is damaged: {error}") from error


def server_urls(run_dir: Path) -> list[str]:
    """Where the servers of an attached run are, or were, a line of the file for each."""
    return (run_dir / SERVER_URL).read_text(encoding="utf-8").split()


@contextmanager
def servers(run_dir: Path, opened_as: Callable[[str, str], S]) -> Iterator[list[S]]:
    """The servers that have the rollouts of an attached run, each opened by its URL and the key in the environment.
    Raises NotRecorded where there is no key, and for what a server refuses, or does not answer, within the block."""
    urls, key = server_urls(run_dir), os.environ.get(ADMIN_KEY)
    at = f"the server at {urls[0]}, which has its rollouts"
    if len(urls) > 1:
        at = f"the servers at {' and '.join(urls)}, which have its rollouts"
    where = f"{run_dir.resolve()} is of a run that attached to {at}"
    if not key:
        raise NotRecorded(f"{where}: set {ADMIN_KEY} to that server's admin key")
    if not (run_dir / RUN_ID).is_file():
        raise NotRecorded(f"{where}, and there is no {RUN_ID} to tell which: put the run's file back")
    with ExitStack() as close:
        try:
            yield [close.enter_context(closing(opened_as(url, key))) for url in urls]
        except NotAllowed as error:
            raise NotRecorded(f"{where} and refuses the key in {ADMIN_KEY}: set it to its admin key") from error
        except StoreError as error:
            raise NotRecorded(
                f"{where} and cannot be read ({error}): start it again with its store, or write where it is now into "
                f"{(run_dir / SERVER_URL).resolve()}"
            ) from error


def _close(connection: sa.Connection) -> None:
    with _interrupts_wait():
        connection.close()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Hold a Ctrl-C back for a moment: SQLAlchemy logs or loses one that comes as it opens or closes a connection."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def find(connection: sa.Connection, name: str) -> str:
    """The id of the one rollout that is called `name`, with or without what tells its run, or begins or ends so.

    Raises NotRecorded.
    """
    column = schema.rollouts.c.rollout_id
    if connection.execute(sa.select(column).where(column == name)).one_or_none() is not None:
        return name
    unmarked = sa.select(column).where(sa.func.substr(column, 1, len(name) + 1) == f"{name}.").limit(2)
    if len(whole := connection.execute(unmarked).scalars().all()) == 1:  # all but what tells the run
        return str(whole[0])
    length = len(name)
    like = sa.or_(sa.func.substr(column, 1, length) == name, sa.func.substr(column, -length) == name)
    matches = connection.execute(sa.select(column).where(like).limit(6)).scalars().all() if name else []
    if len(matches) == 1:
        return str(matches[0])
    if matches:
        more = " and more" if len(matches) > 5 else ""
        raise NotRecorded(
            f"{name!r} names several rollouts, {', '.join(matches[:5])}{more}: give more of the one you mean"
        )
    newest = sa.select(column).order_by(schema.rollouts.c.position.desc()).limit(_NEAR)
    near = difflib.get_close_matches(name, connection.execute(newest).scalars().all(), n=3, cutoff=0.5)
    hint = f"near are {', '.join(near)}" if near else "`lightning-rl explain` alone lists those with most forks"
    raise NotRecorded(f"there is no rollout {name!r} in this run; {hint}")


def trace(connection: sa.Connection, rollout_id: str) -> RolloutTrace:
    """Everything that was recorded in a rollout of this id, which is there."""
    packed = msgspec.msgpack.encode(queries.traces(connection, [rollout_id])[rollout_id])
    return msgspec.msgpack.decode(packed, type=RolloutTrace)


def forks(connection: sa.Connection, run_dir: Path, *, most: int = 10) -> RunForks:
    """The forks of a whole run, read a batch of spans at a time; `most` rollouts are named."""
    by_rollout: defaultdict[str, Counter[str]] = defaultdict(Counter)
    continued: set[str] = set()
    count = 0
    for place in calls(connection, _PLACE):
        count += 1
        if place.attributes.cause is not None:
            by_rollout[place.rollout_id][place.attributes.cause] += 1
        if (parent := place.attributes.parent) is not None:
            if parent in continued:
                by_rollout[place.rollout_id]["branches"] += 1
            continued.add(parent)
    total = sum(by_rollout.values(), Counter[str]())
    worst = sorted(by_rollout.items(), key=lambda item: (-item[1].total(), item[0]))[:most]
    return RunForks(
        run_dir=str(run_dir.resolve()),
        rollouts=connection.execute(sa.select(sa.func.count()).select_from(schema.rollouts)).scalar_one(),
        calls=count,
        causes={cause: n for cause, n in total.most_common() if cause != "branches"},
        branches=total["branches"],
        most={rollout_id: dict(counts.most_common()) for rollout_id, counts in worst},
    )


def calls(connection: sa.Connection, decoder: msgspec.msgpack.Decoder[C]) -> Iterator[C]:
    """The calls of the whole store, in the order they were kept, a batch at a time; of each what `decoder` reads."""
    last = 0
    while rows := connection.execute(_RECORDS, {"after": last}).all():
        for row in rows:
            one = decoder.decode(unpacked(row.record))
            if one.name == semconv.CALL_SPAN:
                yield one
        last = rows[-1].rowid


def _connect(store: Path) -> sqlite3.Connection:
    # Without a WAL nobody writes: `immutable` then keeps SQLite from making its two files beside the store.
    still = "" if _wal(store).exists() else "&immutable=1"
    return sqlite3.connect(f"{store.resolve().as_uri()}?mode=ro{still}", uri=True, isolation_level=None)


def _check_version(connection: sa.Connection, store: Path) -> None:
    query = sa.select(schema.meta.c.value).where(schema.meta.c.key == "schema_version")
    version = connection.execute(query).scalar_one_or_none()
    if version not in schema.READABLE:
        raise NotRecorded(
            f"the store {store.resolve()} has schema version {version}, this program reads {schema.SCHEMA_VERSION}: "
            "read it with the version that wrote it"
        )


def _written(run_dir: Path) -> float:
    store = run_dir / STORE
    files = [store, _wal(store)] if store.exists() else [run_dir / SERVER_URL, run_dir / "metrics.jsonl"]
    return max(file.stat().st_mtime for file in files if file.exists())


def _wal(store: Path) -> Path:
    return store.with_name(f"{store.name}-wal")
