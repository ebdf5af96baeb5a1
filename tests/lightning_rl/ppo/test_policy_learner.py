"""Policies of one run write chats alike, since one gateway renders them; and which passes a step needs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, Qwen2Config

import lightning_rl as lrl
from lightning_rl.config import ConfigError, compose
from lightning_rl.config.policies import policies_of
from lightning_rl.inference.embedded import EmbeddedPolicy
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.estimators import kl_controller_of
from lightning_rl.ppo.policy_learner import PolicyLearner, learns_nothing
from lightning_rl.ppo.run_state import PolicyState
from lightning_rl.training.learner import Planner
from tests.lightning_rl.ppo.test_ppo import CHECKPOINT


@pytest.mark.parametrize(
    ("words", "step", "found"),
    [
        ([], 2, True),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=8"], 2, False),
        (["trainer.critic_warmup=2", "algorithm.adv_estimator=gae"], 2, False),
        (["trainer.critic_warmup=2", "algorithm.adv_estimator=gae"], 3, True),
        (["algorithm.rollout_correction.bypass_mode=true"], 2, False),
        (["algorithm.rollout_correction.rollout_is=token"], 2, False),
        (["algorithm.rollout_correction.rollout_token_veto_threshold=0.001"], 2, False),
        (["algorithm.use_kl_in_reward=true"], 2, False),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"], 2, False),
    ],
)
def test_the_update_finds_old_log_probs_where_nothing_needs_them_before(
    words: list[str], step: int, found: bool
) -> None:
    config = compose(command_line=["data.train_batch_size=16", *words])
    [of_run] = policies_of(config)
    learner = PolicyLearner(of_run, resolved_config.step_rules(config))
    model: Any = torch.nn.Module()
    model.config = Qwen2Config()
    learner.models = SimpleNamespace(model=model, actor=Planner())  # type: ignore[assignment]
    learner.models.actor.config = resolved_config.actor_config(config, 10)
    learner.state, learner.run = PolicyState(kl_controller_of(config), "policy"), SimpleNamespace(step=step)  # type: ignore[assignment]
    rollouts = 16 * config.actor_rollout_ref.rollout.n
    assert learner._update_finds_old_log_probs(rollouts) is found
    model.config = GPT2Config()
    assert not learner._update_finds_old_log_probs(rollouts), "it has dropout"


@pytest.mark.parametrize(("train_from", "train_every", "step", "warms_up"), [
    (1, 1, 2, True), (1, 1, 3, False), (10, 1, 11, True), (10, 1, 12, False), (1, 2, 3, True), (1, 2, 5, False),
])  # fmt: skip
def test_a_critic_warms_up_in_the_first_steps_in_which_its_policy_learns(
    train_from: int, train_every: int, step: int, warms_up: bool
) -> None:
    config = compose(command_line=["trainer.critic_warmup=2", "algorithm.adv_estimator=gae"])
    [of_run] = policies_of(config)
    learner = PolicyLearner(
        replace(of_run, train_from=train_from, train_every=train_every), resolved_config.step_rules(config)
    )
    learner.run = SimpleNamespace(step=step)  # type: ignore[assignment]
    assert learner._critic_warms_up is warms_up


@pytest.mark.parametrize(
    ("train_from", "steps", "warm_up", "why"),
    [
        (1, 3, 0, None),
        (4, 3, 0, "policies.a.train_from=4 holds policy a back in all of the run's 3 steps: it learns nothing"),
        (2, 3, 2, "trainer.critic_warmup=2 holds policy a back in all of its 2 updates: it learns nothing"),
        (4, 0, 0, None),
    ],
)
def test_a_policy_that_learns_nothing_in_a_run_is_told_of(
    train_from: int, steps: int, warm_up: int, why: str | None
) -> None:
    config = compose(command_line=[f"trainer.critic_warmup={warm_up}", "algorithm.adv_estimator=gae"])
    [of_run] = policies_of(config)
    told = learns_nothing(replace(of_run, name="a", train_from=train_from), steps)
    assert told == (None if why is None else f"{why} in this run")


def swap_two_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))


def write_chats_otherwise(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"renderer": "prime-qwen3"}))


@pytest.mark.parametrize(("change", "what"), [(swap_two_tokens, "tokenizer"), (write_chats_otherwise, "chat format")])
def test_models_that_write_chats_otherwise_are_refused_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], what: str
) -> None:
    other = shutil.copytree(CHECKPOINT, tmp_path / "other")
    change(other)
    monkeypatch.setattr(EmbeddedPolicy, "start", lambda _: pytest.fail("an engine starts"))
    algorithm = lrl.PPO(policies={"one": {}, "two": {"actor_rollout_ref": {"model": {"path": str(other)}}}})
    message = f"policies.two.actor_rollout_ref.model.path: its {what} is another one than that of policies.one"
    with pytest.raises(ConfigError, match=message):
        algorithm.open(tmp_path)
    algorithm.close()
