"""What the log probabilities of trained tokens cost in memory and time: in chunks, as training does, and directly.

    python benchmarks/logits.py

Each measurement is a process of its own, since a process's largest memory never goes down again. Run by hand; nothing
asserts a time.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor

from lightning_rl.rl.logits import token_log_probs
from lightning_rl.rl.losses import entropy


def directly(
    logits: Tensor, rows: Tensor, targets: Tensor, temperature: Tensor, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """The same numbers, with everything of the vocabulary's width held at once."""
    at = logits[rows].float() / temperature[:, None]
    log_probs = torch.log_softmax(at, dim=-1).gather(-1, targets[:, None]).squeeze(-1)
    return log_probs, entropy(at) if with_entropy else None


def measure(way: str, tokens: int, vocabulary: int, entropy_gradient: bool) -> dict[str, float]:
    """One forward and backward pass in this process, on one core: seconds, and MiB above what the logits took."""
    torch.set_num_threads(1)
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, vocabulary, generator=made).requires_grad_()
    rows, targets = torch.arange(tokens), torch.randint(0, vocabulary, (tokens,), generator=made)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    compute = {"chunked": token_log_probs, "direct": directly}[way]
    log_probs, entropies = compute(logits, rows, targets, torch.ones(tokens), with_entropy=entropy_gradient)
    loss = log_probs.sum() if entropies is None else log_probs.sum() - 0.01 * entropies.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "mib": (peak - before) / 1024}


def main() -> None:
    """Compare the two ways in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--one", choices=["chunked", "direct"], help=argparse.SUPPRESS)
    parser.add_argument("--entropy", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.tokens, given.vocabulary, given.entropy)))
        return
    size = given.tokens * given.vocabulary * 4 / 2**20
    print(f"{given.tokens} tokens, vocabulary {given.vocabulary}: the logits are {size:.0f} MiB of float32")
    ways = [(way, with_entropy) for with_entropy in (False, True) for way in ("direct", "chunked")]
    found: dict[tuple[str, bool], list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(given.repeat):
        for way, with_entropy in ways:  # they take turns
            command = [sys.executable, __file__, "--one", way, "--tokens", str(given.tokens)]
            command += ["--vocabulary", str(given.vocabulary), *(["--entropy"] if with_entropy else [])]
            found[way, with_entropy].append(json.loads(subprocess.check_output(command)))
    for (way, with_entropy), runs in found.items():
        what = "with entropy" if with_entropy else "log probabilities"
        medians = {name: statistics.median(run[name] for run in runs) for name in ("mib", "seconds")}
        print(f"{what:>18} {way:>8}: {medians['mib']:7.0f} MiB more at the peak, {medians['seconds']:.2f} s")


if __name__ == "__main__":
    main()
