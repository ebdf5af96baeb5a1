"""PPO through the real parts, some steps: critic, reference, adapter, tuning set; hooks; steps that train nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

import lightning_rl as lrl
from lightning_rl.rl.shaping import OverlongBuffer
from lightning_rl.store.sql import SqlStore
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trajectories import step_record
from lightning_rl_adapters.call import calls_of
from tests.lightning_rl.ppo.agents import some_fail, two_calls
from tests.lightning_rl.ppo.test_ppo import config

pytestmark = pytest.mark.e2e
LR = {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-3}}}}


def fitted(tmp_path: Path, *changes: dict[str, Any], agent: Any = two_calls, algorithm: Any = lrl.PPO, **more: Any):
    settings: Any = OmegaConf.to_container(OmegaConf.merge(config(), LR, *changes))
    made = algorithm(settings, **more)
    lrl.Trainer(agent, n_runners=4, run_dir=tmp_path).fit(made, [0, 1, 2, 3], [5])
    return made, read(tmp_path / "metrics.jsonl")


GAE = {"algorithm": {"adv_estimator": "gae", "lam": 0.9}, "critic": {"optim": {"lr": 1e-3}}}


def test_the_policy_stays_while_the_critic_warms_up(tmp_path: Path) -> None:
    _, rows = fitted(
        tmp_path, GAE, {"trainer": {"total_training_steps": 3, "critic_warmup": 1, "val_before_train": False}}
    )
    first, second, third = rows
    assert "actor/pg_loss" not in first
    assert first["critic/vf_loss"] > 0
    assert {first["training/policy_version"], second["training/policy_version"]} == {0, 1}
    assert first["critic/values/mean"] == 0.0 != second["critic/values/mean"]
    assert {"critic/returns/mean", "critic/vf_explained_var", "critic/grad_norm", "critic/lr"} <= third.keys()
    assert all(
        row["tokens/received"] == row["tokens/trained"] + row.get("tokens/excluded/validation", 0) for row in rows
    )


@pytest.mark.long
def test_a_shared_trunk_learns_both_and_warms_up(tmp_path: Path) -> None:
    trainer = {"total_training_steps": 3, "critic_warmup": 1, "val_before_train": False}
    _, (first, second, third) = fitted(tmp_path, GAE, {"trainer": trainer, "critic": {"shared_trunk": True}})
    assert "actor/pg_loss" not in first
    assert [row["training/policy_version"] for row in (first, second, third)] == [0, 1, 2]
    assert first["critic/values/mean"] == 0.0 != second["critic/values/mean"]
    assert third["critic/vf_loss"] > 0
    assert third["actor/grad_norm"] > 0


@pytest.mark.long
@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}], ids=["whole", "adapter"])
def test_the_distance_from_the_reference_grows_from_0_and_lowers_rewards(lora: dict[str, Any], tmp_path: Path) -> None:
    keys = {
        "actor_rollout_ref": {"model": lora, "actor": {"use_kl_loss": True, "kl_loss_coef": 0.1}},
        "algorithm": {"use_kl_in_reward": True, "kl_penalty": "k3", "kl_ctrl": {"kl_coef": 0.5}},
        "trainer": {"total_training_steps": 3, "val_before_train": False},
    }
    _, rows = fitted(tmp_path, keys)
    assert rows[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert rows[2]["actor/reward_kl_penalty"] > 1e-5
    assert rows[2]["actor/kl_loss"] > 1e-5
    assert rows[2]["critic/rewards/mean"] < rows[2]["critic/score/mean"]
    assert rows[2]["actor/reward_kl_penalty_coeff"] == 0.5


@pytest.mark.smoke
@pytest.mark.parametrize("merge", [None, False])
def test_an_adapter_is_trained_sampled_and_left_as_a_whole_model(tmp_path: Path, merge: bool | None) -> None:
    model = {"lora_rank": 4, "lora": {"merge": merge}}
    made, rows = fitted(tmp_path, {"actor_rollout_ref": {"model": model}, "trainer": {"total_training_steps": 2}})
    assert made.policy.takes_adapter == (merge is False)
    assert rows[-1]["training/policy_version"] == 2
    assert rows[-1]["training/rollout_probs_diff_max"] < 1e-4  # the engine samples what is trained
    begun, final = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (config()["actor_rollout_ref"]["model"]["path"], tmp_path / "model")
    )
    assert begun.keys() == final.keys()
    assert (tmp_path / "model" / "tokenizer.json").exists()


@pytest.mark.long
def test_greedy_rollouts_are_compared_with_and_not_trained(tmp_path: Path) -> None:
    keys = {"algorithm": {"adv_estimator": "remax"}, "trainer": {"total_training_steps": 2, "val_before_train": False}}
    keys["reward"] = {"overlong_buffer": {"enable": True, "len": 8, "max_resp_len": 8}}
    made, rows = fitted(tmp_path, keys)
    buffer = OverlongBuffer(max_length=8, length=8)
    [_, record] = step_record.read_all(tmp_path)
    assert len(record.rollouts) == 8
    assert len(made.parts.rollouts.greedy) == 4
    for rollout in record.rollouts:
        assert rollout.reward is not None
        for call in rollout.calls.values():
            greedy_one = made.parts.rollouts.greedy[rollout.group_id]
            assert call.baseline == greedy_one.reward + buffer.penalty(greedy_one.forest) < greedy_one.reward
            assert call.advantage == pytest.approx(rollout.reward - call.baseline)
    assert rows[1]["tokens/excluded/greedy_logprobs"] > 0
    store = SqlStore(f"sqlite:///{tmp_path / 'store.db'}")
    greedy = [r.rollout_id for r in store.page(limit=100)[0] if r.rollout_id.startswith("greedy-")]
    calls = [call for trace in store.traces(greedy).values() for call in calls_of(trace.attempts[0].spans)]
    store.close()
    assert len(greedy) == 8
    assert {call.logprob_kind for call in calls} == {"greedy"}


class Told(lrl.PPO):
    """Notes which hooks it passes."""

    said: list[str]

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.said = []

    def on_init_end(self) -> None:
        self.said.append("init_end")

    def on_train_begin(self) -> None:
        self.said.append("train_begin")

    def on_step_begin(self) -> None:
        self.said.append(f"step_begin {self.step}")

    def on_sample_begin(self) -> None:
        self.said.append("sample_begin")

    def on_sample_end(self, trajectories: Any) -> None:
        self.said.append(f"sample_end {len(trajectories)}")

    def on_validate_begin(self) -> None:
        self.said.append("validate_begin")

    def on_validate_end(self, metrics: dict[str, float]) -> None:
        self.said.append("validate_end")

    def on_step_end(self, metrics: dict[str, float]) -> None:
        self.said.append("step_end")
        metrics["own/step"] = self.step


def test_hooks_are_passed_in_order_and_may_add_metrics(tmp_path: Path) -> None:
    made, rows = fitted(tmp_path, algorithm=Told)
    assert made.said == [
        "init_end", "train_begin", "validate_begin", "validate_end",
        "step_begin 1", "sample_begin", "sample_end 8", "validate_begin", "validate_end", "step_end",
    ]  # fmt: skip
    assert rows[-1]["own/step"] == 1


@pytest.mark.long
def test_a_step_that_trains_nothing_says_why_and_still_validates_and_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = lrl.PPO(config(total_training_steps=2, test_freq=1, save_freq=1, all_failed="go_on"))
    lrl.Trainer(some_fail, n_runners=4, run_dir=tmp_path).fit(made, [3, 3, 3, 3], [0])
    assert "step 1 updates nothing: 8 of 8 rollouts made no call" in caplog.text
    rows = read(tmp_path / "metrics.jsonl")
    assert [row.get("training/skipped") for row in rows] == [None, 1, 1]
    assert [row["training/policy_version"] for row in rows] == [0, 0, 0]
    assert all("val/reward" in row for row in rows)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-2"]


@pytest.mark.long
def test_the_best_on_the_tuning_tasks_is_kept_and_the_run_ends_early(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the agents earn does not hang on the policy here, so no measurement is better than the first."""
    trainer = {"total_training_steps": 9, "test_freq": 1, "save_freq": 1, "max_actor_ckpt_to_keep": 1,
               "early_stopping": {"patience": 2}}  # fmt: skip
    made, rows = fitted(tmp_path, {"trainer": trainer}, agent=some_fail, tune_dataset=[0, 1])
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["tune/reward"] for row in rows] == [0.5] * 3
    assert all(row["tokens/excluded/tuning"] > 0 for row in rows)
    assert made.tuning.best_step == 0
    assert "the reward on the tuning tasks, now 0.5, has not risen in the last 2 measurements" in caplog.text
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-0", "step-2"]
    begun = Path(config()["actor_rollout_ref"]["model"]["path"])
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "qwen2"
    one, other = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (begun, tmp_path / "model"))
    assert all((one[name].float() == other[name].float()).all() for name in one)
