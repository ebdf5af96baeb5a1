"""The contract of a store, whatever keeps it: claims, leases, retries, rewards, idempotency.

Each test runs over SQLite, over PostgreSQL, and over the HTTP client of a server before each (`backends.py`).
"""

import inspect
import math

import pytest
from msgspec.structs import replace

from lightning_rl.store import queries
from lightning_rl.store.contract import (
    ErrorInfo,
    Finish,
    ResourcesRequest,
    Reward,
    RolloutConfig,
    RolloutRequest,
)
from lightning_rl.store.errors import Conflict, Invalid, NotFound
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters.call import Call, to_span
from lightning_rl_adapters.span import Span
from tests.lightning_rl.store.backends import NOT_OVER_HTTP, OverHttp

SUCCEEDED = Finish(status="succeeded", reward=1.0)
AGENT_FAILED = Finish(status="failed", error=ErrorInfo(type="ValueError", message="no"))
INFRASTRUCTURE = Finish(status="failed", error=ErrorInfo(type="Gone", message="engine", infrastructure=True))
PAUSE = 60.0  # seconds before a retry, at most


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


def test_every_operation_is_tested_over_http_or_it_is_told_why_not() -> None:
    operations = {name for name, _ in inspect.getmembers(SqlStore, inspect.isfunction) if not name.startswith("_")}
    over_http = {name for name, _ in inspect.getmembers(OverHttp, inspect.isfunction) if not name.startswith("_")}
    assert over_http | set(NOT_OVER_HTTP) == operations
    assert not over_http & set(NOT_OVER_HTTP)


# Enqueue


def test_enqueued_rollouts_come_back_in_order_and_queued(store) -> None:
    made = store.enqueue([request("b"), request(), request("a", group_id="g")])
    assert [r.rollout_id for r in made][::2] == ["b", "a"]
    assert {r.status for r in made} == {"queued"}
    assert made[2].group_id == "g"
    assert made[0].task == {"question": "?"}


def test_the_same_rollout_again_is_the_same_rollout(store) -> None:
    first = store.enqueue([request("r1")])
    assert store.enqueue([request("r1"), request("r1")]) == first * 2
    assert len(store.claim("w", limit=9)) == 1


def test_another_body_under_a_known_id_is_a_conflict_and_changes_nothing(store) -> None:
    store.enqueue([request("r1")])
    with pytest.raises(Conflict, match="r1"):
        store.enqueue([request("r2"), request("r1", mode="val")])
    with pytest.raises(NotFound):
        store.rollout("r2")


def test_the_order_of_keys_does_not_make_another_body(store) -> None:
    store.enqueue([RolloutRequest(task={"a": 1, "b": 2}, rollout_id="r1")])
    store.enqueue([RolloutRequest(task={"b": 2, "a": 1}, rollout_id="r1")])


def test_a_task_that_is_not_json_is_refused(store) -> None:
    for task, message in (
        (object(), "JSON"),
        ("\ud83d", "surrogates"),
        ({"answer": -(2**64)}, "more than 64 bits"),
        ([float("-inf")], "infinity"),
    ):
        with pytest.raises(Invalid, match=message):
            store.enqueue([RolloutRequest(task=task)])
    store.enqueue([RolloutRequest(task=2**64 - 1)])
    assert [claim.rollout.task for claim in store.claim("w", limit=5)] == [2**64 - 1]


def test_pages_go_on_at_the_cursor_and_filter(store) -> None:
    store.enqueue([request(f"r{n}", mode="val" if n % 2 else "train") for n in range(7)])
    seen, cursor = [], None
    while True:
        page, cursor = store.page(mode="train", cursor=cursor, limit=2)
        seen += [r.rollout_id for r in page]
        if cursor is None:
            break
    assert seen == ["r0", "r2", "r4", "r6"]
    assert store.page(limit=7)[1] is None, "no empty page follows"
    for nonsense in ("x", "-1", "9" * 40):
        with pytest.raises(Invalid, match="cursor"):
            store.page(cursor=nonsense)


# Claims


def test_what_is_shelved_is_claimed_when_it_is_asked_for_again(store) -> None:
    store.enqueue([request(name) for name in ("r1.one", "r2.one", "r3.one", "r4.1one")])
    (under_way,) = store.claim("w")
    store.shelve("one")
    assert [claim.rollout.rollout_id for claim in store.claim("w", limit=9)] == ["r4.1one"], "another run's goes on"
    assert not store.claimable()
    store.enqueue([request("r2.one"), request("r5.one")])
    assert store.claimable()
    assert [claim.rollout.rollout_id for claim in store.claim("w", limit=9)] == ["r2.one", "r5.one"]
    store.finish("r1.one", under_way.attempt.attempt_id, INFRASTRUCTURE)
    assert store.rollout("r1.one").status == "queued"  # its retry is asked for by nobody else
    assert store.rollout("r3.one").status == "queued"
    assert store.cancel("r3.one").status == "cancelled"


def test_the_running_attempts_of_a_run_are_told_from_the_others(store) -> None:
    store.enqueue([request("r1.one"), request("r1.two"), request("one")])
    assert len(store.claim("w", limit=3)) == 3
    (found,) = store.running(why="session", run_id="one")
    assert found.rollout_id == "r1.one"
    store.finish("r1.one", found.attempt_id, SUCCEEDED)
    assert store.running(why="session", run_id="one") == []
    store.enqueue([request("r2.a_b"), request("r2.axb")])
    store.claim("w", limit=2)
    assert [late.rollout_id for late in store.running(why="session", run_id="a_b")] == ["r2.a_b"]


def test_workers_are_told_by_name_each_with_its_oldest_attempt_first(store, clock) -> None:
    store.enqueue([request(f"r{number}") for number in range(3)])
    for worker in ("b", "a", "b"):
        store.claim(worker)
        clock.advance(1)
    told = {worker.worker_id: [one.rollout_id for one in worker.attempts] for worker in store.workers()}
    assert list(told.items()) == [("a", ["r1"]), ("b", ["r0", "r2"])]


def test_claims_take_the_oldest_first_and_each_once(store) -> None:
    store.enqueue([request(f"r{n}") for n in range(3)])
    assert [c.rollout.rollout_id for c in store.claim("w", limit=2)] == ["r0", "r1"]
    assert [c.rollout.rollout_id for c in store.claim("w", limit=2)] == ["r2"]
    assert store.claim("w") == []


def test_a_worker_gets_its_agents_rollouts_and_those_of_no_agent(store) -> None:
    store.enqueue([request("a", agent="a"), request("b", agent="b"), request("any")])
    claims = store.claim("w", agents=["b"], limit=9)
    assert [c.rollout.rollout_id for c in claims] == ["b", "any"]
    store.enqueue([request("any2")])
    assert [c.rollout.rollout_id for c in store.claim("w", agents=[], limit=9)] == ["any2"]


def test_the_same_claim_id_gives_the_same_claims(store) -> None:
    store.enqueue([request(f"r{n}") for n in range(3)])
    first = store.claim("w", limit=2, claim_id="c")
    assert store.claim("w", limit=2, claim_id="c") == first
    for worker, other in (("other", {}), ("w", {"limit": 1}), ("w", {"agents": ["a"]})):
        with pytest.raises(Conflict, match="claim id c"):
            store.claim(worker, claim_id="c", **({"limit": 2} | other))
    store.claim("w", claim_id="c1")
    with pytest.raises(Conflict, match="claim id c1"):
        store.claim("other", claim_id="c1")


def test_start_enqueues_and_claims_in_one(store) -> None:
    claim = store.start(request("r1"), "w")
    assert claim.rollout.status == "running"
    assert store.start(request("r1"), "w") == claim
    assert store.claim("w") == []
    store.enqueue([request("r2")])
    (others,) = store.claim("w")
    with pytest.raises(Conflict, match="r2 was claimed before and is running"):
        store.start(request("r2"), "w")
    store.finish("r2", others.attempt.attempt_id, INFRASTRUCTURE)
    with pytest.raises(Conflict, match="r2 was claimed before and is queued"):
        store.start(request("r2"), "w")


def test_a_claim_carries_the_resources_that_were_the_latest_when_enqueued(store) -> None:
    store.publish(ResourcesRequest(resources={"x": {"v": 1}}, resources_id="one"))
    store.enqueue([request("r1")])
    store.publish(ResourcesRequest(resources={"x": {"v": 2}}))
    store.enqueue([request("r2"), request("r3", resources_id="one")])
    values = [c.resources["x"]["v"] for c in store.claim("w", limit=3)]
    assert values == [1, 2, 1]
    with pytest.raises(Invalid, match="nope"):
        store.enqueue([request("r4", resources_id="nope")])


# Leases, deadlines, retries


def test_a_heartbeat_renews_the_lease_until_the_attempt_ends(store, clock) -> None:
    attempt = one_claim(store, unresponsive_seconds=10)
    clock.advance(9)
    assert store.heartbeat("r1", attempt).lease_expires_at == clock.now + 10
    clock.advance(9)
    assert store.sweep() == []
    store.finish("r1", attempt, SUCCEEDED)
    with pytest.raises(Conflict, match="no longer yours"):
        store.heartbeat("r1", attempt)


def test_a_lost_attempt_is_retried_then_the_rollout_fails_as_infrastructure(store, clock) -> None:
    first = one_claim(store, unresponsive_seconds=10, max_attempts=2)
    clock.advance(11)
    (rollout,) = store.sweep()
    assert (rollout.status, rollout.error) == ("queued", None)
    clock.advance(PAUSE)
    (claim,) = store.claim("w2")
    assert claim.attempt.attempt_id != first
    assert claim.attempt.sequence == 2
    clock.advance(11)
    (rollout,) = store.sweep()
    assert rollout.status == "failed"
    assert rollout.error.infrastructure
    assert rollout.counting_attempt_id is None
    assert [a.status for a in store.rollout("r1").attempts] == ["lost", "lost"]


def test_a_lost_attempt_cannot_finish_any_more(store, clock) -> None:
    attempt = one_claim(store, unresponsive_seconds=10)
    clock.advance(11)
    store.sweep()
    with pytest.raises(Conflict, match="drop this result"):
        store.finish("r1", attempt, SUCCEEDED)


def test_attempts_that_do_not_run_any_more_are_named(store, clock) -> None:
    first = one_claim(store, unresponsive_seconds=10)
    assert store.closed([("r1", first)]) == []
    clock.advance(11)
    store.sweep()
    clock.advance(PAUSE)
    second = store.claim("w")[0].attempt.attempt_id
    assert store.closed([("r1", first), ("r1", second), ("r1", "unknown")]) == [("r1", first)]


def test_of_attempts_that_are_asked_about_those_that_run_are_told_and_no_others_of_their_rollouts(store, clock) -> None:
    first = one_claim(store, unresponsive_seconds=10)
    assert list(store.openings([("r1", first), ("r1", "unknown"), ("unknown", first)])) == [("r1", first)]
    clock.advance(11)
    store.sweep()
    clock.advance(PAUSE)
    second = store.claim("w")[0].attempt.attempt_id
    assert store.openings([("r1", first)]) == {}
    told = store.openings([("r1", first), ("r1", second)])
    assert [(place, each.rollout.attempt_id, each.recorded) for place, each in told.items()] == [
        (("r1", second), second, False)
    ]
    store.add_spans([span(second)])
    assert store.openings([("r1", second)])["r1", second].recorded
    store.finish("r1", second, SUCCEEDED)
    assert store.openings([("r1", second)]) == {}


def test_a_deadline_is_the_agents_failure_and_is_not_retried(store, clock) -> None:
    attempt = one_claim(store, timeout_seconds=20, unresponsive_seconds=1000)
    store.add_rewards("r1", attempt, [Reward(value=0.5)])
    clock.advance(21)
    (rollout,) = store.sweep()
    assert (rollout.status, rollout.reward) == ("failed", 0.5)
    assert rollout.error.type == "DeadlineExceeded"
    assert not rollout.error.infrastructure
    assert rollout.counting_attempt_id == attempt


def test_an_attempt_that_ran_out_of_time_after_the_gateway_failed_a_call_of_it_is_tried_again(store, clock) -> None:
    one_claim(store, timeout_seconds=20, unresponsive_seconds=1000)
    clock.advance(21)
    (late,) = store.overdue()
    (rollout,) = store.expire([replace(late, failure="the engine is gone")])
    (lost,) = store.rollout("r1").attempts
    assert (rollout.status, lost.status, lost.error.infrastructure) == ("queued", "lost", True)
    assert lost.error.message.endswith("(the gateway had failed with a call of it: the engine is gone)")


def test_parked_time_moves_the_deadline(store, clock) -> None:
    one_claim(store, timeout_seconds=20, unresponsive_seconds=1000)
    clock.advance(21)
    (before,) = store.rollout("r1").attempts
    store.postpone(5)
    (parked,) = store.rollout("r1").attempts
    assert (parked.deadline_at, parked.lease_expires_at) == (before.deadline_at + 5, before.lease_expires_at)
    assert store.sweep() == []
    clock.advance(5)
    assert len(store.sweep()) == 1
    ended = store.rollout("r1")
    store.postpone(5, lease_seconds=5)
    assert store.rollout("r1") == ended


def test_leases_begin_anew_when_a_server_comes_back(store, clock) -> None:
    one_claim(store, unresponsive_seconds=10)
    clock.advance(100)
    store.renew_leases()
    assert store.sweep() == []
    store.cancel("r1")
    ended = store.rollout("r1")
    clock.advance(100)
    store.renew_leases()
    assert store.rollout("r1") == ended


def test_infrastructure_is_retried_an_agents_failure_is_not(store, clock) -> None:
    attempt = one_claim(store, max_attempts=2)
    rollout, ended = store.finish("r1", attempt, INFRASTRUCTURE)
    assert (rollout.status, ended.status) == ("queued", "failed")
    assert (rollout.ended_at, store.rollout("r1").ended_at, ended.ended_at) == (None, None, clock.now)
    clock.advance(PAUSE)
    (claim,) = store.claim("w")
    rollout, _ = store.finish("r1", claim.attempt.attempt_id, AGENT_FAILED)
    assert rollout.status == "failed"
    assert rollout.error.type == "ValueError"
    assert rollout.counting_attempt_id == claim.attempt.attempt_id
    assert store.claim("w") == []


def test_a_retry_comes_before_younger_rollouts(store, clock) -> None:
    attempt = one_claim(store)
    store.enqueue([request("younger")])
    store.finish("r1", attempt, INFRASTRUCTURE)
    clock.advance(PAUSE)
    assert [c.rollout.rollout_id for c in store.claim("w")] == ["r1"]


def test_a_retry_pauses_twice_as_long_after_each_failure_and_others_pass_it(store, clock) -> None:
    attempt = one_claim(store, max_attempts=9, unresponsive_seconds=1000)
    paused = []
    for number in range(8):
        store.finish("r1", attempt, INFRASTRUCTURE)
        store.enqueue([request(f"other{number}")])
        assert [c.rollout.rollout_id for c in store.claim("w", limit=9)] == [f"other{number}"]
        assert not store.claimable()
        began = clock.now
        while not store.claimable():
            clock.advance(0.5)
        paused.append(clock.now - began)
        assert store.claimable(newly_seconds=1)
        clock.advance(2)
        assert not store.claimable(newly_seconds=1)
        (claim,) = store.claim("w")
        attempt = claim.attempt.attempt_id
    assert paused == [1, 2, 4, 8, 16, 32, 60, 60]
    store.finish("r1", attempt, INFRASTRUCTURE)
    assert store.rollout("r1").status == "failed", "it was the last attempt"


def test_whoever_asks_again_for_a_rollout_that_pauses_before_a_retry_ends_no_pause(store, clock) -> None:
    store.finish("r1", one_claim(store), INFRASTRUCTURE)
    store.enqueue([request("r1")])
    assert store.claim("w") == []
    clock.advance(PAUSE)
    assert len(store.claim("w")) == 1


def test_the_pause_before_a_retry_stays_a_minute_however_often_it_failed(store, monkeypatch) -> None:
    attempt = one_claim(store, max_attempts=100_000)
    monkeypatch.setattr(queries, "counted_attempts", lambda *_: 5000)
    store.finish("r1", attempt, INFRASTRUCTURE)
    assert store.rollout("r1").status == "queued"


def test_what_was_stopped_from_outside_is_claimed_again_at_once(store) -> None:
    attempt = one_claim(store)
    stopped = ErrorInfo(type="RunnerStopped", message="", infrastructure=True)
    store.finish("r1", attempt, Finish(status="failed", error=stopped))
    assert store.claim("w")
    store.expire(store.running(why="session"))
    assert store.claim("w")


def test_time_in_which_the_server_stood_still_counts_against_no_lease_and_no_deadline(store, clock) -> None:
    one_claim(store, timeout_seconds=20, unresponsive_seconds=10)
    clock.advance(31)
    store.postpone(30, lease_seconds=30)
    assert store.overdue() == []
    clock.advance(9.5)
    assert [late.why for late in store.overdue()] == ["lease"]


def test_a_worker_that_was_lost_before_its_deadline_was_over_is_infrastructures_failure(store, clock) -> None:
    one_claim(store, timeout_seconds=20, unresponsive_seconds=10)
    clock.advance(21)
    assert [late.why for late in store.overdue()] == ["lease"]
    assert [rollout.status for rollout in store.sweep()] == ["queued"]


def test_what_is_overdue_for_some_time_is_told_from_the_others(store, clock) -> None:
    one_claim(store, unresponsive_seconds=10)
    clock.advance(12)
    assert store.overdue(since_seconds=3) == []
    clock.advance(2)
    assert [late.why for late in store.overdue(since_seconds=3)] == ["lease"]


def test_a_lease_is_extended_from_now_on(store, clock) -> None:
    attempt = one_claim(store, unresponsive_seconds=10)
    clock.advance(11)
    [late] = store.overdue()
    assert (late.why, late.lease_seconds) == ("lease", 10)
    store.extend_leases({attempt: 4})
    clock.advance(3.5)
    assert store.overdue() == []
    clock.advance(1)
    assert [late.why for late in store.overdue()] == ["lease"]


# Finish and cancel


def test_finish_again_gives_the_same_answer_another_finish_a_conflict(store) -> None:
    attempt = one_claim(store)
    first = store.finish("r1", attempt, SUCCEEDED)
    assert store.finish("r1", attempt, SUCCEEDED) == first
    with pytest.raises(Conflict):
        store.finish("r1", attempt, Finish(status="succeeded", reward=2.0))
    assert store.rollout("r1").reward == 1.0


def test_an_attempt_that_succeeded_has_no_error_whatever_its_worker_says(store) -> None:
    attempt = one_claim(store)
    said = ErrorInfo(type="ValueError", message="caught")
    rollout, ended = store.finish("r1", attempt, Finish(status="succeeded", reward=1.0, error=said))
    assert (rollout.status, rollout.error, ended.error) == ("succeeded", None, None)


def test_cancel_ends_queued_and_running_rollouts_and_leaves_ended_ones(store) -> None:
    attempt = one_claim(store)
    store.enqueue([request("r2"), request("r3")])
    assert store.cancel("r1").status == "cancelled"
    assert store.cancel("r2").status == "cancelled"
    assert store.rollout("r1").attempts[0].status == "cancelled"
    assert store.rollout("r1").counting_attempt_id is None
    with pytest.raises(Conflict):
        store.finish("r1", attempt, SUCCEEDED)
    (claim,) = store.claim("w", limit=9)
    store.finish("r3", claim.attempt.attempt_id, SUCCEEDED)
    assert store.cancel("r3").status == "succeeded"


@pytest.mark.parametrize("call", ["heartbeat", "finish", "add_rewards"])
def test_an_unknown_attempt_is_named(store, call) -> None:
    attempt = one_claim(store)
    more = {"heartbeat": [], "finish": [SUCCEEDED], "add_rewards": [[Reward(value=1.0)]]}[call]
    with pytest.raises(NotFound, match="nope"):
        getattr(store, call)("nope", attempt, *more)
    with pytest.raises(NotFound, match="nope"):
        getattr(store, call)("r1", "nope", *more)


# Rewards


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", True, None])
def test_a_reward_that_is_no_finite_number_names_the_rollout(store, value) -> None:
    attempt = one_claim(store)
    with pytest.raises(Invalid, match="rollout r1"):
        store.add_rewards("r1", attempt, [Reward(value=value)])
    with pytest.raises(Invalid, match="rollout r1"):
        store.finish("r1", attempt, Finish(status="succeeded", reward={"reward": value}))
    assert store.rollout("r1").status == "running"


def test_a_returned_dict_needs_one_named_reward(store) -> None:
    attempt = one_claim(store)
    with pytest.raises(Invalid, match="'reward'"):
        store.finish("r1", attempt, Finish(status="succeeded", reward={"format": 1.0}))
    _, ended = store.finish("r1", attempt, Finish(status="succeeded", reward={"format": 1.0, "reward": 0.5}))
    assert (ended.reward, ended.rewards) == (0.5, {"format": 1.0, "reward": 0.5})


def test_a_returned_reward_is_final_else_the_last_emitted_one_without_a_call(store) -> None:
    emitted = [
        Reward(value=0.1),
        Reward(value=0.2),
        Reward(value=9.0, call_id="c1"),
        Reward(value=0.3, name="format"),
    ]
    store.enqueue([request("returns"), request("emits"), request("silent")])
    returns, emits, silent = (c.attempt.attempt_id for c in store.claim("w", limit=3))
    store.add_rewards("returns", returns, emitted)
    store.add_rewards("emits", emits, emitted)
    _, ended = store.finish("returns", returns, Finish(status="succeeded", reward=1.0))
    assert ended.rewards == {"reward": 1.0, "format": 0.3}
    _, ended = store.finish("emits", emits, Finish(status="succeeded"))
    assert ended.rewards == {"reward": 0.2, "format": 0.3}
    assert [(each.call_id, each.value) for each in store.rollout("emits").attempts[0].call_rewards] == [("c1", 9.0)]
    rollout, ended = store.finish("silent", silent, Finish(status="succeeded"))
    assert (rollout.reward, ended.rewards) == (None, {})


def test_rewards_are_idempotent_by_id_and_only_for_running_attempts(store) -> None:
    attempt = one_claim(store)
    reward = Reward(value=1.0, reward_id="w1")
    assert store.add_rewards("r1", attempt, [reward, reward]) == [reward, reward]
    store.add_rewards("r1", attempt, [reward])
    assert store.trace("r1", attempt).rewards == [reward]
    with pytest.raises(Conflict, match="w1"):
        store.add_rewards("r1", attempt, [Reward(value=2.0, reward_id="w1")])
    store.finish("r1", attempt, SUCCEEDED)
    assert store.add_rewards("r1", attempt, [reward]) == [reward]  # a late repeat
    with pytest.raises(Conflict):
        store.add_rewards("r1", attempt, [Reward(value=1.0)])


# Spans


def test_spans_come_back_by_number_and_a_known_id_is_left_as_it_is(store) -> None:
    attempt = one_claim(store)
    store.add_spans([span(attempt, 1), span(attempt, 0)])
    store.add_spans([span(attempt, 7, span_id="s0"), span(attempt, 2)])
    assert store.spans("r1", attempt) == [span(attempt, n) for n in range(3)]


def test_traces_hold_every_attempt_with_its_status(store, clock) -> None:
    first = one_claim(store, unresponsive_seconds=1)
    store.add_spans([span(first, 0, "lost")])
    clock.advance(2)
    store.sweep()
    clock.advance(PAUSE)
    (claim,) = store.claim("w")
    second = claim.attempt.attempt_id
    store.add_spans([span(second, 0, "kept")])
    store.finish("r1", second, SUCCEEDED)
    trace = store.traces(["r1", "unknown"])["r1"]
    assert [(a.attempt.status, a.spans[0].span_id) for a in trace.attempts] == [
        ("lost", "lost"),
        ("succeeded", "kept"),
    ]
    assert [attempt.returned for attempt in trace.attempts] == [None, {"reward": 1.0}]
    assert trace.rollout.counting_attempt_id == second
    assert trace.rollout.reward == 1.0


# Resources


def test_resources_are_versioned_and_never_change(store) -> None:
    with pytest.raises(NotFound):
        store.resources("latest")
    one = store.publish(ResourcesRequest(resources={"x": {"v": 1}}, resources_id="one"))
    assert store.publish(ResourcesRequest(resources={"x": {"v": 1}}, resources_id="one")) == one
    with pytest.raises(Conflict, match="one"):
        store.publish(ResourcesRequest(resources={"x": {"v": 2}}, resources_id="one"))
    two = store.publish(ResourcesRequest(resources={"x": {"v": 2}}))
    assert (one.version, two.version) == (1, 2)
    assert store.resources("latest") == two
    assert store.resources("one") == one
    with pytest.raises(Invalid):
        store.publish(ResourcesRequest(resources={}, resources_id="latest"))
    for prompt in ({}, {"template": 1}, {"template": "x", "engine": "mako"}):
        with pytest.raises(Invalid, match="resource 'p' is a prompt_template: it has a text"):
            store.publish(ResourcesRequest(resources={"p": {"type": "prompt_template"} | prompt}))
    store.publish(ResourcesRequest(resources={"p": {"type": "prompt_template", "template": "x"}}))


# What does not count


def test_attempts_that_were_stopped_from_outside_do_not_count(store, clock) -> None:
    store.enqueue([RolloutRequest(task=1, rollout_id="r", config=RolloutConfig(max_attempts=2))])
    stopped = ErrorInfo(type="RunnerStopped", message="", infrastructure=True)
    failed = ErrorInfo(type="EngineGone", message="", infrastructure=True)
    for _ in range(20):
        (claim,) = store.claim("w")
        assert store.finish("r", claim.attempt.attempt_id, Finish(status="failed", error=stopped))[0].status == "queued"
        store.claim("w")
        assert [rollout.status for rollout in store.expire(store.running(why="session"))] == ["queued"]
    for expected in ("queued", "failed"):
        (claim,) = store.claim("w")
        ended, _ = store.finish("r", claim.attempt.attempt_id, Finish(status="failed", error=failed))
        assert ended.status == expected
        clock.advance(PAUSE)
    assert ended.attempt_count == 42


def test_the_attempts_of_a_dead_process_are_lost_and_nobody_elses(store) -> None:
    store.enqueue([RolloutRequest(task=i, rollout_id=f"r{i}") for i in range(3)])
    for worker in ("a.0", "a.1", "b.0"):
        store.claim(worker)
    moved = store.expire(store.running(["a.0", "a.1"], why="worker"))
    assert [(r.rollout_id, r.status) for r in moved] == [("r0", "queued"), ("r1", "queued")]
    (attempt,) = store.rollout("r0").attempts
    assert (attempt.status, attempt.error.type) == ("lost", "RunnerDied")
    assert store.rollouts(["r2"])[0].status == "running"


def test_whatever_ended_an_attempt_from_outside_is_told_as_its_error(store) -> None:
    reasons = {
        "worker": "RunnerDied",
        "server": "ServerGone",
        "journal": "RecordingLost",
        "session": "SessionEnded",
    }
    store.enqueue([request(why) for why in reasons])
    for why, error in reasons.items():
        store.claim(why)
        store.expire(store.running([why], why=why))
        (lost,) = store.rollout(why).attempts
        assert (lost.status, lost.error.type, lost.error.infrastructure) == ("lost", error, True)


def test_what_has_ended_since_it_was_found_overdue_stays_as_it_ended(store, clock) -> None:
    attempt = one_claim(store)
    clock.advance(3600)
    late = store.overdue()
    assert [one.attempt_id for one in late] == [attempt]
    ended, _ = store.finish("r1", attempt, SUCCEEDED)
    assert store.expire(late) == []
    assert store.rollouts(["r1"]) == [ended]


def test_time_in_which_nothing_could_be_written_is_made_up_for(store, clock) -> None:
    store.enqueue([RolloutRequest(task=1, config=RolloutConfig(timeout_seconds=100, unresponsive_seconds=10))])
    (claim,) = store.claim("w")
    clock.advance(90)
    store.make_up(80)
    assert store.overdue() == []
    clock.advance(9)
    assert store.overdue() == []
    for _ in range(10):
        store.heartbeat(claim.rollout.rollout_id, claim.attempt.attempt_id)
        assert store.overdue() == []
        clock.advance(8.2)
    store.heartbeat(claim.rollout.rollout_id, claim.attempt.attempt_id)
    assert [late.why for late in store.overdue()] == ["deadline"]


def test_sampled_tokens_are_summed_by_model_over_all_calls(store) -> None:
    assert store.recorded_calls().tokens == {}
    store.enqueue([RolloutRequest(task=1, rollout_id="r")])
    (claim,) = store.claim("w")
    place = {"rollout_id": "r", "attempt_id": claim.attempt.attempt_id}
    times = {"start_ns": 0, "end_ns": 0}
    for i in range(600):  # more than are read at a time
        call = Call(
            call_id=f"c{i}", number=i, model=f"m{i % 2}", prompt_ids=[1], response_ids=[1] * (i % 2 + 1), logprobs=None,
            versions=[], temperature=1.0, finish_reason="stop", **place,
        )  # fmt: skip
        store.add_spans([to_span(call)])
    frozen = {"gen_ai.response.model": "gpt", "lightning_rl.response_ids": b"1234", "lightning_rl.trainable": False}
    store.add_spans([
        Span(span_id="x", name="lightning_rl.call", number=600, attributes=frozen, **times, **place),
        Span(span_id="y", name="something", number=601, attributes={}, **times, **place),
    ])  # fmt: skip
    assert store.recorded_calls().tokens == {"m0": 300, "m1": 600}


def test_a_span_that_has_a_calls_name_and_other_attributes_is_kept_and_counts_nothing(store) -> None:
    store.enqueue([RolloutRequest(task=1, rollout_id="r")])
    (claim,) = store.claim("w")
    place = {"rollout_id": "r", "attempt_id": claim.attempt.attempt_id, "start_ns": 0, "end_ns": 0}
    odd = [{"gen_ai.response.model": 5}, {"lightning_rl.response_ids": "text"}, {"lightning_rl.overshoot": "x"}]
    names = ("lightning_rl.call", "something")
    spans = [
        Span(span_id=f"{name}{number}", name=name, number=number, attributes=attributes, **place)
        for name in names
        for number, attributes in enumerate(odd)
    ]
    store.add_spans(spans)
    assert len(store.spans("r", claim.attempt.attempt_id)) == len(spans)
    assert store.recorded_calls().tokens == {}
