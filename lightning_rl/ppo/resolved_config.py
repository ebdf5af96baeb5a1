"""What each part of PPO reads of the config, resolved: defaults that hang on other keys are decided here, once.

Raises ConfigError, before a model is loaded, for what does not go together.
"""

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec
from msgspec.structs import replace

from lightning_rl.algorithms.base import NEUTRAL, Endpoint
from lightning_rl.config import ConfigError
from lightning_rl.config.idle_keys import idle_beside_others
from lightning_rl.config.schema import Config, Fsdp, Optim, RolloutSection, ValKwargs
from lightning_rl.inference.load import device_of, is_model_id
from lightning_rl.inference.vllm.command import Options
from lightning_rl.inference.weights.check import Tolerance
from lightning_rl.loading import NotLoadable, load
from lightning_rl.ppo import rollout_correction
from lightning_rl.ppo.batch import BatchRules
from lightning_rl.ppo.estimators import (
    check_function,
    check_reward,
    estimator_of,
    gdpo_weights,
    needs_critic,
    overlong_buffer_of,
    strategy_of,
)
from lightning_rl.ppo.off_policy.schedules import Async, OneStepOff, Schedule
from lightning_rl.ppo.privileged import Privileged
from lightning_rl.rewards import GroupReward
from lightning_rl.rewards.training_rewards import Grader
from lightning_rl.rl import distillation
from lightning_rl.rl.advantages import ESTIMATORS, Estimator, OfOutcomes, OfTokens
from lightning_rl.rl.baselines import OutcomeEstimator
from lightning_rl.rl.correction import CorrectionRules
from lightning_rl.rl.distillation import DistillationOptions
from lightning_rl.rl.losses import check_options
from lightning_rl.training import checkpoint, optimizer
from lightning_rl.training.actor import ActorConfig
from lightning_rl.training.chat_template import with_template
from lightning_rl.training.critic import CriticConfig
from lightning_rl.training.distributed import placement
from lightning_rl.training.distributed.placement import Placement
from lightning_rl.training.optimizer import OptimizerConfig
from lightning_rl.trajectories.call_filter import selection
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.credit import GROUP, Strategy
from lightning_rl_proxy.rendering.base import Renderer
from lightning_rl_proxy.rendering.load import load_renderer

_log = logging.getLogger(__name__)
C = TypeVar("C", bound=Config)
_SMALLEST_LR, _LARGEST_LR = 1e-6, 1e-3
_OF_STARTED_SERVERS: Final = ("python", "gpu_memory_utilization", "enforce_eager")
_OF_ANY_ENGINE_HERE: Final = ("tensor_model_parallel_size", "data_parallel_size", "max_num_seqs", "num_threads")
_DEVICES: Final = "actor_rollout_ref.rollout.devices"
_THRESHOLD = 4  # of `trainer.max_off_policy_threshold`
# What these do to a number of a weight hangs on this number's gradients alone.
_ELEMENTWISE: Final = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta", "Adagrad", "RMSprop", "ASGD", "SGD")


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """How the steps of a run are made, as the config and the arguments of `PPO` say together.

    `select` says which calls are trained (None: all), `grader` gives rewards (None: the agents' own count), `schedule`
    says when rollouts are requested (None: by each step when it begins). `privileged` says what a teacher is told that
    the policy was not. `credit` and `estimator` are names, for the records.
    """

    batch: BatchRules
    correction: CorrectionRules
    schedule: Schedule | None
    select: Callable[[Call], bool] | None
    grader: Grader | None
    privileged: Privileged | None
    credit: str
    estimator: str


def step_rules(
    config: Config,
    *,
    select: Callable[[Call], bool] | None = None,
    credit: Strategy | None = None,
    estimator: Estimator | OutcomeEstimator | None = None,
    reward: GroupReward | None = None,
    privileged: Privileged | None = None,
) -> StepRules:
    """Resolve and check them, and warn of keys that the run's engine does not read; the arguments are those of `PPO`.

    Raises ConfigError.
    """
    algorithm = config.algorithm
    for idle in idle_keys(config):
        _log.warning("%s", idle)
    takes = {"select": ("call",), "credit": ("forest", "rewards"), "reward": ("rollouts",)}
    if reward is not None:
        check_reward(reward)
    for (argument, parameters), function in zip(takes.items(), (select, credit, reward), strict=True):
        if function is not None:
            check_function(function, f"PPO({argument}=...)", *parameters)
    chosen = selection(algorithm.train_agents, select)
    of_batch, correction = rules(config, credit, estimator), ratio_rules(config)
    check(config, of_batch.estimator)
    if not credit and (alone := _nobody_to_compare_with(config, of_batch.estimator)):
        _log.warning("%s", alone)
    return StepRules(
        batch=of_batch,
        correction=correction,
        schedule=schedule(config),
        select=chosen,
        grader=Grader.of(config.reward, reward),
        privileged=privileged_of(config, privileged),
        credit=name_of(credit) if credit else algorithm.credit.function or algorithm.credit.strategy,
        estimator=name_of(estimator) if estimator else algorithm.adv_estimator,
    )


def check(config: Config, estimator: Estimator | OutcomeEstimator) -> None:
    """Raises ConfigError for names that do not exist, and for keys that do not go together."""
    actor, critic, trainer = config.actor_rollout_ref.actor, config.critic, config.trainer
    update = actor_config(config, 1)
    checks: dict[str, Callable[[], object]] = {
        "actor_rollout_ref.actor.policy_loss": lambda: check_options(update.loss_mode, update),
        "actor_rollout_ref.actor.optim": lambda: optimizer.check(optimizer_config(actor.optim, 1, actor.grad_clip)),
        "critic.optim": lambda: optimizer.check(optimizer_config(critic.optim, 1, critic.grad_clip)),
    }
    for key, check_it in checks.items():
        try:
            check_it()
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
    _check_engine(config)
    _check_schedule(config)
    _check_4bit(config)
    _check_teachers(config)
    if trainer.workers > 1:
        _check_workers(config)
    chat_template_kwargs(config)
    if config.actor_rollout_ref.model.chat_template is not None and renderer(config) != "template":
        raise ConfigError(
            f"actor_rollout_ref.model.chat_template has no effect where actor_rollout_ref.rollout.renderer="
            f"{renderer(config)} writes the chats: leave one of them out"
        )
    if config.algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n == 1:
        raise ConfigError(
            "algorithm.filter_groups.enable=true trains groups in which rewards differ, and with "
            "actor_rollout_ref.rollout.n=1 a group has one rollout: set n to 2 or more, or leave filter_groups out"
        )
    critic_learns = needs_critic(config, estimator)
    if trainer.critic_warmup and not critic_learns and not config.policies:  # of several, each is asked
        raise ConfigError("trainer.critic_warmup has no critic to warm up: set algorithm.adv_estimator=gae, or 0")
    if trainer.early_stopping.patience is not None and trainer.test_freq < 1:
        raise ConfigError("trainer.early_stopping.patience counts measurements: set trainer.test_freq to make some")


def keys_left_unread(config: Config, estimator: Estimator | OutcomeEstimator) -> Iterable[str]:
    """What is to be said of keys that are given and not read; of several policies nothing: each reads its own."""
    if config.policies:
        return ()
    own = estimator is not ESTIMATORS[config.algorithm.adv_estimator]
    return idle_beside_others(config, with_critic=needs_critic(config, estimator), own_estimator=own)


def check_spans(config: Config, *, sees: bool) -> None:
    """Raises ConfigError where a model that `sees` would be trained on prompts without the images that they showed."""
    if sees and config.algorithm.train_spans:
        raise ConfigError(
            "algorithm.train_spans=true: agents' own spans hold no images, and this model sees them, so prompts that "
            "showed some would be trained without: leave it out"
        )


def check_paths(config: Config, *, with_critic: bool) -> None:
    """Raises ConfigError for a critic or a teacher that is neither a folder nor a model id: they are loaded late."""
    teachers = config.distillation.teachers().items()
    named = {f"distillation.teacher_models.{name}.model_path": teacher.model_path for name, teacher in teachers}
    if with_critic:
        named["critic.model.path"] = config.critic.model.path
    for key, path in named.items():
        if path is not None:
            check_model_path(path, key)


def check_model_path(path: str, key: str) -> None:
    """Raises ConfigError naming `key` for what is neither a folder here nor an id of the hub."""
    if not Path(path).is_dir() and not is_model_id(path):
        raise ConfigError(f"{key}={path!r} is neither a folder nor a model id (owner/name)")


def _check_teachers(config: Config) -> None:
    """Of what servers cannot score: rows are refused when they come, and by then they were sampled."""
    served = [name for name, teacher in config.distillation.teachers().items() if teacher.server_urls]
    temperature = config.actor_rollout_ref.rollout.temperature
    if served and config.gateway.sampling == "algorithm" and temperature != 1:
        raise ConfigError(
            f"actor_rollout_ref.rollout.temperature={temperature:g}: the servers of teacher {served[0]} score tokens "
            "that were sampled at temperature 1 alone: set it to 1, or give the teacher as a folder (model_path)"
        )


def _check_4bit(config: Config) -> None:
    model, key = config.actor_rollout_ref.model, "actor_rollout_ref.model.load_in_4bit=true"
    if not model.load_in_4bit:
        return
    if not model.lora_rank:
        raise ConfigError(
            f"{key} holds weights that are not trained: train an adapter over them, as with "
            "actor_rollout_ref.model.lora_rank=16"
        )
    if config.trainer.workers > 1:
        raise ConfigError(
            f"{key} is for one process, and trainer.n_gpus_per_node x trainer.nnodes is {config.trainer.workers}: "
            "several hold the weights in shards, whole numbers of 16 bits; leave one of them out"
        )


def _check_schedule(config: Config) -> None:
    name, threshold = config.trainer.schedule, config.trainer.max_off_policy_threshold
    if threshold is not None and name != "async":
        raise ConfigError(
            f"trainer.max_off_policy_threshold={threshold} has no effect under trainer.schedule={name}: leave it null, "
            "or set trainer.schedule=async"
        )
    if name == "one_step_off" and config.algorithm.filter_groups.enable:
        raise ConfigError(
            "algorithm.filter_groups.enable=true rolls out as many tasks as a step turns out to need, and "
            "trainer.schedule=one_step_off asks for one step ahead: set trainer.schedule=async or sync"
        )
    if name != "sync" and config.algorithm.train_spans:
        raise ConfigError(
            "algorithm.train_spans=true trains calls of which no span says which weights sampled them, and "
            f"trainer.schedule={name} bounds how old these may be: leave it out, or set trainer.schedule=sync"
        )
    if name != "sync" and _frees_memory(config):
        raise ConfigError(
            "actor_rollout_ref.rollout.free_cache_engine=true lets the engine rest while the trainer computes, and "
            f"under trainer.schedule={name} it samples then: leave it out, or set trainer.schedule=sync"
        )


def schedule(config: Config) -> Schedule | None:
    """When rollouts are asked for; None: for each step when it begins, as `sync` says."""
    batch, trainer = config.data.train_batch_size, config.trainer
    if trainer.schedule == "one_step_off":
        return OneStepOff(batch)
    if trainer.schedule == "async":
        threshold = trainer.max_off_policy_threshold
        return Async(batch, _THRESHOLD if threshold is None else threshold)
    return None


def versions_at_once(config: Config) -> int:
    """How many versions of the policy may be sampled at once, at most: an answer ends with the one it began with."""
    off_policy = schedule(config)
    return 2 if off_policy is None else max(2, off_policy.threshold + 1)


def uncorrected(config: Config) -> str | None:
    """What is to be said of an off-policy schedule whose rollouts are trained as if they were the trainer's own."""
    section = config.algorithm.rollout_correction
    if config.trainer.schedule == "sync" or section.bypass_mode or ratio_rules(config).active:
        return None
    return (
        f"trainer.schedule={config.trainer.schedule} trains what older weights have sampled, and nothing corrects for "
        "that: algorithm.rollout_correction.rollout_is is null; set it to auto"
    )


def _frees_memory(config: Config) -> bool:
    """Whether the engine is asked to give its memory back while the trainer computes: on a CPU there is none of a GPU
    to give."""
    enabled = config.actor_rollout_ref.rollout.free_cache_engine is True
    return enabled and device_of(config.trainer.device).type == "cuda"


def _check_engine(config: Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    on_gpus = rollout.name == "vllm" and device_of(config.trainer.device).type == "cuda"
    for key, is_set in (
        (f"weight_transfer={rollout.weight_transfer}", rollout.weight_transfer != "file"),
        ("free_cache_engine=true", _frees_memory(config)),
    ):
        if is_set and not on_gpus:
            raise ConfigError(f"actor_rollout_ref.rollout.{key} is for vLLM on GPUs (rollout.name=vllm): leave it out")
    model = config.actor_rollout_ref.model
    if (
        model.lora_rank
        and model.lora.merge is False
        and (rollout.name == "sglang" or rollout.weight_transfer != "file")
    ):
        raise ConfigError(
            "actor_rollout_ref.model.lora.merge=false has the engine read the adapter from a file, and "
            f"rollout.name={rollout.name} with rollout.weight_transfer={rollout.weight_transfer} takes whole weights: "
            "leave it out"
        )
    for key, devices in (("trainer.devices", config.trainer.devices), (_DEVICES, rollout.devices)):
        if devices is not None and device_of(config.trainer.device).type != "cuda":
            raise ConfigError(
                f"{key}={devices} names GPUs, and this run is on the CPU (trainer.device={config.trainer.device}"
                f"{', and torch finds no GPU' * (config.trainer.device == 'auto')}): leave it out"
            )
    placement.check_keys(config)
    if rollout.name == "sglang" and not rollout.server_urls:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=sglang needs actor_rollout_ref.rollout.server_urls: SGLang's servers are "
            "not started by a run"
        )
    if rollout.name == "embedded":
        for key, value, usual in (
            ("tensor_model_parallel_size", rollout.tensor_model_parallel_size, 1),
            ("data_parallel_size", rollout.data_parallel_size, 1),
            ("server_urls", rollout.server_urls, None),
        ):
            if value != usual:
                raise ConfigError(
                    f"actor_rollout_ref.rollout.{key}={value} is for vLLM, and the embedded engine runs in the "
                    "trainer's process, on one device: set actor_rollout_ref.rollout.name=vllm, or leave it out"
                )


def with_train_agents(config: Config, agents: str) -> Config:
    """The configuration with `algorithm.train_agents`. Raises ConfigError where it says otherwise."""
    algorithm = config.algorithm
    if algorithm.train_agents not in (None, agents):
        raise ConfigError(f"algorithm.train_agents is {algorithm.train_agents!r}, and agent_match {agents!r}")
    return replace(config, algorithm=replace(algorithm, train_agents=agents))


def _nobody_to_compare_with(config: Config, estimator: Estimator | OutcomeEstimator) -> str | None:
    """What is said where a run learns nothing from rewards, since each group has one rollout."""
    algorithm, of_groups = config.algorithm, False
    if isinstance(estimator, OfOutcomes):
        of_groups = not estimator.needs_greedy
    elif isinstance(estimator, OfTokens):
        of_groups = estimator.compared_with == GROUP
    forks = algorithm.credit.function is not None or algorithm.credit.strategy in ("leave_one_out", "step_groups")
    if config.actor_rollout_ref.rollout.n > 1 or not of_groups or algorithm.groups_of_one == "raw" or forks:
        return None
    return (
        f"algorithm.adv_estimator={algorithm.adv_estimator} compares the rollouts of a task, and with "
        "actor_rollout_ref.rollout.n=1 each has none to be compared with: all advantages are 0. Set n to 4 or more, or "
        "algorithm.adv_estimator to one without groups (reinforce_plus_plus, remax, gae)"
    )


def idle_keys(config: Config) -> Iterator[str]:
    """What is to be said of keys that this run does not read."""
    mode, path = config.trainer.resume_mode, config.trainer.resume_from_path
    if path is not None and mode != "resume_path":
        yield f"trainer.resume_from_path={path} is not read: trainer.resume_mode is {mode}"
    rollout = config.actor_rollout_ref.rollout
    if rollout.free_cache_engine and not _frees_memory(config):
        yield "rollout.free_cache_engine: no effect, on a CPU there is no memory of a GPU to give back"
    elif rollout.free_cache_engine and rollout.devices not in (None, "colocated"):
        yield f"rollout.free_cache_engine: no effect, rollout.devices={rollout.devices} are none of the trainer's GPUs"
    if (idle := _idle_engine_keys(config)) is not None:
        yield idle


def _idle_engine_keys(config: Config) -> str | None:
    """What is to be said of keys that are for servers which a run starts, where it starts none; None: nothing."""
    rollout, usual = config.actor_rollout_ref.rollout, RolloutSection()
    if rollout.name == "vllm" and not rollout.server_urls:
        return None
    names = _OF_STARTED_SERVERS + (_OF_ANY_ENGINE_HERE if rollout.name != "embedded" else ())
    names += ("max_model_len",) if rollout.name == "sglang" else ()
    idle = [f"rollout.{name}" for name in names if getattr(rollout, name) != getattr(usual, name)]
    if rollout.engine_kwargs != usual.engine_kwargs:
        idle.append("rollout.engine_kwargs.vllm")
    where = "the engine is in the trainer's process" if rollout.name == "embedded" else "servers that run already"
    return f"{', '.join(idle)}: no effect, {where}; these are for vLLM's servers that a run starts" if idle else None


def _check_workers(config: Config) -> None:
    """Several processes train."""
    trainer = config.trainer
    keys = f"trainer.nnodes={trainer.nnodes} and trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    if find_spec("ray") is None:
        raise ConfigError(f"{keys} need Ray: pip install 'lightning-rl[ray]', or set both to 1")
    for section, optim in (
        ("actor_rollout_ref.actor", config.actor_rollout_ref.actor.optim),
        ("critic", config.critic.optim),
    ):
        if optim.optimizer_impl.startswith("torchao"):
            raise ConfigError(
                f"{section}.optim.optimizer_impl={optim.optimizer_impl}: its states are kept in checkpoints of "
                f"one process, and {keys}: take torch.optim, whose states the workers share"
            )
    if trainer.nnodes > 1 and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"trainer.nnodes={trainer.nnodes} needs a Ray cluster: start one (docs/distributed.md), and set "
            "RAY_ADDRESS to its address"
        )
    policy = config.actor_rollout_ref
    sections = {
        "actor_rollout_ref.actor": policy.actor.fsdp_config,
        "actor_rollout_ref.ref": policy.ref.fsdp_config,
        "critic": config.critic.fsdp_config,
    }
    for key, formats in sections.items():
        if formats.fsdp_size == 0 or trainer.workers % formats.fsdp_size:
            raise ConfigError(
                f"{key}.fsdp_config.fsdp_size={formats.fsdp_size}: {keys} are not so many groups of "
                f"{formats.fsdp_size} workers; give a divisor of {trainer.workers}, or -1"
            )
        together = sequence_parallel(config, formats)
        if trainer.workers % together:
            raise ConfigError(
                f"{key}.fsdp_config.ulysses_sequence_parallel_size={together}: {keys} are not so many groups of "
                f"{together} workers; give a divisor of {trainer.workers}"
            )
    optimizers = {"actor_rollout_ref.actor": policy.actor.optim, "critic": config.critic.optim}
    for key, optim in optimizers.items():
        if optim.optimizer_impl != "torch.optim" or optim.optimizer not in _ELEMENTWISE:
            raise ConfigError(
                f"{key}.optim.optimizer={optim.optimizer} of {optim.optimizer_impl} may look at whole weights, and "
                f"with {keys} a worker has a part of each: take one of {', '.join(_ELEMENTWISE)} of torch.optim"
            )


def sequence_parallel(config: Config, formats: Fsdp) -> int:
    """How many workers compute a row of a model together; `formats` are those of its section. Of one worker, one."""
    if config.trainer.workers == 1:
        return 1
    policy = config.actor_rollout_ref.actor.fsdp_config
    return formats.ulysses_sequence_parallel_size or policy.ulysses_sequence_parallel_size or 1


def check_sequence_parallel(config: Config, model: Any, *, sees: bool) -> None:
    """Raises ConfigError where several workers are to compute a row of the policy together, and cannot.

    Args:
        model: its config, of `transformers`.
        sees: whether it is shown images.
    """
    together = sequence_parallel(config, config.actor_rollout_ref.actor.fsdp_config)
    if together == 1:
        return
    heads, key = model.get_text_config().num_attention_heads, "ulysses_sequence_parallel_size"
    where = f"actor_rollout_ref.actor.fsdp_config.{key}={together}"
    if heads % together:
        raise ConfigError(
            f"{where}: the model's {heads} heads of attention are not so many equal parts; give a divisor"
        )
    if sees:
        raise ConfigError(f"{where}: rows that show images are computed by one worker each; set {key} to 1")


def chat_template_kwargs(config: Config) -> dict[str, Any]:
    """What the chat format is told besides the messages; verl has two keys for it."""
    first, second = (
        config.data.apply_chat_template_kwargs,
        config.actor_rollout_ref.rollout.multi_turn.chat_template_kwargs,
    )
    kwargs = dict(first or {})
    for name, value in (second or {}).items():
        if kwargs.setdefault(name, value) != value:
            raise ConfigError(
                f"data.apply_chat_template_kwargs.{name}={kwargs[name]!r} and "
                f"actor_rollout_ref.rollout.multi_turn.chat_template_kwargs.{name}={value!r} are two values of one "
                "thing: leave one out"
            )
    return kwargs


def rules(
    config: Config, strategy: Strategy | None = None, estimator: Estimator | OutcomeEstimator | None = None
) -> BatchRules:
    """How a step's batch is built."""
    algorithm, overlong = config.algorithm, config.data.overlong
    bypass = algorithm.rollout_correction.bypass_mode
    if bypass and overlong == "truncate_left":
        raise ConfigError(
            "data.overlong=truncate_left needs old log probabilities of the shorter context, which the sampler cannot "
            "give: set algorithm.rollout_correction.bypass_mode=false, or another data.overlong"
        )
    return BatchRules(
        strategy=strategy or strategy_of(algorithm),
        estimator=estimator_of(config, strategy, estimator),
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        kl_penalty=algorithm.kl_penalty,
        reward_weights=gdpo_weights(config),
        overlong_buffer=overlong_buffer_of(config),
        min_successful_rollouts=algorithm.min_successful_rollouts,
        groups_of_one=algorithm.groups_of_one,
        groups_without_variance=algorithm.groups_without_variance,
        overlong=overlong,
        max_tokens=config.data.max_tokens,
        need_log_probs=bypass or ratio_rules(config).active,
    )


def ratio_rules(config: Config) -> CorrectionRules:
    """How a batch is corrected for its sampler."""
    return rollout_correction.rules_of(
        msgspec.structs.replace(config.algorithm.rollout_correction, rollout_is=config.rollout_is),
        overlong=config.data.overlong,
        loss_mode=config.actor_rollout_ref.actor.policy_loss.loss_mode,
    )


def actor_config(config: Config, training_steps: int) -> ActorConfig:
    """The update of the policy in a run of `training_steps`; in those that warm up the critic its schedules wait."""
    actor = config.actor_rollout_ref.actor
    rows = actor.ppo_micro_batch_size_per_gpu
    dynamic = rows is None if actor.use_dynamic_bsz is None else actor.use_dynamic_bsz
    loss, sampler = actor.policy_loss, config.algorithm.rollout_correction
    updates = max(min(1, training_steps), training_steps - config.trainer.critic_warmup)
    return ActorConfig(
        loss_mode=config.loss_mode,
        clip_cov_ratio=loss.clip_cov_ratio,
        clip_cov_lb=loss.clip_cov_lb,
        clip_cov_ub=loss.clip_cov_ub,
        kl_cov_ratio=loss.kl_cov_ratio,
        ppo_kl_coef=loss.ppo_kl_coef,
        dro_beta=loss.dro_beta,
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        rollout_is=config.rollout_is,
        rollout_is_threshold=sampler.rollout_is_threshold,
        rollout_is_batch_normalize=sampler.rollout_is_batch_normalize,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_loss_type=actor.kl_loss_type,
        mini_batch_rollouts=actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
        micro_batch_rows=None if dynamic else rows,
        log_prob_rows=config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,
        micro_batch_tokens=actor.ppo_max_token_len_per_gpu if dynamic else None,
        ppo_epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        clip_ratio_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
        entropy_coeff=actor.entropy_coeff,
        param_offload=actor.fsdp_config.param_offload,
        optimizer_offload=actor.fsdp_config.optimizer_offload,
        distillation=distillation_options(config),
        value_coef=config.critic.value_coef,
        cliprange_value=config.critic.cliprange_value,
        optim=optimizer_config(actor.optim, updates, actor.grad_clip),
    )


def distillation_options(config: Config) -> DistillationOptions | None:
    """The loss against the teacher; None where there is none. Raises ConfigError for one that makes no sense."""
    loss = config.distillation.distillation_loss
    if not config.distillation.enabled:
        return None
    if config.distillation.averages and config.actor_rollout_ref.model.lora_rank:
        raise ConfigError(
            "distillation.teacher_models: weights=averaged is of whole models, and an adapter is trained "
            "(actor_rollout_ref.model.lora_rank); take weights=initial or weights=present"
        )
    options = DistillationOptions(
        loss_mode=loss.loss_mode,
        topk=loss.topk,
        use_task_rewards=loss.use_task_rewards,
        distillation_loss_coef=loss.distillation_loss_coef,
        distillation_loss_coef_end=loss.distillation_loss_coef_end,
        loss_max_clamp=loss.loss_max_clamp,
        log_prob_min_clamp=loss.log_prob_min_clamp,
        use_policy_gradient=loss.use_policy_gradient,
        gate=loss.gate,
        control_variate=loss.control_variate,
        clip_ratio_low=loss.clip_ratio if loss.clip_ratio_low is None else loss.clip_ratio_low,
        clip_ratio_high=loss.clip_ratio if loss.clip_ratio_high is None else loss.clip_ratio_high,
    )
    try:
        distillation.check(options)
    except ValueError as error:
        raise ConfigError(f"distillation.distillation_loss: {error}") from error
    return options


class PrivilegedUnusable(ConfigError, NotLoadable):
    """`distillation.privileged` names no function."""


def privileged_of(config: Config, argument: Privileged | None) -> Privileged | None:
    """What says of calls what their teacher is told: the argument of `PPO`, or the function that the config names.

    Raises ConfigError for both, for a name of nothing that can be called, and where there is no teacher.
    """
    named = config.distillation.privileged
    if argument is not None and named is not None:
        raise ConfigError("distillation.privileged and PPO(privileged=...) both name a function; leave one out")
    function = argument if named is None else load(named, "distillation.privileged", error=PrivilegedUnusable)
    if function is None:
        for name, teacher in config.distillation.teachers().items():
            if teacher.weights == "present":
                raise ConfigError(
                    f"distillation.teacher_models.{name}: weights=present is the policy itself, which teaches nothing "
                    "where it is told nothing more: name a function (distillation.privileged), or take weights=initial "
                    "or weights=averaged"
                )
        return None
    if not callable(function):
        raise ConfigError(f"distillation.privileged: {named or function!r} is no function")
    if not config.distillation.enabled:
        raise ConfigError(
            "a privileged function is told to a teacher, and there is none: set distillation.enabled=true and "
            "distillation.teacher_models.NAME.weights=initial (or averaged, or present), or another teacher"
        )
    return cast("Privileged", function)


def critic_config(config: Config, training_steps: int) -> CriticConfig:
    """The update of the critic; what it leaves open is as the actor's."""
    critic, actor = config.critic, config.actor_rollout_ref.actor
    tasks = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
    rows = critic.ppo_micro_batch_size_per_gpu
    dynamic = rows is None if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    return CriticConfig(
        cliprange_value=critic.cliprange_value,
        mini_batch_rollouts=tasks * config.actor_rollout_ref.rollout.n,
        micro_batch_rows=None if dynamic else rows,
        micro_batch_tokens=critic.ppo_max_token_len_per_gpu if dynamic else None,
        ppo_epochs=critic.ppo_epochs or actor.ppo_epochs,
        param_offload=critic.fsdp_config.param_offload,
        optimizer_offload=critic.fsdp_config.optimizer_offload,
        loss_agg_mode=critic.loss_agg_mode or actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
        optim=optimizer_config(critic.optim, training_steps, critic.grad_clip, section="critic.optim"),
    )


def optimizer_config(
    optim: Optim, training_steps: int, grad_clip: float, *, section: str = "actor_rollout_ref.actor.optim"
) -> OptimizerConfig:
    """An optimizer and its schedule over `training_steps`; `section` is where it is configured."""
    by_share = round(optim.lr_warmup_steps_ratio * training_steps)
    return OptimizerConfig(
        optimizer=optim.optimizer,
        optimizer_impl=optim.optimizer_impl,
        arguments=optim.override_optimizer_config or {},
        lr=_SMALLEST_LR if optim.lr is None else optim.lr,  # None where nothing is trained: see `with_learning_rate`
        lr_warmup_steps=by_share if optim.lr_warmup_steps < 0 else optim.lr_warmup_steps,
        lr_scheduler_type=optim.lr_scheduler_type,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        grad_clip=grad_clip,
        section=section,
        training_steps=training_steps,
    )


def learning_rate(config: Config, parameters: int) -> float:
    """That of the policy, of so many parameters.

    By default 1e-6 for 7 billion of them, as is usual, and more for smaller models, which bear it and need it: 5e-6 for
    0.6 billion and 3e-4 for a million, in between by a power law. An adapter takes ten times as much, as it does in
    supervised training.
    """
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if actor.optim.lr is not None:
        return actor.optim.lr
    whole = max(_SMALLEST_LR, _SMALLEST_LR * (7e9 / parameters) ** 0.63)
    return float(f"{min(_LARGEST_LR, 10 * whole) if model.lora_rank else whole:.0e}")


def with_learning_rate(config: C, parameters: int) -> C:
    """The same with the learning rate of a policy of so many parameters."""
    policy = config.actor_rollout_ref
    optim = replace(policy.actor.optim, lr=learning_rate(config, parameters))
    return replace(config, actor_rollout_ref=replace(policy, actor=replace(policy.actor, optim=optim)))


def renderer(config: Config) -> str:
    """Who writes chats: where a template is given that one, unless the config says otherwise."""
    name = config.actor_rollout_ref.rollout.renderer
    return "template" if name == "auto" and config.actor_rollout_ref.model.chat_template is not None else name


def resume_from(config: Config) -> Path | None:
    """The checkpoint that a run begins with, as `trainer.resume_mode=resume_path` says; None: with none.

    Raises ConfigError where it is no whole checkpoint.
    """
    key, named = "trainer.resume_from_path", config.trainer.resume_from_path
    if config.trainer.resume_mode != "resume_path":
        return None
    if named is None:
        raise ConfigError(f"trainer.resume_mode=resume_path needs a checkpoint: {key}=RUN_DIR/checkpoints/step-N")
    folder = Path(named).expanduser().resolve()
    if wrong := checkpoint.fault(folder):
        raise ConfigError(
            f"{key}: {folder} is no checkpoint of a run, or broken: {wrong}; name RUN_DIR/checkpoints/step-N. Weights "
            "that something else has written are given as actor_rollout_ref.model.path"
        )
    return folder


def loaded_renderer(config: Config, folder: Path) -> Renderer:
    """The renderer of the policy in `folder`. Raises ConfigError where nobody can write its chats."""
    model, path = config.actor_rollout_ref.model, config.actor_rollout_ref.model.path
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return load_renderer(
                with_template(folder, model.chat_template, Path(scratch) / "tokenizer"),
                renderer(config),
                folder.name if path is None or Path(path).is_dir() else path,
                history=config.actor_rollout_ref.rollout.history,
                chat_template_kwargs=chat_template_kwargs(config),
                special_tokens_in_text=config.gateway.special_tokens_in_text,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error


def sampler_tolerance(config: Config) -> Tolerance:
    """How far log probabilities of sampler and trainer may be apart. In float32 they are 1e-5 apart, vLLM's up to 1e-4,
    and a temperature below 1 makes as many times more of what logits differ by; with bfloat16 on either side single
    tokens differ by much more, so the mean is judged."""
    formats, limit = config.actor_rollout_ref.actor.fsdp_config, config.trainer.sampler_tolerance
    sharper = 1 / min(max(config.actor_rollout_ref.rollout.temperature, 0.01), 1.0)
    if {"bf16", "bfloat16"} & {formats.model_dtype, formats.dtype, config.actor_rollout_ref.rollout.dtype}:
        return Tolerance(mean=limit or 0.1)
    exact = 1e-4 if config.actor_rollout_ref.rollout.name == "embedded" else 1e-3
    return Tolerance(largest=limit or exact * sharper)


def vllm_options(config: Config, placed: Placement | None = None, names: Sequence[str] = ()) -> Options:
    """How the vLLM servers of a run are started, on the GPUs where they are placed, by their names."""
    where = placed or Placement()
    rollout, formats = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.fsdp_config
    return Options(
        python=rollout.python or sys.executable,
        context=rollout.max_model_len,
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
        dtype=rollout.dtype or {"fp32": "float32", "bf16": "bfloat16"}[formats.model_dtype],
        device=device_of(config.trainer.device).type,
        # Raw ones are of temperature 1, and of nothing else; processed ones of what truncation has left, too.
        processed_logprobs=rollout.temperature != 1,
        servers=rollout.data_parallel_size,
        tensor_parallel=rollout.tensor_model_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        max_num_seqs=rollout.max_num_seqs,
        enforce_eager=rollout.enforce_eager,
        weight_transfer=rollout.weight_transfer,
        devices=() if where.by_ray else tuple(tuple(names[gpu] for gpu in server) for server in where.engines),
        sleeps=placement.sleeps(config, where),
        threads=rollout.num_threads or 1,
        flags=rollout.engine_kwargs.vllm or {},
    )


def sampling_parameters(config: Config) -> dict[str, dict[str, float | int]]:
    """What replaces the agents' own sampling, in training and in validation."""
    rollout, limit = config.actor_rollout_ref.rollout, config.data.max_response_length
    agents_own = config.gateway.sampling == "agent"
    greedy = not rollout.val_kwargs.do_sample
    endless: dict[str, float | int] = {"ignore_eos": True} if rollout.ignore_eos else {}
    return {
        "sampling_parameters": ({"max_tokens": limit} if agents_own else _sampling(rollout, limit)) | endless,
        "val_sampling_parameters": (greedy_sampling(config) if greedy else _sampling(rollout.val_kwargs, limit))
        | endless,
    }


def greedy_sampling(config: Config) -> dict[str, float | int]:
    """That of greedy rollouts: those that training compares others with, and validation without `do_sample`."""
    return {**NEUTRAL, "temperature": 0.0, "max_tokens": config.data.max_response_length}


def _sampling(section: RolloutSection | ValKwargs, max_tokens: int) -> dict[str, float | int]:
    return {
        **NEUTRAL,
        "temperature": section.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
        "max_tokens": max_tokens,
    }


def endpoint(config: Config, policy: str, tokenizer: Path, engines: list[dict[str, Any]]) -> Endpoint:
    """The policy as the server needs to know it; `tokenizer` is its folder."""
    return Endpoint(
        model=policy,
        tokenizer=str(tokenizer),
        renderer=renderer(config),
        history=config.actor_rollout_ref.rollout.history,
        chat_template_kwargs=chat_template_kwargs(config),
        special_tokens_in_text=config.gateway.special_tokens_in_text,
        unknown_model=config.gateway.unknown_model,
        otlp_endpoint=config.gateway.otlp_endpoint,
        allowed_media_domains=config.gateway.allowed_media_domains,
        housekeeping=config.gateway.housekeeping,
        engines=engines,
    )


def training_steps(config: Config, tasks: int) -> int:
    """How many steps a run makes of so many tasks. Raises ConfigError where it is not one."""
    trainer, batch = config.trainer, config.data.train_batch_size
    if trainer.val_only:
        return 0
    if not tasks:
        raise ConfigError("train_dataset is empty; PPO needs tasks to learn from")
    if tasks < batch:
        raise ConfigError(
            f"{tasks} tasks are fewer than data.train_batch_size={batch}: not one step; "
            f"give more tasks, or set data.train_batch_size={tasks} or less"
        )
    return trainer.total_training_steps or trainer.total_epochs * (tasks // batch)


def name_of(function: Any) -> str:
    """How a function of the user's is called in the records."""
    return getattr(getattr(function, "function", function), "__qualname__", type(function).__name__)


def rollouts_at_once(config: Config, schedule: Schedule | None) -> int:
    """How many rollouts are asked for at a time; `schedule` says how many groups there are ahead of training."""
    groups = config.data.train_batch_size if schedule is None else schedule.before
    return groups * config.actor_rollout_ref.rollout.n
