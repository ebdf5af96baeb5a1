"""A process group whose members hold a model in shards, by FSDP2 (`fully_shard`), each layer a unit of its own.

Invariant: the gradient of a parameter is the SUM of what the workers computed. Losses are sums of weighted token
losses whose weights know the whole mini-batch; FSDP2's own mean would divide them once more.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_rl.training.distributed.forward import ShardedForward
from lightning_rl.training.distributed.sequence_parallel import SequenceParallelForward
from lightning_rl.vision import ModelVision

_PATIENCE = timedelta(minutes=30)  # of a collective: a worker may compute long before it comes to it


class ProcessGroup:
    """The workers that train together; gloo carries weights and gradients on a CPU, NCCL on GPUs.

    Args:
        store: where they find each other.
        rank, size: which of how many this one is.
        device: cpu or cuda; of several GPUs the one that this process sees.

    `talk` is the group over which they tell each other numbers; not the one that carries weights and gradients.
    """

    def __init__(self, store: Store, rank: int, size: int, device: str) -> None:
        backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)
        self.rank = rank
        self.talk: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._size, self._device = size, device
        whole: DeviceMesh = init_device_mesh(device, (size,))
        self._meshes = {-1: whole, size: whole}
        self._rows: dict[int, DeviceMesh] = {}

    def forward(
        self,
        model: nn.Module,
        pad_id: int,
        *,
        packed: bool = False,
        autocast: torch.dtype | None = None,
        vision: ModelVision | None = None,
        fsdp_size: int = -1,
        reshard_after_forward: bool = True,
        sequence_parallel: int = 1,
        fill: Callable[[nn.Module], None] = lambda model: None,
    ) -> ShardedForward:
        """Cut `model` into shards; how it is run then. With `autocast` weights travel in that format, and gradients are
        added up in float32.

        Args:
            model, pad_id, packed, autocast, vision: as of `Forward`.
            fsdp_size: how many workers hold a whole model together; -1: all of them.
            reshard_after_forward: a layer gives up its weights behind its forward pass; else behind its backward pass.
            sequence_parallel: how many workers compute a row together.
            fill: reads the weights of a model that has none yet, when it is cut.
        """
        policy = MixedPrecisionPolicy(
            param_dtype=autocast,
            reduce_dtype=None if autocast is None else torch.float32,
            cast_forward_inputs=False,  # masks stay what they are; autocast sees to the rest
        )
        mesh = self._mesh(fsdp_size)
        for layer in _layers(model):
            _shard(layer, mesh, policy, reshard_after_forward=reshard_after_forward)
        _shard(model, mesh, policy)
        fill(model)
        common: dict[str, Any] = {"talk": self.talk, "packed": packed, "autocast": autocast, "vision": vision}
        if sequence_parallel == 1:
            return ShardedForward(model, pad_id, **common)
        return SequenceParallelForward(model, pad_id, group=self._neighbours(sequence_parallel), **common)

    def shard(self, head: nn.Module, fsdp_size: int = -1) -> None:
        """Cut a small module that stands beside its model."""
        _shard(head, self._mesh(fsdp_size), MixedPrecisionPolicy())

    def _neighbours(self, size: int) -> dist.ProcessGroup:
        """The group of `size` workers that this one is in; the config has seen that this can be."""
        if size not in self._rows:
            shape = (self._size // size, size)
            self._rows[size] = init_device_mesh(self._device, shape, mesh_dim_names=("rows", "row"))
        return self._rows[size].get_group("row")

    def _mesh(self, fsdp_size: int) -> DeviceMesh:
        """The workers, in groups of `fsdp_size` that hold a model each; the config has seen that this can be."""
        if fsdp_size not in self._meshes:
            groups = (self._size // fsdp_size, fsdp_size)
            self._meshes[fsdp_size] = init_device_mesh(self._device, groups, mesh_dim_names=("replicate", "shard"))
        return self._meshes[fsdp_size]


def _shard(
    module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard_after_forward: bool = True
) -> None:
    # The outermost unit is always resharded: else it would keep weights of before an update that it slept through.
    cut: FSDPModule = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    cut.set_gradient_divide_factor(1.0)
    cut.set_force_sum_reduction_for_comms(True)  # gloo has no other


def _layers(model: Any) -> list[nn.Module]:
    """The layers of a transformer, as its architecture names them; none: the model is one unit."""
    names = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return [part for part in model.modules() if type(part).__name__ in names]
