"""Attention over a tree of tokens on a GPU, by torch's `flex_attention`: nothing of T x T is made, in no number format.

Token i may attend to token j exactly where j <= i < end[j] (`training.packing`). That is all a kernel is told: the
places of a line are cut into blocks of 128, and of each pair of blocks `end` says whether nothing, all or some of it is
seen. Invariant: a pair that is left out sees nothing, and of one that is taken whole everything is seen.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._dynamo import config as dynamo
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK: Final = 128
FORMATS: Final = {torch.float32, torch.bfloat16, torch.float16}
KERNELS: Final = 64  # of shapes of heads, formats, with and without gradients; torch's own limit is 8
_compiled: Any = None


class SeenBlocks(NamedTuple):
    """Of each pair of blocks of queries and keys, bool [B, N, N]: whether some of it is seen, or all."""

    some: NDArray[np.bool_]
    all: NDArray[np.bool_]


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it computes there, gradients too; elsewhere attention is computed as ever."""
    return device.type == "cuda" and dtype in FORMATS


def seen_blocks(end: NDArray[np.int64]) -> SeenBlocks:
    """Which pairs of blocks are seen, of `end` [B, T]; places beyond T see nothing and are not seen."""
    by_block = _padded(end)
    by_block, length = by_block.reshape(len(end), -1, BLOCK), end.shape[1]
    first = np.arange(by_block.shape[1]) * BLOCK
    last = np.minimum(first + BLOCK, length) - 1
    before = first[:, None] > first  # keys that stand in a block before that of the queries
    some = before & (by_block.max(-1)[:, None, :] > first[:, None])
    whole = before & (by_block.min(-1)[:, None, :] > last[:, None])
    some |= np.eye(len(first), dtype=bool)  # each place sees itself
    return SeenBlocks(some & ~whole, whole)


def block_mask(end: NDArray[np.int64], device: torch.device) -> BlockMask:
    """What the kernel is told of `end` [B, T]."""
    on_device, length = torch.from_numpy(_padded(end)).to(device), end.shape[1]

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < on_device[row, key])

    blocks = seen_blocks(end)
    (count, which), (full_count, full_which) = _listed(blocks.some, device), _listed(blocks.all, device)
    return BlockMask.from_kv_blocks(
        count, which, full_count, full_which, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """Attention [B, H, T, D] of `query` [B, H, T, D] to `key` and `value` [B, H or fewer, T, D].

    Beyond `KERNELS` compiled kernels it raises torch's FailOnRecompileLimitHit: torch would go on with scores of T x T.
    """
    global _compiled  # once for all models: a kernel is compiled for each shape of heads
    if _compiled is None:
        _compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    grouped = key.shape[1] != query.shape[1]
    with dynamo.patch(recompile_limit=KERNELS):
        output: Tensor = _compiled(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return output


def _padded(end: NDArray[np.int64]) -> NDArray[np.int64]:
    """`end` in whole blocks: a kernel asks about places beyond T too, which nothing sees."""
    return np.pad(end, ((0, 0), (0, -end.shape[1] % BLOCK)))


def _listed(blocks: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, int32 [B, 1, N], and which, those first, [B, 1, N, N]."""
    order = np.argsort(~blocks, axis=-1, kind="stable").astype(np.int32)
    counts = blocks.sum(-1).astype(np.int32)
    return torch.from_numpy(counts)[:, None].to(device), torch.from_numpy(order)[:, None].to(device)
