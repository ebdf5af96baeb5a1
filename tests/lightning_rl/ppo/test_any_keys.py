"""Keys that nobody has put together before: a run with them learns, and when it is stopped goes on to the end that it
would have had, bit by bit; or it is refused by a ConfigError before its first step."""

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

import lightning_rl as lrl
from lightning_rl.config import ConfigError, compose, keys
from lightning_rl.config.schema import Config
from lightning_rl.rl.kl import KINDS
from lightning_rl.rl.losses import LOSSES
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.training.optimizer import OptimizerRefused
from lightning_rl.trajectories.trajectory import Trajectory
from tests.lightning_rl.ppo.agents import two_calls
from tests.lightning_rl.ppo.test_ppo import CHECKPOINT
from tests.lightning_rl.ppo.test_ppo_resume import assert_same_end, stored

pytestmark = pytest.mark.e2e

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
ALWAYS = {
    "data.train_batch_size": 4,
    "data.max_response_length": 8,
    f"{MODEL}path": str(CHECKPOINT),
    f"{ROLLOUT}n": 2,
    f"{ROLLOUT}max_model_len": 128,
    "trainer.logger": ["jsonl"],
    "trainer.save_freq": 1,
    "trainer.total_epochs": 3,
    "trainer.total_training_steps": 3,
}
# Numbers and names; what is one of several words, or true and false, is found in the schema.
VALUES: dict[str, list[Any]] = {
    "data.train_batch_size": [1, 3],
    "data.max_prompt_length": [30, 60],
    f"{ROLLOUT}n": [1, 3],
    f"{ROLLOUT}temperature": [0.7],
    f"{ROLLOUT}top_k": [5],
    f"{ROLLOUT}max_num_seqs": [2],
    f"{ROLLOUT}agent.max_concurrent_rollouts": [1],
    f"{ROLLOUT}val_kwargs.n": [2],
    f"{MODEL}lora_rank": [4],
    f"{ACTOR}ppo_mini_batch_size": [1, 2],
    f"{ACTOR}ppo_micro_batch_size_per_gpu": [1],
    f"{ACTOR}ppo_max_token_len_per_gpu": [64],
    f"{ACTOR}ppo_epochs": [2],
    f"{ACTOR}policy_loss.loss_mode": list(LOSSES),
    f"{ACTOR}policy_loss.dro_beta": [0.1],
    f"{ACTOR}kl_loss_type": [*KINDS, "k3+"],
    f"{ACTOR}optim.optimizer": ["SGD", "Adafactor", "Muon", "RMSprop"],
    f"{ACTOR}optim.lr_warmup_steps": [1],
    "critic.ppo_mini_batch_size": [2],
    "critic.optim.optimizer": ["SGD", "Adafactor"],
    "algorithm.gamma": [0.5],
    "algorithm.kl_penalty": list(KINDS),
    "algorithm.min_successful_rollouts": [2],
    "algorithm.filter_groups.max_num_gen_batches": [2],
    "algorithm.rollout_correction.rollout_rs": ["token_k1", "seq_mean_k3"],
    "algorithm.rollout_correction.rollout_rs_threshold": [2.0],
    "trainer.max_off_policy_threshold": [0, 2],
    "trainer.critic_warmup": [1],
    "trainer.test_freq": [1],
    "trainer.max_actor_ckpt_to_keep": [1],
}
# What needs another program, a GPU, files or a second model, or does something else than to train.
NOT_HERE = (
    "distillation", "gateway.", "reward.judge", "reward.reward_model", "sft.", "trainer.device", "trainer.memory_check",
    "trainer.resume_mode", "trainer.val_only", f"{MODEL}load_in_4bit", f"{ROLLOUT}enforce_eager", f"{ROLLOUT}name",
    f"{ROLLOUT}trace", f"{ROLLOUT}weight_transfer", f"{ROLLOUT}multi_turn",
)  # fmt: skip


def _words(annotation: Any) -> Iterator[Any]:
    """The values of a type that is one of several words, or true and false."""
    if annotation is bool:
        yield from (True, False)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is not list:
        for part in get_args(annotation):
            yield from _words(part)


def _choices() -> dict[str, list[Any]]:
    found = dict(VALUES)
    for key in keys(Config):
        if key.kind == "effect" and not key.name.startswith(NOT_HERE) and key.name not in found:
            found[key.name] = [value for value in _words(key.type) if value not in (key.default, "flash_attention_2")]
    return {name: values for name, values in found.items() if values}


class Stopped(Exception):
    """As a run is by whatever ends its process."""


class StoppedPPO(lrl.PPO):
    """It stops in its last step, when that has sampled and has not learned yet."""

    def on_sample_end(self, trajectories: Sequence[Trajectory]) -> None:
        if self.step == 3:
            raise Stopped


def _run(run_dir: Path, given: dict[str, Any], algorithm: type[lrl.PPO] = lrl.PPO) -> None:
    """Train with these keys."""
    words = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in given.items()]
    trainer = lrl.Trainer(two_calls, n_runners=4, run_dir=run_dir)
    trainer.fit(algorithm(compose(command_line=words)), list(range(8)), list(range(2)))


def _assert_same_end_without_a_stop(run_dir: Path, given: dict[str, Any], unbroken: Path) -> None:
    """A run that does not stop, over what this one has sampled."""
    unbroken.mkdir()
    for name in ("store.db", "run.id"):
        shutil.copy(run_dir / name, unbroken)
    _run(unbroken, given)
    assert stored(unbroken) == stored(run_dir)
    assert_same_end(run_dir, unbroken, steps=3)


# The pass that compares the first batch of a session with its sampler is cut otherwise than its update.
CUT_OTHERWISE = {"algorithm.groups_without_variance": "drop", f"{ROLLOUT}log_prob_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.smoke),
        *range(1, 8),
        pytest.param(CUT_OTHERWISE, marks=pytest.mark.smoke, id="cut otherwise"),
    ],
)
@pytest.mark.long
def test_a_run_with_any_keys_learns_and_goes_on_or_is_refused_by_name(
    seed: int | dict[str, Any], tmp_path: Path
) -> None:
    chance, choices = random.Random(seed if isinstance(seed, int) else 0), _choices()
    run_dir = tmp_path / "run"
    while True:
        sample = chance.sample(sorted(choices), 8)
        drawn = {name: chance.choice(choices[name]) for name in sample} if isinstance(seed, int) else seed
        print(drawn)
        try:
            with pytest.raises(Stopped):
                _run(run_dir, ALWAYS | drawn, StoppedPPO)
            break
        except (ConfigError, OptimizerRefused) as refusal:
            print(refusal)
            assert not list(run_dir.glob("checkpoints/*"))
    given = ALWAYS | drawn | {"trainer.resume_mode": "auto"}
    _run(run_dir, given)
    assert {row["step"] for row in read(run_dir / "metrics.jsonl")} - {0} == {1, 2, 3}
    if drawn.get("trainer.schedule", "sync") == "sync":  # the others take groups in the order in which they end
        _assert_same_end_without_a_stop(run_dir, given, tmp_path / "unbroken")
