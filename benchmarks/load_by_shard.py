"""Host memory of two workers that read a model: whole and then cut, and each its part alone. On the CPU, over gloo.

    python benchmarks/load_by_shard.py [--layers 12]

Prints, for each way, the most anonymous memory that a worker had above what it had before (sampled each 2 ms).
"""

import argparse
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn
from torch._C._distributed_c10d import FileStore
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightning_rl.inference.load import load_model
from lightning_rl.ppo.local_workers import by_slices
from lightning_rl.training import shards
from lightning_rl.training.distributed.process_group import ProcessGroup


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


class Peak:
    """The most anonymous memory while it is open."""

    def __enter__(self) -> "Peak":
        self.most, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class _There(Exception):  # no error
    """The model is cut, and has its weights."""


def worker(rank: int, folder: str, sliced: bool, told: Any) -> None:
    """One of two workers: reads the policy, and cuts it."""
    torch.set_num_threads(1)
    team = ProcessGroup(FileStore(f"{folder}/store-{sliced}", 2), rank, 2, "cpu")
    before = anonymous()
    with Peak() as peak:
        model, files = by_slices(Path(folder), torch.float32, None) if sliced else (load_model(folder), None)

        def fill(model: nn.Module) -> None:
            if files is not None:
                shards.fill(model, files, torch.float32)
            raise _There

        with suppress(_There):  # a forward pass, which takes memory of its own, would come next
            team.forward(model, 0, fill=fill)
    told.put(peak.most - before)


def main() -> None:
    """Makes a model, and has it read in both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    layers = parser.parse_args().layers
    config = Qwen2Config(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=12, tie_word_embeddings=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen2ForCausalLM(config)
        model.bfloat16().save_pretrained(folder)  # as most are; read as float32, they are no longer pages of the file
        sizes = [4 * parameter.numel() for parameter in model.parameters()]
        print(f"{sum(sizes) / 4e6:.0f}M parameters, {sum(sizes) / 1e6:.0f} MB; the largest {max(sizes) / 1e6:.0f} MB")
        del model
        for sliced in (False, True):
            told = mp.get_context("spawn").SimpleQueue()
            mp.spawn(worker, (folder, sliced, told), nprocs=2)
            most = max(told.get() for _ in range(2))
            print(f"{'part by part' if sliced else 'whole, then cut'}: {most / 1e6:.0f} MB a worker at most")


if __name__ == "__main__":
    main()
