"""How long one update takes: ours plain, ours with shared prefixes, and TRL's GRPO trainer, on the same rows.

    python benchmarks/train_step.py [--trl PYTHON] [--device cuda] [--bf16]

TRL lives in an environment of its own, made once:

    python -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0 torch==2.13.0 transformers==5.23.0

and then `--trl /tmp/trl/bin/python`; without it ours alone are measured. Only the update is timed: forward, loss,
backward, clipping, optimizer. Every way is a process of its own that holds the same model and rows; first each looks
for its best micro-batch, then fresh processes take turns. Memory is a process's peak over what it held before the first
update. Ours need torch, transformers and numpy alone. Run by hand; nothing asserts a time.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

VOCABULARY = 1280
OLD_LOG_PROB = -7.15  # log(1/VOCABULARY): the random model's own, nearly
Update = Callable[[], float]  # one update; the norm of its gradient


@dataclass(frozen=True)
class Work:
    """What every way is given; `micro` rows are computed at once (packed: as many tokens as these have plainly)."""

    prompt: int
    response: int = 32
    group: int = 8
    groups: int = 8
    micro: int = 64
    device: str = "cpu"
    bf16: bool = False
    threads: int = 1


def make_model(work: Work) -> nn.Module:
    """A random model of 2.6M parameters, float32."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=1,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.to(work.device)


def make_rows(work: Work) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids [rows, prompt + response], a group's prompts alike; advantages [rows], of mean 0 in each group."""
    made = np.random.default_rng(0)
    ids = made.integers(2, VOCABULARY, (work.groups, work.group, work.prompt + work.response))
    ids[:, :, : work.prompt] = ids[:, :1, : work.prompt]
    advantages = made.normal(size=(work.groups, work.group)).astype(np.float32)
    advantages -= advantages.mean(axis=1, keepdims=True)
    return ids.reshape(-1, ids.shape[-1]), advantages.reshape(-1)


def ours(work: Work, *, packed: bool) -> Update:
    """Our actor: token-mean PPO loss, AdamW."""
    from lightning_rl.training.actor import Actor, ActorConfig
    from lightning_rl.training.batch import TrainingSequence
    from lightning_rl.training.forward import Forward
    from lightning_rl.training.optimizer import OptimizerConfig

    model = make_model(work)
    length = work.prompt + work.response
    config = ActorConfig(
        mini_batch_rollouts=work.group * work.groups,
        micro_batch_rows=None,
        micro_batch_tokens=work.micro * length,
        ppo_epochs=1,
        loss_agg_mode="token-mean",
        loss_scale_factor=None,
        entropy_coeff=0.0,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
        optim=OptimizerConfig(
            lr=1e-6,
            lr_warmup_steps=0,
            lr_scheduler_type="constant",
            min_lr_ratio=0.0,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            grad_clip=1.0,
            training_steps=1,
        ),
    )
    autocast = torch.bfloat16 if work.bf16 else None
    forward = Forward(model, 0, packed=packed, autocast=autocast)
    if packed and not forward.packed:
        raise SystemExit(f"this model cannot be packed: {forward.unpacked_because}")
    actor = Actor(model, config, 0, forward)
    trained = np.arange(work.prompt, length)
    each = np.ones(work.response, np.float32)
    sequences = [
        TrainingSequence(n, ids, trained, OLD_LOG_PROB * each, advantage * each, each, OLD_LOG_PROB * each)
        for n, (ids, advantage) in enumerate(zip(*make_rows(work), strict=True))
    ]
    plan = actor.plan(sequences, rollouts=len(sequences))
    return lambda: actor.update(plan)["actor/grad_norm"]


def trl(work: Work) -> Update:
    """TRL's GRPO trainer, its `training_step` over micro-batches that are given, clipping and optimizer step."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    class Given(GRPOTrainer):  # type: ignore[misc]
        """Rows are given; nothing is generated."""

        def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
            return generation_batch

    words = {"<pad>": 0, "<eos>": 1, **{f"w{n}": n for n in range(2, VOCABULARY)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    ids, advantages = make_rows(work)
    parts = len(ids) // work.micro
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=work.micro,
        gradient_accumulation_steps=parts,
        num_generations=work.group,
        generation_batch_size=len(ids),
        max_completion_length=work.response,
        use_cpu=work.device == "cpu",
        bf16=work.bf16,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        loss_type="dapo",
        beta=0.0,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Given(
        model=make_model(work),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["w2"] * len(ids)}),
        processing_class=tokenizer,
    )
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.current_gradient_accumulation_steps = parts
    at = torch.from_numpy(ids).to(work.device)
    inputs = []
    for rows in torch.arange(len(ids), device=work.device).split(work.micro):
        completion = at[rows, work.prompt :]
        inputs.append(
            {
                "prompt_ids": at[rows, : work.prompt],
                "prompt_mask": torch.ones_like(at[rows, : work.prompt]),
                "completion_ids": completion,
                "completion_mask": torch.ones_like(completion),
                "advantages": torch.from_numpy(advantages).to(work.device)[rows],
                "old_per_token_logps": torch.full(completion.shape, OLD_LOG_PROB, device=work.device),
                "num_items_in_batch": torch.tensor(len(ids) * work.response, device=work.device),
            }
        )

    def update() -> float:
        for part in inputs:
            trainer.training_step(model, part, None)
        norm = trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        return float(norm)

    return update


WAYS: dict[str, Callable[[Work], Update]] = {
    "plain": lambda work: ours(work, packed=False),
    "packed": lambda work: ours(work, packed=True),
    "trl": trl,
}


def work_on(way: str, work: Work) -> None:
    """A process of its own: an update for every line that it reads, its seconds for every one; memory at the end."""
    torch.set_num_threads(work.threads)
    update = WAYS[way](work)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if work.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    print(json.dumps("ready"), file=sys.__stdout__, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        norm = update()
        if work.device == "cuda":
            torch.cuda.synchronize()
        found = {"seconds": time.perf_counter() - began, "norm": norm}
        found["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
        if work.device == "cuda":
            found["mib"] = torch.cuda.max_memory_allocated() / 2**20
        print(json.dumps(found), file=sys.__stdout__, flush=True)


class Process:
    """One way at work in a process of its own."""

    def __init__(self, python: str, way: str, work: Work) -> None:
        command = [python, __file__, "--way", way, "--work", json.dumps(asdict(work))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def update(self) -> dict[str, float]:
        """One update: seconds, the gradient's norm, MiB so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, float] = self._read()
        return found

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("{", '"ready"')):
                return json.loads(line)
        raise SystemExit(f"a process ended before its time, with {self._process.wait()}")


def best(python: str, way: str, work: Work, tries: int) -> Work:
    """The fastest of the micro-batches 8, 16, 32 and 64."""
    found = {}
    for micro in (8, 16, 32, 64):
        given = Work(**asdict(work) | {"micro": micro})
        process = Process(python, way, given)
        found[given] = statistics.median([process.update()["seconds"] for _ in range(tries + 1)][1:])
        process.close()
    return min(found, key=found.__getitem__)


def compare(pythons: dict[str, str], work: Work, repeats: int, tries: int) -> None:
    """Each way at its best micro-batch, taking turns; medians and ratios."""
    chosen = {way: best(python, way, work, tries) for way, python in pythons.items()}
    processes = {way: Process(python, way, chosen[way]) for way, python in pythons.items()}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in pythons}
    for turn in range(repeats + 1):
        for way, process in processes.items():
            update = process.update()
            if turn:  # the first warms up
                found[way].append(update)
            else:
                print(f"  {way}: norm of the first gradient {update['norm']:.6f}")
    for process in processes.values():
        process.close()
    print(f"prompt {work.prompt}, response {work.response}, {work.groups} groups of {work.group}")
    seconds = {way: statistics.median(update["seconds"] for update in updates) for way, updates in found.items()}
    for way, updates in found.items():
        mib = max(update["mib"] for update in updates)
        ratios = ", ".join(
            f"{statistics.median(a['seconds'] / b['seconds'] for a, b in zip(found[other], updates, strict=True)):.2f}x"
            f" {other}"
            for other in found
            if other != way
        )
        print(f"  {way:>6}: {seconds[way]:7.3f} s, {mib:6.0f} MiB, micro-batch {chosen[way].micro:2}: {ratios}")


def main() -> None:
    """Short prompts and long ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="the Python of an environment with TRL")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--bf16", action="store_true", help="multiply matrices in bfloat16 (autocast)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, nargs="+", default=[40, 256])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tries", type=int, default=2, help="updates per micro-batch in the search for the best")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        work_on(given.way, Work(**json.loads(given.work)))
        return
    pythons = {"plain": sys.executable, "packed": sys.executable} | ({"trl": given.trl} if given.trl else {})
    for prompt in given.prompts:
        work = Work(
            prompt, groups=given.groups, device=given.device, bf16=given.bf16, threads=given.threads
        )  # the rest as it stands there
        compare(pythons, work, given.repeats, given.tries)


if __name__ == "__main__":
    main()
