"""A claim whose answer was lost is found again by its id, and is not run where it was lost in the meantime."""

import threading
from typing import Any

from lightning_rl.runner.leases import ActiveClaims
from lightning_rl.runner.slots import Slots
from lightning_rl.runner.worker import Worker
from lightning_rl.store.contract import Claim, RolloutRequest
from lightning_rl.store.errors import Unreachable
from lightning_rl.store.sql import SqlStore


class LosingAnswers:
    """The store behind a server that claims and then does not answer, each time it is told so."""

    def __init__(self, store: SqlStore, lost: list[bool]) -> None:
        self.store = store
        self.lost = lost

    def claim(self, worker_id: str, *, limit: int, wait_seconds: float, claim_id: str) -> list[Claim]:
        claims = self.store.claim(worker_id, limit=limit, claim_id=claim_id)
        if self.lost.pop(0):
            raise Unreachable("no answer")
        return claims


def begun(store: Any, wanted: int) -> list[str]:
    """The attempts that a worker with one slot at a time began."""
    attempts: list[str] = []
    slots = Slots(1, freed=lambda _: None, empty=lambda: None)
    worker = Worker(
        store=store, worker_id="w", slots=slots, active=ActiveClaims(), results=None, runs=None,
        stop=threading.Event(), finished=lambda: None, hangs=lambda: None,
    )  # fmt: skip

    def begin(claim: Claim) -> None:
        attempts.append(claim.attempt.attempt_id)
        if len(attempts) == wanted:
            slots.close()
        slots.give_back()

    worker.begin = begin
    worker.take()
    return attempts


def test_a_claim_whose_answer_was_lost_is_found_again() -> None:
    store = SqlStore("sqlite://")
    store.enqueue([RolloutRequest(task=n, rollout_id=f"r{n}") for n in range(2)])
    attempts = begun(LosingAnswers(store, [True, True, False, True, False]), wanted=2)
    assert attempts == [store.rollout(f"r{n}").attempts[0].attempt_id for n in range(2)]
    assert [store.rollout(f"r{n}").attempt_count for n in range(2)] == [1, 1]
    store.close()


def test_a_claim_that_was_lost_in_the_meantime_is_not_run() -> None:
    store = SqlStore("sqlite://")
    store.enqueue([RolloutRequest(task=1, rollout_id="r0")])

    class LosingTheAttempt(LosingAnswers):
        def claim(self, worker_id: str, **fields: Any) -> list[Claim]:
            if len(self.lost) == 2:
                self.store.expire(self.store.running(why="session"))
            return super().claim(worker_id, **fields)

    attempts = begun(LosingTheAttempt(store, [True, False, False]), wanted=1)
    first, second = store.rollout("r0").attempts
    assert first.status == "lost"
    assert attempts == [second.attempt_id]
    store.close()
