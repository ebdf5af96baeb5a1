"""Train the agent in `agent.sh`: the rollout is a child process that gets a URL, a key and a model's name.

Run it with `python -m examples.any_language.train`. It trains the tutorial's small model to count.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import lightning_rl as lrl

AGENT = Path(__file__).parent / "agent.sh"
TASKS = [{"question": f"cars: {c} id\nHow many cars are there?", "answer": "count"} for c in ("size", "color")] * 8


@lrl.rollout
def shell_agent(task: dict[str, str], llm: lrl.LLM) -> float:
    """1.0 where what the script prints holds the answer. A script that fails fails the rollout."""
    command = ["sh", str(AGENT), task["question"]]
    done = subprocess.run(
        command, env=os.environ | llm.env(), stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    return float(task["answer"] in done.stdout)


def train(run_dir: Path, *, tasks: Sequence[dict[str, str]] = TASKS, epochs: int = 8) -> lrl.PPO:
    """Train in `run_dir`, one step an epoch; the algorithm with its `history` of metrics."""
    ppo = lrl.PPO(
        {
            "data": {"train_batch_size": len(tasks)},
            "actor_rollout_ref": {"actor": {"optim": {"lr": 3e-4}}},
            "trainer": {"total_epochs": epochs},
        }
    )
    lrl.Trainer(shell_agent, run_dir=run_dir).fit(ppo, tasks)
    return ppo


if __name__ == "__main__":
    train(Path("runs") / "any_language")
