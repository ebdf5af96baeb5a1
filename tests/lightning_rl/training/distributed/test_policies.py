"""Several policies, each trained by two workers: the same weights as by one, also after a run was stopped."""

from pathlib import Path

import pytest

import lightning_rl as lrl
from tests.lightning_rl.ppo.agents import plan_by_tags_alone
from tests.lightning_rl.ppo.test_ppo_policies import given, weights

pytestmark = [pytest.mark.cluster, pytest.mark.long]
TASKS = [0, 1, 2, 3]


def trained(folder: Path, *, workers: int, steps: int, rank: int) -> None:
    keys = given(total_training_steps=steps, n_gpus_per_node=workers, resume_mode="auto")
    keys["actor_rollout_ref"]["actor"] = {"optim": {"lr": 1e-3, "override_optimizer_config": {"eps": 1e-4}}}
    keys["actor_rollout_ref"]["model"] |= {"lora_rank": rank}
    algorithm = lrl.PPO(keys, policies={"planner": {}, "executor": {}})
    lrl.Trainer(plan_by_tags_alone, n_runners=1, run_dir=folder).fit(algorithm, TASKS)


@pytest.mark.parametrize("rank", [0, 4])  # whole models; adapters over one, in one engine
def test_two_workers_of_each_policy_train_as_one_does(tmp_path: Path, rank: int) -> None:
    trained(tmp_path / "one", workers=1, steps=2, rank=rank)
    for steps in (1, 2):
        trained(tmp_path / "two", workers=2, steps=steps, rank=rank)
    for policy in ("planner", "executor"):
        one, two = (weights(tmp_path / folder / "model" / policy) for folder in ("one", "two"))
        assert max(float((one[name].float() - two[name].float()).abs().max()) for name in one) < 1e-5
