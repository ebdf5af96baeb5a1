"""Keys that are given and not read, since another key is as it is: a run tells of them as it begins.

A coefficient of something that is off is the usual one: nothing is penalised, and nothing else would say so.
"""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from lightning_rl.config import changed_keys
from lightning_rl.config.schema import Config

_ACTOR, _MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
_LOSS = f"{_ACTOR}policy_loss."
_DISTILLED = "distillation.distillation_loss."
_OF_DISTRIBUTIONS = ("forward_kl_topk", "forward_kl_tail", "reverse_kl_tail", "jsd_tail")  # rl.distillation.DIVERGENCES
# Not `critic.` as a whole: some of its keys have other defaults in verl, whose scripts would be told of them.
_UPDATE_OF_CRITIC = (
    "critic.optim.",
    "critic.grad_clip",
    "critic.loss_agg_mode",
    "critic.model.path",
    "critic.ppo_epochs",
    "critic.ppo_mini_batch_size",
)


class _Need(NamedTuple):
    """Keys, or groups of them (`group.`), that are read where `is_met`; `condition` says how that is."""

    names: tuple[str, ...]
    condition: str
    is_met: Callable[[Config], bool]


def _of_loss(mode: str, *names: str) -> _Need:
    return _Need(
        names,
        f"{_LOSS}loss_mode={mode}",
        lambda config: config.actor_rollout_ref.actor.policy_loss.loss_mode == mode,
    )


def _of_schedule(optim: str) -> tuple[_Need, ...]:
    schedule, read = f"{optim}.lr_scheduler_type", attrgetter(optim)
    return (
        _Need(
            (f"{optim}.min_lr_ratio",),
            f"{schedule}=linear or cosine",
            lambda c: read(c).lr_scheduler_type != "constant",
        ),
        _Need((f"{optim}.num_cycles",), f"{schedule}=cosine", lambda c: read(c).lr_scheduler_type == "cosine"),
        _Need(
            (f"{optim}.lr_warmup_steps_ratio",), f"{optim}.lr_warmup_steps=-1", lambda c: read(c).lr_warmup_steps < 0
        ),
    )


_WITHOUT_CRITIC = _Need(
    (*_UPDATE_OF_CRITIC, "critic.shared_trunk", "critic.value_coef", "critic.cliprange_value", "algorithm.lam"),
    "a critic, as with algorithm.adv_estimator=gae",
    lambda config: False,
)
_WITH_CRITIC = (
    _Need(
        _UPDATE_OF_CRITIC,
        "a critic of its own: with critic.shared_trunk=true the head learns in the policy's update, by "
        "actor_rollout_ref.actor.optim",
        lambda config: not config.critic.shared_trunk,
    ),
    _Need(("critic.value_coef",), "critic.shared_trunk=true", lambda config: config.critic.shared_trunk),
)
_CREDITS_OF_GAMMA = ("discounted", "return_to_go", "step_groups")
_SPREAD_OF_GROUPS = ("grpo", "grpo_vectorized", "grpo_passk", "gdpo")
_WITHOUT_CLIP = ("gpg", "sapo", "kl_cov", "dro", "reinforce")
_OF_NAMED_ESTIMATORS = (  # one of the user's own may read them
    _Need(
        ("algorithm.gamma",),
        "algorithm.credit.strategy=discounted, return_to_go or step_groups, or algorithm.adv_estimator=gae or "
        "reinforce_plus_plus",
        lambda config: (
            config.algorithm.adv_estimator in ("gae", "reinforce_plus_plus")
            or (config.algorithm.credit.function is None and config.algorithm.credit.strategy in _CREDITS_OF_GAMMA)
        ),
    ),
    _Need(
        ("algorithm.norm_adv_by_std_in_grpo",),
        f"algorithm.adv_estimator={', '.join(_SPREAD_OF_GROUPS)}",
        lambda config: config.algorithm.adv_estimator in _SPREAD_OF_GROUPS,
    ),
)
_NEEDS = (
    *_of_schedule("actor_rollout_ref.actor.optim"),
    *_of_schedule("critic.optim"),
    _Need(
        (
            f"{_DISTILLED}distillation_loss_coef",
            f"{_DISTILLED}distillation_loss_coef_end",
            f"{_ACTOR}entropy_coeff",
            f"{_ACTOR}use_kl_loss",
        ),
        f"{_DISTILLED}use_task_rewards=true, since the teacher's loss alone is trained",
        lambda config: not config.distillation.enabled or config.distillation.distillation_loss.use_task_rewards,
    ),
    _Need(
        tuple(f"{_DISTILLED}{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")),
        f"{_DISTILLED}use_policy_gradient=true",
        lambda config: not config.distillation.enabled or config.distillation.distillation_loss.use_policy_gradient,
    ),
    _Need(
        (f"{_DISTILLED}topk",),
        f"{_DISTILLED}loss_mode=forward_kl_tail (or another that compares distributions), or control_variate=true",
        lambda config: (
            not config.distillation.enabled
            or config.distillation.distillation_loss.loss_mode in _OF_DISTRIBUTIONS
            or config.distillation.distillation_loss.control_variate
        ),
    ),
    _Need(
        (f"{_DISTILLED}log_prob_min_clamp",),
        f"{_DISTILLED}loss_mode=forward_kl_topk",
        lambda config: (
            not config.distillation.enabled or config.distillation.distillation_loss.loss_mode == "forward_kl_topk"
        ),
    ),
    _Need(
        (f"{_ACTOR}kl_loss_coef", f"{_ACTOR}kl_loss_type"),
        f"{_ACTOR}use_kl_loss=true",
        lambda config: config.actor_rollout_ref.actor.use_kl_loss,
    ),
    _Need(
        (f"{_ACTOR}loss_scale_factor",),
        f"{_ACTOR}loss_agg_mode=seq-mean-token-sum-norm",
        lambda config: (
            "seq-mean-token-sum-norm" in (config.actor_rollout_ref.actor.loss_agg_mode, config.critic.loss_agg_mode)
        ),
    ),
    _of_loss("sapo", f"{_ACTOR}tau_pos", f"{_ACTOR}tau_neg"),
    _of_loss("clip_cov", f"{_LOSS}clip_cov_ratio", f"{_LOSS}clip_cov_lb", f"{_LOSS}clip_cov_ub"),
    _of_loss("kl_cov", f"{_LOSS}kl_cov_ratio", f"{_LOSS}ppo_kl_coef"),
    _of_loss("dro", f"{_LOSS}dro_beta"),
    _Need(
        tuple(
            f"{_MODEL}{name}"
            for name in ("lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path", "lora_export", "lora.")
        ),
        f"{_MODEL}lora_rank",
        lambda config: config.actor_rollout_ref.model.lora_rank > 0,
    ),
    _Need(
        ("algorithm.kl_penalty", "algorithm.kl_ctrl."),
        "algorithm.use_kl_in_reward=true",
        lambda config: config.algorithm.use_kl_in_reward,
    ),
    _Need(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        "algorithm.kl_ctrl.type=adaptive",
        lambda config: not config.algorithm.use_kl_in_reward or config.algorithm.kl_ctrl.type == "adaptive",
    ),
    _Need(
        (f"{_ACTOR}clip_ratio", f"{_ACTOR}clip_ratio_c"),
        f"a loss that clips: {_LOSS}loss_mode is none of {', '.join(_WITHOUT_CLIP)}",
        lambda config: config.loss_mode not in _WITHOUT_CLIP,
    ),
    _Need(
        ("algorithm.credit.step_weight",),
        "algorithm.credit.strategy=step_groups",
        lambda config: config.algorithm.credit.strategy == "step_groups",
    ),
    _Need(
        ("algorithm.rollout_correction.loss_type",),
        "algorithm.rollout_correction.bypass_mode=true and the loss vanilla",
        lambda config: config.loss_by_sampler,
    ),
    _Need(
        ("algorithm.rollout_correction.rollout_is_threshold",),
        "algorithm.rollout_correction.rollout_is (auto is null under trainer.schedule=sync and in bypass_mode)",
        lambda config: config.rollout_is is not None,
    ),
    _Need(
        ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
        "algorithm.adv_estimator=gdpo",
        lambda config: config.algorithm.adv_estimator == "gdpo",
    ),
    _Need(
        ("algorithm.groups_without_variance",),
        "an estimator that compares the rollouts of a group",
        lambda config: config.algorithm.adv_estimator not in ("gae", "reinforce_plus_plus"),
    ),
    _Need(
        ("algorithm.filter_groups.",),
        "algorithm.filter_groups.enable=true",
        lambda config: config.algorithm.filter_groups.enable,
    ),
    _Need(
        ("reward.custom_reward_function.",),
        "reward.custom_reward_function.path",
        lambda config: config.reward.custom_reward_function.path is not None,
    ),
    _Need(("reward.judge.",), "reward.judge.model", lambda config: config.reward.judge.model is not None),
    _Need(
        ("reward.reward_model.",),
        "reward.reward_model.enable=true",
        lambda config: config.reward.reward_model.enable,
    ),
    _Need(
        ("reward.overlong_buffer.",),
        "reward.overlong_buffer.enable=true",
        lambda config: config.reward.overlong_buffer.enable,
    ),
    _Need(  # the others have other defaults in verl, whose scripts would be told of them
        ("distillation.teacher_models", "distillation.privileged"),
        "distillation.enabled=true",
        lambda config: config.distillation.enabled,
    ),
    _Need(
        ("trainer.early_stopping.min_delta",),
        "trainer.early_stopping.patience",
        lambda config: config.trainer.early_stopping.patience is not None,
    ),
)


def idle_beside_others(config: Config, *, with_critic: bool, own_estimator: bool = False) -> Iterator[str]:
    """What is to be said of keys that have other values than their defaults, and are not read. `with_critic`: whether a
    critic is trained; `own_estimator`: whether advantages are made by a function of the user's."""
    names = sorted(changed_keys(config))
    of_critic = _WITH_CRITIC if with_critic else (_WITHOUT_CRITIC,)
    for need in (*_NEEDS, *of_critic, *(() if own_estimator else _OF_NAMED_ESTIMATORS)):
        groups = tuple(name for name in need.names if name.endswith("."))
        idle = [name for name in names if name in need.names or name.startswith(groups)]
        if idle and not need.is_met(config):
            yield f"{', '.join(idle)}: no effect without {need.condition}"
