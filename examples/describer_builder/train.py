"""Train both parts of the game: as two policies, as two adapters of one model, or, to compare, as one policy.

Run it with `python -m examples.describer_builder.train [two | adapters | one]`.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import lightning_rl as lrl

from .agent import MAX_TOKENS, WHEEL, one_model, two_models
from .warm_start import make_model

TASKS = [{"word": word} for word in WHEEL * 4]
STEPS = 40

CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": len(TASKS), "max_prompt_length": 64, "max_response_length": MAX_TOKENS},
    "actor_rollout_ref": {
        # The bonus keeps a part from settling on one word before the other part has learned anything.
        "actor": {
            "entropy_coeff": 0.03,
            "ppo_mini_batch_size": len(TASKS),
            "optim": {"lr": 5e-4, "betas": [0.9, 0.95]},
        },
        "rollout": {"n": 8, "max_model_len": 128, "val_kwargs": {"temperature": 1.0, "n": 4}},
    },
    "algorithm": {"rollout_correction": {"bypass_mode": True}},
    "trainer": {"total_training_steps": STEPS, "test_freq": 10},
}
ADAPTER = {"lora_rank": 8, "lora_alpha": 16}
ADAPTER_RATE = 4e-3
KINDS = ("two", "adapters", "one")


def algorithm(kind: str, model: Path, *, seed: int = 0, steps: int = STEPS) -> lrl.PPO:
    """PPO with a policy for each part, with an adapter for each, or with one policy."""
    config = copy.deepcopy(CONFIG)
    config["data"]["seed"] = seed
    config["trainer"]["total_training_steps"] = steps
    config["actor_rollout_ref"]["model"] = {"path": str(model)}
    if kind == "adapters":
        config["actor_rollout_ref"]["model"] |= ADAPTER
        config["actor_rollout_ref"]["actor"]["optim"]["lr"] = ADAPTER_RATE
    if kind == "one":
        config["algorithm"]["credit"] = {"strategy": "per_agent"}  # each part has its reward here, too
        return lrl.PPO(config)
    return lrl.PPO(config, policies={"describer": {}, "builder": {}})


def train(run_dir: Path, kind: str, model: Path, **given: Any) -> lrl.PPO:
    """Train in `run_dir`, from `model`; the algorithm with its `history` of metrics."""
    ppo = algorithm(kind, model, **given)
    lrl.Trainer(one_model if kind == "one" else two_models, run_dir=run_dir).fit(ppo, TASKS, val_dataset=TASKS)
    return ppo


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else KINDS[0]
    if asked not in KINDS:
        sys.exit(f"{asked!r} is none of {', '.join(KINDS)}")
    train(Path("runs") / f"describer_builder_{asked}", asked, make_model(Path("runs") / "describer_builder_model"))
