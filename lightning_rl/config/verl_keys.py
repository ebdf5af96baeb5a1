"""verl's keys that are not ours under the same name and values: what becomes of each, and why.

Every key of verl 0.9's `ppo_trainer` tree is one of four: a key of the schema; *converted* to keys of the schema;
*accepted*, because it changes nothing here; or *refused*, with what to write instead. Nothing is dropped in silence: an
accepted key is reported when a configuration is composed, and a value that asks for something that is not done here is
refused. A value of null asks for nothing.

Pure data: `lightning_rl/config/from_verl.py` applies it. The first rule whose pattern matches a key holds; `*` stands
for any part of a name, dots too.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, NamedTuple

Kind = Literal["converted", "accepted", "refused"]
Converted = dict[str, Any]

# Names in the first two are the user's, such as a frozen model that is called `checkpoint`; the other is ours as it is.
_AS_IT_IS = ("gateway.", "policies.", "actor_rollout_ref.model.lora.merge")
_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_VLLM = f"{_ROLLOUT}engine_kwargs.vllm."
_REWARD = "reward.custom_reward_function."
_REWARD_KWARGS = "custom_reward_function.reward_kwargs."
_BUFFER = "reward.overlong_buffer."


class Rule(NamedTuple):
    """What becomes of the keys that match one of `patterns`.

    Attributes:
        patterns: names, with `*` for any part.
        text: why an accepted key changes nothing, what a converted one becomes, or what to write instead.
        values: the values that this holds for; None: all. Any other value is refused with `instead`.
        instead: what to write where a value is refused.
        convert: from a value, and all keys that are given beside it, to our keys and their values; None: the key sets
            nothing.
        off: the values that it accepts ask for nothing, so there is nothing to report.
        in_verl: where a script or file of verl's gives the key: why it changes nothing there. "": it is as elsewhere.
    """

    patterns: tuple[str, ...]
    text: str
    values: tuple[Any, ...] | None = None
    instead: str = ""
    convert: Callable[[Any, Mapping[str, Any]], Converted] | None = None
    off: bool = False
    in_verl: str = ""

    @property
    def kind(self) -> Kind:
        """What becomes of the values that it holds for."""
        if self.convert is not None:
            return "converted"
        return "refused" if self.values == () else "accepted"


def rule_of(key: str) -> Rule | None:
    """The rule of one of verl's keys; None: it is ours under its own name, or unknown."""
    return None if key.startswith(_AS_IT_IS) else _rule_of(key)


@cache
def _rule_of(key: str) -> Rule | None:
    return next((rule for rule in RULES if any(fnmatchcase(key, pattern) for pattern in rule.patterns)), None)


def _same(patterns: str, because: str) -> Rule:
    return Rule(tuple(patterns.split()), because)


def _only(patterns: str, values: tuple[Any, ...], because: str, instead: str) -> Rule:
    return Rule(tuple(patterns.split()), because, values, instead)


def _off(patterns: str, instead: str) -> Rule:
    """What is off by default in verl, and not there."""
    return Rule(tuple(patterns.split()), "off, as always here", (False, 0, "", {}, []), instead, off=True)


def _refused(patterns: str, instead: str) -> Rule:
    return Rule(tuple(patterns.split()), instead, (), instead)


def _to(key: str, target: str, values: Mapping[Any, Any] | None = None, instead: str = "") -> Rule:
    """`target` gets the value, or what `values` makes of it."""
    if values is None:
        return Rule((key,), f"`{target}`", convert=lambda value, _: {target: value})
    shown = ", ".join(f"{name}: {value}" for name, value in values.items() if name != value)
    text = f"`{target}` ({shown})" if shown else f"`{target}`"
    return Rule((key,), text, tuple(values), instead, lambda value, _: {target: values[value]})


def _each(pattern: str, targets: tuple[str, ...], text: str) -> Rule:
    """All of `targets` get the value; false sets nothing."""
    return Rule((pattern,), text, convert=lambda value, _: dict.fromkeys(targets, value) if value else {})


def _overlong(truncation: str, beside: Mapping[str, Any]) -> str:
    keys = (f"algorithm.rollout_correction.{name}" for name in ("bypass_mode", "rollout_is", "rollout_rs"))
    corrected = any(beside.get(key) not in (None, False) for key in keys)
    return "truncate_left" if truncation == "left" and not corrected else "drop_row"


def _moved(old: str, new: str, names: str) -> list[Rule]:
    return [_to(f"{old}{name}", f"{new}{name}") for name in names.split()]


def _offloaded(old: str, new: str) -> Rule:
    targets = (f"{new}param_offload", f"{new}optimizer_offload")
    return _each(f"{old}offload_policy", targets, f"true: `{targets[0]}` and `{targets[1]}`")


_FORMATS = {name: name for name in ("float32", "bfloat16")} | {"fp32": "float32", "bf16": "bfloat16"}
_HELD = {"fp32": "fp32", "bf16": "bf16", "float32": "fp32", "bfloat16": "bf16"}
_LOAD_FORMATS = {"dummy_dtensor": "dummy", "dummy_hf": "dummy", "dtensor": "auto", "hf": "auto"}  # verl's own names
_NO_HALF = "models compute in float32 or bfloat16"
_TRUNCATED = (
    "write algorithm.rollout_correction.rollout_is=token for truncated importance sampling, with the cap as "
    "algorithm.rollout_correction.rollout_is_threshold"
)
_FINAL = ("score", "seq_reward", "seq_final_reward")
_BY_THE_UPDATE = "log probabilities are computed in micro-batches as the update's are"
_GATEWAY_RENDERS = "the gateway renders prompts; nothing is tokenised beforehand"
_AS_A_WHOLE = "a checkpoint is whole: model, optimizers, counters, random numbers"
_COMPUTED = "how the same numbers are computed: models are as `transformers` and torch run them"
_ALWAYS_SHARDED = "several workers hold a model in shards (FSDP2)"
_MEASURED = "`timing_s/...` says what the parts of a step took; profilers are attached from outside"
_WEIGHTS = "weights go as `actor_rollout_ref.rollout.weight_transfer` says"
_WITH_FSDP = "models are trained by FSDP2: leave `model_engine` and its keys out, and use the keys of the FSDP trainer"
_FSDP = {
    f"{_ACTOR}fsdp_config.": f"{_ACTOR}fsdp_config.",
    "actor_rollout_ref.ref.fsdp_config.": "actor_rollout_ref.ref.fsdp_config.",
    "critic.fsdp.": "critic.fsdp_config.",
    "critic.fsdp_config.": "critic.fsdp_config.",
    "critic.model.fsdp_config.": "critic.fsdp_config.",
}


def _fsdp_rules(old: str, new: str) -> list[Rule]:
    """The keys of one of verl's FSDP sections; ours lies at `new`."""
    return [
        _to(f"{old}model_dtype", f"{new}model_dtype", _HELD, _NO_HALF),
        _to(f"{old}dtype", f"{new}dtype", _FORMATS, _NO_HALF),
        _to(f"{old}mixed_precision.param_dtype", f"{new}dtype", _FORMATS, _NO_HALF),
        _same(f"{old}mixed_precision.*", "gradients and buffers are float32"),
        *(
            _moved(
                old,
                new,
                "param_offload optimizer_offload fsdp_size reshard_after_forward ulysses_sequence_parallel_size",
            )
            if old != new
            else []
        ),
        _offloaded(old, new),
        _same(
            " ".join(
                f"{old}{name}"
                for name in (
                    "wrap_policy*",
                    "forward_prefetch",
                    "use_orig_params",
                    "use_no_sync_for_gradient_accumulation",
                    "forward_only",
                    "strategy",
                    "turbo_config.*",
                )
            ),
            _ALWAYS_SHARDED,
        ),
    ]


RULES: list[Rule] = [
    # What verl's other trainers add to the tree.
    _only("model_engine", ("dp", "fsdp"), "FSDP2, where there are several workers", _WITH_FSDP),
    _refused("*.megatron *.megatron.* *.veomni *.veomni.* *.torchtitan *.torchtitan.* *.mindspeed.*", _WITH_FSDP),
    _refused("*.router_replay.* *.router_replay", "routers of experts are not replayed: leave it out"),
    _only(
        "actor_rollout_ref.*.strategy critic.strategy",
        ("fsdp", "fsdp2", "${actor_rollout_ref.actor.strategy}"),
        _ALWAYS_SHARDED,
        _WITH_FSDP,
    ),
    _same("*.profiler *.profiler.* global_profiler.* *.prometheus.*", _MEASURED),
    # Tasks.
    Rule(
        ("data.truncation",),
        "`data.overlong`: error: drop_row; left: truncate_left, and drop_row where rollouts are corrected by the "
        "sampler's log probabilities, which are of the whole context",
        ("error", "left"),
        "no prompt is cut before it is sampled from: data.overlong says what becomes of a row that is too long",
        lambda value, beside: {"data.overlong": _overlong(value, beside)},
    ),
    _to("data.tool_config_path", f"{_ROLLOUT}multi_turn.tool_config_path"),
    _to("data.function_tool_path", f"{_ROLLOUT}multi_turn.function_tool_path"),
    Rule(("data.seed",), "`data.seed`", convert=lambda value, _: {"data.seed": value}),
    _same("data.filter_overlong_prompts_workers", "prompts are counted in the trainer's process"),
    _same("data.gen_batch_size", "`algorithm.filter_groups` takes batches of data.train_batch_size"),
    _same("data.val_batch_size", "all validation tasks at once, as many as run at a time"),
    _same("data.validation_shuffle", "every validation task counts, in any order the same"),
    _only("data.prompt_key", ("prompt",), "loops begin with a task's `prompt`", "name the column `prompt`"),
    _only(
        "data.reward_fn_key",
        ("data_source",),
        "a reward function is given the task's `data_source`",
        "name the column `data_source`",
    ),
    _only("data.image_key", ("images",), "loops show a task's `images`", "name the column `images`"),
    _same("data.video_key data.audio_key", "models are shown images alone, and a prompt of another kind is refused"),
    _same("data.return_* data.image_patch_size", _GATEWAY_RENDERS),
    _off("data.tokenizer data.mm_processor_kwargs*", "the model's folder has its tokenizer and processor"),
    _same("data.dataloader_num_workers data.use_shm", "tasks are read in the trainer's process"),
    _off("data.custom_cls.path data.sampler.class_path data.datagen.path", "give `fit` any sequence of tasks"),
    _same("data.custom_cls.* data.sampler.* data.datagen.*", "belongs to a class that is not named"),
    _same("data.trust_remote_code", "a tokenizer is read from tokenizer.json: none of its code is run"),
    _off("reward*.trust_remote_code", "none of a reward model's code is run: score by a function"),
    # Models.
    _to("actor_rollout_ref.model.override_config.attn_implementation", "actor_rollout_ref.model.attn_implementation"),
    _off(
        "critic.model.override_config critic.model.override_config.*",
        "a critic's config is the policy's, or what stands in its folder: change config.json there",
    ),
    _off(
        "*.model.hf_config_path actor_rollout_ref.model.tokenizer_path *.model.external_lib",
        "a model's folder has its config and its tokenizer; models are as `transformers` loads them",
    ),
    _same("critic.model.tokenizer_path", "the policy's"),
    _off("*.model.custom_chat_template", "write the template into a file: actor_rollout_ref.model.chat_template=FILE"),
    _off("critic.model.lora_rank", "an adapter is the policy's alone: leave it out"),
    _same(
        "critic.model.lora_alpha critic.model.target_modules critic.model.exclude_modules "
        "critic.model.lora_adapter_path",
        "of no adapter",
    ),
    _off("*.model.lora.rank", "set actor_rollout_ref.model.lora_rank: `lora.rank` is Megatron's"),
    _same("*.model.lora.*", "of Megatron's adapters; those of FSDP are `actor_rollout_ref.model.lora_rank`, ..."),
    _same(
        "*.model.use_shm *.model.enable_activation_offload *.use_liger *.use_fused_kernels *.fused_kernel_options* "
        "*.model.tiled_mlp.* critic.model.use_remove_padding *.use_torch_compile *.use_prefix_grouper",
        _COMPUTED,
    ),
    _off("*.mtp.enable *.mtp.enable_train *.mtp.enable_rollout", "multi-token prediction is not there: leave it out"),
    _same("*.mtp.* *.mtp", "read where multi-token prediction is on"),
    _off("*.qat.enable", "training in a quantised format is not there: leave it out"),
    _same("*.qat.* *.qat", "read where quantised training is on"),
    _off("*.freeze_vision_tower", "the vision tower is trained with the model: leave it out"),
    _same("actor_rollout_ref.hybrid_engine", "trainer and engine share devices or not, as `rollout.name` says"),
    _same("actor_rollout_ref.nccl_timeout", "a worker that died is found by Ray"),
    # Update.
    *[rule for old, new in _FSDP.items() for rule in _fsdp_rules(old, new)],
    _same(
        "*.rollout_n *.calculate_entropy *.entropy_from_logits_* *.entropy_checkpointing",
        "computed where it is needed, logits in chunks",
    ),
    _same(
        "*.calculate_sum_pi_squared *.sum_pi_squared_checkpointing",
        "token baselines take 1 - pi for it (docs/algorithms.md)",
    ),
    _off(
        "*.ppo_micro_batch_size *.log_prob_micro_batch_size *.forward_micro_batch_size",
        "verl's old name, of all GPUs together: put `_per_gpu` behind it, and divide by their number",
    ),
    _same("*.log_prob_use_dynamic_bsz *.log_prob_max_token_len_per_gpu critic.forward_*", _BY_THE_UPDATE),
    _same(
        "*.data_loader_seed *.fsdp_config.seed critic.fsdp.seed *.rollout.seed", "`data.seed` seeds order and sampling"
    ),
    _same(
        "*.full_determinism",
        "seeds come from task, rollout and call, so runs draw with the same random numbers; in float32 on one machine "
        "the engine's log probabilities differ at most in the last bits, by what it answers together",
    ),
    _only(
        "*.checkpoint.load_contents",
        (["model", "optimizer", "extra"], ["model", "optimizer", "extra", "hf_model"], "${.save_contents}"),
        _AS_A_WHOLE,
        "a checkpoint is loaded whole; to begin with its model alone, name it as actor_rollout_ref.model.path",
    ),
    _same("*.checkpoint.*", _AS_A_WHOLE),
    *[
        _to(f"{section}.ulysses_sequence_parallel_size", f"{section}.fsdp_config.ulysses_sequence_parallel_size")
        for section in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    ],
    _same("*.pad_to_length* actor_rollout_ref.actor.use_remove_padding", _ALWAYS_SHARDED),
    _to(f"{_ACTOR}optim.clip_grad", f"{_ACTOR}grad_clip"),
    _to("critic.optim.clip_grad", "critic.grad_clip"),
    _to(f"{_ACTOR}optim.warmup_style", f"{_ACTOR}optim.lr_scheduler_type"),
    _to("critic.optim.warmup_style", "critic.optim.lr_scheduler_type"),
    _same("*.optim.total_training_steps", "a schedule is over the steps of the run, as verl sets it too"),
    _same("*.optim.zero_indexed_step", "the first step has the first learning rate of the schedule"),
    _off("critic.shuffle", "the critic's mini-batches keep the order of the batch: leave it out"),
    _same("critic.loss_scale_factor", "the actor's"),
    _off("actor_rollout_ref.ref.model *.ref.path *.ref.model.*", "the reference is the model that training began with"),
    *_moved(f"{_ACTOR}policy_loss.", _ACTOR, "tau_pos tau_neg"),
    # Sampling.
    _to(f"{_ROLLOUT}dtype", f"{_ROLLOUT}dtype", _FORMATS, _NO_HALF),
    _to(f"{_ROLLOUT}prompt_length", "data.max_prompt_length"),
    _same(f"{_ROLLOUT}mode", "agents run at the same time, and every call is served as it comes"),
    _off(f"{_ROLLOUT}nnodes", "engines on machines of their own are started by you: rollout.server_urls"),
    _same(f"{_ROLLOUT}n_gpus_per_node", "an engine takes tensor_model_parallel_size x data_parallel_size GPUs"),
    _only(f"{_ROLLOUT}do_sample", (True,), "training samples", "a group of equal rollouts teaches nothing"),
    _same(f"{_ROLLOUT}calculate_log_probs", "every sampled token is recorded with its log probability"),
    _same(f"{_ROLLOUT}logprobs_mode", "asked of the engine when it is registered"),
    Rule(
        (f"{_ROLLOUT}load_format",),
        f"`{_VLLM}load_format`; the engine gets the trainer's weights before it is asked",
        ("auto", "dummy", "safetensors", "dummy_dtensor", "dummy_hf", "dtensor", "hf"),
        f"set {_VLLM}load_format",
        lambda value, _: {f"{_VLLM}load_format": _LOAD_FORMATS.get(value, value)},
    ),
    _same(f"{_ROLLOUT}skip_tokenizer_init", "engines are given token ids, and give token ids"),
    *[
        _to(f"{_ROLLOUT}{name}", f"{_VLLM}{flag}")
        for name, flag in (
            ("max_num_batched_tokens", "max_num_batched_tokens"),
            ("enable_chunked_prefill", "enable_chunked_prefill"),
            ("enable_prefix_caching", "enable_prefix_caching"),
            ("scheduling_policy", "scheduling_policy"),
            ("cudagraph_capture_sizes", "cudagraph_capture_sizes"),
            ("pipeline_model_parallel_size", "pipeline_parallel_size"),
            ("disable_log_stats", "disable_log_stats"),
        )
    ],
    _each(f"{_ROLLOUT}limit_images", (f"{_VLLM}limit_mm_per_prompt.image",), f"`{_VLLM}limit_mm_per_prompt.image`"),
    _only(f"{_ROLLOUT}expert_parallel_size", (1,), "off", f"set {_VLLM}enable_expert_parallel=true"),
    _off(
        f"{_ROLLOUT}quantization {_ROLLOUT}quantization_config_file",
        "an engine samples with the weights that are trained: leave it out",
    ),
    _off(f"{_ROLLOUT}disaggregation.enabled", "start such servers yourself, and name them: rollout.server_urls"),
    _same(f"{_ROLLOUT}disaggregation.*", "read where disaggregation is on"),
    _off(f"{_ROLLOUT}enable_rollout_routing_replay", "routers of experts are not replayed: leave it out"),
    _same(f"{_ROLLOUT}moe_load_balance_metrics_interval", "no metric of experts is logged"),
    _same(
        f"{_ROLLOUT}layered_summon {_ROLLOUT}multi_stage_wake_up {_ROLLOUT}update_weights_bucket_megabytes", _WEIGHTS
    ),
    _same(f"{_ROLLOUT}checkpoint_engine.*", _WEIGHTS),
    _same(f"{_ROLLOUT}over_sample_rate", "no rollout is begun to be dropped: every one that is asked for counts"),
    _off(f"{_ROLLOUT}router_config_path", "the gateway chooses among servers, the least busy one"),
    _same(f"{_ROLLOUT}engine_kwargs.sglang*", "flags of SGLang's servers, which are started by you: give them there"),
    _same(f"{_ROLLOUT}engine_kwargs.trtllm*", "flags of an engine that is not there"),
    _same(
        f"{_ROLLOUT}multi_turn.enable",
        "an agent calls as often as it likes; loops are `rollout.agent.default_agent_loop`",
    ),
    _off(
        f"{_ROLLOUT}multi_turn.interaction_config_path",
        f"write the user as a function, {_ROLLOUT}multi_turn.user.path=FILE.py:NAME, or name a model (docs/loops.md)",
    ),
    _same(
        f"{_ROLLOUT}multi_turn.use_inference_chat_template {_ROLLOUT}multi_turn.tokenization_sanity_check_mode "
        f"{_ROLLOUT}multi_turn.num_repeat_rollouts",
        "without effect in verl, too",
    ),
    _to(f"{_ROLLOUT}agent.num_workers", f"{_ROLLOUT}agent.max_concurrent_rollouts")._replace(
        text=f"`{_ROLLOUT}agent.max_concurrent_rollouts`, which it was called; with --from-verl nothing",
        in_verl="processes of runners follow from the cores, and rollouts at once from the step: "
        f"{_ROLLOUT}agent.max_concurrent_rollouts",
    ),
    _off(f"{_ROLLOUT}agent.custom_async_server.*", "an engine of your own is registered at the gateway"),
    _same(f"{_ROLLOUT}trace.project_name {_ROLLOUT}trace.experiment_name", "`trainer.project_name`, `experiment_name`"),
    _off("*.skip_rollout *.skip.enable", "a run that starts with another's store reads its rollouts"),
    # Critic.
    # Rewards.
    *_moved("custom_reward_function.", _REWARD, "path name reward_kwargs"),
    Rule(
        (f"{_REWARD_KWARGS}*",),
        f"`{_REWARD}reward_kwargs.*`",
        convert=lambda value, beside: {
            f"reward.{key}": given for key, given in beside.items() if key.startswith(_REWARD_KWARGS) and given == value
        },
    ),
    _same("reward*.num_workers", "functions run in the trainer's process when a group has ended"),
    _only("reward*.reward_manager.source", ("register",), "by name", f"a function of yours: {_REWARD}path"),
    _only(
        "reward*.reward_manager reward*.reward_manager.name",
        ("naive", "dapo", "gdpo", "batch", "rate_limited"),
        "a reward function is called for each rollout; `reward.overlong_buffer` is DAPO's, named rewards are GDPO's",
        f"write the manager as a function: {_REWARD}path=FILE {_REWARD}name=NAME",
    ),
    _off("reward*.reward_manager.module.path", f"write the manager as a function: {_REWARD}path"),
    _same("reward*.reward_manager.*", "belongs to a manager that is not named"),
    *[
        rule
        for section in ("reward.reward_kwargs.", "reward_model.reward_kwargs.")
        for rule in (
            *_moved(f"{section}overlong_buffer_cfg.", _BUFFER, "enable len penalty_factor"),
            _same(f"{section}overlong_buffer_cfg.log", "the metrics have it"),
            _to(f"{section}max_resp_len", f"{_BUFFER}max_resp_len"),
        )
    ],
    *_moved("reward_model.overlong_buffer.", _BUFFER, "enable len penalty_factor"),  # of recipe/dapo
    _same("reward_model.overlong_buffer.log", "the metrics have it"),
    _to("reward_model.enable", "reward.reward_model.enable"),
    _to("reward_model.model.path", "reward.reward_model.model_path"),
    *[
        _to(f"{section}reward_model.rollout.dtype", "reward.reward_model.dtype", _FORMATS, _NO_HALF)
        for section in ("", "reward.")
    ],
    _off("reward*.sandbox_fusion.url sandbox_fusion.url", "call the sandbox from a reward function"),
    _same("reward*.sandbox_fusion.* sandbox_fusion.*", "read where a sandbox is named"),
    _same(
        "reward.reward_model.rollout.* reward.reward_model.n_gpus_per_node reward.reward_model.nnodes "
        "reward.reward_model.enable_resource_pool reward_model.model.* reward_model.rollout.* reward_model.load_weight "
        "reward_model.profiler.* reward_model.enable_resource_pool reward_model.n_gpus_per_node reward_model.nnodes "
        "reward_model.strategy reward_model.num_workers reward_model.micro_batch_size* reward_model.max_length "
        "reward_model.use_dynamic_bsz reward_model.forward_max_token_len_per_gpu reward_model.nccl_timeout "
        "reward_model.ulysses_sequence_parallel_size reward_model.launch_reward_fn_async reward_model.use_reward_loop "
        "reward_model.reward_loop_source reward_model.reward_loop_module_path reward_model.reward_loop_class_name",
        "no server is started for a reward model: the trainer's process computes it, a conversation at a time",
    ),
    # What truncated importance sampling was called before it was a section of its own.
    _only(f"{_ACTOR}tis_imp_ratio_cap algorithm.rollout_is", (-1, 0, False, None), "off", _TRUNCATED),
    _same(
        "algorithm.rollout_is_threshold* algorithm.rollout_is_level algorithm.rollout_is_mode "
        "algorithm.rollout_is_veto_threshold",
        f"read where algorithm.rollout_is is on; {_TRUNCATED}",
    ),
    # Advantages.
    Rule(
        ("algorithm.filter_groups.metric",),
        "the same key; score, seq_reward and seq_final_reward: reward, before penalties",
        convert=lambda value, _: {"algorithm.filter_groups.metric": "reward" if value in _FINAL else value},
    ),
    Rule(
        ("algorithm.filter_groups.max_num_gen_batches",),
        "the same key; 0, without a limit: 1000000",
        convert=lambda value, _: {"algorithm.filter_groups.max_num_gen_batches": value if value != 0 else 1_000_000},
    ),
    _same("algorithm.filter_groups.max_inflight_gen_batches", "one batch after the other"),
    _off("algorithm.use_pf_ppo", "rows are not sampled again by their rewards: leave it out"),
    _same("algorithm.pf_ppo.*", "read where algorithm.use_pf_ppo is on"),
    _same(
        "distillation.n_gpus_per_node distillation.nnodes distillation.teacher_models.*.num_replicas",
        "a teacher of a folder is computed beside the trainer's models, as the reference is; one behind `server_urls` "
        "is started by you",
    ),
    _same(
        "distillation.teacher_models.*.inference.*",
        "no engine is started for a teacher: its folder is computed by the trainer, in the reference's formats, and "
        "servers are given by `server_urls`",
    ),
    _only(
        "distillation.distillation_loss.policy_loss_mode",
        ("vanilla",),
        "the clipped loss, as in verl",
        "leave it out: the teacher's policy gradient is the clipped one",
    ),
    _same("distillation.distillation_loss.*chunked_topk*", "logits are read in chunks, always"),
    # Run.
    _same("transfer_queue.*", "the store is always there"),
    _off("skip.*.enable", "a run that starts with another's store reads its rollouts"),
    _same("skip.*", "read where skipping is on"),
    _same("ray_kwargs.*.env_vars.TRANSFER_QUEUE_*", "the store is always there"),
    _off(
        "ray_kwargs.ray_init.runtime_env ray_kwargs.ray_init.runtime_env.*",
        "set environment variables in the shell that starts the run",
    ),
    _same("ray_kwargs.*", "a Ray of the run's own has the machine's cores and GPUs; another is named by RAY_ADDRESS"),
    _same("trainer.balance_batch", "the workers' shares are cut by tokens, always"),
    _same("trainer.log_val_generations", "`lightning-rl rollouts` and traces show what was generated"),
    Rule(
        ("trainer.logger",),
        "`trainer.logger`, as a list (file: jsonl)",
        convert=lambda value, _: {"trainer.logger": ["jsonl" if one == "file" else one for one in _listed(value)]},
    ),
    _same("trainer.max_critic_ckpt_to_keep", "one checkpoint holds both: trainer.max_actor_ckpt_to_keep"),
    _off("trainer.default_hdfs_dir", "copy the run's folder when it has ended"),
    _off("trainer.checkpoint_callback_class", "override `on_step_end` of `lrl.PPO` (docs/training.md)"),
    _same(
        "trainer.del_local_ckpt_after_load trainer.esi_redundant_time trainer.ray_wait_register_center_timeout "
        "trainer.use_legacy_worker_impl trainer.use_v1",
        "how verl places and restarts its workers",
    ),
    _only(
        "trainer.v1.trainer_mode",
        ("sync",),
        "`trainer.schedule` is sync",
        "set trainer.schedule=async or one_step_off (docs/training.md)",
    ),
    _same("trainer.v1.*", "read by verl's asynchronous trainers: here trainer.schedule and its keys"),
    # What Agent-lightning adds to the tree.
    _to("agentlightning.rollout_timeout_seconds", f"{_ROLLOUT}agent.timeout_seconds"),
    _only(
        "agentlightning.trace_aggregator.level",
        ("trajectory",),
        "calls that continue each other are one row",
        "leave it out: calls that continue each other are one row, always (docs/concepts/forest.md)",
    ),
    _same(
        "agentlightning.trace_aggregator.*",
        "a row has at most data.max_prompt_length + data.max_response_length tokens, whatever calls it is made of",
    ),
    _off("agentlightning.async_rollout.enabled", "set trainer.schedule=async or one_step_off (docs/training.md)"),
    _same("agentlightning.async_rollout.*", "read by their asynchronous rollouts: here trainer.schedule and its keys"),
    _same("agentlightning.agl_base_url agentlightning.agl_key", "the server starts with the trainer and its own keys"),
    _same("agentlightning.local.* agentlightning.kubernetes.*", "the agent is what `fit` is given"),
]


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value)


# Those of single keys, for hints.
NAMES = frozenset(pattern for rule in RULES for pattern in rule.patterns if "*" not in pattern)

# verl's defaults where ours are others: what one of its commands stands on, where it does not say otherwise.
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    f"{_ACTOR}optim.lr": 1e-6,
    f"{_ACTOR}fsdp_config.dtype": "bfloat16",
    f"{_ACTOR}ppo_mini_batch_size": 256,
    f"{_ACTOR}use_dynamic_bsz": False,
    f"{_ACTOR}ppo_max_token_len_per_gpu": 16384,
    f"{_ACTOR}clip_ratio_low": 0.2,
    f"{_ACTOR}clip_ratio_high": 0.2,
    "actor_rollout_ref.ref.fsdp_config.dtype": "bfloat16",
    f"{_ROLLOUT}name": "vllm",
    f"{_ROLLOUT}dtype": "bfloat16",
    f"{_ROLLOUT}tensor_model_parallel_size": 2,
    f"{_ROLLOUT}n": 1,
    f"{_ROLLOUT}val_kwargs.do_sample": False,
    f"{_ROLLOUT}agent.default_agent_loop": "single_turn_agent",
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.model.enable_gradient_checkpointing": True,
    "critic.fsdp_config.dtype": "bfloat16",
    "distillation.distillation_loss.loss_mode": "k3",
    "distillation.distillation_loss.use_policy_gradient": False,
    "algorithm.adv_estimator": "gae",
    "trainer.total_epochs": 30,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.logger": ["console", "wandb"],
    "trainer.resume_mode": "auto",  # of no effect in a new folder
    "trainer.n_gpus_per_node": 8,
}
