"""A whole training job beside TRL's: seconds and CPU of a step, and what is learned, as users write it.

    python benchmarks/beside_trl.py [--trl PYTHON] [--seeds 3] [--hidden 128] [--num-threads 1]
                                    [--isolation process]

TRL lives in an environment of its own, made once:

    python -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0 torch==2.13.0 transformers==5.23.0

and then `--trl /tmp/trl/bin/python`; without it ours alone is measured. Both train the same new model, in float32, on
the same prompts: a step is 16 prompts x 8 answers of at most 32 tokens, one update of all of them with the same Adam,
and no KL. The reward is the share of vowels among an answer's letters, which every random model can learn. Ours is
README's script: agents in runner processes ask the gateway by `llm.openai()`, and everything is recorded; its engine
has `--num-threads` cores, and with `--isolation process` each rollout a process of its own. TRL's is `GRPOTrainer` with
`model.generate`, which its documentation begins with.

CPU is that of the process and all those that it started. A step's costs are the median from the second step on; the
start is everything before the first step has ended. Ways take turns; nothing asserts a time.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "sql_agent" / "checkpoint"
PROMPTS, ANSWERS, TOKENS = 16, 8, 32
LEARNING_RATE = 3e-3
QUESTIONS = [f"cars: {a} {b}\nHow many {b} are there?" for a in ("size", "color", "city", "price") for b in
             ("books", "shops", "names", "years")]  # fmt: skip


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """A new model with the tutorial's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    known = Qwen2Config.from_pretrained(EXAMPLE)
    config = Qwen2Config(
        vocab_size=known.vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
        bos_token_id=known.bos_token_id,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", flush=True)


def score(text: str) -> float:
    """The share of vowels among the letters."""
    letters = [each for each in text.lower() if each.isalpha()]
    return sum(each in "aeiou" for each in letters) / len(letters) if letters else 0.0


class Meter:
    """Writes a line a step: seconds and CPU seconds since the process began, and the reward."""

    def __init__(self, began: float) -> None:
        self._began = began

    def step(self, reward: float) -> None:
        line = {"seconds": time.time() - self._began, "cpu": cpu_of_tree(), "reward": reward}
        print("STEP " + json.dumps(line), flush=True)


def cpu_of_tree() -> float:
    """CPU seconds of this process and of all that it started, those that ended too."""
    import psutil

    this = psutil.Process()
    used = 0.0
    for each in [this, *this.children(recursive=True)]:
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        used += times.user + times.system + times.children_user + times.children_system
    return used


def ours(model: Path, folder: Path, seed: int, steps: int, began: float, given: argparse.Namespace) -> None:
    """README's script."""
    import lightning_rl as lrl

    meter = Meter(began)

    class Metered(lrl.PPO):
        def on_step_end(self, metrics: dict[str, float]) -> None:
            meter.step(metrics["critic/score/mean"])

    config = {
        "data": {"train_batch_size": PROMPTS, "max_response_length": TOKENS, "seed": seed},
        "actor_rollout_ref": {
            "model": {"path": str(model)},
            "actor": {"optim": {"lr": LEARNING_RATE}},
            "rollout": {"n": ANSWERS, "num_threads": given.num_threads},
        },
        "trainer": {"total_training_steps": steps, "total_epochs": steps},
    }
    lrl.Trainer(agent, run_dir=folder, isolation=given.isolation).fit(
        Metered(config), [{"question": each} for each in QUESTIONS]
    )


def agent(task: Any, llm: Any) -> float:
    """One call."""
    chat = [{"role": "user", "content": task["question"]}]
    answer = llm.openai().chat.completions.create(model=llm.model, messages=chat)
    return score(answer.choices[0].message.content or "")


def trl(model: Path, folder: Path, seed: int, steps: int, began: float) -> None:
    """TRL's GRPO trainer."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    meter = Meter(began)
    rewards: list[float] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        given = [score(each[0]["content"]) for each in completions]
        rewards.append(fmean(given))
        return given

    class Metered(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.step(rewards[-1])

    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=PROMPTS * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=TOKENS,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": each}]} for each in QUESTIONS]),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Metered()],
    )
    trainer.train()


def run(way: str, python: str, model: Path, seed: int, given: argparse.Namespace) -> list[dict[str, float]]:
    """The steps of one job."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, __file__, "--way", way, "--model", str(model), "--folder", folder, "--seed", str(seed)]
        command += ["--steps", str(given.steps), "--began", str(time.time()), "--isolation", given.isolation]
        command += [] if given.num_threads is None else ["--num-threads", str(given.num_threads)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("STEP ")]


def main() -> None:
    """Let the ways take turns, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl", help="the Python of an environment with TRL")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--num-threads", type=int, help="cores of our engine")
    parser.add_argument("--isolation", choices=("thread", "process"), default="thread")
    parser.add_argument("--way")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--began", type=float)
    given = parser.parse_args()
    if given.way is not None:
        job = (given.model, given.folder, given.seed, given.steps, given.began)
        if given.way == "ours":
            ours(*job, given)
        else:
            trl(*job)
        return
    pythons = {"ours": sys.executable, "trl": given.trl}
    found: dict[str, list[list[dict[str, float]]]] = {way: [] for way, python in pythons.items() if python}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), given.hidden, given.layers)
        for seed in range(given.seeds):
            for way, runs in found.items():
                runs.append(run(way, pythons[way], Path(folder), seed, given))
                first, last = runs[-1][0]["reward"], fmean(each["reward"] for each in runs[-1][-3:])
                print(f"{way} seed {seed}: {runs[-1][-1]['seconds']:.1f} s, {runs[-1][-1]['cpu']:.1f} CPU s, "
                      f"reward {first:.2f} -> {last:.2f}", flush=True)  # fmt: skip
    print("| | seconds a step | CPU s a step | seconds to the first step's end | CPU s | reward, first -> last |")
    print("|---|---|---|---|---|---|")
    for way, runs in found.items():
        seconds, cpu = (
            median(b[key] - a[key] for run in runs for a, b in itertools.pairwise(run)) for key in ("seconds", "cpu")
        )
        start = [median(run[0][key] for run in runs) for key in ("seconds", "cpu")]
        learned = [fmean(run[0]["reward"] for run in runs), fmean(each["reward"] for run in runs for each in run[-3:])]
        print(f"| {way} | {seconds:.2f} | {cpu:.2f} | {start[0]:.1f} | {start[1]:.1f} | "
              f"{learned[0]:.2f} -> {learned[1]:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
