"""PostgreSQL's own troubles, made in a real server: what is done again, what is told, and that nothing is half done."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from lightning_rl.store import call_counts
from lightning_rl.store.contract import Finish, ResourcesRequest, Reward, RolloutRequest
from lightning_rl.store.databases import Postgres, shown
from lightning_rl.store.errors import Conflict, Invalid, StoreUnwritable
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters.span import Span
from tests.lightning_rl.store.backends import OverHttp, served
from tests.postgres import Cluster

SUCCEEDED = Finish(status="succeeded", reward=1.0)


class Broken:
    """A database of its own, and ways to break it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.name = cluster.database()
        self.url = cluster.url(self.name)

    def do(self, statement: str) -> list[Any]:
        with self.cluster.connect(self.name) as connection:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def cut(self) -> None:
        """Cut everybody else off."""
        self.do("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid()")  # fmt: skip

    def trouble(self, body: str, *, times: int, at_commit: bool = False) -> None:
        """The next `times` rollouts that are written run `body`; a sequence counts, since no rollback undoes it."""
        self.do("CREATE SEQUENCE troubles")
        self.do(f"""
            CREATE FUNCTION trouble() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF nextval('troubles') <= {times} THEN {body}; END IF;
                RETURN NULL;
            END $$""")
        deferred = "CONSTRAINT" if at_commit else ""
        when = "DEFERRABLE INITIALLY DEFERRED" if at_commit else ""
        self.do(
            f"CREATE {deferred} TRIGGER trouble AFTER INSERT ON rollouts {when} FOR EACH ROW EXECUTE FUNCTION trouble()"
        )


@pytest.fixture
def broken(cluster: Cluster) -> Broken:
    return Broken(cluster)


@pytest.fixture
def store(broken: Broken) -> Iterator[SqlStore]:
    with closing(SqlStore(broken.url)) as store:
        yield store


def request(rollout_id: str | None = None) -> RolloutRequest:
    return RolloutRequest(task=1, rollout_id=rollout_id)


# What is done again


@pytest.mark.parametrize("state", ["40001", "40P01", "23505"])
def test_a_transaction_that_was_in_anothers_way_is_done_again(broken: Broken, store: SqlStore, state: str) -> None:
    broken.trouble(f"RAISE EXCEPTION USING ERRCODE = '{state}'", times=3)
    store.enqueue([request("r1")])
    assert broken.do("SELECT last_value FROM troubles") == [(4,)]
    assert store.counts() == {"queued": 1}


def test_one_that_always_is_ends_as_what_it_is(broken: Broken, store: SqlStore, monkeypatch: Any) -> None:
    monkeypatch.setattr("lightning_rl.store.databases._PAUSE_SECONDS", 0)
    broken.trouble("RAISE EXCEPTION USING ERRCODE = '40001'", times=1000)
    with pytest.raises(StoreUnwritable, match=r"cannot be written .* what was recorded waits in the journal"):
        store.enqueue([request("r1")])
    assert store.counts() == {}


def test_a_connection_that_was_cut_while_nobody_used_it_is_made_anew(broken: Broken, store: SqlStore) -> None:
    store.enqueue([request("r1")])
    broken.cut()
    assert store.rollout("r1").status == "queued"
    broken.cut()
    assert len(store.claim("w")) == 1


def test_a_connection_that_is_cut_in_mid_transaction_is_made_anew(broken: Broken, store: SqlStore) -> None:
    broken.trouble("PERFORM pg_terminate_backend(pg_backend_pid())", times=1)
    store.enqueue([request("r1"), request("r2")])
    assert store.counts() == {"queued": 2}


def failed(state: str | None, kind: Any = sa.exc.OperationalError, *, cut: bool = False) -> Any:
    """A statement that failed; `state` is what the server said of it, None where it is not there."""
    origin = Exception("said so")
    origin.sqlstate = state  # type: ignore[attr-defined]
    return kind("SELECT 1", {}, origin, connection_invalidated=cut)


NOWHERE = Postgres(sa.make_url("postgresql://nowhere/db"))


@pytest.mark.parametrize(
    ("error", "tried", "committing", "again"),
    [
        (failed("40001"), 11, False, True),
        (failed("40001"), 12, False, False),
        (failed("42601"), 1, False, False),
        (failed(None, cut=True), 1, False, True),
        (failed(None, cut=True), 2, False, False),  # it is cut whenever it is made anew
        (failed(None, cut=True), 1, True, False),
    ],
)
def test_what_is_done_again_and_how_often(
    error: Any, tried: int, committing: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rl.store.databases._PAUSE_SECONDS", 0)
    assert NOWHERE._again(error, tried, committing=committing) == again


# What is told


@pytest.mark.parametrize(
    ("error", "committing", "told"),
    [
        (failed(None, cut=True), True, "whether it did is not known"),
        (failed(None, cut=True), False, "cannot be reached (said so)"),
        (failed(None), True, "cannot be reached (said so)"),
        *((failed(state, sa.exc.ProgrammingError), False, "cannot be used (said so)") for state in
          ("42P01", "3F000", "42501", "28000", "28P01")),
        (failed("55P03"), False, "was held by another process"),
        (failed("53100"), False, "cannot be written (said so)"),
        (failed("25006", sa.exc.InternalError), False, "cannot be written (said so)"),
        (failed("22P05", sa.exc.DataError), False, "cannot hold this (said so): change it"),
        (failed("42601", sa.exc.ProgrammingError), False, None),  # a mistake of ours
    ],
)  # fmt: skip
def test_each_trouble_is_told_in_words_of_its_own(error: Any, committing: bool, told: str | None) -> None:
    found = NOWHERE._refusal(error, committing=committing)
    assert (found is error) if told is None else (told in str(found))


def test_a_connection_that_is_cut_in_a_commit_is_told_and_a_repeat_does_no_harm(
    broken: Broken, store: SqlStore
) -> None:
    broken.trouble("PERFORM pg_terminate_backend(pg_backend_pid())", times=1, at_commit=True)
    with pytest.raises(StoreUnwritable, match="whether it did is not known: ask again with the same ids"):
        store.enqueue([request("r1")])
    store.enqueue([request("r1")])
    assert store.counts() == {"queued": 1}


def test_a_full_disk_is_told_and_nothing_is_half_written(broken: Broken, store: SqlStore) -> None:
    broken.trouble("RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'", times=1)
    with pytest.raises(StoreUnwritable, match=r"cannot be written \(could not extend file"):
        store.enqueue([request("r1"), request("r2")])
    assert store.counts() == {}
    store.enqueue([request("r1")])


def test_a_read_only_server_is_told_and_can_be_read(broken: Broken, store: SqlStore) -> None:
    store.enqueue([request("r1")])
    broken.do(f"ALTER DATABASE {broken.name} SET default_transaction_read_only = on")
    broken.cut()
    with pytest.raises(StoreUnwritable, match=r"cannot be written \(cannot execute .* in a read-only transaction"):
        store.claim("w")
    assert store.rollout("r1").status == "queued"
    with broken.cluster.connect("postgres") as elsewhere:
        elsewhere.execute(f"ALTER DATABASE {broken.name} RESET ALL")  # type: ignore[arg-type]
    broken.cut()
    assert len(store.claim("w")) == 1


def test_a_server_that_dies_is_told_and_loses_nothing_that_was_answered(broken: Broken, store: SqlStore) -> None:
    store.enqueue([request("r1")])
    [claim] = store.claim("w")
    broken.cluster.kill()
    try:
        with pytest.raises(StoreUnwritable, match=r"cannot be reached .*start PostgreSQL"):
            store.finish("r1", claim.attempt.attempt_id, SUCCEEDED)
        with pytest.raises(ValueError, match="cannot be reached"):
            SqlStore(broken.url)
    finally:
        broken.cluster.start()
    store.finish("r1", claim.attempt.attempt_id, SUCCEEDED)
    assert store.rollout("r1").reward == 1.0


def test_clients_wait_for_a_server_that_restarts(broken: Broken, store: SqlStore, tmp_path: Path) -> None:
    with served(store, tmp_path) as address:
        client = OverHttp(address, store)
        client.enqueue([request("r1")])
        broken.cluster.kill()
        starting = threading.Timer(0.5, broken.cluster.start)
        starting.start()
        assert [claim.rollout.rollout_id for claim in client.claim("w")] == ["r1"]
        starting.join()
        client.close()


def test_one_who_is_held_off_for_too_long_is_told_by_whom(broken: Broken, store: SqlStore, monkeypatch: Any) -> None:
    store.enqueue([request("r1")])
    monkeypatch.setattr("lightning_rl.store.databases._LOCK_SECONDS", 1)
    with closing(SqlStore(broken.url)) as impatient, broken.cluster.connect(broken.name) as other:
        other.execute("BEGIN; SELECT 1 FROM rollouts FOR UPDATE")  # type: ignore[arg-type]
        with pytest.raises(StoreUnwritable, match="was held by another process for 1 s"):
            impatient.cancel("r1")
        assert impatient.claim("w") == []  # it waits for nobody
        other.execute("ROLLBACK")
        assert impatient.cancel("r1").status == "cancelled"


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.enqueue([RolloutRequest(task=1, agent="a\0b")]),
        lambda store: store.claim("w\0", limit=1),
    ],
)
def test_text_that_postgresql_cannot_hold_is_refused(store: SqlStore, write: Callable[[SqlStore], Any]) -> None:
    store.enqueue([request("r1")])
    with pytest.raises(Invalid, match="cannot hold this"):
        write(store)
    store.enqueue([RolloutRequest(task="a\0b", rollout_id="r2")])  # a task it can
    assert store.rollout("r2").task == "a\0b"


def test_a_password_is_shown_nowhere(broken: Broken) -> None:
    secret = broken.url.replace("postgres@", "postgres:hidden@").replace(broken.name, "nowhere")
    with pytest.raises(ValueError, match="nowhere") as refused:
        SqlStore(secret)
    assert "hidden" not in str(refused.value)
    with closing(SqlStore(broken.url.replace("postgres@", "postgres:hidden@"))) as store:
        broken.do("ALTER TABLE spans DROP COLUMN record")
        with pytest.raises(sa.exc.ProgrammingError) as failed:
            store.traces(["r1"])
    assert "hidden" not in str(failed.value)


def test_a_password_in_a_urls_query_is_shown_nowhere(broken: Broken) -> None:
    url = sa.make_url(broken.url).update_query_dict({"password": "hidden", "sslpassword": "hidden"})
    secret = url.render_as_string(hide_password=False)
    assert "hidden" not in shown(secret)
    with closing(SqlStore(secret)) as store:
        broken.do("DROP TABLE rollouts CASCADE")
        with pytest.raises(StoreUnwritable, match=r"password=\.\.\.&") as failed:
            store.rollout("r1")
    assert "hidden" not in str(failed.value)


def test_tables_that_are_gone_are_a_store_that_cannot_be_used(broken: Broken, store: SqlStore) -> None:
    """As a SQLite file that was deleted: callers wait, and the health page says so."""
    broken.do("ALTER TABLE rollouts RENAME TO elsewhere")
    with pytest.raises(StoreUnwritable, match=r'cannot be used \(relation "rollouts" does not exist\)'):
        store.enqueue([request("r1")])
    broken.do("ALTER TABLE elsewhere RENAME TO rollouts")
    store.enqueue([request("r1")])


# Two at once


class Halfway:
    """Holds a store's next write back between its work and its commit."""

    def __init__(self, store: SqlStore) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

        def wait(_connection: Any) -> None:
            self.reached.set()
            assert self.go_on.wait(60)

        sa.event.listen(store._database.engine, "commit", wait, once=True)


def in_the_middle(
    first: SqlStore, one: Callable[[], Any], other: Callable[[], Any], *, waits: bool = True
) -> tuple[Any, Any]:
    """What `one` gives whose commit is held back until `other` waits for it, or is done; and what `other` gives."""
    halfway, answers = Halfway(first), {}

    def run(name: str, work: Callable[[], Any]) -> None:
        try:
            answers[name] = work()
        except Conflict as error:
            answers[name] = error

    threads = [threading.Thread(target=run, args=(name, work)) for name, work in (("one", one), ("other", other))]
    threads[0].start()
    assert halfway.reached.wait(60)
    threads[1].start()
    threads[1].join(1 if waits else 60)
    assert waits or not threads[1].is_alive()
    halfway.go_on.set()
    for thread in threads:
        thread.join()
    return answers["one"], answers["other"]


@pytest.fixture
def second(broken: Broken, store: SqlStore) -> Iterator[SqlStore]:
    with closing(SqlStore(broken.url)) as second:
        yield second


def test_two_that_claim_at_once_get_different_rollouts_and_neither_waits(store: SqlStore, second: SqlStore) -> None:
    store.enqueue([request("r1"), request("r2")])
    one, other = in_the_middle(store, lambda: store.claim("a"), lambda: second.claim("b"), waits=False)
    assert [claim.rollout.rollout_id for claim in (*one, *other)] == ["r1", "r2"]


def test_the_same_claim_id_at_once_is_one_claim(store: SqlStore, second: SqlStore) -> None:
    store.enqueue([request("r1"), request("r2")])
    one, other = in_the_middle(store, lambda: store.claim("a", claim_id="c"), lambda: second.claim("a", claim_id="c"))
    assert one == other
    assert len(one) == 1


def test_the_same_start_at_once_is_one_claim(store: SqlStore, second: SqlStore) -> None:
    one, other = in_the_middle(store, lambda: store.start(request("r1"), "w"), lambda: second.start(request("r1"), "w"))
    assert one == other
    one, other = in_the_middle(store, lambda: store.start(request("r2"), "w"), lambda: second.start(request("r2"), "x"))
    assert one.rollout.rollout_id == "r2"
    assert isinstance(other, Conflict)


def test_the_same_rollout_enqueued_at_once_is_one_and_another_body_is_refused(
    store: SqlStore, second: SqlStore
) -> None:
    one, other = in_the_middle(store, lambda: store.enqueue([request("r1")]), lambda: second.enqueue([request("r1")]))
    assert one == other
    val = RolloutRequest(task=1, rollout_id="r2", mode="val")
    _, other = in_the_middle(store, lambda: store.enqueue([request("r2")]), lambda: second.enqueue([val]))
    assert isinstance(other, Conflict)
    assert store.rollout("r2").mode == "train"


def test_a_finish_and_a_cancel_at_once_end_it_once(store: SqlStore, second: SqlStore) -> None:
    claim = store.start(request("r1"), "w")
    (rollout, _), cancelled = in_the_middle(
        store, lambda: store.finish("r1", claim.attempt.attempt_id, SUCCEEDED), lambda: second.cancel("r1")
    )
    assert rollout.status == cancelled.status == "succeeded"
    claim = store.start(request("r2"), "w")
    cancelled, finished = in_the_middle(
        store, lambda: store.cancel("r2"), lambda: second.finish("r2", claim.attempt.attempt_id, SUCCEEDED)
    )
    assert cancelled.status == "cancelled"
    assert isinstance(finished, Conflict)


def test_a_reward_that_was_taken_is_in_the_outcome(store: SqlStore, second: SqlStore) -> None:
    attempt = store.start(request("r1"), "w").attempt.attempt_id
    _, (_, ended) = in_the_middle(
        store,
        lambda: store.add_rewards("r1", attempt, [Reward(value=0.5, name="style")]),
        lambda: second.finish("r1", attempt, SUCCEEDED),
    )
    assert ended.rewards == {"style": 0.5, "reward": 1.0}
    attempt = store.start(request("r2"), "w").attempt.attempt_id
    _, refused = in_the_middle(
        store,
        lambda: store.finish("r2", attempt, SUCCEEDED),
        lambda: second.add_rewards("r2", attempt, [Reward(value=0.5)]),
    )
    assert isinstance(refused, Conflict)
    assert store.trace("r2", attempt).rewards == []


def test_two_late_rewards_at_once_both_count(store: SqlStore, second: SqlStore) -> None:
    attempt = store.start(request("r1"), "w").attempt.attempt_id
    store.finish("r1", attempt, SUCCEEDED)
    in_the_middle(
        store,
        lambda: store.add_rewards("r1", attempt, [Reward(value=0.5, name="style")], late=True),
        lambda: second.add_rewards("r1", attempt, [Reward(value=0.25, name="form")], late=True),
    )
    assert store.rollout("r1").rewards == {"reward": 1.0, "style": 0.5, "form": 0.25}


def test_a_sweep_and_a_retry_at_once_move_it_once(broken: Broken) -> None:
    with closing(SqlStore(broken.url, lambda: 0.0)) as now, closing(SqlStore(broken.url, lambda: 1e6)) as later:
        now.start(request("r1"), "w")
        overdue = later.overdue()
        one, other = in_the_middle(later, lambda: later.expire(overdue), lambda: now.expire(overdue))
        assert [rollout.status for rollout in one] == ["queued"]
        assert other == []


def test_resources_published_at_once_have_versions_of_their_own(store: SqlStore, second: SqlStore) -> None:
    ask = [ResourcesRequest(resources={"x": {"v": n}}, resources_id=f"s{n}") for n in range(2)]
    one, other = in_the_middle(store, lambda: store.publish(ask[0]), lambda: second.publish(ask[1]))
    assert (one.version, other.version) == (1, 2)
    one, other = in_the_middle(
        store,
        lambda: store.publish(ResourcesRequest(resources={"x": {"v": 9}}, resources_id="same")),
        lambda: second.publish(ResourcesRequest(resources={"x": {"v": 9}}, resources_id="same")),
    )
    assert one == other


def test_what_is_read_is_one_moment(store: SqlStore, second: SqlStore) -> None:
    """A rollout that ends while it is read is shown as it was, with its attempts as they were."""
    claim = store.start(request("r1"), "w")
    reads = iter([True])

    def between(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM rollouts" in statement and next(reads, False):
            second.finish("r1", claim.attempt.attempt_id, SUCCEEDED)

    sa.event.listen(store._database._reader, "after_cursor_execute", between)
    read = store.rollout("r1")
    assert (read.status, read.attempts[0].status) == ("running", "running")
    assert store.rollout("r1").status == "succeeded"
    assert next(reads, None) is None


def test_calls_are_counted_once_by_servers_that_record_merge_and_begin_to_count_at_once(
    store: SqlStore, second: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_counts, "_WORTH_MERGING", 3)
    over = threading.Event()

    def merge(server: SqlStore) -> None:
        while not over.wait(0.002):
            server.merge_counts()

    def begin(server: SqlStore) -> None:
        server.recorded_calls()  # the first count reads what is there, while others add to it
        while not over.wait(0.01):
            server._database.write(partial(call_counts.count_anew, server._database))

    def record(server: SqlStore, first: int) -> None:
        for batch in range(40):  # a half of each batch is another's too
            server.add_spans([sampled(f"c{4 * batch + first + number}") for number in range(4)])

    others = [threading.Thread(target=work, args=(server,)) for work in (merge, begin) for server in (store, second)]
    recorders = [threading.Thread(target=record, args=each) for each in ((store, 0), (second, 2))]
    for thread in [*others, *recorders]:
        thread.start()
    for thread in recorders:
        thread.join()
    over.set()
    for thread in others:
        thread.join()
    found = store.recorded_calls()
    assert (found.tokens, found.spans) == ({"m": 2 * 162}, 162)
    assert store._database.write(partial(call_counts.count_anew, store._database)) == found


def sampled(call_id: str) -> Span:
    """A call whose engine sampled two tokens."""
    attributes = {"gen_ai.response.model": "m", "lightning_rl.response_ids": bytes(8)}
    place = {"rollout_id": "r", "attempt_id": "a", "name": "lightning_rl.call", "number": 0}
    return Span(span_id=call_id, start_ns=0, end_ns=1, attributes=attributes, **place)
