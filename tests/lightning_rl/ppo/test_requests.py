"""What a step asks for: ids that no other run has, and samples that do not hang on the run."""

from lightning_rl.config import compose
from lightning_rl.control_plane.gateways.store_ledger import seed_key
from lightning_rl.control_plane.routes.engines import store_id
from lightning_rl.ppo.collector import Purpose, requests
from lightning_rl.store.contract import RolloutRequest
from lightning_rl.store.sql import SqlStore


def asked(run: str) -> list[RolloutRequest]:
    return requests(compose({}), Purpose(name="train-0-3", mode="train", step=3, run=run), [(7, "task")], 2)


def test_ids_end_with_the_run_and_seeds_know_nothing_of_it() -> None:
    one, other = SqlStore("sqlite://"), SqlStore("sqlite://")
    runs = [store_id(store.secret) for store in (one, other)]
    assert runs[0] != runs[1]
    assert store_id(one.secret) == runs[0]
    ids = [[request.rollout_id for request in asked(run)] for run in runs]
    assert ids[0] == [f"train-0-3-7-0.{runs[0]}", f"train-0-3-7-1.{runs[0]}"]
    assert not set(ids[0]) & set(ids[1])
    keys = [
        [seed_key(rollout) for rollout in store.enqueue(asked(run))]
        for store, run in zip((one, other), runs, strict=True)
    ]
    assert keys[0] == keys[1] == ["train-0-3-7-0", "train-0-3-7-1"]
    for store in (one, other):
        store.close()
