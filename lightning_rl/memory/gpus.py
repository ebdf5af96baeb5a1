"""GPUs as a plan knows them: memory, and the range of speeds of cards of that size.

Bytes are GiB as cards report them; speeds are of data sheets (dense bfloat16, memory bandwidth), from the slowest to
the fastest usual card of a size. A share of the memory is no tensor's: `CONTEXT` for each process (CUDA context, cuBLAS
workspaces), and what the allocator cannot use (`FRAGMENTATION`). Both are estimates.
"""

import re
from dataclasses import dataclass
from typing import Final

import torch

from lightning_rl.config import ConfigError

GIB: Final = 2**30
CONTEXT: Final = 3 * GIB // 4  # 0.74 on an H200 (docs/gpu.md)
FRAGMENTATION: Final = 0.05


@dataclass(frozen=True)
class Gpu:
    """A card: `memory` in bytes, `flops` (bfloat16) and `bandwidth` (bytes) per second, lowest and highest."""

    memory: int
    flops: tuple[float, float]
    bandwidth: tuple[float, float]


@dataclass(frozen=True)
class Hardware:
    """`nodes` machines with `per_node` cards each."""

    gpu: Gpu
    per_node: int = 1
    nodes: int = 1

    @property
    def count(self) -> int:
        """Cards in all."""
        return self.per_node * self.nodes

    def __str__(self) -> str:
        cards = "x".join(str(n) for n in (self.nodes, self.per_node) if n > 1)
        return f"{cards}{'x' if cards else ''}{self.gpu.memory / GIB:.0f} GiB"


_CARDS: Final = [  # up to so many GiB: TFLOP/s, GB/s
    (16, (65, 210), (320, 900)),  # T4 to RTX 4080
    (24, (121, 165), (300, 1008)),  # L4, RTX 3090 and 4090, A10
    (32, (105, 210), (900, 1792)),  # V100 to RTX 5090
    (48, (150, 362), (696, 864)),  # A6000, L40S
    (80, (312, 989), (1555, 3350)),  # A100, H100
    (141, (989, 989), (4000, 4800)),  # H100 NVL, H200
    (192, (2250, 2250), (8000, 8000)),  # B200
]


def card(gib: float) -> Gpu:
    """A card with so much memory."""
    flops, bandwidth = next(((f, b) for most, f, b in _CARDS if gib <= most + 1), _CARDS[-1][1:])
    speeds = [(low * unit, high * unit) for (low, high), unit in ((flops, 1e12), (bandwidth, 1e9))]
    return Gpu(round(gib * GIB), *speeds)


def stated(text: str) -> Hardware:
    """`24` (a card of 24 GiB), `8x80`, `2x8x80` (machines x cards x GiB). Raises ConfigError for anything else."""
    if not re.fullmatch(r"(\d+x){0,2}\d+(\.\d+)?", text) or not all(map(float, text.split("x"))):
        raise ConfigError(f"--gpus {text}: write GiB of a card, 24; cards x GiB, 8x80; machines x cards x GiB, 2x8x80")
    *counts, gib = text.split("x")
    nodes, per_node = ([1, 1] + [int(count) for count in counts])[-2:]
    return Hardware(card(float(gib)), per_node, nodes)


def here(nodes: int = 1) -> Hardware | None:
    """The cards of this machine, and of others like it; None: there are none."""
    if not torch.cuda.is_available():
        return None
    return Hardware(card(torch.cuda.get_device_properties(0).total_memory / GIB), torch.cuda.device_count(), nodes)
