"""How much time do the schedules save where few rollouts take long, and what does it cost? An agent with a slow tool.

    python benchmarks/schedules.py --seeds 0 1 2 --steps 10 --out runs/benchmark-schedules

Before its second call the SQL agent waits, mostly next to nothing and sometimes for seconds (a Lomax distribution, cut
at `--longest`); how long is settled by the rollout's id, so it is the same in every schedule. Every schedule makes the
same number of updates. Prints the seconds of all steps, validation left out, as a share of those of `sync`, the
held-out accuracy after the last step, and the staleness of what was trained.
"""

import argparse
import random
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning_rl as lrl
from examples.sql_agent.agent import MAX_TOKENS, Message, _client, solve
from examples.sql_agent.data import make
from examples.sql_agent.train import CONFIG
from lightning_rl.config import compose
from lightning_rl.telemetry.metrics.jsonl import read

SCHEDULES = ("sync", "one_step_off", "async")
TASKS, N = 8, 4


def wait_of(rollout_id: str, longest: float) -> float:
    """Seconds: the median is 0.3, one in ten is above 2.5, one in 20 above 5."""
    return float(min(longest, 0.4 * (random.Random(rollout_id).random() ** (-1 / 1.15) - 1)))


def agent_that_waits(longest: float) -> Any:
    """The SQL agent, whose first query takes its time in training."""

    @lrl.rollout
    def waits(task: dict[str, str], llm: lrl.LLM, rollout: Any) -> float:
        client = _client().with_options(base_url=llm.base_url, api_key=llm.api_key)

        def chat(messages: list[Message]) -> str:
            if len(messages) == 3 and rollout.mode == "train":
                time.sleep(wait_of(rollout.rollout_id, longest))
            given: Any = messages
            answer = client.chat.completions.create(model=llm.model, messages=given, max_tokens=MAX_TOKENS)
            return answer.choices[0].message.content or ""

        return solve(task, chat)[0]

    return waits


def train(schedule: str, seed: int, steps: int, longest: float, folder: Path) -> dict[str, float]:
    """One run: the seconds of its steps, its accuracy, its mean and largest staleness."""
    if not (folder / "metrics.jsonl").exists():
        given = {
            "data": {**CONFIG["data"], "train_batch_size": TASKS, "seed": seed},
            "actor_rollout_ref": {
                **CONFIG["actor_rollout_ref"],
                "actor": {**CONFIG["actor_rollout_ref"]["actor"], "optim": {"lr": 6e-4, "betas": [0.9, 0.95]}},
                "rollout": {**CONFIG["actor_rollout_ref"]["rollout"], "n": N},
            },
            "trainer": {
                "schedule": schedule,
                "total_training_steps": steps,
                "val_before_train": False,
                "logger": ["jsonl"],
            },
        }
        tasks = make(folder / "data")
        trainer = lrl.Trainer(agent_that_waits(longest), n_runners=5 * TASKS * N, run_dir=folder)
        trainer.fit(lrl.PPO(compose(given)), tasks["train"], val_dataset=tasks["heldout"])
    rows = read(folder / "metrics.jsonl")
    return {
        "seconds": sum(row["timing_s/step"] for row in rows),
        "waiting": sum(row["timing_s/gen"] for row in rows),
        "accuracy": rows[-1]["val/reward"],
        "staleness": fmean(row["training/staleness/mean"] for row in rows),
        "oldest": max(row["training/staleness/max"] for row in rows),
        "stale": sum(row.get("schedule/groups_stale", 0.0) for row in rows),
    }


def main() -> None:
    """Run, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--longest", type=float, default=6.0, help="seconds that the tool takes at most")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-schedules"))
    asked = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in SCHEDULES}
    for seed in asked.seeds:
        for schedule in SCHEDULES:
            folder = asked.out / schedule / f"seed-{seed}"
            found[schedule].append(train(schedule, seed, asked.steps, asked.longest, folder))
            print(schedule, seed, {name: round(value, 3) for name, value in found[schedule][-1].items()}, flush=True)
    print(
        "| schedule | time, share of sync | waiting, share of time | accuracy | staleness: mean, max | stale groups |"
    )
    print("|---|---|---|---|---|---|")
    for schedule, runs in found.items():
        shares = [run["seconds"] / sync["seconds"] for run, sync in zip(runs, found["sync"], strict=True)]
        waits = fmean(run["waiting"] / run["seconds"] for run in runs)
        accuracies = ", ".join(f"{run['accuracy']:.3f}" for run in runs)
        print(
            f"| `{schedule}` | {fmean(shares):.2f} ({min(shares):.2f} to {max(shares):.2f}) | {waits:.2f} | "
            f"{fmean(run['accuracy'] for run in runs):.3f} ({accuracies}) | "
            f"{fmean(run['staleness'] for run in runs):.2f}, {max(run['oldest'] for run in runs):.0f} | "
            f"{sum(run['stale'] for run in runs):.0f} |"
        )


if __name__ == "__main__":
    main()
