"""Keys that another key leaves unread are told of, and no others."""

import re

import pytest

import lightning_rl as lrl
from lightning_rl.config import compose, keys
from lightning_rl.config.idle_keys import (
    _NEEDS,
    _OF_NAMED_ESTIMATORS,
    _WITH_CRITIC,
    _WITHOUT_CRITIC,
    idle_beside_others,
)
from lightning_rl.config.schema import Config
from lightning_rl.config.verl_keys import DEFAULTS
from lightning_rl.rl.advantages import ESTIMATORS

CORRECTION = "algorithm.rollout_correction."
ACTOR, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
LOSS, GAE = "distillation.distillation_loss.", "algorithm.adv_estimator=gae"
DISTILLED = ["distillation.enabled=true", "distillation.teacher_models.big.model_path=x"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], []),
        ([f"{ACTOR}kl_loss_coef=0.01"], ["kl_loss_coef: no effect without .*use_kl_loss=true"]),
        ([f"{ACTOR}kl_loss_coef=0.01", f"{ACTOR}use_kl_loss=true"], []),
        (["algorithm.kl_ctrl.kl_coef=0.1"], [r"kl_ctrl\.kl_coef: no effect without algorithm\.use_kl_in_reward=true"]),
        (
            [f"{MODEL}lora_alpha=32", f"{MODEL}lora.merge=false"],
            [r"model\.lora\.merge, .*model\.lora_alpha: no effect without actor_rollout_ref\.model\.lora_rank"],
        ),
        ([f"{MODEL}lora_alpha=32", f"{MODEL}lora_rank=4"], []),
        ([f"{MODEL}exclude_modules=lm_head"], [r"exclude_modules: no effect without .*lora_rank"]),
        (["trainer.early_stopping.min_delta=0.1"], ["min_delta: no effect without trainer.early_stopping.patience"]),
        (["trainer.early_stopping.min_delta=0.1", "trainer.early_stopping.patience=3"], []),
        (
            [f"{ACTOR}policy_loss.dro_beta=0.1", f"{ACTOR}tau_pos=2"],
            ["tau_pos: no effect without .*loss_mode=sapo", "dro_beta: no effect without .*loss_mode=dro"],
        ),
        (
            ["critic.optim.lr=0.1", "algorithm.lam=0.9"],
            [r"algorithm\.lam, critic\.optim\.lr: no effect without a critic, as with algorithm\.adv_estimator=gae"],
        ),
        (["critic.optim.lr=0.1", "algorithm.lam=0.9", GAE], []),
        (["algorithm.groups_without_variance=drop"], []),
        (["algorithm.groups_without_variance=drop", GAE], ["groups_without_variance: no effect without an estimator"]),
        (
            ["algorithm.groups_without_variance=drop", "algorithm.adv_estimator=reinforce_plus_plus"],
            ["groups_without_variance: no effect without an estimator"],
        ),
        ([f"{ACTOR}loss_scale_factor=8"], ["loss_scale_factor: no effect without .*=seq-mean-token-sum-norm"]),
        ([f"{ACTOR}loss_scale_factor=8", "critic.loss_agg_mode=seq-mean-token-sum-norm", GAE], []),
        (["critic.value_coef=2", GAE], [r"critic\.value_coef: no effect without critic\.shared_trunk=true"]),
        (
            ["critic.shared_trunk=true", "critic.value_coef=2", "critic.optim.lr=0.1", "critic.model.path=x", GAE],
            [r"critic\.model\.path, critic\.optim\.lr: .* the head learns in the policy's update"],
        ),
        (
            [f"{ACTOR}optim.min_lr_ratio=0.1", f"{ACTOR}optim.num_cycles=2", f"{ACTOR}optim.lr_warmup_steps_ratio=0.1"],
            [r"min_lr_ratio: .*lr_scheduler_type=linear or cosine", "num_cycles: .*=cosine"],
        ),
        (
            [f"{ACTOR}optim.lr_warmup_steps=3", f"{ACTOR}optim.lr_warmup_steps_ratio=0.1"],
            ["lr_warmup_steps_ratio: no effect without .*lr_warmup_steps=-1"],
        ),
        (
            [f"{ACTOR}optim.lr_warmup_steps=0", f"{ACTOR}optim.lr_warmup_steps_ratio=0.1"],
            ["lr_warmup_steps_ratio: no effect without .*lr_warmup_steps=-1"],
        ),
        (
            [*DISTILLED, f"{LOSS}use_task_rewards=false", f"{LOSS}distillation_loss_coef=3", f"{ACTOR}entropy_coeff=1"],
            [r"entropy_coeff, .*distillation_loss_coef: no effect without .*use_task_rewards=true"],
        ),
        ([*DISTILLED, f"{LOSS}distillation_loss_coef=3"], []),
        ([f"{LOSS}use_task_rewards=false", f"{ACTOR}entropy_coeff=1"], []),
        ([*DISTILLED, f"{LOSS}topk=8", f"{LOSS}control_variate=true"], []),
        (
            [*DISTILLED, f"{LOSS}topk=8", f"{LOSS}log_prob_min_clamp=-9"],
            [r"\.topk: .*loss_mode=forward_kl_tail", r"log_prob_min_clamp: .*loss_mode=forward_kl_topk"],
        ),
        ([*DISTILLED, f"{LOSS}topk=8", f"{LOSS}loss_mode=jsd_tail", f"{LOSS}use_policy_gradient=false"], []),
        (["algorithm.gamma=0.9"], [r"algorithm\.gamma: no effect without algorithm\.credit\.strategy=discounted"]),
        (["algorithm.gamma=0.9", "algorithm.credit.strategy=return_to_go"], []),
        (["algorithm.gamma=0.9", "algorithm.credit.strategy=step_groups"], []),
        (
            ["algorithm.gamma=0.9", "algorithm.credit.strategy=discounted", "algorithm.credit.function=mine.py:credit"],
            [r"algorithm\.gamma: no effect without algorithm\.credit\.strategy=discounted"],
        ),
        (["algorithm.gamma=0.9", "algorithm.adv_estimator=reinforce_plus_plus"], []),
        (["algorithm.norm_adv_by_std_in_grpo=false"], []),
        (["algorithm.norm_adv_by_std_in_grpo=false", "algorithm.adv_estimator=grpo_passk"], []),
        (
            ["algorithm.norm_adv_by_std_in_grpo=false", "algorithm.adv_estimator=rloo"],
            ["norm_adv_by_std_in_grpo: no effect without algorithm.adv_estimator=grpo"],
        ),
        (["algorithm.credit.step_weight=2"], ["step_weight: no effect without .*strategy=step_groups"]),
        (["algorithm.credit.step_weight=2", "algorithm.credit.strategy=step_groups"], []),
        ([f"{ACTOR}clip_ratio=0.1", f"{ACTOR}clip_ratio_c=9"], []),
        (
            [f"{ACTOR}clip_ratio=0.1", f"{ACTOR}clip_ratio_c=9", f"{ACTOR}policy_loss.loss_mode=gpg"],
            ["clip_ratio, .*clip_ratio_c: no effect without a loss that clips"],
        ),
        (
            [f"{ACTOR}clip_ratio=0.1", f"{CORRECTION}bypass_mode=true", f"{CORRECTION}loss_type=reinforce"],
            ["clip_ratio: no effect without a loss that clips"],
        ),
        ([f"{CORRECTION}loss_type=reinforce"], ["loss_type: no effect without .*bypass_mode=true"]),
        ([f"{CORRECTION}rollout_is_threshold=3"], [r"rollout_is_threshold: no effect without .*rollout_is "]),
        ([f"{CORRECTION}rollout_is_threshold=3", "trainer.schedule=async"], []),
        ([f"{CORRECTION}rollout_is_threshold=3", f"{CORRECTION}rollout_is=sequence"], []),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.horizon=9"],
            [r"kl_ctrl\.horizon: no effect without algorithm\.kl_ctrl\.type=adaptive"],
        ),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.horizon=9", "algorithm.kl_ctrl.type=adaptive"], []),
        (
            ["algorithm.kl_ctrl.horizon=9"],
            [r"kl_ctrl\.horizon: no effect without algorithm\.use_kl_in_reward=true"],
        ),
        (
            ["reward.overlong_buffer.len=8"],
            [r"overlong_buffer\.len: no effect without reward\.overlong_buffer\.enable"],
        ),
    ],
)
def test_keys_that_are_not_read_are_told(given: list[str], told: list[str]) -> None:
    found = list(idle_beside_others(compose(command_line=given), with_critic=GAE in given))
    assert len(found) == len(told)
    assert all(re.search(pattern, text) for pattern, text in zip(told, found, strict=True))


def test_a_run_tells_of_them_once_and_of_several_policies_none_does(caplog: pytest.LogCaptureFixture) -> None:
    penalty = {"actor_rollout_ref": {"actor": {"kl_loss_coef": 0.01}}}
    lrl.PPO(penalty)
    assert [text for text in caplog.messages if "use_kl_loss=true" in text] == caplog.messages
    assert len(caplog.messages) == 1
    lrl.PPO(penalty, policies={"a": {}, "b": {"actor_rollout_ref": {"actor": {"use_kl_loss": True}}}})
    assert len(caplog.messages) == 1


def test_an_estimator_of_the_users_own_may_read_what_others_read(caplog: pytest.LogCaptureFixture) -> None:
    given = {"algorithm": {"gamma": 0.9, "norm_adv_by_std_in_grpo": False}}
    lrl.PPO(given, estimator=lambda outcomes, settings: ESTIMATORS["grpo"].function(outcomes, settings))
    assert caplog.messages == []
    lrl.PPO(given)
    assert ["algorithm.gamma" in text for text in caplog.messages] == [True]


def test_verls_defaults_are_not_told_of() -> None:
    """Who starts a script of verl's has not written them."""
    for with_critic in (True, False):
        assert list(idle_beside_others(compose(base=DEFAULTS), with_critic=with_critic)) == []


def test_all_names_are_keys() -> None:
    names = {key.name for key in keys(Config)}
    for need in (*_NEEDS, *_OF_NAMED_ESTIMATORS, *_WITH_CRITIC, _WITHOUT_CRITIC):
        for name in need.names:
            assert name in names or (name.endswith(".") and any(key.startswith(name) for key in names)), name
