"""Train the SQL agent: its data, a small model, and the hyperparameters that suit it.

Run it as `python examples/sql_agent/train.py`, or see the same with a summary by `lightning-rl quickstart`.
"""

from pathlib import Path

import lightning_rl as lrl
from sql_agent.agent import sql_agent
from sql_agent.data import make

HERE = Path(__file__).parent

CONFIG = {
    "data": {
        "train_batch_size": 16,
        "max_prompt_length": 256,
        "max_response_length": 48,
    },
    "actor_rollout_ref": {
        "model": {"path": str(HERE / "checkpoint")},
        "actor": {
            "ppo_mini_batch_size": 4,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.28,
            "optim": {"lr": 3e-4, "lr_warmup_steps": 5, "betas": [0.9, 0.95]},
        },
        "rollout": {
            "n": 16,
            "max_model_len": 320,
            "renderer": "qwen3",
            "val_kwargs": {"temperature": 1.0},
        },
    },
    "algorithm": {"rollout_correction": {"bypass_mode": True}},
    "trainer": {"total_training_steps": 80, "test_freq": 20},
}


def train(run_dir: Path, seed: int = 0, steps: int | None = None) -> lrl.PPO:
    """Train in `run_dir`; the algorithm with its `history` of metrics."""
    tasks = make(run_dir / "data")
    config = CONFIG | {"data": CONFIG["data"] | {"seed": seed}}
    if steps is not None:
        config |= {"trainer": CONFIG["trainer"] | {"total_training_steps": steps}}
    trainer = lrl.Trainer(sql_agent, n_runners=32, run_dir=run_dir)
    ppo = lrl.PPO(config)
    trainer.fit(ppo, tasks["train"], val_dataset=tasks["heldout"])
    return ppo


if __name__ == "__main__":
    train(Path("runs") / "sql_agent")
