"""Every key that is said to have an effect has one: changing it changes what is observed."""

import ast
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch

from lightning_rl.agents.agent import agent_of_run, load_agent
from lightning_rl.config import ConfigError, compose, keys
from lightning_rl.config.schema import Config, TrainConfig
from lightning_rl.inference.load import load_model
from lightning_rl.loading import NotLoadable
from lightning_rl.memory.choices import with_keys
from lightning_rl.ppo import collector, reporting, resolved_config
from lightning_rl.ppo.estimators import kl_controller_of
from lightning_rl.ppo.local_workers import LocalWorkers
from lightning_rl.ppo.off_policy.schedules import Async, OneStepOff
from lightning_rl.ppo.run_state import PolicyState, RunState
from lightning_rl.ppo.tasks import tasks_of
from lightning_rl.ppo_algorithm import PPO
from lightning_rl.rewards import FinishedRollout
from lightning_rl.rl.advantages import ESTIMATORS
from lightning_rl.rl.correction import correct
from lightning_rl.rl.shaping import OverlongBuffer
from lightning_rl.runner import on_ray
from lightning_rl.store.contract import RolloutRequest
from lightning_rl.tools.config import limits_of
from lightning_rl.training.distributed import placement
from lightning_rl.trajectories.reader import agent_failure
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl_adapters import credit, forest
from lightning_rl_adapters.credit import Credit, Rewards
from tests.adapters.forests import make_call

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
LOSS = "distillation.distillation_loss."
PROGRAM = "command_agent/test_agent.py::"
CHECKPOINT = Path(__file__).parents[3] / "examples" / "sql_agent" / "checkpoint"


class Story(PPO):
    """A PPO that tells what it would do, instead of doing it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.said: list[str] = []
        self.asked: list[RolloutRequest] = []
        models: Any = _Models(config)
        store: Any = _Store()
        [learner] = self.learners
        learner.models, learner.state, self.store = models, PolicyState(None, "policy"), store
        learner.run = self.state
        self.learners.opened.append(learner)
        self._tune_dataset = ["tune"]

    def finished(self, requests: Sequence[RolloutRequest], read: Callable[[Any], Any]) -> list[Any]:
        self.asked += requests
        return []

    def train_step(self) -> dict[str, float]:
        rollouts = self.parts.rollouts
        tasks = rollouts.next_batch()
        self.said.append(f"train {[index for index, _ in tasks]}")
        rollouts.roll_out("train", tasks, self.config.actor_rollout_ref.rollout.n)
        return {}

    def validate(self, val_dataset: Sequence[Any]) -> dict[str, float]:
        self.said.append("validate")
        n = self.config.actor_rollout_ref.rollout.val_kwargs.n
        self.parts.rollouts.roll_out("val", list(enumerate(val_dataset)), n)
        return {}

    def tune(self) -> dict[str, float]:
        self.said.append("tune")
        self.tuning.measured(self.step, 0.0)
        return {}

    def save(self) -> Path:
        self.said.append("save")
        return Path()


class _Models:
    tokenizer, learning_rate_by_size = Path(), False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.teachers: dict[str, Any] = {}

    def train(self, total: int) -> None: ...

    @property
    def policy(self) -> Any:
        return self


class _Store:
    def publish(self, resources: Any, resources_id: str) -> Any:
        return SimpleNamespace(resources_id=resources_id)


def vllm(config: Config, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How vLLM servers would be started; what becomes of each of these is in `test_command.py`."""
    monkeypatch.setattr(resolved_config, "device_of", lambda _: torch.device("cuda"))
    config = with_keys(config, {f"{ROLLOUT}name": "vllm"})
    placed = placement.place(config, 8)
    return placed.line([]), resolved_config.vllm_options(config, placed, [str(gpu) for gpu in range(8)])


def story(config: Config, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a run of 8 tasks would do and ask for."""
    monkeypatch.setattr(RunState, "export_final_model", lambda _: None)
    monkeypatch.setattr("lightning_rl.ppo_algorithm.note_finished", lambda *_, **__: None)
    monkeypatch.setattr(reporting.trackers, "open_trackers", lambda *_, **__: [])
    told = Story(config)
    told.run(list(range(8)), list(range(2)))
    return told.said, told.asked


def update(config: Config, _: pytest.MonkeyPatch) -> Any:
    return resolved_config.actor_config(config, 10)


def refusal(config: Config, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is said of options that make no sense together."""
    try:
        return distilled(config, monkeypatch)
    except ConfigError as error:
        return str(error)


def distilled(config: Config, _: pytest.MonkeyPatch) -> Any:
    """The loss against a teacher; what its options do is in `rl/test_distillation.py`."""
    teacher = {"teacher_models": {"big": {"model_path": "x"}}}
    enabled = msgspec.structs.replace(config.distillation, enabled=True, **teacher)
    with_it = msgspec.structs.replace(config, distillation=enabled)
    return resolved_config.distillation_options(with_it)


def values(config: Config, _: pytest.MonkeyPatch) -> Any:
    return resolved_config.critic_config(config, 10)


def penalty(config: Config, _: pytest.MonkeyPatch) -> Any:
    """The coefficient of the distance from the reference, before and after a step that was too far from it."""
    with_it = msgspec.structs.replace(
        config, algorithm=msgspec.structs.replace(config.algorithm, use_kl_in_reward=True)
    )
    control = kl_controller_of(PPO(with_it).config)
    assert control is not None
    before = control.value
    control.update(1.0, 100)
    return before, control.value


def template_kwargs(config: Config, _: pytest.MonkeyPatch) -> Any:
    """What prompts are rendered with; that it is so is in `test_template_kwargs.py`."""
    return resolved_config.chat_template_kwargs(config)


def tool_limits(config: Config, _: pytest.MonkeyPatch) -> Any:
    """How much of a tool's answer is read; what becomes of it is in `tools/test_results.py`."""
    return limits_of(config.actor_rollout_ref.rollout.multi_turn, CHECKPOINT)


def sampling(config: Config, _: pytest.MonkeyPatch) -> Any:
    return resolved_config.sampling_parameters(config)


def limits(config: Config, _: pytest.MonkeyPatch) -> Any:
    return (
        config.data.max_tokens,
        agent_failure(config),
        PPO(config).n_runners,
        PPO(config).isolation,
        PPO(config).ray,
        PPO(config).resume,
        PPO(config).watchdog_seconds,
        PPO(config).max_restarts,
        bool(PPO(config).rules.select),
    )


def actors(config: Config, _: pytest.MonkeyPatch) -> Any:
    """What they ask of Ray, and how many there are; that Ray gives it is in `tests/cluster/test_ray.py`."""
    given = config.actor_rollout_ref.rollout.agent.ray
    return on_ray.resources_of(given), on_ray.seats(given, 100, [{"CPU": 4.0, "GPU": 4.0, "browser": 4.0}])


def batch(config: Config, _: pytest.MonkeyPatch) -> Any:
    rules = PPO(config).rules.batch
    credits = credit.assign(rules.strategy, TWO_CALLS, Rewards(final=1.0))
    decided = rules.groups_of_one, rules.groups_without_variance, rules.overlong
    decided += (rules.min_successful_rollouts,)
    return credits, decided, rules.settings.lam, rules.kl_penalty


def place(config: Config, _: pytest.MonkeyPatch) -> Any:
    return re.sub(r"\d{8}-\d{6}", "DATE", str(PPO(config).default_run_dir()))


def stopping(config: Config, _: pytest.MonkeyPatch) -> Any:
    stopping = msgspec.structs.replace(config.trainer.early_stopping)
    if stopping.patience is None and stopping.min_delta:
        stopping = msgspec.structs.replace(stopping, patience=2)
    tested = msgspec.structs.replace(config.trainer, test_freq=1, early_stopping=stopping)
    tuning = PPO(msgspec.structs.replace(config, trainer=tested)).tuning
    return [tuning.measured(step, 0.1 * step) or tuning.stop for step in range(3)], tuning.patience


TWO_CALLS = forest.build([make_call(0, None), make_call(1, 0)])
SMALL = {"data": {"train_batch_size": 2, "shuffle": False}, "trainer": {"total_training_steps": 4}}
TABLE: list[tuple[str, Any, Callable[[Config, pytest.MonkeyPatch], Any]]] = [
    ("data.train_batch_size", 4, story),
    ("data.shuffle", True, story),
    ("data.seed", 1, story),
    ("data.max_prompt_length", 7, limits),
    ("data.max_response_length", 7, sampling),
    (ACTOR + "ppo_mini_batch_size", 3, update),
    (ACTOR + "ppo_micro_batch_size_per_gpu", 3, update),
    (ACTOR + "ppo_max_token_len_per_gpu", 3, update),
    (ACTOR + "use_dynamic_bsz", False, update),
    (ACTOR + "ppo_epochs", 3, update),
    (ACTOR + "clip_ratio", 0.3, update),
    (ACTOR + "clip_ratio_low", 0.3, update),
    (ACTOR + "clip_ratio_high", 0.3, update),
    (ACTOR + "clip_ratio_c", 5.0, update),
    (ACTOR + "loss_agg_mode", "token-sum", update),
    (ACTOR + "loss_scale_factor", 5.0, update),
    (ACTOR + "tau_pos", 2.0, update),
    (ACTOR + "tau_neg", 2.0, update),
    (LOSS + "loss_mode", "jsd_tail", distilled),
    (LOSS + "topk", 8, distilled),
    (LOSS + "use_task_rewards", False, distilled),
    (LOSS + "distillation_loss_coef", 0.5, distilled),
    (LOSS + "distillation_loss_coef_end", 0.5, distilled),
    (LOSS + "loss_max_clamp", 10.0, distilled),
    (LOSS + "log_prob_min_clamp", -10.0, distilled),
    (LOSS + "use_policy_gradient", False, refusal),
    (LOSS + "gate", 5.0, distilled),
    (LOSS + "control_variate", True, distilled),
    (LOSS + "clip_ratio", 0.1, distilled),
    (LOSS + "clip_ratio_low", 0.1, distilled),
    (LOSS + "clip_ratio_high", 0.3, distilled),
    (ACTOR + "policy_loss.loss_mode", "gspo", update),
    (ACTOR + "policy_loss.clip_cov_ratio", 0.1, update),
    (ACTOR + "policy_loss.clip_cov_lb", 0.1, update),
    (ACTOR + "policy_loss.clip_cov_ub", 9.0, update),
    (ACTOR + "policy_loss.kl_cov_ratio", 0.1, update),
    (ACTOR + "policy_loss.ppo_kl_coef", 0.5, update),
    (ACTOR + "policy_loss.dro_beta", 0.5, update),
    (ACTOR + "entropy_coeff", 0.1, update),
    (ACTOR + "grad_clip", 0.1, update),
    (ACTOR + "optim.lr", 0.1, update),
    (ACTOR + "optim.lr_warmup_steps", 2, update),
    (ACTOR + "optim.lr_scheduler_type", "cosine", update),
    (ACTOR + "optim.min_lr_ratio", 0.1, update),
    (ACTOR + "optim.lr_warmup_steps_ratio", 0.5, update),
    (ACTOR + "optim.num_cycles", 1.5, update),
    (ACTOR + "optim.optimizer", "Adam", update),
    (ACTOR + "optim.override_optimizer_config", {"eps": 1e-3}, update),
    (ACTOR + "optim.betas", [0.5, 0.5], update),
    (ACTOR + "optim.weight_decay", 0.5, update),
    (ACTOR + "shuffle", True, update),
    (ACTOR + "use_kl_loss", True, update),
    (ACTOR + "kl_loss_type", "k1", update),
    (ACTOR + "fsdp_config.param_offload", True, update),
    (ACTOR + "fsdp_config.optimizer_offload", True, update),
    ("critic.cliprange_value", 0.1, values),
    ("critic.ppo_mini_batch_size", 3, values),
    ("critic.ppo_micro_batch_size_per_gpu", 3, values),
    ("critic.ppo_max_token_len_per_gpu", 3, values),
    ("critic.use_dynamic_bsz", False, values),
    ("critic.ppo_epochs", 3, values),
    ("critic.loss_agg_mode", "token-sum", values),
    ("critic.grad_clip", 0.1, values),
    ("critic.optim.lr", 0.1, values),
    ("critic.optim.lr_warmup_steps", 2, values),
    ("critic.optim.lr_warmup_steps_ratio", 0.5, values),
    ("critic.optim.lr_scheduler_type", "linear", values),
    ("critic.optim.num_cycles", 1.5, values),
    ("critic.optim.min_lr_ratio", 0.1, values),
    ("critic.optim.optimizer", "Adam", values),
    ("critic.optim.override_optimizer_config", {"eps": 1e-3}, values),
    ("critic.optim.betas", [0.5, 0.5], values),
    ("critic.optim.weight_decay", 0.5, values),
    ("critic.fsdp_config.param_offload", True, values),
    ("critic.fsdp_config.optimizer_offload", True, values),
    ("algorithm.lam", 0.5, batch),
    ("algorithm.kl_penalty", "k2", batch),
    ("algorithm.kl_ctrl.type", "adaptive", penalty),
    ("algorithm.kl_ctrl.kl_coef", 0.5, penalty),
    ("trainer.early_stopping.patience", 2, stopping),
    ("trainer.early_stopping.min_delta", 0.5, stopping),
    (ROLLOUT + "n", 2, story),
    (ROLLOUT + "temperature", 0.5, sampling),
    (ROLLOUT + "top_p", 0.5, sampling),
    (ROLLOUT + "top_k", 5, sampling),
    (ROLLOUT + "ignore_eos", True, sampling),
    (ROLLOUT + "multi_turn.chat_template_kwargs", {"enable_thinking": False}, template_kwargs),
    (ROLLOUT + "multi_turn.max_parallel_calls", 2, tool_limits),
    (ROLLOUT + "multi_turn.max_tool_response_length", 7, tool_limits),
    (ROLLOUT + "multi_turn.tool_response_length_unit", "tokens", tool_limits),
    (ROLLOUT + "multi_turn.tool_response_truncate_side", "left", tool_limits),
    ("data.apply_chat_template_kwargs", {"enable_thinking": False}, template_kwargs),
    (ROLLOUT + "log_prob_micro_batch_size_per_gpu", 2, update),
    (ROLLOUT + "python", "/envs/vllm/bin/python", vllm),
    (ROLLOUT + "tensor_model_parallel_size", 2, vllm),
    (ROLLOUT + "data_parallel_size", 2, vllm),
    (ROLLOUT + "gpu_memory_utilization", 0.8, vllm),
    (ROLLOUT + "enforce_eager", True, vllm),
    (ROLLOUT + "weight_transfer", "ipc", vllm),
    (ROLLOUT + "free_cache_engine", True, vllm),
    (ROLLOUT + "devices", [3], vllm),
    ("trainer.devices", [3], vllm),
    (ROLLOUT + "engine_kwargs.vllm", {"block_size": 32}, vllm),
    (ROLLOUT + "agent.max_concurrent_rollouts", 2, limits),
    (ROLLOUT + "agent.isolation", "process", limits),
    (ROLLOUT + "agent.ray.address", "auto", limits),
    (ROLLOUT + "agent.ray.num_actors", 3, actors),
    (ROLLOUT + "agent.ray.num_cpus", 2.0, actors),
    (ROLLOUT + "agent.ray.num_gpus", 0.5, actors),
    (ROLLOUT + "agent.ray.resources", {"browser": 1.0}, actors),
    (ROLLOUT + "agent.timeout_seconds", 2.0, story),
    (ROLLOUT + "agent.max_attempts", 2, story),
    (ROLLOUT + "val_kwargs.temperature", 0.5, sampling),
    (ROLLOUT + "val_kwargs.top_p", 0.5, sampling),
    (ROLLOUT + "val_kwargs.top_k", 5, sampling),
    (ROLLOUT + "val_kwargs.n", 2, story),
    ("data.overlong", "drop_rollout", batch),
    ("algorithm.credit.strategy", "last_call", batch),
    ("algorithm.groups_of_one", "raw", batch),
    ("algorithm.min_successful_rollouts", 2, batch),
    ("algorithm.groups_without_variance", "drop", batch),
    ("algorithm.agent_failure", "exclude", limits),
    ("algorithm.train_agents", "writer", limits),
    ("trainer.total_training_steps", 2, story),
    ("trainer.watchdog_seconds", 5.0, limits),
    ("trainer.val_before_train", False, story),
    ("trainer.val_only", True, story),
    ("trainer.test_freq", 1, story),
    ("trainer.save_freq", 1, story),
    ("trainer.resume_mode", "auto", limits),
    ("trainer.max_restarts", 2, limits),
    ("trainer.project_name", "p", place),
    ("trainer.experiment_name", "e", place),
    ("gateway.sampling", "agent", sampling),
]
# Shown elsewhere, each by tests of its own: of this file, or FILE::TEST below tests/lightning_rl.
_IN_GROUPS = "training/distributed/test_equal.py::test_groups_of_workers_that_hold_a_whole_model_each"
ELSEWHERE = {
    **{
        f"{name}fsdp_config.reshard_after_forward": (
            "training/distributed/test_equal.py::test_layers_that_keep_their_weights_until_the_backward_pass"
        )
        for name in (ACTOR, "actor_rollout_ref.ref.", "critic.")
    },
    **{
        f"{name}fsdp_config.ulysses_sequence_parallel_size": (
            "training/distributed/test_equal.py::test_workers_that_compute_a_row_together"
        )
        for name in (ACTOR, "actor_rollout_ref.ref.", "critic.")
    },
    **{f"{name}fsdp_config.fsdp_size": _IN_GROUPS for name in (ACTOR, "actor_rollout_ref.ref.", "critic.")},
    "actor_rollout_ref.model.override_config": "ppo/test_models.py::test_the_config_of_a_model_has_what_overrides_it",
    "algorithm.train_spans": (
        "ppo/test_ppo_spans.py::test_an_agent_that_never_called_the_gateway_is_trained_from_its_spans"
    ),
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": (
        "tools/test_config.py::test_both_documented_shapes_give_the_whole_schema"
    ),
    "actor_rollout_ref.rollout.multi_turn.function_tool_path": (
        "tools/test_config.py::test_a_file_gives_its_marked_functions_and_tools_each_once"
    ),
    "data.train_files": "test_tasks_come_from_files",
    "data.val_files": "test_tasks_come_from_files",
    "data.tune_files": "test_tasks_come_from_files",
    "trainer.default_local_dir": (
        "ppo/test_run_folders.py::test_a_run_goes_where_its_keys_say_and_another_begins_with_its_checkpoint"
    ),
    "trainer.rollout_data_dir": (
        "ppo/test_run_folders.py::test_a_run_goes_where_its_keys_say_and_another_begins_with_its_checkpoint"
    ),
    "trainer.validation_data_dir": (
        "ppo/test_run_folders.py::test_a_run_goes_where_its_keys_say_and_another_begins_with_its_checkpoint"
    ),
    "trainer.resume_from_path": (
        "ppo/test_run_folders.py::test_a_run_goes_where_its_keys_say_and_another_begins_with_its_checkpoint"
    ),
    "data.train_max_samples": "ppo/test_tasks.py::test_a_run_takes_so_many_tasks",
    "data.val_max_samples": "ppo/test_tasks.py::test_a_run_takes_so_many_tasks",
    "data.filter_overlong_prompts": "ppo/test_tasks.py::test_tasks_with_long_prompts_are_left_out",
    "actor_rollout_ref.model.use_remove_padding": "test_rows_are_packed_unless_the_keys_say_otherwise",
    "actor_rollout_ref.model.trust_remote_code": (
        "inference/test_model_code.py::test_a_trusted_model_is_trained_sampled_and_exported_with_its_code"
    ),
    "critic.model.trust_remote_code": (
        "inference/test_model_code.py::test_a_trusted_model_is_trained_sampled_and_exported_with_its_code"
    ),
    "actor_rollout_ref.model.attn_implementation": ("ppo/test_models.py::test_attention_is_computed_as_the_keys_say"),
    "actor_rollout_ref.model.chat_template": (
        "ppo/test_models.py::test_a_chat_template_is_given_to_a_model_that_has_none"
    ),
    "distillation.enabled": "ppo/test_teachers.py::test_a_run_is_drawn_to_its_teacher",
    "distillation.teacher_key": "ppo/test_teachers.py::test_tasks_and_agents_say_which_teacher_a_call_has",
    "distillation.privileged": "ppo/test_privileged.py::test_functions_that_cannot_be_used_are_refused",
    "distillation.teacher_models": "ppo/test_teachers.py::test_tasks_and_agents_say_which_teacher_a_call_has",
    "actor_rollout_ref.model.lora_rank": "ppo/test_models.py::test_an_adapter_alone_is_trained",
    "actor_rollout_ref.model.lora_alpha": "ppo/test_models.py::test_an_adapter_alone_is_trained",
    "actor_rollout_ref.model.target_modules": "ppo/test_models.py::test_an_adapter_alone_is_trained",
    "actor_rollout_ref.model.exclude_modules": "ppo/test_models.py::test_what_is_excluded_gets_no_adapter",
    ROLLOUT + "val_kwargs.do_sample": "test_validation_without_sampling_is_greedy",
    "actor_rollout_ref.model.lora_adapter_path": "ppo/test_models.py::test_an_adapter_goes_on_from_a_folder",
    "actor_rollout_ref.model.load_in_4bit": (
        "ppo/test_models.py::test_a_base_in_4_bits_is_sampled_scored_and_exported_with_the_same_numbers"
    ),
    "actor_rollout_ref.model.lora.merge": (
        "ppo/test_ppo_models.py::test_an_adapter_is_trained_sampled_and_left_as_a_whole_model"
    ),
    "actor_rollout_ref.model.lora_export": "ppo/test_models.py::test_an_adapter_is_exported_merged_or_alone",
    ACTOR + "fsdp_config.model_dtype": "ppo/test_models.py::test_number_formats_are_what_the_keys_say",
    ACTOR + "fsdp_config.dtype": "ppo/test_models.py::test_number_formats_are_what_the_keys_say",
    ACTOR + "optim.optimizer_impl": "training/test_optimizer.py::test_any_optimizer_gets_the_arguments_that_it_has",
    ACTOR + "kl_loss_coef": "test_the_loss_knows_the_reference",
    "critic.optim.optimizer_impl": "training/test_optimizer.py::test_any_optimizer_gets_the_arguments_that_it_has",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (
        "ppo/test_models.py::test_the_reference_is_what_the_keys_say"
    ),
    "actor_rollout_ref.ref.fsdp_config.model_dtype": ("ppo/test_models.py::test_the_reference_is_what_the_keys_say"),
    "actor_rollout_ref.ref.fsdp_config.dtype": "ppo/test_models.py::test_the_reference_is_what_the_keys_say",
    "actor_rollout_ref.ref.fsdp_config.param_offload": ("ppo/test_models.py::test_the_reference_is_what_the_keys_say"),
    "critic.enable": "ppo/test_estimators.py::test_a_critic_is_trained_where_the_estimator_needs_one",
    "critic.shared_trunk": (
        "ppo/test_models.py::test_a_shared_trunk_has_one_model_and_learns_values_in_the_policys_update"
    ),
    "critic.value_coef": (
        "ppo/test_models.py::test_a_shared_trunk_has_one_model_and_learns_values_in_the_policys_update"
    ),
    "critic.model.path": "ppo/test_models.py::test_the_critic_begins_where_the_keys_say",
    "critic.model.enable_gradient_checkpointing": ("ppo/test_models.py::test_the_critic_begins_where_the_keys_say"),
    "critic.fsdp_config.model_dtype": "ppo/test_models.py::test_number_formats_are_what_the_keys_say",
    "critic.fsdp_config.dtype": "ppo/test_models.py::test_number_formats_are_what_the_keys_say",
    "algorithm.use_kl_in_reward": (
        "ppo/test_ppo_models.py::test_the_distance_from_the_reference_grows_from_0_and_lowers_rewards"
    ),
    "algorithm.kl_ctrl.horizon": "test_the_penalty_steers_as_the_keys_say",
    "algorithm.kl_ctrl.target_kl": "test_the_penalty_steers_as_the_keys_say",
    "trainer.schedule": (
        "test_the_schedule_is_what_the_keys_say, "
        "ppo/test_ppo_schedules.py::test_off_policy_runs_stay_within_the_bound_and_balance"
    ),
    "trainer.max_off_policy_threshold": "test_the_schedule_is_what_the_keys_say",
    "trainer.nnodes": "test_many_processes_need_what_they_need",
    "trainer.n_gpus_per_node": "training/distributed/test_crew.py::test_the_engine_gets_what_workers_trained_apart",
    "trainer.colocate": "training/distributed/test_crew.py::test_who_shares_workers",
    "trainer.critic_warmup": "ppo/test_ppo_models.py::test_the_policy_stays_while_the_critic_warms_up",
    "trainer.max_actor_ckpt_to_keep": (
        "ppo/test_ppo_models.py::test_the_best_on_the_tuning_tasks_is_kept_and_the_run_ends_early"
    ),
    ROLLOUT + "dtype": "ppo/test_models.py::test_number_formats_are_what_the_keys_say",
    "trainer.total_epochs": "test_epochs_count_the_steps",
    "agent": "test_the_agent_is_the_one_that_is_named",
    "command": f"{PROGRAM}test_the_configuration_names_the_program_and_its_reward",
    "reward.command": f"{PROGRAM}test_the_configuration_names_the_program_and_its_reward",
    "sandbox.kind": "command_agent/test_harbor.py::test_image_and_times_are_the_tasks",
    "sandbox.image": "command_agent/test_harbor.py::test_image_and_times_are_the_tasks",
    "sandbox.options": "sandboxes/test_local.py::test_what_cannot_be_is_refused_when_it_is_named",
    "sandbox.folder": f"{PROGRAM}test_files_are_there_before_the_program_and_tests_only_after_it",
    "sandbox.files": f"{PROGRAM}test_files_are_there_before_the_program_and_tests_only_after_it",
    "sandbox.tests": f"{PROGRAM}test_files_are_there_before_the_program_and_tests_only_after_it",
    "sandbox.setup": f"{PROGRAM}test_files_are_there_before_the_program_and_tests_only_after_it",
    "sandbox.environment": f"{PROGRAM}test_files_are_there_before_the_program_and_tests_only_after_it",
    "sandbox.timeout_seconds": f"{PROGRAM}test_a_program_whose_time_is_over_is_judged_by_what_it_did",
    "sandbox.gateway_url": f"{PROGRAM}test_a_gateway_that_a_sandbox_cannot_reach_is_said_or_named_otherwise",
    ROLLOUT + "agent.default_agent_loop": "loops/test_loops_page.py::test_a_loop_of_ones_own",
    ROLLOUT + "agent.agent_loop_config_path": "loops/test_loops_page.py::test_a_loop_of_ones_own",
    ROLLOUT + "response_length": "loops/test_loop_registry.py::test_loops_get_the_limits_of_the_config",
    ROLLOUT + "multi_turn.max_assistant_turns": "loops/test_loop_registry.py::test_loops_get_the_limits_of_the_config",
    ROLLOUT + "multi_turn.max_user_turns": "loops/test_loop_registry.py::test_loops_get_the_limits_of_the_config",
    ROLLOUT + "multi_turn.user.path": "loops/test_loop_registry.py::test_a_function_speaks_as_the_user",
    ROLLOUT + "multi_turn.user.model": "loops/test_loop_registry.py::test_a_model_speaks_as_the_user",
    ROLLOUT + "multi_turn.user.prompt": "loops/test_loop_registry.py::test_a_model_speaks_as_the_user",
    ROLLOUT + "multi_turn.user.done": "loops/test_loop_registry.py::test_a_model_speaks_as_the_user",
    f"{ROLLOUT}multi_turn.langgraph.path": "test_the_graph_is_the_one_that_is_named",
    f"{ROLLOUT}multi_turn.langgraph.graph_config.recursion_limit": "test_the_graph_is_the_one_that_is_named",
    "actor_rollout_ref.model.path": "test_the_engine_is_what_the_keys_say",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "test_the_engine_is_what_the_keys_say",
    ROLLOUT + "max_num_seqs": "test_the_engine_is_what_the_keys_say",
    ROLLOUT + "max_model_len": "test_the_engine_is_what_the_keys_say",
    ROLLOUT + "num_threads": "test_the_engine_is_what_the_keys_say",
    ROLLOUT + "renderer": "test_the_engine_is_what_the_keys_say",
    ROLLOUT + "history": "test_the_engine_is_what_the_keys_say",
    "gateway.unknown_model": "test_the_engine_is_what_the_keys_say",
    "gateway.special_tokens_in_text": "test_the_engine_is_what_the_keys_say",
    "gateway.allowed_media_domains": "test_the_engine_is_what_the_keys_say",
    "gateway.housekeeping": "test_the_engine_is_what_the_keys_say",
    "gateway.otlp_endpoint": (
        "test_the_engine_is_what_the_keys_say, control_plane/test_otlp_export.py::test_a_run_sends_its_spans"
    ),
    ROLLOUT + "trace.backend": "telemetry/traces/test_training.py::test_mlflow_shows_the_rollouts_and_changes_nothing",
    ROLLOUT
    + "trace.token2text": "telemetry/traces/test_training.py::test_mlflow_shows_the_rollouts_and_changes_nothing",
    ROLLOUT + "trace.max_samples_per_step_per_worker": (
        "telemetry/traces/test_training.py::test_mlflow_shows_the_rollouts_and_changes_nothing"
    ),
    ROLLOUT + "trace.otlp_endpoint": (
        "telemetry/traces/test_training.py::test_an_otlp_endpoint_changes_nothing_even_where_it_takes_nothing"
    ),
    "gateway.backends": "test_the_engine_is_what_the_keys_say",
    ROLLOUT
    + "name": "test_what_cannot_be_started_is_refused, inference/test_sglang_policy.py::test_a_run_trains_with_it",
    ROLLOUT + "server_urls": "inference/test_sglang_policy.py::test_a_run_trains_with_it",
    "trainer.logger": "ppo/test_ppo.py::test_agents_that_fail_are_data",
    "trainer.device": "test_the_engine_is_what_the_keys_say",
    "trainer.sampler_tolerance": "ppo/test_models.py::test_number_formats_are_what_the_keys_say",
    "algorithm.norm_adv_by_std_in_grpo": "test_the_estimator_is_what_the_keys_say",
    "algorithm.gamma": "test_credit_is_what_the_keys_say",
    "algorithm.credit.weights": "ppo/test_ppo_rewards.py::test_named_rewards_are_weighed",
    "algorithm.filter_groups.enable": (
        "ppo/test_ppo_rewards.py::test_dynamic_sampling_rolls_out_until_enough_groups_say_something"
    ),
    "algorithm.filter_groups.max_num_gen_batches": (
        "ppo/test_ppo_rewards.py::test_dynamic_sampling_ends_where_nothing_can_be_learned"
    ),
    "algorithm.filter_groups.metric": "test_groups_are_filtered_by_the_metric_that_the_keys_name",
    "algorithm.credit.function": "test_credit_is_what_the_keys_say",
    "reward.custom_reward_function.path": "test_rewards_are_what_the_keys_say",
    "reward.custom_reward_function.name": "test_rewards_are_what_the_keys_say",
    "reward.custom_reward_function.reward_kwargs": "test_rewards_are_what_the_keys_say",
    **{
        f"reward.reward_model.{name}": "rewards/test_reward_model.py::test_the_keys_say_how_it_is_computed"
        for name in ("enable", "model_path", "dtype", "device")
    },
    "reward.judge.model": "test_rewards_are_what_the_keys_say",
    "reward.judge.base_url": "test_rewards_are_what_the_keys_say",
    "reward.judge.api_key_env": "test_rewards_are_what_the_keys_say",
    "reward.judge.rubric": "test_rewards_are_what_the_keys_say",
    "reward.judge.timeout_seconds": "test_rewards_are_what_the_keys_say",
    "reward.judge.concurrency": "test_rewards_are_what_the_keys_say",
    "algorithm.adv_estimator": "test_the_estimator_is_what_the_keys_say",
    "algorithm.gdpo_reward_keys": "test_the_estimator_is_what_the_keys_say",
    "algorithm.gdpo_reward_weights": "test_the_estimator_is_what_the_keys_say",
    "algorithm.credit.step_weight": "test_credit_is_what_the_keys_say",
    "reward.overlong_buffer.enable": "test_the_overlong_buffer_is_what_the_keys_say",
    "reward.overlong_buffer.len": "test_the_overlong_buffer_is_what_the_keys_say",
    "reward.overlong_buffer.penalty_factor": "test_the_overlong_buffer_is_what_the_keys_say",
    "reward.overlong_buffer.max_resp_len": "test_the_overlong_buffer_is_what_the_keys_say",
    "algorithm.rollout_correction.bypass_mode": (
        "ppo/test_ppo.py::test_with_the_samplers_own_numbers_a_run_trains_as_with_recomputed_ones"
    ),
    "algorithm.rollout_correction.loss_type": "test_in_bypass_mode_the_loss_is_what_the_keys_say",
    "algorithm.rollout_correction.rollout_is": "test_the_correction_is_what_the_keys_say",
    "algorithm.rollout_correction.rollout_is_threshold": "test_the_correction_is_what_the_keys_say",
    "algorithm.rollout_correction.rollout_is_batch_normalize": "test_the_correction_is_what_the_keys_say",
    "algorithm.rollout_correction.rollout_rs": "test_the_correction_is_what_the_keys_say",
    "algorithm.rollout_correction.rollout_rs_threshold": "test_the_correction_is_what_the_keys_say",
    "algorithm.rollout_correction.rollout_token_veto_threshold": "test_the_correction_is_what_the_keys_say",
    "policies": "ppo/test_ppo_policies.py::test_one_endpoint_reaches_every_policy",
    "sft.traces": "sft/test_sft.py::test_the_command_trains_and_says_what_is_next",
    **{
        f"sft.{name}": "sft/test_traces.py::test_the_keys_say_which_rollouts_are_learned_from"
        for name in ("mode", "models", "min_reward", "best_of_group")
    },
    "sft.weights": "sft/test_traces.py::test_answers_weigh_what_their_rollouts_were_rewarded_with",
    "sft.held_out": "sft/test_traces.py::test_whole_groups_are_held_out",
    "distillation.when_away": "training/test_teacher.py::test_a_row_is_skipped_where_the_run_shall_not_wait",
    "sft.teacher": "sft/test_teacher.py::test_one_command_imitates_and_then_goes_on_with_rewards",
    "sft.n": "sft/test_teacher.py::test_a_teacher_of_ours_with_the_policys_tokenizer_is_learned_by_its_ids",
    "sft.lr": "sft/test_teacher.py::test_one_command_imitates_and_then_goes_on_with_rewards",
    "sft.total_epochs": "sft/test_teacher.py::test_a_frozen_models_answers_are_learned",
    "sft.total_training_steps": "sft/test_teacher.py::test_one_command_imitates_and_then_goes_on_with_rewards",
    "trainer.memory_check": ("memory/test_plan.py::test_a_run_that_cannot_fit_is_refused_with_the_phase_and_a_way"),
    "trainer.all_failed": (
        "cli/test_train.py::test_an_agent_that_fails_in_all_rollouts_of_a_step_ends_the_run_with_its_traceback"
    ),
}


@pytest.mark.parametrize(("key", "value", "observe"), TABLE, ids=[row[0] for row in TABLE])
def test_it_has_an_effect(key: str, value: Any, observe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unchanged = compose(SMALL)
    before = observe(unchanged, monkeypatch)
    assert before == observe(unchanged, monkeypatch)
    written = re.sub(r'"(\w+)":', r"\1:", json.dumps(value))  # Hydra wants names of dicts without quotes
    changed = compose(SMALL, command_line=[f"{key}={written}"])
    assert observe(changed, monkeypatch) != before


def test_validation_without_sampling_is_greedy() -> None:
    def validation(**kwargs: Any) -> Any:
        config = compose(
            {"actor_rollout_ref": {"rollout": {"val_kwargs": {"temperature": 0.7, "top_p": 0.5, **kwargs}}}}
        )
        found = resolved_config.sampling_parameters(config)["val_sampling_parameters"]
        return found["temperature"], found["top_p"]

    assert (validation(), validation(do_sample=False)) == ((0.7, 0.5), (0.0, 1.0))


def test_no_key_is_forgotten() -> None:
    effective = {key.name for key in keys(TrainConfig) if key.kind == "effect"}
    assert effective == {row[0] for row in TABLE} | ELSEWHERE.keys()


TESTS = Path(__file__).parents[1]


def reached(file: Path, name: str) -> str:
    """The source of a test, and of what it uses of its file; "" where there is no such test."""
    source = file.read_text()
    parts: dict[str, ast.stmt] = {}
    for part in ast.parse(source).body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            parts[part.name] = part
        elif isinstance(part, ast.Assign):
            parts |= {target.id: part for target in part.targets if isinstance(target, ast.Name)}
    found: dict[str, str] = {}
    asked = [name]
    while asked:
        one = asked.pop()
        if one in parts and one not in found:
            decorators = getattr(parts[one], "decorator_list", [])
            pieces = [ast.get_source_segment(source, piece) or "" for piece in (parts[one], *decorators)]
            found[one] = "\n".join(pieces)
            asked += [node.id for node in ast.walk(parts[one]) if isinstance(node, ast.Name)]
            asked += [node.arg for node in ast.walk(parts[one]) if isinstance(node, ast.arg)]
    return "\n".join(found.values())


@pytest.mark.parametrize("key", ELSEWHERE)
def test_what_is_shown_elsewhere_is_shown_by_a_test_that_sets_it(key: str) -> None:
    for place in ELSEWHERE[key].split(", "):
        file, _, name = place.rpartition("::")
        source = reached(TESTS / file if file else Path(__file__), name)
        assert source, f"there is no test {place}"
        assert re.search(rf"\b{key.rpartition('.')[2]}\b", source), f"{place} never sets {key}"


def test_tasks_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1\n2\n")
    assert tasks_of("train", None, [str(tmp_path / "a.jsonl")] * 2) == [1, 2, 1, 2]
    assert tasks_of("val", None, None) == []
    assert tasks_of("val", [7], str(tmp_path / "a.jsonl")) == [7]
    for name in "bc":
        (tmp_path / f"{name}.jsonl").write_text(f'"{name}"\n')
    files = {"val_files": str(tmp_path / "b.jsonl"), "tune_files": str(tmp_path / "c.jsonl")}
    named = PPO({"data": {"train_batch_size": 1, "train_files": [str(tmp_path / "a.jsonl")], **files}})
    assert named.prepare(None, None) == ([1, 2], ["b"])
    assert named._tune_dataset == ["c"]


def test_the_learning_rate_follows_from_the_model_unless_it_is_given() -> None:
    def rate(parameters: float, *changes: str) -> float:
        return resolved_config.learning_rate(compose(command_line=list(changes)), int(parameters))

    assert [rate(size) for size in (1e6, 6e8, 7e9, 7e10)] == [3e-4, 5e-6, 1e-6, 1e-6]
    adapter = "actor_rollout_ref.model.lora_rank=8"
    assert [rate(size, adapter) for size in (1e6, 6e8, 7e9)] == [1e-3, 5e-5, 1e-5]
    assert rate(6e8, adapter, "actor_rollout_ref.actor.optim.lr=2e-6") == 2e-6
    resolved = resolved_config.with_learning_rate(compose({}), 600_000_000)
    assert resolved_config.actor_config(resolved, 1).optim.lr == 5e-6


@pytest.mark.parametrize("packed", [True, False])
def test_rows_are_packed_unless_the_keys_say_otherwise(packed: bool) -> None:
    config = compose({"actor_rollout_ref": {"model": {"use_remove_padding": packed}}})
    learners = LocalWorkers(config, load_model(CHECKPOINT), {"actor"})
    learners.train(CHECKPOINT, 1)
    assert learners.actor is not None
    assert learners.actor.forward.packed is packed


def test_groups_are_filtered_by_the_metric_that_the_keys_name() -> None:
    def why_not(metric: str) -> str | None:
        rule = PPO({"algorithm": {"filter_groups": {"enable": True, "metric": metric}}}).config.algorithm.filter_groups
        group = [
            Trajectory(
                rollout_id=f"g-{tone}", group_id="g", reward=1.0, rewards=Rewards(final=1.0, named={"tone": tone}),
                forest=forest.build([]), rows=[], calls=0, sampled_tokens=0, excluded={}, agent_failed=False,
            )
            for tone in (0.0, 1.0)
        ]  # fmt: skip
        return collector.why_not(rule, OneStepOff(1), group, {"": 0})

    assert why_not("reward") == "zero_variance"
    assert why_not("tone") is None


def test_epochs_count_the_steps() -> None:
    config = {"data": {"train_batch_size": 2}, "trainer": {"total_epochs": 3}}
    assert PPO(config).steps(5) == 6


def test_the_agent_is_the_one_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("def solve(task): return float(task)\n")
    named = compose(command_line=[f"agent={tmp_path}/theirs.py:solve"], schema=TrainConfig).agent
    assert load_agent(str(named)).rollout(3, {}, None) == 3.0


def test_the_graph_is_the_one_that_is_named(tmp_path: Path) -> None:
    named = f"{tmp_path / 'named_graph.py'}:graph"
    (tmp_path / "named_graph.py").write_text("def graph(model): ...\n")
    langgraph = {"path": named, "graph_config": {"recursion_limit": 3}}
    settings = compose({"actor_rollout_ref": {"rollout": {"multi_turn": {"langgraph": langgraph}}}})
    configured: Any = agent_of_run(None, PPO(settings).configured_agents)
    assert (configured.graph, configured.config) == (named, {"recursion_limit": 3})


def test_two_names_of_the_template_kwargs_agree_or_are_an_error() -> None:
    def together(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any]:
        multi_turn = {"chat_template_kwargs": second}
        config = {"data": {"apply_chat_template_kwargs": first}}
        return resolved_config.chat_template_kwargs(
            PPO(config | {"actor_rollout_ref": {"rollout": {"multi_turn": multi_turn}}}).config
        )

    assert together(None, None) == {}
    assert together({"a": 1}, None) == together(None, {"a": 1}) == together({"a": 1}, {"a": 1}) == {"a": 1}
    assert together({"a": 1}, {"b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template_kwargs\.a=1 and .* are two values of one thing"):
        together({"a": 1}, {"a": 2})


def test_credit_is_what_the_keys_say(tmp_path: Path) -> None:
    (tmp_path / "mine_of_effects.py").write_text("def twice(forest, rewards): return {'c0': 2 * rewards.final}\n")
    own = PPO({"algorithm": {"credit": {"function": f"{tmp_path}/mine_of_effects.py:twice"}}}).rules.batch.strategy
    assert credit.assign(own, TWO_CALLS, Rewards(final=1.0)) == {"c0": Credit(2.0)}
    halved = PPO({"algorithm": {"gamma": 0.5, "credit": {"strategy": "discounted"}}}).rules.batch.strategy
    assert credit.assign(halved, TWO_CALLS, Rewards(final=1.0)) == {"c0": Credit(0.5), "c1": Credit(1.0)}
    steps = PPO({"algorithm": {"credit": {"strategy": "step_groups", "step_weight": 0.25}}}).rules.batch.strategy
    assert {
        given.plus.weight for given in credit.assign(steps, TWO_CALLS, Rewards(final=1.0)).values() if given.plus
    } == {0.25}
    with pytest.raises(ConfigError, match="must be a function"):
        PPO({"algorithm": {"credit": {"function": "math:pi"}}})
    with pytest.raises(NotLoadable, match="did you mean 'twice'"):
        PPO({"algorithm": {"credit": {"function": f"{tmp_path}/mine_of_effects.py:twise"}}})
    with pytest.raises(ConfigError, match="truncate_left needs old log probabilities of the shorter context"):
        PPO({"data": {"overlong": "truncate_left"}, "algorithm": {"rollout_correction": {"bypass_mode": True}}})


def test_the_correction_is_what_the_keys_say() -> None:
    def corrected(**keys: Any) -> tuple[list[float] | None, list[bool]]:
        """Two rollouts of two tokens; the trainer's probability of the first's second token is four times as high."""
        algorithm = PPO({"algorithm": {"rollout_correction": keys}})
        sampler, rollout = np.array([-3.0, -3.0, -2.0, -2.0]), np.array([0, 0, 1, 1])
        found = correct(sampler + np.log([1, 4, 1, 1]), sampler, rollout, algorithm.rules.correction)
        assert algorithm.rules.batch.need_log_probs == bool(keys)
        return None if found.weights is None else found.weights.round(6).tolist(), found.keep.tolist()

    whole = [True] * 4
    assert corrected() == (None, whole)
    assert corrected(rollout_is="token") == ([1, 2, 1, 1], whole)
    assert corrected(rollout_is="token", rollout_is_threshold=3.0) == ([1, 3, 1, 1], whole)
    assert corrected(rollout_is="token", rollout_is_threshold="0.5_2.0") == ([1, 0, 1, 1], whole)
    assert corrected(rollout_is="sequence", rollout_is_threshold=3.0) == ([3, 3, 1, 1], whole)
    assert corrected(rollout_is="geometric", rollout_is_threshold=3.0) == ([2, 2, 1, 1], whole)
    normalized = corrected(rollout_is="token", rollout_is_threshold=5.0, rollout_is_batch_normalize=True)
    assert normalized == (pytest.approx([4 / 7, 16 / 7, 4 / 7, 4 / 7], abs=1e-6), whole)
    assert corrected(rollout_rs="token_k1", rollout_rs_threshold=2.0) == (None, [True, False, True, True])
    assert corrected(rollout_rs="seq_max_k2", rollout_rs_threshold=0.5) == (None, [False, False, True, True])
    assert corrected(rollout_rs="seq_max_k2", rollout_rs_threshold=1.0) == (None, whole)
    assert corrected(rollout_token_veto_threshold=0.5) == (None, whole)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout_is": "row"}, "there are token, sequence, geometric"),
        ({"rollout_is_threshold": 0.52}, "rollout_correction: rollout_is_threshold 0.52 is below 1"),
        ({"rollout_is_batch_normalize": True}, "has no weights to normalize: set algorithm.rollout_correction.rollout"),
        (
            {"rollout_is_batch_normalize": True, "bypass_mode": True, "loss_type": "reinforce"},
            "has no weights to normalize",
        ),
        ({"rollout_rs_threshold": 2.0}, "bounds nothing: name criteria in algorithm.rollout_correction.rollout_rs"),
        ({"rollout_rs": "token_k1"}, "rollout_correction: rollout_rs_threshold None has 0 thresholds"),
        ({"rollout_is": "token", "bypass_mode": True}, "there are none of the trainer's to compare them with"),
        ({"rollout_token_veto_threshold": 1.0}, "rollout_token_veto_threshold is 1.0"),
        ({"loss_type": "dpo"}, "there are ppo_clip, reinforce"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0, "bypass_mode": True}, "none of the trainer's"),
    ],
)
def test_a_correction_that_cannot_be_honoured_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPO({"algorithm": {"rollout_correction": keys}})


def test_the_schedule_is_what_the_keys_say() -> None:
    def planned(**trainer: Any) -> Any:
        ppo = PPO({"data": {"train_batch_size": 4}, "actor_rollout_ref": {"rollout": {"n": 2}}, "trainer": trainer})
        schedule = ppo.rules.schedule
        return None if schedule is None else (type(schedule), schedule.threshold, schedule.before, ppo.asks_for)

    assert planned() is None
    assert planned(schedule="one_step_off") == (OneStepOff, 1, 4, 8)
    assert planned(schedule="async") == (Async, 4, 20, 40)
    assert planned(schedule="async", max_off_policy_threshold=2) == (Async, 2, 12, 24)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"trainer": {"max_off_policy_threshold": 3}}, "has no effect under trainer.schedule=sync"),
        (
            {"trainer": {"schedule": "one_step_off"}, "algorithm": {"filter_groups": {"enable": True}}},
            "set trainer.schedule=async or sync",
        ),
        (
            {
                "trainer": {"schedule": "async", "device": "cuda"},
                "actor_rollout_ref": {"rollout": {"name": "vllm", "free_cache_engine": True}},
            },
            "lets the engine rest while the trainer computes",
        ),
        ({"trainer": {"schedule": "asink"}}, "there are sync, one_step_off, async"),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(
    config: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolved_config, "device_of", lambda _: torch.device("cuda"))
    with pytest.raises(ConfigError, match=message):
        PPO(config)


@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
def test_what_older_weights_sampled_is_corrected_unless_the_config_says_otherwise(schedule: str) -> None:
    def corrected(**keys: Any) -> tuple[str | None, bool, bool]:
        """The weights, whether old log probabilities are recomputed, and whether a warning is given."""
        ppo = PPO({"trainer": {"schedule": schedule}, "algorithm": {"rollout_correction": keys}})
        bypass = ppo.config.algorithm.rollout_correction.bypass_mode
        return ppo.rules.correction.level, not bypass, resolved_config.uncorrected(ppo.config) is not None

    assert corrected() == ("token", True, False)
    assert corrected(rollout_is="sequence") == ("sequence", True, False)
    assert corrected(rollout_is=None) == (None, True, True)
    assert corrected(rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold=2.0) == (None, True, False)
    assert corrected(bypass_mode=True) == (None, False, False)  # the clip bounds the ratio to the sampler itself


def test_in_bypass_mode_the_loss_is_what_the_keys_say() -> None:
    def loss(loss_mode: str = "vanilla", **keys: Any) -> tuple[str, str | None]:
        actor = {"policy_loss": {"loss_mode": loss_mode}}
        algorithm = PPO({"actor_rollout_ref": {"actor": actor}, "algorithm": {"rollout_correction": keys}})
        assert not algorithm.rules.correction.active  # the loss itself has the weights
        made = resolved_config.actor_config(algorithm.config, 10)
        return made.loss_mode, made.rollout_is

    assert loss(loss_type="reinforce") == ("vanilla", None)
    assert loss(bypass_mode=True) == ("ppo_clip", None)
    assert loss(bypass_mode=True, loss_type="reinforce", rollout_is="token") == ("reinforce", "token")
    whole = {"rollout_is": "sequence", "rollout_is_batch_normalize": True}
    assert loss(bypass_mode=True, loss_type="reinforce", **whole) == ("reinforce", "sequence")
    assert loss("gspo", bypass_mode=True, loss_type="reinforce") == ("gspo", None)
    assert loss("reinforce", bypass_mode=True, rollout_is="sequence") == ("reinforce", "sequence")


def test_a_correction_of_cut_contexts_is_refused() -> None:
    with pytest.raises(ConfigError, match="shows the trainer less than the sampler saw"):
        PPO({"data": {"overlong": "truncate_left"}, "algorithm": {"rollout_correction": {"rollout_is": "token"}}})


def test_the_estimator_is_what_the_keys_say() -> None:
    [literal] = [get_args(key.type.__origin__) for key in keys() if key.name == "algorithm.adv_estimator"]
    assert set(literal) == ESTIMATORS.keys()
    for name in ESTIMATORS.keys() - {"gdpo"}:
        rules = PPO({"algorithm": {"adv_estimator": name, "gamma": 0.5, "norm_adv_by_std_in_grpo": False}}).rules.batch
        assert rules.estimator is ESTIMATORS[name]
        assert (rules.settings.gamma, rules.settings.norm_by_std, rules.settings.reward_weights) == (0.5, False, {})
    gdpo: dict[str, Any] = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"]}
    assert PPO({"algorithm": gdpo}).rules.batch.settings.reward_weights == {"a": 1.0, "b": 1.0}
    weighed = PPO({"algorithm": gdpo | {"gdpo_reward_weights": [0.5, 2.0]}}).rules.batch
    assert (weighed.estimator, weighed.settings.reward_weights) == (ESTIMATORS["gdpo"], {"a": 0.5, "b": 2.0})


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"adv_estimator": "gdpo"}, "set algorithm.gdpo_reward_keys.*; there are 0 names"),
        (
            {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a"], "gdpo_reward_weights": [1.0, 2.0]},
            "there are 1 names and 2 weights",
        ),
        (
            {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a"], "credit": {"strategy": "last_call"}},
            "gdpo spreads named rewards over rollouts itself, so a credit strategy has no effect",
        ),
        (
            {"adv_estimator": "reinforce_plus_plus", "credit": {"strategy": "step_groups"}},
            "reinforce_plus_plus spreads rewards over tokens itself, so a credit strategy has no effect",
        ),
    ],
)
def test_an_estimator_that_cannot_do_what_is_asked_is_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPO({"algorithm": algorithm})


def test_the_overlong_buffer_is_what_the_keys_say() -> None:
    assert PPO().rules.batch.overlong_buffer is None
    data = {"max_response_length": 300}
    on = PPO({"data": data, "reward": {"overlong_buffer": {"enable": True}}}).rules.batch.overlong_buffer
    assert on == OverlongBuffer(max_length=300, length=128, factor=1.0)
    said = {"enable": True, "len": 7, "penalty_factor": 0.5, "max_resp_len": 9}
    rules = PPO({"data": data, "reward": {"overlong_buffer": said}}).rules.batch
    assert rules.overlong_buffer == OverlongBuffer(max_length=9, length=7, factor=0.5)
    with pytest.raises(ConfigError, match=r"overlong_buffer\.len=301 is more than the 300 tokens"):
        PPO({"data": data, "reward": {"overlong_buffer": {"enable": True, "len": 301}}})
    gdpo = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a"]}
    with pytest.raises(ConfigError, match="put overlong_penalty into algorithm"):
        PPO({"algorithm": gdpo, "data": data, "reward": {"overlong_buffer": {"enable": True}}})


@pytest.mark.parametrize(
    ("mode", "told"),
    [("vanila", "'vanila' is unknown; there are vanilla, dppo_tv"), ("dro", "'dro' needs dro_beta, and it is null")],
)
def test_a_loss_that_cannot_be_computed_is_refused_before_a_model_is_loaded(mode: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"policy_loss: loss_mode {told}"):
        PPO({"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": mode}}}})


def test_the_penalty_steers_as_the_keys_say() -> None:
    def after(**control: float) -> float:
        steering = {"type": "adaptive", "kl_coef": 0.1, **control}
        made = kl_controller_of(PPO({"algorithm": {"use_kl_in_reward": True, "kl_ctrl": steering}}).config)
        assert made is not None
        made.update(0.2, 100)
        return made.value

    assert kl_controller_of(PPO().config) is None
    assert after(horizon=1000, target_kl=0.1) == pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))
    assert after(horizon=500, target_kl=0.1) == pytest.approx(0.1 * (1 + 0.2 * 100 / 500))
    assert after(horizon=1000, target_kl=0.4) == pytest.approx(0.1 * (1 - 0.2 * 100 / 1000))


def test_the_loss_knows_the_reference() -> None:
    def weight(**actor: Any) -> float:
        return resolved_config.actor_config(compose({"actor_rollout_ref": {"actor": actor}}), 10).kl_loss_coef

    assert (weight(kl_loss_coef=0.5), weight(kl_loss_coef=0.5, use_kl_loss=True)) == (0.0, 0.5)


def test_token_sums_are_divided_by_the_length_that_verl_pads_rows_to() -> None:
    """Without a factor of its own the first update ended the run."""
    for factor, divisor in ((None, 24), (8.0, 8.0)):
        actor = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": factor}
        config = compose({"data": {"max_response_length": 24}, "actor_rollout_ref": {"actor": actor}})
        assert resolved_config.actor_config(config, 10).loss_scale_factor == divisor
        assert resolved_config.critic_config(config, 10).loss_scale_factor == divisor


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algorithm": {"adv_estimator": "gae"}, "critic": {"enable": False}}, "gae needs a critic"),
        ({"critic": {"enable": True}}, "critic.enable=true has no effect under"),
        ({"trainer": {"critic_warmup": 1}}, "has no critic to warm up"),
        ({"actor_rollout_ref": {"actor": {"use_kl_loss": True, "kl_loss_type": "k7"}}}, "kl_loss_type: .*'k7' is unkn"),
        ({"algorithm": {"use_kl_in_reward": True, "kl_penalty": "k7"}}, "algorithm.kl_penalty: .*'k7' is unknown"),
        ({"actor_rollout_ref": {"actor": {"optim": {"optimizer": "AdamV"}}}}, "actor.optim: .*AdamV"),
        ({"critic": {"optim": {"override_optimizer_config": {"epps": 1}}}}, "critic.optim: .*epps"),
        ({"trainer": {"early_stopping": {"patience": 1}}}, "counts measurements: set trainer.test_freq"),
        (
            {"algorithm": {"filter_groups": {"enable": True}}, "actor_rollout_ref": {"rollout": {"n": 1}}},
            "one rollout: set n",
        ),
    ],
)
def test_models_that_cannot_be_what_is_asked_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPO(keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"trainer": {"nnodes": 2}}, r"nnodes=2 needs a Ray cluster: .*set RAY_ADDRESS"),
        (
            {
                "trainer": {"n_gpus_per_node": 2},
                "actor_rollout_ref": {"actor": {"optim": {"optimizer": "Adafactor", "override_optimizer_config": {}}}},
            },
            r"actor_rollout_ref\.actor\.optim\.optimizer=Adafactor .* may look at whole weights",
        ),
    ],
)
def test_many_processes_need_what_they_need(
    keys: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=message):
        PPO(keys)
    PPO({"trainer": {"n_gpus_per_node": 2}})
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    PPO({"trainer": {"nnodes": 2}})


def test_without_ray_one_process_trains_and_more_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved_config, "find_spec", lambda name: None if name == "ray" else name)
    PPO()
    with pytest.raises(ConfigError, match=r"n_gpus_per_node=2 need Ray: pip install 'lightning-rl\[ray\]'"):
        PPO({"trainer": {"n_gpus_per_node": 2}})


def test_early_stopping_needs_tasks_to_go_by() -> None:
    config = {"data": {"train_batch_size": 1}, "trainer": {"test_freq": 1, "early_stopping": {"patience": 1}}}
    with pytest.raises(ConfigError, match="give PPO a tune_dataset, or set data"):
        PPO(config).prepare([1], [2])
    PPO(config, tune_dataset=[3]).prepare([1], [2])


def test_rewards_are_what_the_keys_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PPO().rules.grader is None
    file = tmp_path / "scores.py"
    file.write_text("def long(data_source, solution_str, ground_truth, extra_info, times): return times\n")
    named = {"path": str(file), "name": "long", "reward_kwargs": {"times": 3}}
    task = {"reward_model": {"ground_truth": "x"}}
    finished = FinishedRollout(rollout_id="r", group_id="g", task=task, answer="a", messages=[])
    grader = PPO({"reward": {"custom_reward_function": named}}).rules.grader
    assert grader is not None
    assert grader.reward([finished]) == [{"reward": 3.0}]
    monkeypatch.setenv("MY_KEY", "secret")
    judge = {"model": "m", "base_url": "http://127.0.0.1:1/v1", "api_key_env": "MY_KEY", "rubric": "short ones",
             "timeout_seconds": 7.0, "concurrency": 2}  # fmt: skip
    grader = PPO({"reward": {"judge": judge}}).rules.grader
    assert grader is not None
    found: Any = grader.reward
    assert (found.model, found.base_url, found._api_key, found.rubric) == (
        "m",
        judge["base_url"],
        "secret",
        "short ones",
    )
    assert (found.timeout_seconds, grader._concurrency) == (7.0, 2)


def test_the_engine_is_what_the_keys_say(tmp_path: Path) -> None:
    model = Path(__file__).parents[3] / "examples" / "sql_agent" / "checkpoint"
    rollout = {"max_num_seqs": 50, "max_model_len": 77, "num_threads": 2, "renderer": "qwen3", "history": "template"}
    config = {
        "actor_rollout_ref": {"model": {"path": model, "enable_gradient_checkpointing": True}, "rollout": rollout},
        "trainer": {"device": "cpu"},
        "gateway": {
            "unknown_model": "refuse",
            "special_tokens_in_text": "control",
            "backends": {"judge": {"kind": "litellm"}},
            "otlp_endpoint": "http://h:4318",
            "allowed_media_domains": ["images.example.com"],
            "housekeeping": {"mine": ["Name this"]},
        },
    }
    algorithm = PPO(config)
    try:
        endpoint = algorithm.open(tmp_path)
        engine = algorithm.policy.engine
        assert (engine.max_num_seqs, engine.max_model_len, len(engine._threads.batches)) == (50, 77, 2)
        assert (endpoint.renderer, endpoint.history, endpoint.tokenizer) == ("qwen3", "template", str(model))
        assert (endpoint.unknown_model, endpoint.otlp_endpoint) == ("refuse", "http://h:4318")
        assert endpoint.special_tokens_in_text == "control"
        assert endpoint.allowed_media_domains == ["images.example.com"]
        assert endpoint.housekeeping == {"mine": ["Name this"]}
        assert endpoint.engines[1:] == [{"model": "judge", "kind": "litellm"}]
        model: Any = algorithm.models.model
        assert model.is_gradient_checkpointing
        assert model.device.type == "cpu"
        assert compose(file=tmp_path / "config.yaml") == algorithm.config
    finally:
        algorithm.close()


@pytest.mark.parametrize(
    ("overrides", "idle"),
    [
        ("name=vllm enforce_eager=true", None),
        (
            "enforce_eager=true max_num_seqs=7",
            "rollout.enforce_eager: no effect, the engine is",
        ),
        (
            "gpu_memory_utilization=0.8 +engine_kwargs.vllm.block_size=32",
            "utilization, rollout.engine",
        ),
        (
            "name=sglang server_urls=[http://h] tensor_model_parallel_size=2 max_num_seqs=7",
            "parallel_size, rollout.max",
        ),
        (
            "name=vllm server_urls=[http://h] data_parallel_size=2",
            "rollout.data_parallel_size: no effect, servers that",
        ),
        ("name=sglang server_urls=[http://h]", None),
        ("free_cache_engine=true", "rollout.free_cache_engine: no effect, on a CPU there is no memory of a GPU"),
    ],
)
def test_keys_of_servers_that_are_not_started_are_reported(
    overrides: str, idle: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    command_line = [f"{'+' * word.startswith('+')}{ROLLOUT}{word.lstrip('+')}" for word in overrides.split()]
    PPO(compose(command_line=command_line))
    assert len(caplog.messages) == (idle is not None)
    assert idle is None or idle in caplog.text


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({}, 0), ({"n": 1}, 1), ({"n": 1, "adv_estimator": "optimal_token_baseline"}, 1),
        ({"n": 1, "adv_estimator": "reinforce_plus_plus"}, 0), ({"n": 1, "adv_estimator": "remax"}, 0),
        ({"n": 1, "groups_of_one": "raw"}, 0), ({"n": 1, "credit": {"strategy": "leave_one_out"}}, 0),
    ],
)  # fmt: skip
def test_groups_of_one_that_teach_nothing_are_told_before_a_run(
    overrides: dict[str, Any], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = {name: value for name, value in overrides.items() if name != "n"}
    PPO({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": overrides.get("n", 4)}}})
    assert sum("each has none to be compared with" in text for text in caplog.messages) == told


@pytest.mark.parametrize(
    ("override", "message", "device"),
    [
        ("name=sglang", "sglang needs .*server_urls: SGLang's servers are not started by a run", "cpu"),
        ("tensor_model_parallel_size=2", "tensor_model_parallel_size=2 is for vLLM", "cpu"),
        ("weight_transfer=ipc", "weight_transfer=ipc is for vLLM on GPUs", "cpu"),
        ("free_cache_engine=true", "free_cache_engine=true is for vLLM on GPUs", "cuda"),
        ("data_parallel_size=2", "data_parallel_size=2 is for vLLM", "cpu"),
        ("server_urls=[http://127.0.0.1:8000]", "server_urls=.* is for vLLM", "cpu"),
    ],
)
def test_what_cannot_be_started_is_refused(
    override: str, message: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolved_config, "device_of", lambda _: torch.device(device))
    with pytest.raises(ConfigError, match=message):
        PPO(compose(command_line=[ROLLOUT + override]))
