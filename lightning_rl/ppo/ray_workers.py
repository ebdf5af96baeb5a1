"""The workers of a run: which group has which models, and what they are asked about all together.

Invariant: a checkpoint says nothing of how many workers wrote it, or of how the models were spread over them.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rl.config.schema import Config
from lightning_rl.inference.load import NotBySlices, device_of, load_model, unfilled
from lightning_rl.inference.weights.stream import BUCKET_BYTES, WeightStream
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.local_workers import FORMATS, Form, LocalWorkers, Role, by_slices, register_model_code
from lightning_rl.rl.losses import LOSSES, loss_named
from lightning_rl.training.distributed import cluster
from lightning_rl.training.distributed.group import WorkerGroup
from lightning_rl.training.distributed.process_group import ProcessGroup
from lightning_rl.training.distributed.remote import RemoteActor, RemoteCritic, RemoteReference, RemoteTeacher
from lightning_rl.training.state import Elsewhere
from lightning_rl.vision import vision_of

_log = logging.getLogger(__name__)


class RayWorkers:
    """Starts the workers that train what `roles` say; whoever makes one calls `close`.

    Args:
        config: the run's.
        roles: the models.
        weights: the folder of the policy's weights, which every worker can read.
        folder: that of the model which training began with.
        training_steps: how many there will be.
        gpus: of a Ray of our own, those that train, by their names in CUDA_VISIBLE_DEVICES.
        room: on a cluster, that of the workers which have the actor, where engines share it.
    """

    critic: RemoteCritic | None = None
    reference: RemoteReference | None = None

    def __init__(
        self,
        config: Config,
        roles: frozenset[Role],
        weights: Path,
        folder: Path,
        training_steps: int,
        *,
        gpus: Sequence[str] = (),
        room: Any = None,
    ) -> None:
        trainer, device = config.trainer, device_of(config.trainer.device).type
        apart = groups(config, roles)
        self._config = config
        if (why := _read_whole_because(config, weights)) is not None:
            _log.warning("each worker reads the whole policy before it is cut, and needs memory for it: %s", why)
        self._ours = cluster.join(*need(config, roles, weights), gpus)
        self._groups: dict[Role, WorkerGroup] = {}
        self._all: list[WorkerGroup] = []
        try:
            for own in apart:
                build = bind(_built, config, own, weights, folder, training_steps, _own_loss(config))
                name, seat = ", ".join(sorted(own)), room if "actor" in own else None
                group = WorkerGroup(name, trainer.nnodes, trainer.per_node, device, build, seat)
                self._all.append(group)
                self._groups |= dict.fromkeys(own, group)
        except BaseException:
            self.close()
            raise
        self.actor = RemoteActor(self._groups["actor"], resolved_config.actor_config(config, training_steps))
        if "critic" in roles:
            self.critic = RemoteCritic(self._groups["critic"], resolved_config.critic_config(config, training_steps))
        if "reference" in roles:
            self.reference = RemoteReference(self._groups["reference"])
        self.teachers = {
            name: RemoteTeacher(self._groups["actor"], name)
            for name, teacher in config.distillation.teachers().items()
            if not teacher.server_urls
        }

    def weights(self) -> dict[str, Tensor]:
        """What was trained of the policy, whole, by name."""
        by_name: dict[str, Tensor] = self._groups["actor"].ask(None, "weights")
        return by_name

    def weight_stream(self, form: Form, device: torch.device) -> WeightStream:
        """The policy's weights, a bucket at a time in this process, on `device`."""
        group = self._groups["actor"]

        def tensors() -> Iterator[tuple[str, Tensor]]:
            with group.alone:  # two that read at once would each get a part
                group.ask(None, "begin_sending", form)
                while bucket := group.ask(None, "next_bucket"):
                    for name in list(bucket):
                        yield name, bucket.pop(name).to(device)

        with group.alone:
            return WeightStream(group.ask(None, "begin_sending", form), tensors, device)

    def average_teachers(self) -> None:
        """As of `LocalWorkers`."""
        if self._config.distillation.averages:
            self._groups["actor"].ask(None, "average_teachers")

    def free_unused_memory(self) -> None:
        """Have all workers give back what they keep for later."""
        for group in self._all:
            group.ask(None, "free_unused_memory")

    def state_dict(self) -> dict[str, Any]:
        """As of `LocalWorkers`; it is written by the workers, each its part, and is never here."""
        lora = bool(self._config.actor_rollout_ref.model.lora_rank)
        there = {"actor": True, "critic": self.critic is not None, "adapter": lora}
        there["value head"] = "value head" in self._groups
        there["teachers"] = self._config.distillation.averages
        return {part: Elsewhere(bind(self._write_state, part)) if has else None for part, has in there.items()}

    def _write_state(self, part: str, folder: Path) -> None:
        group = self._groups["critic" if part == "critic" else "actor"]
        group.ask(None, "write_state", part, folder.resolve())  # workers have other current folders

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As of `LocalWorkers`."""
        for group in self._all:
            group.ask(None, "load_state_dict", dict(state))

    def close(self) -> None:
        """End the workers, and Ray where it was started for them."""
        for group in self._all:
            group.close()
        if self._ours:
            cluster.leave()


def groups(config: Config, roles: frozenset[Role]) -> list[frozenset[Role]]:
    """Who shares workers: all, or with `trainer.colocate=false` each model has its own. A head stays on its model, and
    so does the reference that is the policy without its adapter."""
    if config.trainer.colocate:
        return [roles]
    lora = config.actor_rollout_ref.model.lora_rank
    alone: list[Role] = [role for role in sorted(roles) if role == "critic" or (role == "reference" and not lora)]
    return [roles - set(alone), *(frozenset({role}) for role in alone)]


def _built(
    config: Config,
    roles: frozenset[Role],
    weights: Path,
    folder: Path,
    training_steps: int,
    own_loss: tuple[str, Any],
    team: ProcessGroup,
) -> LocalWorkers:
    """The models of one worker, in its process. They come to its device in shards."""
    mode, loss = own_loss
    LOSSES[mode] = loss
    torch.manual_seed(config.data.seed + team.rank)
    held = FORMATS[config.actor_rollout_ref.actor.fsdp_config.model_dtype]
    register_model_code(config)
    model = config.actor_rollout_ref.model
    if model.lora_rank:  # peft makes an adapter where the weights that it adapts are: not on `meta`
        policy, files = load_model(weights, held, attention=model.attn_implementation), None
    else:
        policy, files = by_slices(weights, held, model.attn_implementation)
    made = LocalWorkers(config, policy, roles, vision_of(folder, policy), files)
    made.train(folder, training_steps, team)
    return made


def _read_whole_because(config: Config, weights: Path) -> str | None:
    """Why workers do not read their parts of the policy alone; None: they do."""
    model = config.actor_rollout_ref.model
    if model.lora_rank:
        return "an adapter is put into it (actor_rollout_ref.model.lora_rank)"
    try:
        unfilled(weights, FORMATS[config.actor_rollout_ref.actor.fsdp_config.model_dtype], model.attn_implementation)
    except NotBySlices as reason:
        return str(reason)
    return None


def _own_loss(config: Config) -> tuple[str, Any]:
    """The loss by its name: one of the user's own is known in this process alone."""
    mode = resolved_config.actor_config(config, 1).loss_mode
    return mode, loss_named(mode)


def need(config: Config, roles: frozenset[Role], weights: Path) -> tuple[int, int]:
    """How many processes a Ray of our own must have room for, and how many bytes they give each other at once."""
    return config.trainer.workers * len(groups(config, roles)), min(4 * _bytes(weights), 8 * BUCKET_BYTES)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
