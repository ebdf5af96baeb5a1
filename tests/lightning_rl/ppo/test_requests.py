"""What a step asks for: ids that no other run has, and samples that do not hang on the run."""

import contextlib

from lightning_rl.config import compose
from lightning_rl.control_plane.gateways.store_ledger import seed_key
from lightning_rl.ppo.collector import Purpose, requests
from lightning_rl.store.contract import SEED_KEY, ResourcesRequest, RolloutRequest
from lightning_rl.store.sql import SqlStore


def asked(run: str, *, ahead: bool = False) -> list[RolloutRequest]:
    purpose = Purpose(name="train-0-3", mode="train", step=3, run=run, resources_id="policy", ahead=ahead)
    return requests(compose({}), purpose, [(7, "task")], 2)


def test_ids_end_with_the_run_and_seeds_know_nothing_of_it() -> None:
    ids = [[request.rollout_id for request in asked(run)] for run in ("one", "other")]
    assert ids[0] == ["train-0-3-7-0.one", "train-0-3-7-1.one"]
    assert not set(ids[0]) & set(ids[1])
    with contextlib.closing(SqlStore("sqlite://")) as store:
        store.publish(ResourcesRequest(resources_id="policy", resources={}))
        keys = [[seed_key(rollout) for rollout in store.enqueue(asked(run))] for run in ("one", "other")]
    assert keys[0] == keys[1] == ["train-0-3-7-0", "train-0-3-7-1"]


def test_what_another_step_may_train_says_so() -> None:
    told = {"task_index": "7-0", "step": 3, SEED_KEY: "train-0-3-7-0"}
    assert asked("one")[0].metadata == told
    assert asked("one", ahead=True)[0].metadata == told | {"ahead": True}
