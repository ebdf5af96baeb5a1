"""Config: defaults, file, dict and command line, composed by Hydra; every error names the key."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_rl.config as config_module
from lightning_rl.config import ConfigError, compose, keys, read_back, reference, to_yaml
from lightning_rl.config.schema import TrainConfig
from tests.random_examples import examples

ROOT = Path(__file__).parents[3]
DOCUMENTED = json.loads((ROOT / "tests" / "data" / "agent_lightning_verl_config.json").read_text())


def test_a_dict_is_merged_into_the_defaults() -> None:
    config = compose({"data": {"train_batch_size": 4}})
    assert config.data.train_batch_size == 4
    assert config.actor_rollout_ref.actor.clip_ratio == 0.2


def test_the_outermost_keys_of_a_dict_and_a_file_may_be_dotted(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data.train_batch_size: 3\ndata: {seed: 5}\nactor_rollout_ref.actor: {ppo_epochs: 2}\n")
    config = compose({"data.max_prompt_length": 7, "critic.optim.lr": 0.5}, file=file)
    data = config.data
    assert (data.train_batch_size, data.seed, data.max_prompt_length) == (3, 5, 7)
    assert (config.actor_rollout_ref.actor.ppo_epochs, config.critic.optim.lr) == (2, 0.5)
    group, key = ("algorithm.credit", {"strategy": "step_groups"}), ("algorithm.credit.step_weight", 2.0)
    for pair in ([group, key], [key, group]):
        credit = compose(dict(pair)).algorithm.credit
        assert (credit.strategy, credit.step_weight) == ("step_groups", 2.0)
    with pytest.raises(ConfigError, match=r"config key data\.seed is given twice"):
        compose({"data.seed": 1, "data": {"seed": 1}})
    with pytest.raises(ConfigError, match=r"'data\.sead' is unknown; did you mean 'data\.seed'"):
        compose({"data.sead": 1})


def test_a_bound_that_bounds_nothing_may_be_infinite() -> None:
    actor = "actor_rollout_ref.actor"
    given = {f"{actor}.clip_ratio_c": math.inf, f"{actor}.grad_clip": math.inf, "critic.cliprange_value": math.inf}
    config = compose(given | {"algorithm.rollout_correction.rollout_is_threshold": math.inf})
    assert config.actor_rollout_ref.actor.clip_ratio_c == config.critic.cliprange_value == math.inf


def test_the_command_line_wins_over_the_dict_and_the_dict_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: {seed: 1, train_batch_size: 1, max_prompt_length: 1}\n")
    given = {"data": {"seed": 2, "train_batch_size": 2}}
    data = compose(given, file=file, command_line=["data.seed=3", "++data.shuffle=false"]).data
    assert (data.seed, data.train_batch_size, data.max_prompt_length, data.shuffle) == (3, 2, 1, False)


def test_a_hydra_file_may_build_on_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [lightning_rl/ppo, _self_]\ndata: {seed: 7, train_batch_size: '${data.seed}'}\n")
    assert compose(file=file).data.train_batch_size == 7


def test_it_leaves_a_hydra_application_of_the_users_alone(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("name: theirs\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose(command_line=["data.seed=3"]).data.seed == 3
        assert hydra_compose("app").name == "theirs"


def test_paths_are_text(tmp_path: Path) -> None:
    config = compose(
        {"actor_rollout_ref": {"model": {"path": tmp_path}}, "data": {"train_files": [tmp_path / "a.jsonl"]}}
    )
    assert config.actor_rollout_ref.model.path == str(tmp_path)
    assert config.data.train_files == [str(tmp_path / "a.jsonl")]


def test_the_documented_dict_of_agent_lightning_composes_unchanged() -> None:
    config = compose(DOCUMENTED)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert config.trainer.logger == ["console", "wandb"]


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ({"data": {"train_batchsize": 4}}, "data.train_batch_size"),
        ({"trainer": {"lr": 1}}, "sft.lr' or 'critic.optim.lr' or 'actor_rollout_ref.actor.optim.lr"),
        ({"algorithms": {"adv_estimator": "grpo"}}, "algorithm.adv_estimator"),
        ({"distillation": {"teacher_model": {"big": {"model_path": "x"}}}}, "distillation.teacher_models"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(override: dict[str, object], nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{nearest}'"):
        compose(override)


@pytest.mark.parametrize("override", ["data.train_batchsize=4", "+data.train_batchsize=4", "++data.train_batchsize=4"])
def test_an_unknown_key_on_the_command_line_is_named(override: str) -> None:
    with pytest.raises(ConfigError, match=r"'data.train_batchsize' is unknown; did you mean 'data.train_batch_size'"):
        compose(command_line=[override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "actor_rollout_ref.actor.optim.lr=fast",
            r"actor_rollout_ref\.actor\.optim\.lr is 'fast': expected `float \| null`",
        ),
        ("data.train_batch_size=0", r"data\.train_batch_size is 0: expected `int` >= 1"),
        ("trainer.logger=[wand]", r"trainer\.logger\[0\] is 'wand'.*there are console, jsonl"),
        ("algorithm.adv_estimator=gea", r"algorithm\.adv_estimator is 'gea'.*there are gae, grpo"),
        ("trainer.nnodes=0", r"trainer\.nnodes is 0: expected `int` >= 1"),
        ("actor_rollout_ref.actor.optim=3", r"actor_rollout_ref\.actor\.optim is 3: expected `object`"),
        ("algorithm.credit.weights={a: x}", r"algorithm\.credit\.weights\[...\] is {'a': 'x'}: expected `float`"),
        ("algorithm.credit.wieghts={a: 1}", r"'algorithm.credit.wieghts' is unknown; .*'algorithm.credit.weights'"),
        ("data.seed=-1", r"data\.seed is -1: expected `int` >= 0"),
        ("actor_rollout_ref.actor.entropy_coeff=nan", r"actor\.entropy_coeff is nan: give a finite number"),
        ("algorithm.credit.weights={a: 1.0, b: -inf}", r"algorithm\.credit\.weights\.b is -inf: give a finite"),
        ("actor_rollout_ref.rollout.temperature=inf", r"rollout\.temperature is inf: give a finite number"),
        ("data.seed=1,2", "gives data.seed several values"),
        ("data.seed", "is no key=value"),
        (f"data.train_batch_size={'9x' * 200}", f"data.train_batch_size is '{('9x' * 200)[:199]}: expected `int`"),
        ("data.seed=3#", "config key data.seed is '3#': expected `int`"),
        ("data.train_files=[ä.jsonl]", "'data.train_files=.ä.jsonl.' cannot be read: .*'ä'.* stands between quotes"),
        ("dätä.x=1", "'dätä.x=1': the key cannot be read"),
        ("foo=1", "'foo' is unknown; docs/config.md has all"),
        ("agent=a:b", "'agent' is unknown"),  # only `lightning-rl train` reads it
    ],
)
def test_a_value_that_does_not_fit_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(command_line=[override])


@pytest.mark.parametrize(
    "name", ["täsks x.jsonl", "a (1).jsonl", "t=a.jsonl", "t#1.jsonl", "it's.jsonl", "~/x.jsonl", "a\\b'c&!.jsonl"]
)
def test_a_file_may_have_any_name(name: str) -> None:
    assert compose(command_line=[f"data.train_files={name}"]).data.train_files == name


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no configuration file {tmp_path / 'x.yaml'}"):
        compose(file=tmp_path / "x.yaml")
    for name in ("x.yml", "x.yaml"):
        (tmp_path / name).write_text("data: {train_batch_size: 1}")
    with pytest.raises(ConfigError, match=r"x\.yml does not end with \.yaml: rename it"):
        compose(file=tmp_path / "x.yml")  # the other file would be read


def test_broken_yaml_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: {seed: 1\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        compose(file=file)


@settings(max_examples=examples(20))
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "data": st.fixed_dictionaries({}, optional={"seed": st.integers(0, 9), "shuffle": st.booleans()}),
            "agent": st.sampled_from(["a:b", "dir/a b.py:c"]),
            "trainer": st.fixed_dictionaries({"total_training_steps": st.none() | st.integers(1, 9)}),
        },
    )
)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, given: dict[str, Any]) -> None:
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    config = compose(given, schema=TrainConfig)
    file.write_text(to_yaml(config))
    assert compose(file=file, schema=TrainConfig) == read_back(file, TrainConfig) == config


def test_a_file_that_somebody_changed_is_read_back_as_it_is_composed(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(compose({}, schema=TrainConfig)) + "data.seeed: 3\n")
    with pytest.raises(ConfigError, match=r"config key 'data.seeed' is unknown; did you mean 'data.seed'"):
        read_back(file, TrainConfig)
    file.write_text("actor_rollout_ref: {rollout: {agent: {num_workers: 3}}}\n")  # a key of verl's
    assert read_back(file, TrainConfig) == compose(file=file, schema=TrainConfig)


def test_the_reference_page_is_the_schemas() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference.page(), "docs/config.md is old: run `make docs`"


def test_every_key_says_what_it_does_or_why_it_does_nothing() -> None:
    assert all(key.text for key in keys())
    assert {key.kind for key in keys()} == {"effect", "no_effect"}


def test_threads_compose_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra has one state for all of them, and msgspec crashes where two make the same type."""
    inside, layers = [0], config_module._layers

    def alone(*args: Any, **kwargs: Any) -> Any:
        inside[0] += 1
        time.sleep(0.005)
        assert inside == [1]
        found = layers(*args, **kwargs)
        inside[0] -= 1
        return found

    monkeypatch.setattr(config_module, "_layers", alone)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: compose(command_line=[f"data.train_batch_size={n}"]), range(1, 9)))
    assert [config.data.train_batch_size for config in found] == list(range(1, 9))
