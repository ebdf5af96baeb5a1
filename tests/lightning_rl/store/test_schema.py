"""Files of the schema version before are opened, read and carried on."""

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec

from lightning_rl.store import schema
from lightning_rl.store.contract import RolloutRequest
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span, pack_ids


def span(rollout_id: str, attempt_id: str, number: int) -> Span:
    attributes = {semconv.RESPONSE_MODEL: "m", semconv.RESPONSE_IDS: pack_ids([1, 2, 3]), "their.own": {"a": [1]}}
    return Span(
        span_id=f"s{number}", rollout_id=rollout_id, attempt_id=attempt_id, name=semconv.CALL_SPAN, number=number,
        start_ns=1, end_ns=2, attributes=attributes,
    )  # fmt: skip


def test_spans_of_version_1_are_read_beside_new_ones(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    with closing(SqlStore(f"sqlite:///{file}")) as store:
        claim = store.start(RolloutRequest(task={}), "w")
    names = (claim.rollout.rollout_id, claim.attempt.attempt_id)
    with closing(sqlite3.connect(file)) as database:
        old = msgspec.msgpack.encode(span(*names, 0))
        database.execute("INSERT INTO spans VALUES ('s0', ?, ?, 0, ?)", (*names, old))
        database.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
        database.commit()
    with closing(SqlStore(f"sqlite:///{file}")) as store:
        store.add_spans([span(*names, 1)])
        assert store.spans(*names) == [span(*names, 0), span(*names, 1)]
        assert store.sampled_tokens() == {"m": 6}
    with closing(sqlite3.connect(file)) as database:
        [(version,)] = database.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()
    assert version == schema.SCHEMA_VERSION  # which an earlier program refuses, instead of failing at a span
