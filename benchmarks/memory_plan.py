"""What the plan says that a step takes, and what torch's allocator really gave out: by model, on the CPU.

    python benchmarks/memory_plan.py [--models tutorial 60M 300M] [--json]

The same actor, critic and rows, once traced without numbers (`lightning_rl.memory`) and once with them, their
allocations recorded by torch's profiler. Each measurement is a process of its own. Run by hand.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from lightning_rl import tutorial
from lightning_rl.config import compose
from lightning_rl.memory import traced_step
from lightning_rl.ppo.local_workers import FORMATS, LocalWorkers, roles_of
from lightning_rl.training.batch import MiniBatch

ACTOR, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
WAYS: dict[str, list[str]] = {
    "float32": [],
    "checkpointed": [MODEL + "enable_gradient_checkpointing=true"],
    "bf16": [ACTOR + "fsdp_config.model_dtype=bf16", MODEL + "enable_gradient_checkpointing=true"],
    "autocast": [ACTOR + "fsdp_config.dtype=bfloat16"],
    "lora": [MODEL + "lora_rank=8", ACTOR + "fsdp_config.model_dtype=bf16"],
}
SIZES: dict[str, dict[str, int]] = {
    "60M": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32_000},
    "300M": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 14, "vocab_size": 50_000},
}


def model_config(name: str) -> Any:
    """The config of a model of this size."""
    if name == "tutorial":
        return AutoConfig.from_pretrained(tutorial.checkpoint())
    return Qwen2Config(**SIZES[name], num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True)


def largest_allocation(work: Callable[[], object]) -> int:
    """How many bytes more than before are allocated at the peak of `work`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    now = peak = 0
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measured(words: list[str], model: Any, lengths: tuple[int, int]) -> dict[str, int]:
    """Peaks of an update with numbers, in bytes beside those of weights."""
    config = compose(command_line=words)
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(
        model, dtype=FORMATS[config.actor_rollout_ref.actor.fsdp_config.model_dtype]
    ).eval()
    workers = LocalWorkers(config, policy, roles_of(config, with_critic=False))
    workers.train(Path(), 1)
    actor = workers.actor
    assert actor is not None
    found = {"backward": 0, "step": 0}
    for shared in (True, False):
        rows = traced_step.rows_of(config, lengths, shared=shared, vocabulary=model.get_text_config().vocab_size)
        actor.model.train()
        micro = actor._micro_batches(rows)[:2]
        mini = MiniBatch([s for part in micro for s in part], {s.rollout: 1.0 for part in micro for s in part})
        if not actor.optimizer.steps:
            actor.accumulate(mini)
            actor.optimizer.step()
        found["backward"] = max(found["backward"], largest_allocation(lambda mini=mini: actor.accumulate(mini)))
        found["step"] = max(found["step"], largest_allocation(actor.optimizer.step))
    return found


def compared(name: str, way: str, lengths: tuple[int, int], tokens: int) -> dict[str, float]:
    """GiB by plan and by allocator: the peak of the passes and that of the optimizer's step."""
    words = [*WAYS[way], f"{ACTOR}ppo_max_token_len_per_gpu={tokens}", "actor_rollout_ref.rollout.n=4"]
    model = model_config(name)
    held = traced_step.trace(compose(command_line=words), model, lengths).actor
    real = measured(words, model, lengths)
    before = held.weights + held.optimizer
    return {
        "parameters": 0.0,
        "planned": max(held.backward, held.step) / 2**30,
        "allocated": max(before + real["backward"], before + held.gradients + real["step"]) / 2**30,
        "planned_passes": (held.backward - before) / 2**30,
        "allocated_passes": real["backward"] / 2**30,
    }


def main() -> None:
    """Compare, each in a process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["tutorial", "60M", "300M"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    lengths = given.prompt, given.response
    if given.one:
        print(json.dumps(compared(*given.one, lengths, given.tokens)))
        return
    print(f"micro-batches of {given.tokens} tokens, {given.prompt} + {given.response} a row; GiB")
    for name in given.models:
        for way in given.ways:
            command = [sys.executable, __file__, "--one", name, way, "--prompt", str(given.prompt)]
            command += ["--response", str(given.response), "--tokens", str(given.tokens)]
            found = json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL))
            whole = found["planned"] / found["allocated"] - 1
            passes = found["planned_passes"] / found["allocated_passes"] - 1
            print(
                f"{name:>9} {way:>13}: plan {found['planned']:.3f}, allocator {found['allocated']:.3f} ({whole:+.1%}); "
                f"passes alone {found['planned_passes']:.3f}, {found['allocated_passes']:.3f} ({passes:+.1%})"
            )


if __name__ == "__main__":
    main()
