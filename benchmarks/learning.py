"""Do the algorithms learn? The SQL agent under each of them, with and without LoRA, over several seeds.

    python benchmarks/learning.py --seeds 0 1 2 --steps 24 --out runs/benchmark-learning

Each run is a process of its own and leaves `<method>/seed-<n>/metrics.jsonl`; runs that are already there are not done
again. Prints a table of held-out accuracy by step (mean over seeds, and the range at the end) and draws
`learning.png`. `--only` names methods; with `--list` they are printed. Those that begin with `teacher` are drawn to the
model that `grpo` makes in 60 steps, which is trained first where it is not there (`teacher/`).

Those that begin with `hinted` train another student (`student/`): the tutorial's model after some supervised steps, in
half of which the right query stands in the prompt. It has learned to read one there; without one it is right about as
often as before. Of them `hinted-grpo` has rewards; `hinted-self-...` are taught by the student itself, which is told
the right query: no reward counts.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from omegaconf import OmegaConf

from lightning_rl.config import compose
from lightning_rl.ppo.privileged import TaughtCall
from lightning_rl.ppo_algorithm import PPO
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl_adapters.rows import Row

LORA = {
    "actor_rollout_ref": {
        "model": {"lora_rank": 16, "lora_alpha": 32},
        "actor": {"optim": {"lr": 1e-3}},
    }
}
CRITIC = {
    "algorithm": {"adv_estimator": "gae", "lam": 0.95},
    "critic": {"optim": {"lr": 1e-3}, "ppo_mini_batch_size": 4},
    "trainer": {"critic_warmup": 2},
}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": CRITIC,
    "rloo": {"algorithm": {"adv_estimator": "rloo"}},
    "reinforce_plus_plus": {"algorithm": {"adv_estimator": "reinforce_plus_plus"}},
}
METHODS |= {f"{name}-lora": {**changes, **LORA} for name, changes in METHODS.items()}
DENSE = {"actor_rollout_ref": {"model": {"use_remove_padding": False}}}
METHODS |= {"grpo-forest_rows": DENSE, "grpo-row_per_call": DENSE}
ALONE = {"use_task_rewards": False}
DISTILLED = {
    "teacher": ALONE,  # by the sampled token, as a policy gradient
    "teacher-reverse_kl_tail": {"loss_mode": "reverse_kl_tail", "use_policy_gradient": False, **ALONE},
    "teacher-forward_kl_tail": {"loss_mode": "forward_kl_tail", "use_policy_gradient": False, **ALONE},
    "teacher-and-rewards": {},
}
METHODS |= {name: {"distillation": {"enabled": True, "distillation_loss": loss}} for name, loss in DISTILLED.items()}
TEACHER_STEPS = 60
OWN_WEIGHTS = ("initial", "averaged", "present")
HINTED = {f"hinted-self-{weights}": (weights, ALONE) for weights in OWN_WEIGHTS}
HINTED["hinted-self-jsd"] = ("initial", {"loss_mode": "jsd_tail", "use_policy_gradient": False, **ALONE})
METHODS |= {"hinted-grpo": {}}
METHODS |= {
    name: {
        "distillation": {
            "enabled": True, "teacher_models": {"itself": {"weights": weights}}, "distillation_loss": loss,
            "privileged": f"{__file__}:hint",
        }
    }
    for name, (weights, loss) in HINTED.items()
}  # fmt: skip
STUDENT_STEPS = 150


class RowPerCall(PPO):
    """Trains every call on a row of its own, as trainers do that know no forest: what stands before it is repeated."""

    def on_sample_end(self, trajectories: Sequence[Trajectory]) -> None:
        """See `PPO`."""
        for trajectory in trajectories:
            trajectory.rows[:] = [own for row in trajectory.rows for own in per_call(row)]


def per_call(row: Row) -> list[Row]:
    """One row for each call that `row` trains: cut after its last token, with its mask alone."""
    found = []
    for call_id in dict.fromkeys(call for call in row.call_ids if call is not None):
        own = [call == call_id for call in row.call_ids]
        end = len(own) - own[::-1].index(True)
        found.append(
            Row(
                token_ids=row.token_ids[:end],
                loss_mask=[int(mask and here) for mask, here in zip(row.loss_mask, own, strict=True)][:end],
                logprobs=[value if here else None for value, here in zip(row.logprobs, own, strict=True)][:end],
                rewards=[value if here else 0.0 for value, here in zip(row.rewards, own, strict=True)][:end],
                policy_versions=[v if here else None for v, here in zip(row.policy_versions, own, strict=True)][:end],
                call_ids=[call if here else None for call, here in zip(row.call_ids, own, strict=True)][:end],
                model=row.model,
                temperature=row.temperature[:end],
                excluded=row.excluded,
                excluded_calls=row.excluded_calls,
            )
        )
    return found


def hint(call: TaughtCall) -> str:
    """What a student is told that is its own teacher: the right query."""
    return hinted(call.task["gold"])


def hinted(gold: str) -> str:
    """The end of a prompt in which the right query stands."""
    return f"right: {gold}"


def make_student(folder: Path) -> None:
    """Train the tutorial's model on its teacher's conversations, and on as many in which the right query is told."""
    import random

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.sql_agent import warm_start
    from examples.sql_agent.agent import solve
    from examples.sql_agent.data import write_set
    from lightning_rl.tutorial import checkpoint

    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    renderer = warm_start.make_renderer(tokenizer)
    rng = random.Random(0)
    examples = []
    for task in write_set(folder.parent / "student-data", "demonstrations", 4_000_000, 700, 18):
        as_ever = solve(task, warm_start.teacher(rng, task["gold"]))[1]
        gold = task["gold"]
        told = solve(task, lambda messages, gold=gold: gold if len(messages) == 1 else "done")[1]
        told[0]["content"] += f"\n\n{hinted(gold)}"
        examples += [warm_start.encode(renderer, tokenizer, messages) for messages in (as_ever, told)]
    model = AutoModelForCausalLM.from_pretrained(checkpoint(), dtype="float32")
    warm_start.train(model, examples, tokenizer.pad_token_id, STUDENT_STEPS, 1e-3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_bytes((checkpoint() / "tokenizer_config.json").read_bytes())


def train(method: str, seed: int, steps: int, folder: Path) -> None:
    """One run, in this process."""
    import lightning_rl as lrl
    from examples.sql_agent.agent import sql_agent
    from examples.sql_agent.data import make
    from examples.sql_agent.train import CONFIG

    own = {
        "data": {"seed": seed},
        "trainer": {"total_training_steps": steps, "test_freq": 6, "logger": ["jsonl"]},
    }
    if method in DISTILLED:
        own["distillation"] = {"teacher_models": {"trained": {"model_path": str(folder.parents[1] / "teacher/model")}}}
    if method.startswith("hinted"):
        own["actor_rollout_ref"] = {"model": {"path": str(folder.parents[1] / "student")}}
    config = compose(OmegaConf.merge(CONFIG, METHODS[method], own))
    algorithm = (RowPerCall if method.endswith("row_per_call") else lrl.PPO)(config)
    tasks = make(folder / "data")
    lrl.Trainer(sql_agent, n_runners=32, run_dir=folder).fit(algorithm, tasks["train"], val_dataset=tasks["heldout"])


def run(method: str, seed: int, steps: int, out: Path) -> list[dict[str, float]]:
    """The metrics of one run, which is done in a process of its own where it is not there yet."""
    folder = out / method / f"seed-{seed}"
    if not (folder / "seconds.json").exists():
        started = time.monotonic()
        in_process(method, seed, steps, folder)
        (folder / "seconds.json").write_text(json.dumps(time.monotonic() - started))
    return read(folder / "metrics.jsonl")


def in_process(method: str, seed: int, steps: int, folder: Path) -> None:
    """One run, in a process of its own."""
    words = [sys.executable, __file__, "--steps", str(steps), "--run", json.dumps([method, seed, str(folder)])]
    root = str(Path(__file__).parents[1])
    subprocess.run(words, check=True, env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "2"})


def curve(history: list[dict[str, float]]) -> dict[int, float]:
    """Held-out accuracy by step."""
    return {int(row["step"]): row["val/reward"] for row in history if "val/reward" in row}


def draw(curves: dict[str, list[dict[int, float]]], path: Path) -> None:
    """The mean over seeds by step, one line a method, their range shaded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for method, of_seeds in curves.items():
        steps = sorted(of_seeds[0])
        low, high = ([pick(one[step] for one in of_seeds) for step in steps] for pick in (min, max))
        [line] = axes.plot(steps, [fmean(one[step] for one in of_seeds) for step in steps], label=method)
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12)
    axes.set(xlabel="step", ylabel="held-out accuracy, sampled", ylim=(0.4, 1.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Run what is asked for, print the table, draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("runs") / "benchmark-learning")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(METHODS))
        return
    if arguments.run:
        method, seed, folder = json.loads(arguments.run)
        train(method, seed, arguments.steps, Path(folder))
        return
    if DISTILLED.keys() & set(arguments.only) and not (arguments.out / "teacher" / "model").exists():
        in_process("grpo", 100, TEACHER_STEPS, arguments.out / "teacher")
    student = arguments.out / "student"
    if any(method.startswith("hinted") for method in arguments.only) and not (student / "config.json").exists():
        student.parent.mkdir(parents=True, exist_ok=True)
        make_student(student)
    histories: dict[str, list[list[dict[str, float]]]] = {method: [] for method in arguments.only}
    for seed in arguments.seeds:  # seeds outside, so that methods that are compared ran at about the same time
        for method in arguments.only:
            histories[method].append(run(method, seed, arguments.steps, arguments.out))
    curves = {method: [curve(history) for history in of_seeds] for method, of_seeds in histories.items()}
    draw(curves, arguments.out / "learning.png")
    steps = sorted(next(iter(curves.values()))[0])
    print(f"| method | {' | '.join(map(str, steps))} | last, by seed | s a step |\n|{'---|' * (len(steps) + 3)}")
    for method, of_seeds in curves.items():
        means = " | ".join(f"{fmean(one[step] for one in of_seeds):.3f}" for step in steps)
        last = ", ".join(f"{one[steps[-1]]:.3f}" for one in of_seeds)
        seconds = median(row["timing_s/step"] for one in histories[method] for row in one if "timing_s/step" in row)
        print(f"| {method} | {means} | {last} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
