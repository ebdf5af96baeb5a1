"""What an operation costs does not grow with the store: counted in steps of SQLite's machine, which no load changes."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from lightning_rl.store.contract import Ending, Finish, Reward, RolloutRequest
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters.span import Span

SUCCEEDED = Finish(status="succeeded", reward=1.0)
WAITED_FOR = 120  # by one wait


def filled(path: Path, rollouts: int) -> SqlStore:
    """A store of so many rollouts that have ended, each with a span and a reward; some are queued, some run."""
    store = SqlStore(f"sqlite:///{path}")
    store.enqueue([RolloutRequest(task=1, rollout_id=f"r{i}", group_id=f"g{i // 4}") for i in range(rollouts)])
    ended = [(claim.rollout.rollout_id, claim.attempt.attempt_id) for claim in store.claim("w", limit=rollouts)]
    store.add_spans([span(place) for place in ended])
    rewards = [Reward(value=1.0, name="n")]
    store.finish_many([Ending(rollout_id=r, attempt_id=a, finish=SUCCEEDED, rewards=rewards) for r, a in ended])
    store.enqueue([RolloutRequest(task=1) for _ in range(20)])
    store.claim("w", limit=10)
    store.counts()  # what has ended is counted once
    return store


def span(place: tuple[str, str]) -> Span:
    rollout_id, attempt_id = place
    return Span(
        span_id=f"s{attempt_id}", rollout_id=rollout_id, attempt_id=attempt_id, name="n", number=0, start_ns=0,
        end_ns=0, attributes={},
    )  # fmt: skip


def operations(store: SqlStore, rollouts: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every operation that a run repeats."""
    yield "enqueue", lambda: store.enqueue([RolloutRequest(task=1, rollout_id=f"new{i}") for i in range(3)])
    claims = store.claim("w", limit=3)
    yield "claim", lambda: store.claim("w", limit=3, claim_id="c")
    yield "claim again", lambda: store.claim("w", limit=3, claim_id="c")
    places = [(claim.rollout.rollout_id, claim.attempt.attempt_id) for claim in claims]
    yield "claimable", store.claimable
    yield "heartbeat", lambda: store.heartbeat(*places[0])
    yield "heartbeats", lambda: store.heartbeats(places)
    yield "add_spans", lambda: store.add_spans([span(place) for place in places])
    yield "statuses", lambda: store.statuses(places)
    yield "closed", lambda: store.closed(places)
    yield "attempt", lambda: store.attempt(*places[0])
    yield "add_rewards", lambda: store.add_rewards(*places[0], [Reward(value=1.0, name="n")])
    yield "finish", lambda: store.finish(*places[0], SUCCEEDED)
    yield "late rewards", lambda: store.add_rewards(*places[0], [Reward(value=1.0, name="n")], late=True)
    [*_, last] = [Ending(rollout_id=r, attempt_id=a, finish=SUCCEEDED) for r, a in places]
    yield "finish_many", lambda: store.finish_many([last])
    yield "cancel", lambda: store.cancel(places[1][0])
    yield "overdue", store.overdue
    yield "running", lambda: store.running(["w"], why="worker")
    yield "postpone", lambda: store.postpone(1.0)
    yield "renew_leases", store.renew_leases
    names = [f"r{i * rollouts // WAITED_FOR}" for i in range(WAITED_FOR)]
    yield "ended", lambda: store.ended(names)
    yield "traces", lambda: store.traces(names)
    yield "rollout", lambda: store.rollout("r0")
    yield "counts", store.counts
    for wanted in ({}, {"status": "succeeded"}, {"mode": "train"}, {"mode": "val"}, {"group_id": "g7"}):
        for cursor in (None, str(rollouts - 100)):
            yield f"page {wanted} {cursor and 'last'}", lambda w=wanted, c=cursor: store.page(limit=50, cursor=c, **w)


def steps(store: SqlStore, rollouts: int) -> dict[str, int]:
    """Steps of SQLite's machine, in tens, by operation."""
    found: Counter[str] = Counter()
    current = ""

    def step() -> int:
        found[current] += 1
        return 0

    assert store._database._connection is not None
    driver = store._database._connection.connection.driver_connection
    for name, operation in operations(store, rollouts):
        current = name
        driver.set_progress_handler(step, 10)
        operation()
        driver.set_progress_handler(None, 0)
    return dict(found)


def test_no_operation_of_a_run_does_more_in_a_larger_store(tmp_path: Path) -> None:
    found = {}
    for rollouts in (300, 3000):
        with closing(filled(tmp_path / f"{rollouts}.db", rollouts)) as store:
            found[rollouts] = steps(store, rollouts)
    assert len(found[300]) > 25
    grown = {name: (found[300][name], more) for name, more in found[3000].items() if more > 1.3 * found[300][name] + 20}
    assert grown == {}


def test_what_has_ended_is_counted_once_and_stays_counted() -> None:
    with closing(SqlStore("sqlite://")) as store:
        for round_ in range(1, 4):
            store.enqueue([RolloutRequest(task=1) for _ in range(3)])
            for claim in store.claim("w", limit=2):
                store.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, SUCCEEDED)
            assert store.counts() == {"succeeded": 2 * round_, "queued": round_}
        for rollout in store.page(status="queued")[0]:
            store.cancel(rollout.rollout_id)
        assert store.counts() == store.counts() == {"succeeded": 6, "cancelled": 3}
