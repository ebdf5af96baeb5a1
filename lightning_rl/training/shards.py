"""Tensors that several processes hold a part of each (`DTensor`), and whole ones: from one to the other.

Invariant: a tensor that no process shares goes through as it is, so whoever calls these functions need not know
whether one process holds it or many do.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

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


@torch.no_grad()
def fill(model: nn.Module, files: Mapping[str, Path], dtype: torch.dtype, prefix: str = "") -> None:
    """Give the parameters of a model that are on `meta`, and shared, their numbers: of each this process's part alone.

    Args:
        files: the safetensors file of each weight, by its name.
        dtype: the format that weights are rounded to before they take the parameter's own.
        prefix: stands before the names of the model's parameters in `files`.
    """
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for at, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                places.setdefault(id(parameter), []).append((module, name, f"{prefix}{at}.{name}".replace("..", ".")))
    for same in places.values():
        module, name, _ = same[0]
        parameter = getattr(module, name)
        saved = next(each for _, _, each in same if each in files)
        filled = nn.Parameter(_slice(files[saved], saved, parameter, dtype), requires_grad=parameter.requires_grad)
        for holder, known_as, _ in same:
            holder.register_parameter(known_as, filled)


def _slice(file: Path, name: str, like: DTensor, dtype: torch.dtype) -> DTensor:
    """This process's part of the tensor `name` of a file, as `like` is cut."""
    mesh, placements = like.device_mesh, like.placements
    shape, begins = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    with safe_open(file, "pt") as opened:  # of a mapped file: what is not asked for is not read
        part = opened.get_slice(name)[tuple(slice(at, at + size) for at, size in zip(begins, shape, strict=True))]
    local = part.to(dtype).to(mesh.device_type, like.dtype, copy=True)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
