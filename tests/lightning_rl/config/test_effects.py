"""Every key that is said to have an effect has one: changing it changes what is observed."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.agent import load_agent
from lightning_rl.algorithms import ppo as ppo_module
from lightning_rl.algorithms.ppo import PPO, tasks_of
from lightning_rl.config import ConfigError, compose, keys
from lightning_rl.config.schema import Config, TrainConfig
from lightning_rl.loading import NotLoadable
from lightning_rl.rewards import FinishedRollout
from lightning_rl.store.contract import RolloutRequest
from lightning_rl_adapters import credit, forest
from lightning_rl_adapters.credit import Credit, Rewards
from tests.adapters.forests import make_call

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."


class Story(PPO):
    """A PPO that tells what it would do, instead of doing it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.said: list[str] = []
        self.asked: list[RolloutRequest] = []
        self.run_dir = Path()
        self.model = _Model()
        self.policy: Any = _Model()
        self._earlier_tokens = self._began_ns = self._began_at = 0

    def _go_on(self) -> None: ...

    def _publish_resources(self) -> None: ...

    def _log(self, metrics: dict[str, float]) -> None: ...

    def finished(self, requests: Sequence[RolloutRequest], read: Callable[[Any], Any]) -> list[Any]:
        self.asked += requests
        return []

    def train_step(self, tasks: Sequence[tuple[int, Any]]) -> dict[str, float]:
        self.said.append(f"train {[index for index, _ in tasks]}")
        self.roll_out("train", tasks, self.config.actor_rollout_ref.rollout.n)
        return {}

    def validate(self, val_dataset: Sequence[Any]) -> dict[str, float]:
        self.said.append("validate")
        self.roll_out("val", list(enumerate(val_dataset)), self.config.actor_rollout_ref.rollout.val_kwargs.n)
        return {}

    def save(self) -> Path:
        self.said.append("save")
        return Path()


class _Model:
    name = "policy"

    class config:
        pad_token_id = 0


def story(config: Config, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a run of 8 tasks would do and ask for."""
    monkeypatch.setattr(ppo_module, "Actor", lambda *_, **__: None)
    monkeypatch.setattr(ppo_module.tracking, "open_trackers", lambda *_, **__: [])
    told = Story(config)
    told.run(list(range(8)), list(range(2)))
    return told.said, told.asked


def update(config: Config, _: pytest.MonkeyPatch) -> Any:
    return ppo_module._actor_config(config, 10)


def sampling(config: Config, _: pytest.MonkeyPatch) -> Any:
    return PPO(config)._sampling_parameters()


def limits(config: Config, _: pytest.MonkeyPatch) -> Any:
    return (
        PPO(config)._max_tokens,
        PPO(config)._agent_failure(),
        PPO(config).n_runners,
        PPO(config).resume,
        bool(PPO(config)._select),
    )


def batch(config: Config, _: pytest.MonkeyPatch) -> Any:
    rules = PPO(config)._rules
    credits = credit.assign(rules.strategy, TWO_CALLS, Rewards(final=1.0))
    return credits, rules.groups_of_one, rules.groups_without_variance, rules.overlong


def place(config: Config, _: pytest.MonkeyPatch) -> Any:
    return re.sub(r"\d{8}-\d{6}", "DATE", str(PPO(config).default_run_dir()))


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
    (ACTOR + "entropy_coeff", 0.1, update),
    (ACTOR + "grad_clip", 0.1, update),
    (ACTOR + "optim.lr", 0.1, update),
    (ACTOR + "optim.lr_warmup_steps", 2, update),
    (ACTOR + "optim.lr_scheduler_type", "cosine", update),
    (ACTOR + "optim.min_lr_ratio", 0.1, update),
    (ACTOR + "optim.betas", [0.5, 0.5], update),
    (ACTOR + "optim.weight_decay", 0.5, update),
    (ROLLOUT + "n", 2, story),
    (ROLLOUT + "temperature", 0.5, sampling),
    (ROLLOUT + "top_p", 0.5, sampling),
    (ROLLOUT + "top_k", 5, sampling),
    (ROLLOUT + "log_prob_micro_batch_size_per_gpu", 2, update),
    (ROLLOUT + "agent.num_workers", 2, limits),
    (ROLLOUT + "agent.timeout_seconds", 2.0, story),
    (ROLLOUT + "agent.max_attempts", 2, story),
    (ROLLOUT + "val_kwargs.temperature", 0.5, sampling),
    (ROLLOUT + "val_kwargs.top_p", 0.5, sampling),
    (ROLLOUT + "val_kwargs.top_k", 5, sampling),
    (ROLLOUT + "val_kwargs.n", 2, story),
    ("data.overlong", "drop_rollout", batch),
    ("algorithm.credit.strategy", "last_call", batch),
    ("algorithm.groups_of_one", "raw", batch),
    ("algorithm.groups_without_variance", "drop", batch),
    ("algorithm.agent_failure", "exclude", limits),
    ("algorithm.train_agents", "writer", limits),
    ("trainer.total_training_steps", 2, story),
    ("trainer.val_before_train", False, story),
    ("trainer.val_only", True, story),
    ("trainer.test_freq", 1, story),
    ("trainer.save_freq", 1, story),
    ("trainer.resume_mode", "auto", limits),
    ("trainer.project_name", "p", place),
    ("trainer.experiment_name", "e", place),
    ("gateway.sampling", "agent", sampling),
]
# Shown elsewhere, each by a test of its own.
ELSEWHERE = {
    "data.train_files": "test_tasks_come_from_files",
    "data.val_files": "test_tasks_come_from_files",
    "trainer.total_epochs": "test_epochs_count_the_steps",
    "agent": "test_the_agent_is_the_one_that_is_named",
    "actor_rollout_ref.model.path": "test_the_engine_is_what_the_keys_say",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "test_the_engine_is_what_the_keys_say",
    ROLLOUT + "max_num_seqs": "test_the_engine_is_what_the_keys_say",
    ROLLOUT + "max_model_len": "test_the_engine_is_what_the_keys_say",
    ROLLOUT + "num_threads": "test_the_engine_is_what_the_keys_say",
    ROLLOUT + "renderer": "test_the_engine_is_what_the_keys_say",
    ROLLOUT + "history": "test_the_engine_is_what_the_keys_say",
    "gateway.unknown_model": "test_the_engine_is_what_the_keys_say",
    ROLLOUT + "name": "test_what_cannot_be_started_is_refused",
    "trainer.logger": "test_what_cannot_be_started_is_refused",
    "trainer.device": "test_the_engine_is_what_the_keys_say",
    "trainer.sampler_tolerance": "test_ppo.py: test_an_engine_with_other_weights_is_refused",
    "algorithm.norm_adv_by_std_in_grpo": "test_numerics.py: the estimator with and without",
    "algorithm.gamma": "test_credit_is_what_the_keys_say",
    "algorithm.credit.weights": "test_ppo_rewards.py: test_named_rewards_are_weighed",
    "algorithm.filter_groups.enable": "test_ppo_rewards.py: test_dynamic_sampling_rolls_out_until_enough_groups_...",
    "algorithm.filter_groups.max_num_gen_batches": "test_ppo_rewards.py: test_dynamic_sampling_ends_where_...",
    "algorithm.filter_groups.metric": "test_trajectories.py: test_a_group_says_something_...",
    "algorithm.credit.function": "test_credit_is_what_the_keys_say",
    "reward.custom_reward_function.path": "test_rewards_are_what_the_keys_say",
    "reward.custom_reward_function.name": "test_rewards_are_what_the_keys_say",
    "reward.custom_reward_function.reward_kwargs": "test_rewards_are_what_the_keys_say",
    "reward.judge.model": "test_rewards_are_what_the_keys_say",
    "reward.judge.base_url": "test_rewards_are_what_the_keys_say",
    "reward.judge.api_key_env": "test_rewards_are_what_the_keys_say",
    "reward.judge.rubric": "test_rewards_are_what_the_keys_say",
    "reward.judge.timeout_seconds": "test_rewards_are_what_the_keys_say",
    "reward.judge.concurrency": "test_rewards_are_what_the_keys_say",
    "algorithm.adv_estimator": "test_config.py: there is one, others are refused",
    "algorithm.rollout_correction.bypass_mode": "test_ppo.py: test_recomputed_old_log_probs_train_too",
}


@pytest.mark.parametrize(("key", "value", "observe"), TABLE, ids=[row[0] for row in TABLE])
def test_it_has_an_effect(key: str, value: Any, observe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = observe(compose(SMALL), monkeypatch)
    assert before == observe(compose(SMALL), monkeypatch)
    changed = compose(SMALL, command_line=[f"{key}={json.dumps(value)}"])
    assert observe(changed, monkeypatch) != before


def test_no_key_is_forgotten() -> None:
    effective = {key.name for key in keys(TrainConfig) if key.kind == "effect"}
    assert effective == {row[0] for row in TABLE} | ELSEWHERE.keys()


def test_tasks_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1\n2\n")
    assert tasks_of("train", None, [str(tmp_path / "a.jsonl")] * 2) == [1, 2, 1, 2]
    assert tasks_of("val", None, None) == []
    with pytest.raises(ValueError, match="give one"):
        tasks_of("val", [1], str(tmp_path / "a.jsonl"))


def test_epochs_count_the_steps() -> None:
    config = {"data": {"train_batch_size": 2}, "trainer": {"total_epochs": 3}}
    assert PPO(config).steps(5) == 6


def test_the_agent_is_the_one_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("def solve(task): return float(task)\n")
    named = compose(command_line=[f"agent={tmp_path}/theirs.py:solve"], schema=TrainConfig).agent
    assert load_agent(str(named)).rollout(3, {}, None) == 3.0


def test_credit_is_what_the_keys_say(tmp_path: Path) -> None:
    (tmp_path / "mine_of_effects.py").write_text("def twice(forest, rewards): return {'c0': 2 * rewards.final}\n")
    own = PPO({"algorithm": {"credit": {"function": f"{tmp_path}/mine_of_effects.py:twice"}}})._rules.strategy
    assert credit.assign(own, TWO_CALLS, Rewards(final=1.0)) == {"c0": Credit(2.0)}
    halved = PPO({"algorithm": {"gamma": 0.5, "credit": {"strategy": "discounted"}}})._rules.strategy
    assert credit.assign(halved, TWO_CALLS, Rewards(final=1.0)) == {"c0": Credit(0.5), "c1": Credit(1.0)}
    with pytest.raises(ConfigError, match="must be a function"):
        PPO({"algorithm": {"credit": {"function": "math:pi"}}})
    with pytest.raises(NotLoadable, match="did you mean 'twice'"):
        PPO({"algorithm": {"credit": {"function": f"{tmp_path}/mine_of_effects.py:twise"}}})
    with pytest.raises(ConfigError, match="truncate_left needs old log probabilities of the shorter context"):
        PPO({"data": {"overlong": "truncate_left"}, "algorithm": {"rollout_correction": {"bypass_mode": True}}})


def test_rewards_are_what_the_keys_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PPO()._grader is None
    file = tmp_path / "scores.py"
    file.write_text("def long(data_source, solution_str, ground_truth, extra_info, times): return times\n")
    named = {"path": str(file), "name": "long", "reward_kwargs": {"times": 3}}
    task = {"reward_model": {"ground_truth": "x"}}
    finished = FinishedRollout(rollout_id="r", group_id="g", task=task, answer="a", messages=[])
    grader = PPO({"reward": {"custom_reward_function": named}})._grader
    assert grader is not None
    assert grader._reward([finished]) == [{"reward": 3.0}]
    monkeypatch.setenv("MY_KEY", "secret")
    judge = {"model": "m", "base_url": "http://127.0.0.1:1/v1", "api_key_env": "MY_KEY", "rubric": "short ones",
             "timeout_seconds": 7.0, "concurrency": 2}  # fmt: skip
    grader = PPO({"reward": {"judge": judge}})._grader
    assert grader is not None
    found: Any = grader._reward
    assert (found.model, found.base_url, found._api_key, found.rubric) == (
        "m",
        judge["base_url"],
        "secret",
        "short ones",
    )
    assert (found.timeout_seconds, grader._concurrency) == (7.0, 2)


def test_the_engine_is_what_the_keys_say(tmp_path: Path) -> None:
    model = Path(__file__).parents[3] / "examples" / "sql_agent" / "checkpoint"
    rollout = {"max_num_seqs": 3, "max_model_len": 77, "num_threads": 2, "renderer": "qwen3", "history": "template"}
    config = {
        "actor_rollout_ref": {"model": {"path": model, "enable_gradient_checkpointing": True}, "rollout": rollout},
        "trainer": {"device": "cpu"},
        "gateway": {"unknown_model": "refuse"},
    }
    algorithm = PPO(config)
    try:
        endpoint = algorithm.open(tmp_path)
        engine = algorithm.engine
        assert (engine.max_num_seqs, engine.max_model_len, engine._threads) == (3, 77, 2)
        assert (endpoint.renderer, endpoint.history, endpoint.tokenizer) == ("qwen3", "template", str(model))
        assert endpoint.unknown_model == "refuse"
        assert algorithm.model.is_gradient_checkpointing
        assert algorithm.model.device.type == "cpu"
        assert compose(file=tmp_path / "config.yaml") == algorithm.config
    finally:
        algorithm.close()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.rollout.name=vllm", "'vllm' cannot be started; there is 'embedded'"),
        ("trainer.logger=[wandb]", "'wandb' cannot be written to; there are console, jsonl"),
    ],
)
def test_what_cannot_be_started_is_refused(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        PPO(compose(command_line=[override])).open(tmp_path)
