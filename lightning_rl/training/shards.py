"""Tensors that several processes hold a part of each (`DTensor`), and whole ones: from one to the other.

Invariant: a tensor that no process shares goes through as it is, so whoever calls these functions need not know
whether one process holds it or many do.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_rl.training.state import Stored


def full(tensor: Tensor) -> Tensor:
    """All of `tensor`. Every process that holds a part of it must ask, in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()
    return gathered


def whole(tree: Any) -> Any:
    """`tree` (dicts, lists and tuples) with its shared tensors whole, in main memory, in the first process; the others
    give up theirs, so that only one holds all. Every process must ask."""
    if isinstance(tree, DTensor):
        gathered = full(tree.detach())
        return gathered.cpu() if dist.get_rank() == 0 else torch.empty(0)
    if isinstance(tree, Mapping):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(whole(value) for value in tree)
    return tree


def cut(tensor: Tensor | Stored, like: Tensor) -> Tensor:
    """A whole tensor, or one of a folder, as this process's part, where `like` is shared and of its shape."""
    if isinstance(tensor, Stored):
        return tensor.read(like)
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    placed = tensor.to(device=like.device)
    # None: every process cuts its part out of what it has, and sends nothing.
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def put(values: Mapping[str, Tensor | Stored], targets: Mapping[str, Tensor]) -> None:
    """Copy whole tensors, or those of a folder, into those of their names, one after another."""
    for name, value in values.items():
        targets[name].copy_(cut(value, targets[name]))
