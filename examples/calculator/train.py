"""Train the agent with the calculator: its sums, its model, and the hyperparameters that suit it.

Run it with `python -m examples.calculator.train`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning_rl as lrl

from .agent import MAX_TOKENS, calculator_agent
from .data import make
from .warm_start import LONGEST, make_model

CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 16, "max_prompt_length": LONGEST, "max_response_length": MAX_TOKENS},
    "actor_rollout_ref": {
        "actor": {"ppo_mini_batch_size": 8, "optim": {"lr": 3e-4, "lr_warmup_steps": 2, "betas": [0.9, 0.95]}},
        "rollout": {"n": 8, "max_model_len": LONGEST, "val_kwargs": {"temperature": 1.0}},
    },
    # Sampler and trainer agree to 1e-5 here, so the sampler's log probabilities serve as the old ones.
    "algorithm": {"rollout_correction": {"bypass_mode": True}},
}


def train(
    run_dir: Path,
    model: Path,
    *,
    agent: Any = calculator_agent,
    tasks: Mapping[str, Sequence[Any]] | None = None,
    steps: int = 25,
) -> lrl.PPO:
    """Train `agent` in `run_dir`, from `model`; the algorithm with its `history` of metrics."""
    tasks = tasks or make()
    actor_rollout_ref = {**CONFIG["actor_rollout_ref"], "model": {"path": str(model)}}
    ppo = lrl.PPO(
        {**CONFIG, "actor_rollout_ref": actor_rollout_ref, "trainer": {"total_training_steps": steps}},
    )
    lrl.Trainer(agent, run_dir=run_dir).fit(ppo, tasks["train"], val_dataset=tasks["heldout"])
    return ppo


if __name__ == "__main__":
    train(Path("runs") / "calculator", make_model(Path("runs") / "calculator_model"))
