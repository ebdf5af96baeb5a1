"""Which of the records of a rollout at several servers counts."""

from lightning_rl.store.contract import Rollout, RolloutConfig
from lightning_rl.store.run_store import rank_of


def record(status: str, created_at: float) -> Rollout:
    return Rollout(
        rollout_id="r", task=None, mode="train", status=status, group_id=None, agent=None, resources_id=None,
        config=RolloutConfig(), metadata={}, attempt_count=1, created_at=created_at,
    )  # fmt: skip


def test_a_record_that_came_to_its_end_counts_and_else_the_newest() -> None:
    records = [record("cancelled", 1.0), record("queued", 2.0), record("running", 3.0), record("cancelled", 4.0)]
    assert max(records, key=rank_of).created_at == 4.0
    for end in ("failed", "succeeded"):
        assert max([*records, record(end, 0.5)], key=rank_of).status == end
    assert max([record("failed", 1.0), record("succeeded", 2.0)], key=rank_of).status == "succeeded"
