"""verl's own configurations: its whole tree, its example commands, and what becomes of each key."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.cli.train import _plan
from lightning_rl.config import ConfigError, compose, keys, notes_of, verl_keys
from lightning_rl.config.from_verl import leaves
from lightning_rl.config.schema import TeacherModel, TrainConfig
from lightning_rl.errors import Explained

DATA = Path(__file__).parents[2] / "data"
TREE: dict[str, Any] = json.loads((DATA / "verl_keys.json").read_text())  # verl 0.9.1: its keys with their defaults
SCRIPTS: dict[str, list[str]] = json.loads((DATA / "verl_scripts.json").read_text())  # of verl 0.9.0, trained by FSDP
OLDER: dict[str, list[str]] = json.loads((DATA / "verl_overrides.json").read_text())  # of verl 0.6.1
OURS = {key.name: key for key in keys(TrainConfig)}
REFUSED = {
    "data.custom_cls.path=": 1,
    "bypass_mode=true takes the sampler's": 1,
}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, leaf = key.split(".")
        inner = made
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[leaf] = value
    return made


def tree() -> dict[str, Any]:
    """verl's defaults, with an engine, which it wants to be named."""
    return nested({**TREE, "actor_rollout_ref.rollout.name": "vllm"})


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """What the example commands name otherwise: files, sizes, devices, an interpreter with vLLM."""
    row = {"prompt": [{"role": "user", "content": "1 + 1"}], "data_source": "x", "reward_model": {"ground_truth": "2"}}
    tasks, python, reward = (tmp_path / name for name in ("tasks.jsonl", "python", "reward.py"))
    tasks.write_text(8 * (json.dumps(row) + "\n"))
    python.write_text("#!/bin/sh\necho 0.32.0\n")
    python.chmod(0o755)
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): return 0.0\n")
    rollout = "actor_rollout_ref.rollout."
    return {
        "data.train_files": str(tasks),
        "data.val_files": str(tasks),
        "data.train_batch_size": "4",
        "trainer.n_gpus_per_node": "1",
        "trainer.nnodes": "1",
        "trainer.device": "auto",
        f"{rollout}python": str(python),
        "actor_rollout_ref.model.path": "owner/model",
        "reward.custom_reward_function.path": str(reward),
        f"{rollout}server_urls": "['http://127.0.0.1:1']",
    }


def planned(overrides: list[str], place: dict[str, str]) -> str | None:
    """Why the command does not pass `--dry-run`; None where it does."""
    replaced = dict(place)
    if "actor_rollout_ref.rollout.name=sglang" not in overrides:
        del replaced["actor_rollout_ref.rollout.server_urls"]
    if not any("custom_reward_function.path" in override for override in overrides):
        del replaced["reward.custom_reward_function.path"]
    if any(override.startswith("reward_model.model.path=") for override in overrides):
        replaced["reward.reward_model.model_path"] = "owner/scorer"
    if any(override.startswith("critic.model.path=") for override in overrides):
        replaced["critic.model.path"] = "owner/critic"
    tools = [f"{key}=null" for key in ("tool_config_path", "interaction_config_path")]
    kept = [word for word in overrides if not any(key.split("=")[0] in word for key in tools)]
    command_line = [*kept, *(f"{key}={value}" for key, value in replaced.items())]
    try:
        _plan(compose(base=verl_keys.DEFAULTS, command_line=command_line, schema=TrainConfig), None)
    except Explained as error:
        return str(error)
    return None


def test_every_key_of_verls_tree_is_known() -> None:
    by_name = "distillation.teacher_models.teacher_model."  # a dict, whose names are the user's
    of_teachers = {by_name + name for name in TeacherModel.__struct_fields__}
    assert [key for key in TREE if key not in OURS.keys() | of_teachers and verl_keys.rule_of(key) is None] == []


def test_verls_own_defaults_compose() -> None:
    config = compose(tree())
    assert config.data.train_batch_size == 1024
    assert config.critic.fsdp_config.dtype == "bfloat16"  # critic.fsdp.dtype there
    assert config.actor_rollout_ref.rollout.response_length == config.data.max_response_length


def test_a_command_stands_on_verls_defaults_where_ours_are_others() -> None:
    theirs = compose(tree())
    ours = compose(base=verl_keys.DEFAULTS)
    # Files and models of verl's authors; a GPU's; what takes its value from other keys; and what means something else.
    not_taken = {
        "data.train_files",
        "data.val_files",
        "data.apply_chat_template_kwargs",
        "actor_rollout_ref.model.lora.merge",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size",
        "actor_rollout_ref.rollout.agent.max_concurrent_rollouts",
        "actor_rollout_ref.rollout.engine_kwargs.vllm",
        "actor_rollout_ref.rollout.free_cache_engine",
        "actor_rollout_ref.rollout.response_length",
        "critic.model.path",
        "critic.ppo_mini_batch_size",
        "critic.ppo_epochs",
        "critic.use_dynamic_bsz",
        "critic.loss_agg_mode",
        "algorithm.filter_groups.max_num_gen_batches",
        "algorithm.rollout_correction.rollout_is",
        "distillation.distillation_loss.clip_ratio_high",
        "distillation.distillation_loss.clip_ratio_low",
        "distillation.teacher_models",
        "trainer.device",
        "trainer.default_local_dir",
    }
    differ = {name for name in OURS if name != "agent" and _at(theirs, name) != _at(ours, name)}
    assert differ == not_taken


def _at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.long
def test_the_example_commands_compose_and_plan(place: dict[str, str]) -> None:
    why = {name: planned(overrides, place) for name, overrides in SCRIPTS.items()}
    left = {name: reason for name, reason in why.items() if reason is not None}
    explained = {reason: [name for name, said in left.items() if reason in said] for reason in REFUSED}
    assert {reason: len(names) for reason, names in explained.items()} == REFUSED
    assert len(left) == sum(REFUSED.values()), left


def test_the_commands_of_an_older_verl_compose_and_plan(place: dict[str, str]) -> None:
    left = {name: reason for name, overrides in OLDER.items() if (reason := planned(overrides, place)) is not None}
    assert not left


@pytest.mark.parametrize(
    ("given", "ours", "value"),
    [
        ("data.truncation=error", "data.overlong", "drop_row"),
        ("data.truncation=left", "data.overlong", "truncate_left"),
        ("data.truncation=left algorithm.rollout_correction.rollout_is=token", "data.overlong", "drop_row"),
        ("data.truncation=left data.overlong=drop_rollout", "data.overlong", "drop_rollout"),
        ("data.overlong=drop_rollout data.truncation=left", "data.overlong", "drop_rollout"),
        ("critic.fsdp.dtype=bf16", "critic.fsdp_config.dtype", "bfloat16"),
        ("critic.model.fsdp_config.param_offload=True", "critic.fsdp_config.param_offload", True),
        (
            "actor_rollout_ref.actor.fsdp_config.offload_policy=True",
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
            True,
        ),
        (
            "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16",
            "actor_rollout_ref.actor.fsdp_config.dtype",
            "bfloat16",
        ),
        ("actor_rollout_ref.actor.optim.clip_grad=0.5", "actor_rollout_ref.actor.grad_clip", 0.5),
        (
            "actor_rollout_ref.rollout.max_num_batched_tokens=4096",
            "actor_rollout_ref.rollout.engine_kwargs.vllm",
            {"max_num_batched_tokens": 4096},
        ),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32 actor_rollout_ref.rollout.limit_images=5",
            "actor_rollout_ref.rollout.engine_kwargs.vllm",
            {"block_size": 32, "limit_mm_per_prompt": {"image": 5}},
        ),
        (
            "+actor_rollout_ref.model.override_config.attn_implementation=eager",
            "actor_rollout_ref.model.attn_implementation",
            "eager",
        ),
        ("actor_rollout_ref.rollout.ignore_eos=true", "actor_rollout_ref.rollout.ignore_eos", True),
        (
            "actor_rollout_ref.rollout.load_format=dummy_dtensor",
            "actor_rollout_ref.rollout.engine_kwargs.vllm",
            {"load_format": "dummy"},
        ),
        ("critic.model.fsdp_config.fsdp_size=2", "critic.fsdp_config.fsdp_size", 2),
        (
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size=2",
            "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size",
            2,
        ),
        (
            "+actor_rollout_ref.model.override_config.max_position_embeddings=600",
            "actor_rollout_ref.model.override_config",
            {"max_position_embeddings": 600},
        ),
        ("actor_rollout_ref.rollout.agent.num_workers=8", "actor_rollout_ref.rollout.agent.max_concurrent_rollouts", 8),
        ("custom_reward_function.name=score", "reward.custom_reward_function.name", "score"),
        (
            "+custom_reward_function.reward_kwargs.bonus=0.5",
            "reward.custom_reward_function.reward_kwargs",
            {"bonus": 0.5},
        ),
        ("+reward_model.reward_kwargs.overlong_buffer_cfg.len=7", "reward.overlong_buffer.len", 7),
        ("reward_model.overlong_buffer.len=7", "reward.overlong_buffer.len", 7),  # as recipe/dapo has it
        ("algorithm.filter_groups.metric=seq_reward", "algorithm.filter_groups.metric", "reward"),
        ("algorithm.filter_groups.max_num_gen_batches=0", "algorithm.filter_groups.max_num_gen_batches", 1_000_000),
        ("trainer.logger=console", "trainer.logger", ["console"]),
        ("data.seed=null", "data.seed", 0),
    ],
)
def test_it_is_converted_on_the_command_line_and_in_a_dict(given: str, ours: str, value: Any) -> None:
    words = given.split()
    assert _at(compose(command_line=words), ours) == value
    assert _at(compose(nested({note.key: note.value for note in notes_of(command_line=words)})), ours) == value


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("actor_rollout_ref.actor.strategy=megatron", "models are trained by FSDP2: leave `model_engine`"),
        ("actor_rollout_ref.actor.megatron.param_offload=True", "models are trained by FSDP2"),
        ("model_engine=megatron", "models are trained by FSDP2"),
        ("data.truncation=middle", "data.overlong says what becomes of a row"),
        ("data.prompt_key=question", "name the column `prompt`"),
        ("distillation.distillation_loss.policy_loss_mode=gspo", "the teacher's policy gradient is the clipped one"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=4", "put `_per_gpu` behind it"),
        ("+ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG=INFO", "in the shell that starts the run"),
        ("actor_rollout_ref.actor.checkpoint.load_contents=[model]", "a checkpoint is loaded whole"),
        ("trainer.v1.trainer_mode=separate_async", "set trainer.schedule=async"),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=2", "write algorithm.rollout_correction.rollout_is=token"),
    ],
)
def test_what_is_not_done_here_is_refused_with_what_to_write(override: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"config key {override.lstrip('+').partition('=')[0]}=.*{hint}"):
        compose(command_line=[override])


def test_a_key_without_effect_is_reported_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compose(
            {"trainer": {"balance_batch": True}, "global_profiler": {"tool": None}, "skip": {}},
            command_line=[
                "actor_rollout_ref.rollout.mode=sync",
                "algorithm.use_pf_ppo=False",
                "actor_rollout_ref.rollout.multi_turn.format=qwen",
            ],
        )
    [line] = caplog.messages
    assert line.startswith("without effect here")
    assert line.endswith(
        "trainer.balance_batch, actor_rollout_ref.rollout.multi_turn.format, actor_rollout_ref.rollout.mode"
    )


def test_verls_number_of_workers_does_not_bound_what_its_commands_roll_out(caplog: pytest.LogCaptureFixture) -> None:
    workers, at_once = (
        f"actor_rollout_ref.rollout.agent.{name}" for name in ("num_workers", "max_concurrent_rollouts")
    )
    with caplog.at_level(logging.WARNING):
        theirs = compose(base=verl_keys.DEFAULTS, command_line=[f"{workers}=8"])
    assert _at(theirs, at_once) is None
    assert caplog.messages == [f"without effect here (docs/config.md says why): {workers}"]
    [note] = notes_of(command_line=[f"{workers}=8"], is_verl=True)
    assert (note.kind, at_once in note.text) == ("accepted", True)
    assert _at(compose(base=verl_keys.DEFAULTS, command_line=[f"{workers}=8", f"{at_once}=5"]), at_once) == 5


def test_a_typing_error_in_one_of_verls_keys_is_told_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'data\.truncation'"):
        compose(command_line=["data.truncaton=left"])


def test_a_yaml_file_of_verls_composes_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "hydra: {searchpath: ['file://verl/trainer/config']}\n"
        "defaults: [ppo_trainer, _self_]\n"
        "data: {max_prompt_length: 77, truncation: left, return_raw_chat: true}\n"
        "actor_rollout_ref: {hybrid_engine: true, rollout: {prompt_length: '${data.max_prompt_length}'}}\n"
    )
    config = compose(base=verl_keys.DEFAULTS, file=file)
    assert (config.data.max_prompt_length, config.data.overlong, config.actor_rollout_ref.rollout.n) == (
        77,
        "truncate_left",
        1,
    )


def test_leaves_are_what_a_mapping_holds() -> None:
    assert dict(leaves({"a": {"b": 1, "c": {}}, "d": [{"e": 2}]})) == {"a.b": 1, "a.c": {}, "d": [{"e": 2}]}
