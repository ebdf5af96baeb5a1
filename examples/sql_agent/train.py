"""Train the SQL agent: its data, a small model, and the hyperparameters that suit it.

Run it with `python -m examples.sql_agent.train`; `lightning-rl quickstart` is the same, with a summary.
"""

from pathlib import Path
from typing import Any

import lightning_rl as lrl

from .agent import MAX_TOKENS, sql_agent
from .data import make

CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 16, "max_prompt_length": 256, "max_response_length": MAX_TOKENS},
    "actor_rollout_ref": {
        "model": {"path": str(Path(__file__).parent / "checkpoint")},
        "actor": {
            "ppo_mini_batch_size": 4,
            "ppo_max_token_len_per_gpu": 2048,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.28,
            "optim": {"lr": 3e-4, "lr_warmup_steps": 5, "betas": [0.9, 0.95]},
        },
        "rollout": {"n": 16, "max_model_len": 320, "val_kwargs": {"temperature": 1.0}},
    },
    # Sampler and trainer agree to 1e-5 here, so the sampler's log probabilities serve as the old ones.
    "algorithm": {"rollout_correction": {"bypass_mode": True}},
    "trainer": {"total_training_steps": 60, "test_freq": 10},
}


def train(run_dir: Path, *, seed: int = 0, steps: int | None = None, validate_on: str = "heldout") -> lrl.PPO:
    """Train in `run_dir`; the algorithm with its `history` of metrics. `validate_on`: `heldout` or `tuning`."""
    tasks = make(run_dir / "data")
    config = {**CONFIG, "data": {**CONFIG["data"], "seed": seed}}
    if steps is not None:
        config["trainer"] = {**CONFIG["trainer"], "total_training_steps": steps}
    ppo = lrl.PPO(config)
    lrl.Trainer(sql_agent, run_dir=run_dir).fit(ppo, tasks["train"], val_dataset=tasks[validate_on])
    return ppo


if __name__ == "__main__":
    train(Path("runs") / "sql_agent")
