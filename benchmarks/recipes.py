"""What the recipes of `docs/gpu.md` take on a GPU: memory and seconds of scoring and updating, beside the plan's.

    python benchmarks/recipes.py [--recipes 1.5B-24 7B-adapter ...] [--limit GIB] [--device cpu --size tiny]

Models of the named shapes with random weights; rows of 2,048 + 2,048 tokens in groups of eight (`long`: two answers of
16,384 tokens to as long a prompt), enough for two micro-batches, and as many that share nothing, which take more
memory. Each recipe is a process of its own, which gets `--limit` GiB of the GPU at most; the plans are traced on the
CPU meanwhile. What is timed was done once before, so kernels are compiled. `--size tiny` plays it all with a small
model on short rows. `1.5B-24` needs torchao. Run by hand; nothing asserts a time.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from lightning_rl.config import Config, compose
from lightning_rl.memory import traced_step
from lightning_rl.ppo.local_workers import FORMATS, LocalWorkers, roles_of
from lightning_rl.training.batch import TrainingSequence

ACTOR, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
CHECKPOINTED = f"{MODEL}enable_gradient_checkpointing=true"
IN_BF16, COMPUTED_IN_BF16 = f"{ACTOR}fsdp_config.model_dtype=bf16", f"{ACTOR}fsdp_config.dtype=bfloat16"
EIGHT_BITS = [
    f"{ACTOR}fsdp_config.optimizer_offload=true",
    f"{ACTOR}optim.optimizer_impl=torchao.optim",
    f"{ACTOR}optim.optimizer=AdamW8bit",
    f"{ACTOR}optim.override_optimizer_config={{bf16_stochastic_round:true}}",
]
ADAPTER = [f"{MODEL}lora_rank=16", f"{ACTOR}fsdp_config.param_offload=true"]
RECIPES: dict[str, tuple[str, list[str]]] = {
    "1.5B-24": ("1.5B", [CHECKPOINTED, IN_BF16, *EIGHT_BITS]),
    "1.5B-80": ("1.5B", [CHECKPOINTED, COMPUTED_IN_BF16]),
    "7B-adapter": ("7B", [CHECKPOINTED, IN_BF16, *ADAPTER]),
    "long": ("1.5B", [CHECKPOINTED, COMPUTED_IN_BF16]),
}
SIZES: dict[str, dict[str, Any]] = {
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "vocab_size": 500, "tie_word_embeddings": True},
}


def work_of(recipe: str, size: str | None) -> tuple[Config, Any, tuple[int, int]]:
    """The config of the run, the model's, and the tokens of prompts and responses."""
    name, words = RECIPES[recipe]
    long = recipe == "long"
    lengths, group = ((16_384, 16_384), 2) if long else ((2048, 2048), 8)
    if size is not None:
        name, lengths = size, (lengths[0] // 64, lengths[1] // 64)
    tokens = lengths[0] + group * lengths[1] if long else 16_384
    limits = [f"actor_rollout_ref.rollout.n={group}", f"{ACTOR}ppo_max_token_len_per_gpu={tokens}"]
    limits += [f"data.max_prompt_length={lengths[0]}", f"data.max_response_length={lengths[1]}"]
    model = Qwen2Config(**SIZES[name], max_position_embeddings=65_536)
    return compose(command_line=[*words, *limits]), model, lengths


def planned(recipe: str, size: str | None) -> dict[str, float]:
    """GiB by the plan."""
    config, model, lengths = work_of(recipe, size)
    held = traced_step.trace(config, model, lengths, on_gpu=True).actor
    return {"update": held.update / 2**30, "scoring": held.scoring / 2**30}


def measured(recipe: str, size: str | None, device: str, limit: float | None) -> dict[str, float]:
    """GiB and seconds on the device."""
    config, model, lengths = work_of(recipe, size)
    if limit is not None and device == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit * 2**30 / torch.cuda.mem_get_info()[1]))
    torch.manual_seed(0)
    with torch.device(device):
        policy: Any = AutoModelForCausalLM.from_config(
            model, dtype=FORMATS[config.actor_rollout_ref.actor.fsdp_config.model_dtype]
        ).eval()
    workers = LocalWorkers(config, policy, roles_of(config, with_critic=False))
    workers.train(Path(), 10)
    actor = workers.actor
    assert actor is not None
    alone, rows = (
        traced_step.rows_of(config, lengths, shared=shared, vocabulary=model.vocab_size) for shared in (False, True)
    )
    found: dict[str, float] = {"tokens": float(sum(len(row.token_ids) for row in rows))}
    found["first_s"], _ = _timed(device, lambda: actor.update(actor.plan(alone, len(alone))))
    _, found["alone_gib"] = _timed(device, lambda: actor.update(actor.plan(_fresh(alone), len(alone))))
    actor.update(actor.plan(rows, len(rows)))
    for name, work in (
        ("scoring", lambda: actor.log_probs(rows)),
        ("update", lambda: actor.update(actor.plan(_fresh(rows), len(rows)))),
    ):
        found[f"{name}_s"], found[f"{name}_gib"] = _timed(device, work)
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        found["beside_gib"] = (total - free - torch.cuda.memory_reserved()) / 2**30
    return found


def _fresh(rows: list[TrainingSequence]) -> list[TrainingSequence]:
    for row in rows:
        row.entropies = None
    return rows


def _timed(device: str, work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and GiB at the peak."""
    if device != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began, 0.0
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began, torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    """Every recipe: its plan in a process on the CPU, meanwhile itself in another on the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--limit", type=float, help="GiB that a recipe may have")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=list(SIZES), help="of the model, instead of the recipe's")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        what, recipe = given.one
        if what == "planned":
            print(json.dumps(planned(recipe, given.size)))
        else:
            print(json.dumps(measured(recipe, given.size, given.device, given.limit)))
        return
    more = ["--device", given.device]
    more += ["--size", given.size] if given.size else []
    more += ["--limit", str(given.limit)] if given.limit else []
    command = [sys.executable, __file__, *more, "--one"]
    plans = {
        recipe: subprocess.Popen([*command, "planned", recipe], stdout=subprocess.PIPE, text=True)
        for recipe in given.recipes
    }
    failed = False
    for recipe in given.recipes:
        done = subprocess.run([*command, "measured", recipe], stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
        plan = json.loads(plans[recipe].communicate()[0].splitlines()[-1])
        print(f"{recipe}: plan {plan['update']:.2f} GiB in an update, {plan['scoring']:.2f} in scoring")
        if found is None:
            failed = True
            print("  failed")
            continue
        print(f"  rows that share nothing: {found['alone_gib']:.2f} GiB; the first update {found['first_s']:.1f} s")
        for name in ("scoring", "update"):
            seconds = found[f"{name}_s"]
            each = found["tokens"] / seconds
            print(f"  {name}: {found[f'{name}_gib']:.2f} GiB; {seconds:.2f} s ({each:,.0f} tokens/s)")
        if "reserved_gib" in found:
            print(f"  reserved {found['reserved_gib']:.2f} GiB, beside torch's {found['beside_gib']:.2f}")
        sys.stdout.flush()
    sys.exit(failed)


if __name__ == "__main__":
    main()
