"""What every algorithm asks of the store."""

from typing import Any

from lightning_rl.algorithms.base import Algorithm
from lightning_rl.store.contract import Finish, RolloutRequest
from tests.lightning_rl.control_plane.conftest import served

__all__ = ["served"]


def test_rollouts_that_were_given_no_id_are_waited_for(served: Any) -> None:
    algorithm, store = Algorithm(), served.client()

    def work() -> None:
        for claim in store.claim("w", limit=2):
            rollout = claim.rollout
            store.finish(rollout.rollout_id, claim.attempt.attempt_id, Finish(status="succeeded", reward=rollout.task))

    algorithm.store, algorithm.check = store, work
    asked = [RolloutRequest(task=reward) for reward in (3.0, 1.0)]
    assert algorithm.finished(asked, lambda trace: trace.rollout.reward) == [3.0, 1.0]
