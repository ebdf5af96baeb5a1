"""The viewer's own index of a run: one row for each rollout, its words, and what a step made of it.

Invariant: the index is a file of the viewer's alone, in a temporary folder, and one thread writes it; the run's own
files are only read. What a list shows is here; what a single rollout holds is read from the run when it is asked for.
"""

import hashlib
import json
import sqlite3
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from lightning_rl.store.contract import Rollout
from lightning_rl.store.life_cycle import ENDED
from lightning_rl.trajectories.step_record import RolloutRecord, StepRecord

_TABLES = """
CREATE TABLE rollouts (
    position INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL UNIQUE, status TEXT, mode TEXT, step INTEGER, group_id TEXT,
    agent TEXT, task TEXT, task_key TEXT, reward REAL, rewards TEXT, error TEXT, attempts INTEGER, created REAL,
    seconds REAL, calls INTEGER DEFAULT 0, forks INTEGER DEFAULT 0, trained_step INTEGER, trained INTEGER,
    advantage REAL, ids INTEGER DEFAULT 0, reported INTEGER DEFAULT 0, sampled INTEGER AS (iif(ids > 0, ids, reported))
);
CREATE INDEX by_step ON rollouts (step, position);
CREATE INDEX by_group ON rollouts (group_id, position);
CREATE INDEX by_task ON rollouts (task_key, step);
CREATE INDEX by_status ON rollouts (status, position);
CREATE TABLE exclusions (position INTEGER, reason TEXT, PRIMARY KEY (position, reason)) WITHOUT ROWID;
CREATE INDEX by_reason ON exclusions (reason, position);
CREATE TABLE steps (step INTEGER PRIMARY KEY, meta TEXT, written INTEGER);
CREATE TABLE records (position INTEGER PRIMARY KEY, step INTEGER, record BLOB);
CREATE VIRTUAL TABLE words USING fts5 (said, content='', tokenize="unicode61 tokenchars '_'");
CREATE VIRTUAL TABLE vocabulary USING fts5vocab (words, 'row');
CREATE TABLE texts (id INTEGER PRIMARY KEY, position INTEGER);
CREATE INDEX texts_by_position ON texts (position);
"""
_FACTS = (
    "position", "rollout_id", "status", "mode", "step", "group_id", "agent", "task", "task_key", "reward", "rewards",
    "error", "attempts", "created", "seconds",
)  # fmt: skip
_PUT = (
    f"INSERT INTO rollouts ({', '.join(_FACTS)}) VALUES ({', '.join('?' * len(_FACTS))}) ON CONFLICT (position) "
    f"DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _FACTS[2:])}"
)
_TASK_CHARACTERS = 400  # of a task, in a list
_TEXT_CHARACTERS = 20_000  # of one call, that a search finds


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a rollout, as far as lists and searches need it: how many token ids were recorded of its answer, and
    how many tokens it was reported to have, which count where no call of the rollout has ids."""

    rollout_id: str
    ids: int
    reported: int
    forked: bool
    text: str


class Index:
    """The index of one run; searches find words only where it is `searched`. `close` removes it."""

    def __init__(self, *, searched: bool = True) -> None:
        self._searched = searched
        self._folder = tempfile.TemporaryDirectory(prefix="lightning-rl-viewer-")
        self.path = Path(self._folder.name) / "index.db"
        self._writing = threading.Lock()
        self._writer = self._connect()
        self._writer.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;" + _TABLES)
        self.version = 0  # rises with each change

    def close(self) -> None:
        """Remove the index."""
        with self._writing:
            self._writer.close()
        self._folder.cleanup()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        return connection

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees one moment of the index."""
        with closing(self._connect()) as connection:
            connection.execute("BEGIN")
            yield connection

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._writing:
            self._writer.execute("BEGIN")
            try:
                yield self._writer
            except BaseException:
                self._writer.execute("ROLLBACK")
                raise
            self._writer.execute("COMMIT")
            self.version += 1

    def put(self, rollouts: Sequence[tuple[int, Rollout]]) -> None:
        """Enter rollouts, each with its position in the run, or what has become of them since."""
        if not rollouts:
            return
        with self._change() as connection:
            connection.executemany(_PUT, [_facts(position, rollout) for position, rollout in rollouts])
            positions = [(position,) for position, _ in rollouts]
            connection.executemany(
                "DELETE FROM exclusions WHERE position = ? "
                "AND position NOT IN (SELECT position FROM records)", positions
            )  # fmt: skip
            reasons = [(position, reason) for position, rollout in rollouts if (reason := _why_not_trained(rollout))]
            connection.executemany("INSERT OR IGNORE INTO exclusions VALUES (?, ?)", reasons)

    def put_calls(self, calls: Sequence[Called]) -> None:
        """Enter calls of rollouts that are entered; each once."""
        if not calls:
            return
        with self._change() as connection:
            positions = _positions(connection, {one.rollout_id for one in calls})
            placed = [(positions[one.rollout_id], one) for one in calls if one.rollout_id in positions]
            connection.executemany(
                "UPDATE rollouts SET calls = calls + 1, ids = ids + ?, reported = reported + ?, forks = forks + ? "
                "WHERE position = ?",
                [(one.ids, one.reported, one.forked, position) for position, one in placed],
            )
            for position, one in placed if self._searched else ():
                _enter_text(connection, position, one.text)

    def put_tasks(self, positions: Sequence[int]) -> None:
        """Let a search find the words of these rollouts' tasks, and of the errors that they ended with."""
        if not self._searched:
            return
        with self._change() as connection:
            for position in positions:
                row = connection.execute("SELECT task, error FROM rollouts WHERE position = ?", (position,)).fetchone()
                _enter_text(connection, position, "\n".join(text for text in row if text is not None))

    def put_step(self, record: StepRecord, written: int) -> None:
        """Enter what a step made of its rollouts; `written` tells this writing of it from a later one."""
        meta = {name: getattr(record, name) for name in ("policy_version", "rule", "loss_agg_mode", "estimator")}
        with self._change() as connection:
            _drop_step(connection, record.step)
            row = (record.step, json.dumps(meta), written)
            connection.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", row)
            positions = _positions(connection, {one.rollout_id for one in record.rollouts})
            for one in record.rollouts:
                if (position := positions.get(one.rollout_id)) is not None:
                    _enter_record(connection, position, record.step, one)

    def drop_steps(self, steps: Iterable[int]) -> None:
        """Forget what steps made of their rollouts: they are made anew."""
        with self._change() as connection:
            for step in steps:
                _drop_step(connection, step)

    def steps(self) -> dict[int, int]:
        """The steps that are entered, with `written`."""
        with self.reading() as connection:
            return dict(map(tuple, connection.execute("SELECT step, written FROM steps")))

    def open_rollouts(self) -> dict[str, int]:
        """The rollouts that have not ended, as far as the index knows, with their positions."""
        marks = ", ".join("?" * len(ENDED))
        query = f"SELECT rollout_id, position FROM rollouts WHERE status NOT IN ({marks})"
        with self.reading() as connection:
            return dict(map(tuple, connection.execute(query, tuple(ENDED))))

    def positions(self, rollout_ids: Iterable[str]) -> dict[str, int]:
        """The positions of those of the rollouts that are entered."""
        with self.reading() as connection:
            return _positions(connection, set(rollout_ids))

    def record_of(self, rollout_id: str) -> tuple[StepRecord, RolloutRecord] | None:
        """What a step made of a rollout, without the step's other rollouts; None where no record says it."""
        query = (
            "SELECT records.step, meta, record FROM records JOIN steps USING (step) JOIN rollouts USING (position) "
            "WHERE rollout_id = ?"
        )
        with self.reading() as connection:
            row = connection.execute(query, (rollout_id,)).fetchone()
        if row is None:
            return None
        record = msgspec.msgpack.decode(row["record"], type=RolloutRecord)
        return StepRecord(step=row["step"], rollouts=[record], **json.loads(row["meta"])), record


def task_text(task: Any) -> str:
    """A task as a line of text."""
    return task if isinstance(task, str) else json.dumps(task, ensure_ascii=False, default=str)


def _facts(position: int, rollout: Rollout) -> tuple[Any, ...]:
    text = task_text(rollout.task)
    step = rollout.metadata.get("step")
    return (
        position,
        rollout.rollout_id,
        rollout.status,
        rollout.mode,
        step if isinstance(step, int) else None,
        rollout.group_id,
        rollout.agent,
        text[:_TASK_CHARACTERS],
        hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest(),
        rollout.reward,
        json.dumps(rollout.rewards) if len(rollout.rewards) > 1 else None,
        None if rollout.error is None else f"{rollout.error.type}: {rollout.error.message}"[:_TASK_CHARACTERS],
        rollout.attempt_count,
        rollout.created_at,
        None if rollout.ended_at is None else rollout.ended_at - rollout.created_at,
    )


def _why_not_trained(rollout: Rollout) -> str | None:
    if rollout.status not in ENDED:
        return "open"
    if rollout.counting_attempt_id is None:
        return "cancelled" if rollout.status == "cancelled" else "infrastructure"
    return None if rollout.mode == "train" else "validation"


def _drop_step(connection: sqlite3.Connection, step: int) -> None:
    of_step = "WHERE position IN (SELECT position FROM records WHERE step = ?)"
    for statement in (
        f"UPDATE rollouts SET trained_step = NULL, trained = NULL, advantage = NULL {of_step}",
        f"DELETE FROM exclusions {of_step}",
        "DELETE FROM records WHERE step = ?",
        "DELETE FROM steps WHERE step = ?",
    ):
        connection.execute(statement, (step,))


def _enter_record(connection: sqlite3.Connection, position: int, step: int, record: RolloutRecord) -> None:
    calls = record.calls.values()
    trained = sum(call.trained_tokens for call in calls)
    weighed = sum(call.advantage * call.trained_tokens for call in calls)
    advantage = weighed / trained if trained else next((call.advantage for call in calls), None)
    # Where its agent failed, or other rewards make it up, the store has no final one, and it counted all the same.
    counted = None if record.reward is None else record.reward - record.overlong_penalty - record.kl_penalty
    connection.execute(
        "UPDATE rollouts SET trained_step = ?, trained = ?, advantage = ?, reward = coalesce(reward, ?) "
        "WHERE position = ?",
        (step, trained, advantage, counted, position),
    )
    row = (position, step, msgspec.msgpack.encode(record))
    connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", row)
    reasons = {call.left_out or record.left_out for call in calls if not call.trained_tokens} | {record.left_out}
    exclusions = [(position, reason) for reason in reasons if reason is not None]
    connection.executemany("INSERT OR IGNORE INTO exclusions VALUES (?, ?)", exclusions)


def _enter_text(connection: sqlite3.Connection, position: int, text: str) -> None:
    placed = connection.execute("INSERT INTO texts (position) VALUES (?)", (position,))
    words = text[:_TEXT_CHARACTERS].encode(errors="replace").decode()
    connection.execute("INSERT INTO words (rowid, said) VALUES (?, ?)", (placed.lastrowid, words))


def _positions(connection: sqlite3.Connection, rollout_ids: set[str]) -> dict[str, int]:
    positions: dict[str, int] = {}
    names = sorted(rollout_ids)
    for start in range(0, len(names), 500):
        part = names[start : start + 500]
        marks = ", ".join("?" * len(part))
        query = f"SELECT rollout_id, position FROM rollouts WHERE rollout_id IN ({marks})"
        positions |= dict(map(tuple, connection.execute(query, part)))
    return positions


def row_of(row: sqlite3.Row | Mapping[str, Any]) -> dict[str, Any]:
    """A row of `rollouts` as JSON-able values."""
    values = dict(row)
    if values.get("rewards"):
        values["rewards"] = json.loads(values["rewards"])
    return values
