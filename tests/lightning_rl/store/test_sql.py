"""The store in a database: what outlives it and its processes, and what it costs; what only one kind of it does."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from lightning_rl.store import call_counts, databases, queries
from lightning_rl.store.contract import (
    ErrorInfo,
    Finish,
    ResourcesRequest,
    Reward,
    RolloutConfig,
    RolloutRequest,
)
from lightning_rl.store.errors import Conflict, StoreUnwritable
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters.span import Span, unpacked
from tests.random_examples import examples

SUCCEEDED = Finish(status="succeeded", reward=1.0)
AGENT_FAILED = Finish(status="failed", error=ErrorInfo(type="ValueError", message="no"))
INFRASTRUCTURE = Finish(status="failed", error=ErrorInfo(type="Gone", message="engine", infrastructure=True))


def request(rollout_id=None, **fields) -> RolloutRequest:
    return RolloutRequest(task={"question": "?"}, rollout_id=rollout_id, **fields)


def one_claim(store, **config):
    store.enqueue([request("r1", config=RolloutConfig(**config))])
    (claim,) = store.claim("w")
    return claim.attempt.attempt_id


def span(attempt_id="a", number=0, span_id=None, rollout_id="r1") -> Span:
    return Span(
        span_id=span_id or f"s{number}",
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        name="chat",
        number=number,
        start_ns=1,
        end_ns=2,
        attributes={"tokens": b"\x01\x00\x00\x00"},
    )


# What outlives the store, and what it costs


def test_all_is_there_when_the_store_is_opened_again(url) -> None:
    store = SqlStore(url)
    attempt = one_claim(store)
    store.add_spans([span(attempt)])
    store.finish("r1", attempt, SUCCEEDED)
    before, secret = store.rollout("r1"), store.secret
    store.close()
    store = SqlStore(url)
    assert store.rollout("r1") == before
    assert store.spans("r1", attempt) == [span(attempt)]
    assert store.secret == secret
    store.close()


_ANSWER_THEN_HANG = """
import sys
from lightning_rl.store.sql import SqlStore
from lightning_rl.store.contract import Finish, RolloutRequest
store = SqlStore(sys.argv[1])
store.enqueue([RolloutRequest(task=1, rollout_id="r1")])
claim = store.claim("w")[0]
store.finish("r1", claim.attempt.attempt_id, Finish(status="succeeded", reward=0.5))
print("answered", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ids_of_a_statement", [500, 1])
def test_what_is_asked_for_twice_is_found_once(
    url: str, monkeypatch: pytest.MonkeyPatch, ids_of_a_statement: int
) -> None:
    monkeypatch.setattr(queries, "_CHUNK", ids_of_a_statement)
    with closing(SqlStore(url)) as store:
        attempt = one_claim(store)
        store.add_spans([span(attempt)])
        store.add_rewards("r1", attempt, [Reward(value=1.0)])
        store.finish("r1", attempt, SUCCEEDED)
        trace = store.traces(["r1", "r1"])["r1"]
        assert [len(one.spans) for one in trace.attempts] == [1]
        assert len(trace.attempts[0].rewards) == 1
        assert [each.rollout_id for each in store.ended(["r1", "r1"])] == ["r1"]


def test_what_was_answered_survives_sigkill(url) -> None:
    command = [sys.executable, "-c", _ANSWER_THEN_HANG, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"answered\n"
        os.kill(child.pid, signal.SIGKILL)
    store = SqlStore(url)
    assert store.rollout("r1").reward == 0.5
    store.close()


def test_another_kind_of_database_is_refused_with_what_to_give() -> None:
    with pytest.raises(ValueError, match=r"mysql://.*neither SQLite nor PostgreSQL; give sqlite:///"):
        SqlStore("mysql://root:hidden@localhost/x")
    with pytest.raises(ValueError, match=r"'run\.db' is no URL; give sqlite:///"):
        SqlStore("run.db")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://user:secret@host/db",
        "postgresql+psycopg://user@host/db?password=secret",
        "postgresql+psycopg://user@host/db?sslmode=require&sslpassword=secret",
        "user:secret@host",
    ],
)
def test_no_password_of_a_url_is_shown(url: str) -> None:
    shown = databases.shown(url)
    assert "secret" not in shown
    assert "host" in shown


def test_threads_never_claim_the_same_rollout(url) -> None:
    store = SqlStore(url)
    store.enqueue([request() for _ in range(60)])
    claimed: list[str] = []

    def work() -> None:
        while claims := store.claim("w", limit=2):
            claimed.extend(c.rollout.rollout_id for c in claims)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == len(set(claimed)) == 60
    store.close()


def test_a_claim_gives_no_more_than_there_is_room_for() -> None:
    with closing(SqlStore("sqlite://")) as store:
        store.enqueue([request(f"r{number}") for number in range(4)])
        assert [each.rollout.rollout_id for each in store.claim("w", limit=3, room=2)] == ["r0", "r1"]
        assert [each.rollout.rollout_id for each in store.claim("w", limit=1, room=2)] == ["r2"]


def test_an_attempt_whose_records_are_lacking_has_failed_with_the_rewards_that_it_was_given() -> None:
    lack = ErrorInfo(type="RecordingLost", message="calls are lacking", infrastructure=True)
    with closing(SqlStore("sqlite://")) as store:
        attempt = one_claim(store, max_attempts=1)
        store.add_rewards("r1", attempt, [Reward(value=0.5, name="format")])
        rollout, ended = store.finish("r1", attempt, SUCCEEDED, lack)
        assert (rollout.status, rollout.counting_attempt_id) == ("failed", None)
        assert (ended.status, ended.error, ended.rewards) == ("failed", lack, {"format": 0.5})
        assert store.trace("r1", attempt).returned is None
        assert store.finish("r1", attempt, SUCCEEDED, lack) == (store.rollouts(["r1"])[0], ended)


def test_no_operation_reads_a_whole_table(tmp_path) -> None:
    """Costs must not grow with the store: every statement of a rollout's way uses an index."""
    statements: list[tuple[str, tuple]] = []
    store = SqlStore(f"sqlite:///{tmp_path / 'run.db'}")
    event.listen(store._database.engine, "before_cursor_execute", lambda *a: statements.append((a[2], a[3])))
    store.enqueue([request("r1", group_id="g")])
    (claim,) = store.claim("w", claim_id="c")
    store.claim("w", claim_id="c")
    attempt = claim.attempt.attempt_id
    store.heartbeat("r1", attempt)
    store.add_rewards("r1", attempt, [Reward(value=1.0)])
    store.add_spans([span(attempt)])
    store.overdue()
    store.finish("r1", attempt, SUCCEEDED)
    store.traces(["r1"])
    store.ended(["r1"])
    store.page(group_id="g")
    store.page(status="queued")
    store.publish(ResourcesRequest(resources={}))
    store.resources("latest")
    store.close()
    assert len(statements) > 20
    with sqlite3.connect(tmp_path / "run.db") as connection:
        for statement, parameters in statements:
            if not statement.startswith(("SELECT", "UPDATE")):
                continue
            one = parameters[0] if isinstance(parameters, list) else parameters
            plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", one)]
            scans = [step for step in plan if step.startswith("SCAN")]
            # The index of running attempts holds those alone; the newest resources are at its end.
            whole = [s for s in scans if "one_running_attempt" not in s and s != "SCAN resources"]
            assert not whole, (statement, plan)
    connection.close()


def test_a_store_that_cannot_be_written_says_which_and_goes_on_later(tmp_path) -> None:
    file = tmp_path / "store.db"
    store = SqlStore(f"sqlite:///{file}")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        with pytest.raises(StoreUnwritable, match=f"the store {file} cannot be written"):
            store.enqueue([RolloutRequest(task=1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.page() == ([], None)
    store.enqueue([RolloutRequest(task=1)])
    assert len(store.page()[0]) == 1
    store.close()


def test_a_store_that_may_only_be_read_is_told_as_one_that_cannot_be_written(tmp_path) -> None:
    with closing(SqlStore(f"sqlite:///{tmp_path / 'store.db'}")) as store:
        store._database.write(lambda connection: connection.exec_driver_sql("PRAGMA query_only = ON"))
        with pytest.raises(StoreUnwritable, match=r"store\.db cannot be written \(.*readonly"):
            store.enqueue([request("r1")])


def test_a_store_whose_log_was_deleted_stores_nothing_more(tmp_path) -> None:
    file = tmp_path / "store.db"
    with closing(SqlStore(f"sqlite:///{file}")) as store:
        store.enqueue([request("r1")])
        (tmp_path / "store.db-wal").unlink()
        with pytest.raises(StoreUnwritable, match=rf"{file}-wal was deleted; nothing more is stored"):
            store.enqueue([request("r2")])


def test_a_file_that_is_no_database_is_refused(tmp_path) -> None:
    file = tmp_path / "store.db"
    file.write_bytes(b"no database" * 100)
    with pytest.raises(ValueError, match="cannot be opened: file is not a database"):
        SqlStore(f"sqlite:///{file}")


def damaged(file: Path) -> None:
    """A store whose pages behind the schema's are overwritten."""
    with closing(SqlStore(f"sqlite:///{file}")) as store:
        claims = [store.start(RolloutRequest(task="x" * 500), "w") for _ in range(50)]
        spans = [span(claim.attempt.attempt_id, 0, f"s{i}", claim.rollout.rollout_id) for i, claim in enumerate(claims)]
        store.add_spans(spans)
    with closing(sqlite3.connect(file)) as database:
        [size], [pages] = (database.execute(f"PRAGMA {name}").fetchone() for name in ("page_size", "page_count"))
        roots = {root for (root,) in database.execute("SELECT rootpage FROM sqlite_master")}
    data = bytearray(file.read_bytes())
    for page in range(max(5, min(roots)), pages):
        data[page * size : page * size + 200] = b"\xff" * 200
    file.write_bytes(data)


def test_a_damaged_store_is_told_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    damaged(file)
    with pytest.raises(StoreUnwritable, match=rf"{file} is damaged \(.*\): put a copy of it back"):  # noqa: PT012, SIM117
        with closing(SqlStore(f"sqlite:///{file}")) as store:
            store.page(limit=1000)
            store.recorded_calls()


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(st.lists(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=4), max_size=8), max_size=6)
)
def test_calls_are_counted_once_however_often_it_is_opened(openings: list[list[list[tuple[int, int]]]]) -> None:
    """Each span of a batch is a call with so many tokens; one whose id is there already is left as it is."""
    with TemporaryDirectory() as folder, patch.object(call_counts, "_WORTH_MERGING", 2):
        url, known = f"sqlite:///{folder}/store.db", dict[int, int]()
        for batches in openings:
            with closing(SqlStore(url)) as store:
                for batch in batches:
                    store.add_spans([sampled(f"c{number}", tokens) for number, tokens in batch])
                    for number, tokens in batch:
                        known.setdefault(number, tokens)
                    store.merge_counts()
                total, found = sum(known.values()), store.recorded_calls()
                assert found.tokens == ({"m": total} if total else {})
                assert store._database.write(partial(call_counts.count_anew, store._database)) == found


def test_a_start_reads_no_span_unless_somebody_has_taken_some_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, read = f"sqlite:///{tmp_path}/store.db", []
    with closing(SqlStore(url)) as store:
        assert store.recorded_calls().tokens == {}
        store.add_spans([sampled(f"c{number}", 2) for number in (*range(300), 0)])
    monkeypatch.setattr(call_counts, "unpacked", lambda record: read.append(1) or unpacked(record))
    with closing(SqlStore(url)) as store:
        assert store.recorded_calls().tokens == {"m": 600}
        assert not read
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        other.execute("DELETE FROM spans")
    with closing(SqlStore(url)) as store:
        store.add_spans([sampled("again", 3)])
        assert store.recorded_calls().tokens == {"m": 3}


def sampled(call_id: str, tokens: int) -> Span:
    return Span(
        span_id=call_id, name="lightning_rl.call", rollout_id="r", attempt_id="a", number=0, start_ns=0, end_ns=tokens,
        attributes={"gen_ai.response.model": "m", "lightning_rl.response_ids": b"1234" * tokens},
    )  # fmt: skip


def test_a_store_that_another_process_holds_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "store.db"
    SqlStore(f"sqlite:///{file}").close()
    monkeypatch.setattr(databases, "_LOCK_SECONDS", 1)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnwritable, match=rf"{file} was held by another process for 1 s"):
            SqlStore(f"sqlite:///{file}")


def test_whoever_sets_the_machines_clock_ends_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward by hours nothing is overdue; back by hours what is overdue is found all the same."""
    real = time.time
    with closing(SqlStore(f"sqlite:///{tmp_path / 'run.db'}")) as store:
        config = RolloutConfig(timeout_seconds=60, unresponsive_seconds=30)
        store.enqueue([RolloutRequest(task=1, rollout_id="r", config=config)])
        (claim,) = store.claim("w")
        monkeypatch.setattr(time, "time", lambda: real() + 3 * 3600)
        assert store.overdue() == []
        lease = store.heartbeat("r", claim.attempt.attempt_id).lease_expires_at
        assert lease < real() + 40
        monkeypatch.setattr(time, "time", lambda: real() - 3 * 3600)
        assert lease - 40 < store.heartbeat("r", claim.attempt.attempt_id).lease_expires_at
    monkeypatch.setattr(time, "time", real)
    monotonic = time.monotonic
    with closing(SqlStore(f"sqlite:///{tmp_path / 'run.db'}")) as store:
        monkeypatch.setattr(time, "time", lambda: real() - 3 * 3600)
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 45)
        assert [late.why for late in store.overdue()] == ["lease"]


def test_rollouts_that_ended_are_counted_once_however_often_somebody_asks(tmp_path: Path) -> None:
    with closing(SqlStore(f"sqlite:///{tmp_path / 'store.db'}")) as store:
        store.enqueue([RolloutRequest(task=None, rollout_id=name) for name in "abc"])
        store.cancel("a")
        assert [store.counts() for _ in range(3)] == [{"cancelled": 1, "queued": 2}] * 3
        store.cancel("b")
        assert [store.counts() for _ in range(2)] == [{"cancelled": 2, "queued": 1}] * 2


def test_a_gateway_remembers_its_own_runs_and_none_of_another_whose_name_looks_alike(tmp_path: Path) -> None:
    with closing(SqlStore(f"sqlite:///{tmp_path / 'store.db'}")) as store:
        store.remember_run("g_1", "mine", "{}")
        store.remember_run("gx1", "theirs", "{}")
        assert store.remembered_runs("g_1") == {"mine": "{}"}


def test_a_run_goes_on_from_the_folder_that_knows_its_last_session_alone() -> None:
    with closing(SqlStore("sqlite://")) as store:
        store.enter_session("run", ["a"])
        store.enter_session("run", ["a"])  # its server was started anew
        store.enter_session("run", ["a", "b"])
        for copy in (["a", "c"], ["d"]):
            with pytest.raises(Conflict, match="run run has gone on at this server from another copy of its folder"):
                store.enter_session("run", copy)
        store.enter_session("another", ["d"])
        store.enter_session("run", ["a", "b", "lost", "e"])  # a session that ended before it was told


def test_a_run_that_attaches_elsewhere_is_remembered_there_alone() -> None:
    with closing(SqlStore("sqlite://")) as store:
        for gateway_id, run_id in (("g", "one"), ("g", "another-one"), ("h", "one")):
            store.remember_run(gateway_id, run_id, "{}")
        assert (store.remembered_runs("g"), store.remembered_runs("h")) == ({"another-one": "{}"}, {"one": "{}"})
        store.forget_run("h", "one")
        assert store.remembered_runs("h") == {}
