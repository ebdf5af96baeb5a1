"""The GPUs that a run has, and the way to them: of this machine by their names, of a Ray cluster by rooms on it.

Invariant: what `placement` says is what trainer and servers are told.
"""

import os
from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from lightning_rl.config import ConfigError
from lightning_rl.config.policies import RunPolicy, engine_of_adapters
from lightning_rl.config.schema import Config
from lightning_rl.inference.load import device_of
from lightning_rl.inference.vllm.command import Options
from lightning_rl.inference.vllm.on_ray import RayServer
from lightning_rl.ppo.local_workers import Role
from lightning_rl.ppo.ray_workers import groups
from lightning_rl.processes import gpus
from lightning_rl.training.distributed import cluster, rooms
from lightning_rl.training.distributed.placement import Placement, by_ray, place, sends_from_a_gpu_of_its_own


class Cards:
    """Those of a run, of none on a CPU; whoever makes one calls `close`.

    `placement` says who is on which; `names` are the GPUs of this machine, as a child process is told of them;
    `device` is that of models in this process; `room` is that of the workers which train the policy, where engines of
    a Ray cluster share it. Raises ConfigError for GPUs that are too few.
    """

    def __init__(self, config: Config, roles: Collection[Role]) -> None:
        self._config, self._joined, self._rooms = config, False, list[Any]()
        self.room: Any = None
        self.names: list[str] = []
        self.placement = Placement()
        self.device: str = config.trainer.device
        if device_of(config.trainer.device).type != "cuda":
            return
        apart = len(groups(config, frozenset(roles))) if config.trainer.workers > 1 else 1
        self.names = gpus.visible()
        if by_ray(config):
            self._joined = cluster.join(0, 0)
            try:
                self.placement = place(config, cluster.gpus(), apart)
                if sends_from_a_gpu_of_its_own(config):
                    self.device = self._of_sender()
            except BaseException:
                self.close()
                raise
        else:
            self.placement = place(config, len(self.names), apart)
            self.device = f"cuda:{self.placement.trainer[0]}"

    @property
    def of_trainer(self) -> list[str]:
        """The names of those that train, of this machine."""
        return [] if self.placement.by_ray else [self.names[gpu] for gpu in self.placement.trainer]

    def _of_sender(self) -> str:
        """The GPU of this machine that Ray gives this process, which sends weights from it."""
        room, gpu = rooms.here()
        self._rooms.append(room)
        if gpu not in self.names:
            raise ConfigError(
                f"Ray gives the trainer's process GPU {gpu}, and it sees {', '.join(self.names) or 'none'} "
                "(CUDA_VISIBLE_DEVICES): show it the same as Ray here"
            )
        return f"cuda:{self.names.index(gpu)}"

    def line(self) -> str | None:
        """Who is where; None: on the CPU, as asked."""
        if self.placement.trainer:
            return self.placement.line(self.names)
        if self._config.trainer.device == "auto" and torch.version.cuda is None and (names := gpus.visible()):
            return f"training on the CPU: there are {len(names)} GPUs, and this torch is built without CUDA"
        return None

    def server_maker(self) -> Callable[[Options, Path, int], RayServer] | None:
        """What starts vLLM's servers on the machines of a Ray cluster; None: they are started on this one."""
        if not (self.placement.by_ray and self.placement.engines):
            return None
        trainer, servers = self._config.trainer, len(self.placement.engines)
        size = self._config.actor_rollout_ref.rollout.tensor_model_parallel_size
        if self.placement.shared:
            of_node = -(-servers // trainer.nnodes)
            self.room = rooms.of_workers("the policy", trainer.nnodes, trainer.per_node, 1, of_node)
            self._rooms.append(self.room)
            seats = rooms.beside(self.room, trainer.nnodes, trainer.per_node, servers, size)
        else:
            seats = rooms.apart(servers, size)
            self._rooms.append(seats[0].room)

        def made(options: Options, run_dir: Path, index: int) -> RayServer:
            seat = seats[index]
            return RayServer(options, run_dir, index, rooms.scheduled(seat.room, seat.bundle), seat.gpus)

        return made

    def close(self) -> None:
        """Give back the rooms, and leave the cluster."""
        for room in self._rooms:
            rooms.give_back(room)
        self._rooms = []
        if self._joined:
            cluster.leave()
            self._joined = False


def check_apart(policies: Sequence[RunPolicy]) -> None:
    """Raises ConfigError where several policies would take the same servers, or the same GPUs of this machine, each as
    if it were alone."""
    trainer = policies[0].config.trainer
    if not policies[0].name:
        return
    on_cuda = device_of(trainer.device).type == "cuda"
    for first, second in combinations(policies, 2):
        own, other = (engine_of_adapters(each.config) for each in (first, second))
        if own is None or own != other:
            _check_engines_apart(first, second, on_cuda=on_cuda)
    if not on_cuda:
        return
    if trainer.workers > 1 and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"trainer.nnodes={trainer.nnodes} and trainer.n_gpus_per_node={trainer.n_gpus_per_node} are asked for by "
            f"each of {len(policies)} policies: start a Ray cluster with as many GPUs (docs/distributed.md), or set "
            "both to 1"
        )
    for policy in policies:
        rollout = policy.config.actor_rollout_ref.rollout
        if rollout.name == "vllm" and not rollout.server_urls and rollout.devices in (None, "colocated"):
            raise ConfigError(
                f"policies.{policy.name}.actor_rollout_ref.rollout.devices is not set: with several policies each vLLM "
                "needs GPUs of its own; name them, or give server_urls of servers that run"
            )


def _check_engines_apart(first: RunPolicy, second: RunPolicy, *, on_cuda: bool) -> None:
    """Raises ConfigError where two policies that cannot share an engine name the same one."""
    own, other = (each.config.actor_rollout_ref.rollout for each in (first, second))
    if "embedded" in (own.name, other.name):
        return
    both: dict[str, set[Any]] = {"server_urls": set(own.server_urls or ()) & set(other.server_urls or ())}
    if on_cuda and not (own.server_urls or other.server_urls):
        named = [each.devices if isinstance(each.devices, list) else () for each in (own, other)]
        both["devices"] = set(named[0]) & set(named[1])
    for key, same in both.items():
        if same:
            raise ConfigError(
                f"policies.{first.name} and policies.{second.name} both have {min(same)} in "
                f"actor_rollout_ref.rollout.{key}: servers are shared by adapters alone (model.lora_rank), over "
                "the same weights and with the same rollout keys but for sampling; give each policy its own"
            )
