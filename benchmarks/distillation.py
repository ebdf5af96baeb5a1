"""A model that hardly ever succeeds: what teaches it most in the same time? The SQL agent, on two CPU cores.

    python benchmarks/distillation.py --seconds 120 --seeds 0 1 2 --out runs/benchmark-distillation

The student (`student/`) is the tutorial's model after some supervised steps on answers to other questions: it writes
SQL, and is right by chance. In half of these steps the right query stood in the prompt, so it can read one there. The
teacher (`teacher/`) is what the tutorial makes of it in 60 steps. Both are made first, and count for nothing.

Each method has `--seconds` of wall clock for all that it does, starts of processes and the teacher's rollouts included,
in a process of its own. Then the agent answers the held-out questions with what it has made, sampled at temperature 1.
What is there already is not run again. Prints a table: held-out accuracy by seed, and what each did in its time. Draws
`distillation.png`: the share of right training rollouts over the seconds, and the held-out accuracy at the end.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from omegaconf import OmegaConf

import lightning_rl as lrl
from benchmarks.learning import hinted
from examples.sql_agent import warm_start
from examples.sql_agent.agent import solve, sql_agent
from examples.sql_agent.data import make, write_set
from examples.sql_agent.train import CONFIG, train
from lightning_rl.config import compose
from lightning_rl.ppo.privileged import TaughtCall
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.training import checkpoint
from lightning_rl.tutorial import checkpoint as tutorial_checkpoint

STUDENT_STEPS = 120
RUNNERS = 32
LOADING_SECONDS = 4.0  # of a model and traces, before the first supervised step
ALONE = {"use_task_rewards": False}
# What is not a teacher's is a share of the time: the teacher's rollouts, then supervised training, then rewards.
SUPERVISED: dict[str, tuple[float, float]] = {"sft": (0.5, 1.0), "sft, then rewards": (0.25, 0.5)}
DISTILLED: dict[str, dict[str, Any]] = {
    "distillation, k1 as a policy gradient": ALONE,
    "distillation, reverse_kl_tail": {"loss_mode": "reverse_kl_tail", "use_policy_gradient": False, **ALONE},
}
ITSELF = "self-distillation, told the right query"
BEGAN = "began"  # in a method's folder: when, in seconds of the clock
METHODS = ("rewards", *SUPERVISED, *DISTILLED, ITSELF)


class TimeIsUp(Exception):
    """Ends a run."""


class Timed(lrl.PPO):
    """PPO that ends when its time is up, `ends` by the clock of `time.monotonic`. The last checkpoint is of the step
    before."""

    ends = 0.0

    def on_step_end(self, metrics: dict[str, float]) -> None:
        """See `PPO`."""
        if time.monotonic() > self.ends and self.step > 1:
            raise TimeIsUp


def hint(call: TaughtCall) -> str:
    """What a student is told that is its own teacher: the right query."""
    return hinted(call.task["gold"])


def make_student(folder: Path) -> None:
    """Supervised steps on conversations about other questions, and on as many in which the right query is told."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tutorial_checkpoint())
    renderer = warm_start.make_renderer(tokenizer)
    rng = random.Random(0)
    examples = []
    tasks = write_set(folder.parent / "student-data", "demonstrations", 4_000_000, 200, 18)
    for task in tasks:
        other = solve(task, warm_start.teacher(rng, task["gold"]))[1]
        asked = rng.choice(tasks)
        other[0]["content"] = f"{asked['schema']}\n{asked['question']}"
        told = solve(task, lambda messages, gold=task["gold"]: gold if len(messages) == 1 else "done")[1]
        told[0]["content"] += f"\n\n{hinted(task['gold'])}"
        examples += [warm_start.encode(renderer, tokenizer, messages) for messages in (other, told)]
    model = AutoModelForCausalLM.from_pretrained(tutorial_checkpoint(), dtype="float32")
    warm_start.train(model, examples, tokenizer.pad_token_id, STUDENT_STEPS, 1e-3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_bytes((tutorial_checkpoint() / "tokenizer_config.json").read_bytes())


def learn(method: str, seed: int, folder: Path, seconds: float) -> tuple[Path, str]:
    """The folder of the model that a method has made in its time, and what it did."""
    began = time.monotonic()
    out = folder.parents[1]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BEGAN).write_text(str(time.time()))
    student, did = out / "student", []
    tasks = make(out / "data")
    teacher = out / "teacher" / "model"
    if method in SUPERVISED:
        shares = SUPERVISED[method]
        student, rollouts, steps = imitated(tasks["train"], student, teacher, folder, seed, seconds, shares)
        did.append(f"{rollouts} rollouts of the teacher, {steps} supervised steps")
        if shares[1] == 1.0:
            return student, did[0]
    own: dict[str, Any] = {
        "data": {"seed": seed},
        "actor_rollout_ref": {"model": {"path": str(student)}},
        "trainer": {"total_training_steps": 10_000, "test_freq": -1, "save_freq": 1, "logger": ["jsonl"]},
    }
    if method in DISTILLED:
        own["distillation"] = {
            "enabled": True,
            "teacher_models": {"trained": {"model_path": str(teacher)}},
            "distillation_loss": DISTILLED[method],
        }
    if method == ITSELF:
        own["distillation"] = {
            "enabled": True,
            "teacher_models": {"itself": {"weights": "initial"}},
            "distillation_loss": ALONE,
            "privileged": f"{__file__}:hint",
        }
    ppo = Timed(compose(OmegaConf.merge(CONFIG, own)))
    ppo.ends = began + seconds
    with contextlib.suppress(TimeIsUp):
        lrl.Trainer(sql_agent, n_runners=RUNNERS, run_dir=folder / "ppo").fit(ppo, tasks["train"])
    made = checkpoint.latest(folder / "ppo" / "checkpoints")
    assert made is not None
    return made, ", ".join([*did, f"{ppo.step} steps of PPO"])


def imitated(
    tasks: list[Any], student: Path, teacher: Path, folder: Path, seed: int, seconds: float, shares: tuple[float, float]
) -> tuple[Path, int, int]:
    """A model trained on the teacher's right answers until its share of the time is over; with how many rollouts the
    teacher made in its share before, and how many steps were made."""
    began = time.monotonic()
    random.Random(seed).shuffle(tasks)

    class Answers(lrl.Baseline):
        """The teacher's rollouts, as many as its time allows."""

        def run(self, train_dataset: Any, val_dataset: Any) -> None:
            self.made = 0
            while time.monotonic() - began < shares[0] * seconds:
                self.made += len(self.roll_out(f"teacher-{self.made}", train_dataset[self.made : self.made + 256]))

    answers = Answers(teacher)
    lrl.Trainer(sql_agent, n_runners=RUNNERS, run_dir=folder / "teacher").fit(answers, tasks)
    traces = folder / "teacher"
    seen = supervised(student, traces, folder / "timed", seed, 4)
    a_step = median(row["timing_s/step"] for row in seen.history if "timing_s/step" in row)
    left = began + shares[1] * seconds - time.monotonic() - LOADING_SECONDS
    steps = max(1, int(left / a_step))
    supervised(student, traces, folder / "sft", seed, steps)
    return folder / "sft" / "model", answers.made, steps


def supervised(student: Path, traces: Path, folder: Path, seed: int, steps: int) -> lrl.SFT:
    """So many supervised steps on the right rollouts of a run."""
    config = {
        "data": {"train_batch_size": 64, "max_prompt_length": 256, "max_response_length": 48, "seed": seed},
        "actor_rollout_ref": {
            "model": {"path": str(student)},
            "actor": {"optim": {"lr": 1e-3, "lr_scheduler_type": "cosine"}},
        },
        "sft": {"mode": "val", "min_reward": 1.0},
        "trainer": {"total_training_steps": steps, "logger": ["jsonl"], "save_freq": -1, "test_freq": -1},
    }
    sft = lrl.SFT(config, traces=traces)
    sft.fit(folder)
    return sft


def judged(model: Path, folder: Path) -> dict[str, float]:
    """Held-out accuracy, with its 95 % confidence interval."""
    baseline = lrl.Baseline(model, sampling_parameters={"temperature": 1.0}, renderer="qwen3")
    heldout = make(folder.parents[1] / "data")["heldout"]
    lrl.Trainer(sql_agent, n_runners=RUNNERS, run_dir=folder / "judged").fit(baseline, heldout)
    [found] = baseline.evaluations
    return {"accuracy": found.mean, "low": found.low, "high": found.high}


def curve(folder: Path) -> tuple[list[float], list[float]]:
    """Seconds since a method began, and the share of right rollouts of the step that ended then; of SFT nothing."""
    began = float((folder / BEGAN).read_text())
    if not (metrics := folder / "ppo" / "metrics.jsonl").exists():
        return [], []
    rows = [row for row in read(metrics) if "critic/score/mean" in row]
    return [row["time"] - began for row in rows], [row["critic/score/mean"] for row in rows]


def draw(found: dict[str, list[dict[str, Any]]], out: Path, seeds: Sequence[int], seconds: float) -> None:
    """Write `distillation.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for method, of_seeds in found.items():
        held_out = [one["accuracy"] for one in of_seeds]
        points = axes.scatter([seconds] * len(held_out), held_out, label=method, zorder=3, clip_on=False)
        for seed in seeds:
            axes.plot(*curve(folder_of(method, seed, out)), color=points.get_facecolor()[0], alpha=0.5, linewidth=1)
    axes.set(
        xlabel="seconds", ylabel="right: rollouts of a step (lines), held-out (points)", ylim=(0, 1), xlim=(0, seconds)
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "distillation.png")


def folder_of(method: str, seed: int, out: Path) -> Path:
    """Where a run of a method is kept."""
    return out / method.replace(", ", "-").replace(" ", "_") / f"seed-{seed}"


def main() -> None:
    """Make teacher and student, run what is not there, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("runs") / "benchmark-distillation")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if arguments.run:
        method, seed, place = json.loads(arguments.run)
        folder = Path(place)
        model, did = learn(method, seed, folder, arguments.seconds)
        (folder / "found.json").write_text(json.dumps({**judged(model, folder), "did": did}))
        return
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "teacher" / "model").exists():
        train(out / "teacher")
    if not (out / "student" / "config.json").exists():
        make_student(out / "student")
    begins = out / "student-judged" / "0"
    if not (begins / "found.json").exists():
        (begins).mkdir(parents=True, exist_ok=True)
        (begins / "found.json").write_text(json.dumps(judged(out / "student", begins)))
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in arguments.only}
    for seed in arguments.seeds:  # seeds outside, so that methods that are compared ran at about the same time
        for method in arguments.only:
            folder = folder_of(method, seed, out)
            if not (folder / "found.json").exists():
                words = [sys.executable, __file__, "--seconds", str(arguments.seconds)]
                words += ["--run", json.dumps([method, seed, str(folder)])]
                root = str(Path(__file__).parents[1])
                subprocess.run(words, check=True, env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "2"})
            found[method].append(json.loads((folder / "found.json").read_text()))
    draw(found, out, arguments.seeds, arguments.seconds)
    before = json.loads((begins / "found.json").read_text())
    print(f"the student: {before['accuracy']:.3f} ({before['low']:.3f} to {before['high']:.3f})")
    print("| method | held-out accuracy | by seed | in its time |\n|---|---|---|---|")
    for method, of_seeds in found.items():
        accuracies = [one["accuracy"] for one in of_seeds]
        by_seed = ", ".join(f"{one:.3f}" for one in accuracies)
        print(f"| {method} | {fmean(accuracies):.3f} | {by_seed} | {of_seeds[-1]['did']} |")


if __name__ == "__main__":
    main()
