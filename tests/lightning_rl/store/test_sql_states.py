"""Whatever happens in whatever order, the invariants of the life cycle hold."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lightning_rl.store.contract import ErrorInfo, Finish, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import Conflict
from lightning_rl.store.life_cycle import ENDED, ROLLOUT_TRANSITIONS
from tests import random_examples
from tests.lightning_rl.store.backends import opened

FINISHES = [
    Finish(status="succeeded", reward=1.0),
    Finish(status="failed", error=ErrorInfo(type="E", message="agent")),
    Finish(status="failed", error=ErrorInfo(type="E", message="engine", infrastructure=True)),
]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, backend: str, url: str) -> None:
        super().__init__()
        self.now = 0.0
        self.open = ExitStack()
        folder = Path(self.open.enter_context(tempfile.TemporaryDirectory()))
        self.store = self.open.enter_context(opened(backend, url, folder, lambda: self.now))
        self.statuses: dict[str, str] = {}
        self.ended: dict[str, object] = {}
        self.claimed: list[tuple[str, str]] = []

    def teardown(self) -> None:
        self.open.close()

    @rule(attempts=st.integers(1, 3), timeout=st.sampled_from([None, 5.0, 25.0]))
    def enqueue(self, attempts: int, timeout: float | None) -> None:
        config = RolloutConfig(max_attempts=attempts, timeout_seconds=timeout, unresponsive_seconds=10)
        (rollout,) = self.store.enqueue([RolloutRequest(task=0, config=config)])
        self.statuses[rollout.rollout_id] = "queued"

    @rule(limit=st.integers(1, 3), claim_id=st.sampled_from([None, "c1", "c2"]))
    def claim(self, limit: int, claim_id: str | None) -> None:
        try:
            claims = self.store.claim("w", limit=limit, claim_id=claim_id)
        except Conflict:
            assert claim_id is not None  # used with another limit
            return
        places = [(c.rollout.rollout_id, c.attempt.attempt_id) for c in claims]
        new = [place for place in places if place not in self.claimed]
        assert new in ([], places)  # a claim id repeats all its claims, or is new
        self.claimed += new

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), finish=st.sampled_from(FINISHES))
    def finish(self, data: st.DataObject, finish: Finish) -> None:
        rollout_id, attempt_id = data.draw(st.sampled_from(self.claimed))
        try:
            self.store.finish(rollout_id, attempt_id, finish)
        except Conflict:
            _, attempt = self.store.attempt(rollout_id, attempt_id)
            assert attempt.status != "running"

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        rollout_id, attempt_id = data.draw(st.sampled_from(self.claimed))
        _, before = self.store.attempt(rollout_id, attempt_id)
        try:
            assert self.store.heartbeat(rollout_id, attempt_id).lease_expires_at == self.now + 10
            assert before.status == "running"
        except Conflict:
            assert before.status != "running"

    @precondition(lambda self: self.statuses)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rollout_id = data.draw(st.sampled_from(list(self.statuses)))
        assert self.store.cancel(rollout_id).status in ENDED

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.store.sweep()
        assert self.store.overdue() == []

    @invariant()
    def laws_hold(self) -> None:
        attempt_ids: list[str] = []
        for rollout_id, before in self.statuses.items():
            rollout = self.store.rollout(rollout_id)
            attempts = rollout.attempts
            attempt_ids += [a.attempt_id for a in attempts]
            running = [a for a in attempts if a.status == "running"]
            assert len(running) == (rollout.status == "running")
            assert len(attempts) == rollout.attempt_count <= rollout.config.max_attempts
            assert [a.sequence for a in attempts] == list(range(1, len(attempts) + 1))
            assert sum(a.status == "succeeded" for a in attempts) == (rollout.status == "succeeded")
            counting = [a for a in attempts if a.attempt_id == rollout.counting_attempt_id]
            assert len(counting) <= 1
            assert all(a is attempts[-1] and a.ended_at is not None for a in counting)
            assert (rollout.ended_at is not None) == (rollout.status in ENDED)
            if before in ENDED:
                assert rollout == self.ended[rollout_id]  # it ends once and stays
            elif rollout.status in ENDED:
                self.ended[rollout_id] = rollout
            if rollout.status != before and before == "queued" and rollout.status != "running":
                # Between two looks it may have run: that is two legal steps.
                assert rollout.status in ROLLOUT_TRANSITIONS["running"]
            self.statuses[rollout_id] = rollout.status
        assert len(attempt_ids) == len(set(attempt_ids))


@pytest.mark.parametrize(
    ("backend", "count"), [("sqlite", 40), ("postgres", 8), ("http-sqlite", 3), ("http-postgres", 3)]
)
def test_whatever_happens_in_whatever_order_the_laws_hold(
    backend: str, count: int, request: pytest.FixtureRequest
) -> None:
    empty: Callable[[], str] = lambda: "sqlite://"  # noqa: E731
    if "postgres" in backend:
        empty = request.getfixturevalue("empty_postgres_store")
    steps = 15 if backend.startswith("http-") else 30
    wanted = settings(max_examples=random_examples.examples(count), stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(lambda: StoreMachine(backend, empty()), settings=wanted)
