"""Adapters of several policies by one embedded engine, against an engine with merged weights for each.

    python benchmarks/adapters.py [--repeats 3] [--threads 1] [--policies 2]

Random models: of the quickstart's size with prompts of 40 tokens and 32 new ones, and of 100M parameters with 300 and
128; adapters of rank 16 on all linear layers. Every policy has eight prompts at a time, all different. The two ways
take turns; medians of CPU milliseconds a token and of tokens a second, and the bytes of weights that the engines hold.
Each engine has `--threads` cores, so one engine has fewer than one for each.
"""

import argparse
import copy
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).parent))
from engine import make_model, prompts

from lightning_rl.inference.engine import EmbeddedEngine
from lightning_rl.inference.sequence import Event, GenerationRequest, GenerationSampling
from lightning_rl.training import lora

RANK = 16
AT_ONCE = 8  # prompts of each policy
_numbers = itertools.count()


def large_model() -> nn.Module:
    """A random model of 100M parameters."""
    config = Qwen3Config(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2304,
        vocab_size=16_000,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    return model


def adapted(model: nn.Module, seed: int) -> nn.Module:
    """A copy of the model with a random adapter."""
    found = lora.adapted(copy.deepcopy(model), rank=RANK, alpha=RANK, targets="all-linear", seed=seed)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.01)
    return found


def sample(engines: list[tuple[EmbeddedEngine, int]], size: int, new: int) -> None:
    """Sample for every policy, all asked for at once, to the last answer."""
    left, done = [AT_ONCE * len(engines)], threading.Event()
    lock = threading.Lock()

    def outbox(events: list[Event]) -> None:
        with lock:
            left[0] -= len(events)
            if not left[0]:
                done.set()

    for engine, adapter in engines:
        sampling = GenerationSampling(max_tokens=new)
        engine.post(
            [
                GenerationRequest(request_id=str(next(_numbers)), token_ids=prompt, sampling=sampling, adapter=adapter)
                for prompt in prompts(AT_ONCE, size)
            ],
            outbox,
        )
    done.wait()


class Cost(NamedTuple):
    """Of a token: CPU milliseconds, and how many there are in a second."""

    cpu: float
    rate: float


def costs(ways: Mapping[str, Callable[[], None]], tokens: int, repeats: int) -> dict[str, Cost]:
    """What each way costs; they take turns, and the first turn does not count."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            cpu, wall = time.process_time(), time.perf_counter()
            way()
            taken[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    found: dict[str, Cost] = {}
    for name, each in taken.items():
        cpu, wall = (statistics.median(one) for one in zip(*each[1:], strict=True))
        found[name] = Cost(1e3 * cpu / tokens, tokens / wall)
    return found


def weight_bytes(*states: Mapping[str, Tensor]) -> int:
    """Bytes of their distinct tensors."""
    return sum({t.data_ptr(): t.nbytes for state in states for t in state.values()}.values())


def compare(name: str, model: nn.Module, size: int, new: int, asked: argparse.Namespace) -> None:
    """One engine for all adapters, and one for each."""
    models = [adapted(model, seed) for seed in range(asked.policies)]
    low = [dict(lora.low_rank(each)) for each in models]
    shared = EmbeddedEngine(copy.deepcopy(model), threads=asked.threads)
    for each in low:
        shared.update_adapter(shared.add_adapter(), each, 1)
    apart = []
    for each in models:
        engine = EmbeddedEngine(copy.deepcopy(model), threads=asked.threads)
        engine.update_weights(lora.changed(each), 1, partial=True)
        apart.append(engine)
    for engine in (shared, *apart):
        engine.start()
    try:
        found = costs(
            {
                "one": lambda: sample([(shared, number + 1) for number in range(asked.policies)], size, new),
                "each": lambda: sample([(engine, 0) for engine in apart], size, new),
            },
            AT_ONCE * asked.policies * new,
            asked.repeats,
        )
    finally:
        for engine in (shared, *apart):
            engine.stop()
    whole = weight_bytes(model.state_dict())
    held = {"one": whole + weight_bytes(*low), "each": asked.policies * whole}
    print(name, flush=True)
    for way, words in (("one", "one engine"), ("each", "an engine for each")):
        cpu, rate = found[way]
        print(f"  {words:<18} {cpu:8.2f} CPU ms/token {rate:7.0f} tokens/s {held[way] / 2**20:6.0f} MiB", flush=True)
    print(f"  CPU, one to each: {found['one'].cpu / found['each'].cpu:.2f}", flush=True)


def main() -> None:
    """Both sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of an engine")
    parser.add_argument("--policies", type=int, default=2)
    asked = parser.parse_args()
    compare("0.9M, 40 + 32", make_model(), 40, 32, asked)
    compare("100M, 300 + 128", large_model(), 300, 128, asked)


if __name__ == "__main__":
    main()
