"""A player learns against older versions of itself, and what it has learned shows against one that stays.

Both say a word at once, and the higher one wins. Against itself the player wins half of the games, at the beginning and
whenever its opponent has caught up; against the model that it began with it then wins nearly all.
"""

import copy
from pathlib import Path
from typing import Any

import pytest

import lightning_rl as lrl
from examples.describer_builder.agent import MAX_TOKENS, WHEEL
from examples.describer_builder.train import CONFIG, TASKS
from examples.describer_builder.warm_start import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.long]
STEPS = 24


@lrl.rollout
def duel(task: dict[str, str], player: lrl.LLM, opponent: lrl.LLM) -> float:
    def said(llm: lrl.LLM) -> int:
        messages: Any = [{"role": "user", "content": task["word"]}]
        answer = llm.openai().chat.completions.create(model=llm.model, messages=messages, max_tokens=MAX_TOKENS)
        word = (answer.choices[0].message.content or "").strip()
        return WHEEL.index(word) if word in WHEEL else -1

    own, other = said(player), said(opponent)
    return 0.5 if own == other else float(own > other)


def played(run_dir: Path, player: Path, opponent: Path, policies: dict[str, Any], **trainer: Any) -> lrl.PPO:
    config = copy.deepcopy(CONFIG)
    config["trainer"] |= trainer
    models = {"player": player, "opponent": opponent}
    for name, model in models.items():
        policies[name]["actor_rollout_ref"] = {"model": {"path": str(model)}}
    ppo = lrl.PPO(config, policies=policies)
    lrl.Trainer(duel, run_dir=run_dir).fit(ppo, TASKS, val_dataset=TASKS)
    return ppo


def test_a_player_that_learned_against_itself_beats_the_model_it_began_with(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    against_itself: dict[str, Any] = {
        "player": {},
        "opponent": {"checkpoints_of": "player", "pool": 2, "train_every": 4, "train_from": 5},
    }
    ppo = played(
        tmp_path / "run", model, model, against_itself, total_training_steps=STEPS, save_freq=2, test_freq=STEPS
    )
    rewards = [row["critic/score/mean"] for row in ppo.history if "critic/score/mean" in row]
    assert ppo.history[-1]["opponent/training/policy_version"] == 5  # times that it was exchanged
    assert max(rewards) > 0.65  # before its opponent caught up
    assert 0.4 < sum(rewards[-4:]) / 4 < 0.6  # since then
    frozen: dict[str, Any] = {"player": {}, "opponent": {"train_every": 0}}
    measured = played(tmp_path / "measured", tmp_path / "run" / "model" / "player", model, frozen, val_only=True)
    before, after = ppo.history[0]["val/reward"], measured.history[-1]["val/reward"]
    assert 0.4 < before < 0.6
    assert after > 0.75
