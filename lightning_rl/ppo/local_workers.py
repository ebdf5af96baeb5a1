"""Actor, critic and reference as the config says, in one process: alone, or as a member of a team that shares them.

Invariant: which weights are there and what a checkpoint holds of them does not depend on how many processes there are.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import Config, Fsdp, TeacherModel
from lightning_rl.inference import model_code
from lightning_rl.inference.load import NotBySlices, folder_here, load_model, model_folder, unfilled, vocabulary_size
from lightning_rl.inference.weights.stream import BUCKET_BYTES, Described, WeightStream, as_saved, buckets, stream_of
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.estimators import needs_reference
from lightning_rl.processes.gpus import free_unused_memory
from lightning_rl.training import lora, shards
from lightning_rl.training import state as states
from lightning_rl.training.actor import Actor
from lightning_rl.training.batch import MiniBatch, TrainingSequence, sequences_of
from lightning_rl.training.critic import Critic, ValueModel, value_head
from lightning_rl.training.distributed.process_group import ProcessGroup
from lightning_rl.training.forward import Forward
from lightning_rl.training.reference import BaseOfAdapter, Reference
from lightning_rl.training.teacher import AveragedTeacher, FrozenTeacher, PolicyAsTeacher, Scores
from lightning_rl.vision import ModelVision, vision_of

_log = logging.getLogger(__name__)

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16}

AVERAGED_RATE = 0.05  # of an averaged teacher, as arXiv 2601.20802 has it

Role = Literal["actor", "value head", "critic", "reference"]
# Of the policy's weights: all under the model's names, or the checkpoint's; or those that an adapter changes.
Form = Literal["model", "saved", "changed", "adapter"]


def roles_of(config: Config, *, with_critic: bool) -> frozenset[Role]:
    """What a run trains and asks; with a shared trunk the actor has a value head, and there is no critic."""
    roles: set[Role] = {"actor"}
    if with_critic:
        roles.add("value head" if config.critic.shared_trunk else "critic")
    if needs_reference(config):
        roles.add("reference")
    return frozenset(roles)


def register_model_code(config: Config) -> None:
    """Have `transformers` know the models that come with Python code of their own, in this process; of the hub's, those
    that are on this machine.

    Raises ConfigError for one whose code is not trusted (`trust_remote_code`), or fails.
    """
    policy, critic = config.actor_rollout_ref.model, config.critic.model
    for key, model in (("actor_rollout_ref.model", policy), ("critic.model", critic)):
        folder = None if model.path is None else folder_here(model.path)
        if folder is None:
            continue
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{key}.path={model.path!r}: {folder} is no model's folder, it has no config.json")
        try:
            if model.trust_remote_code:
                model_code.register(folder)
            else:
                model_code.refuse_unknown(folder)
        except model_code.ModelCodeRefused as error:
            advice = "" if model.trust_remote_code else f": read it, then set {key}.trust_remote_code=true"
            raise ConfigError(f"{key}.path={model.path!r}: {error}{advice}") from error


class LocalWorkers:
    """Those of a run's models that this process has.

    Args:
        config: the run's.
        policy: the causal LM that training begins with; the actor trains it.
        roles: what of the run is here; none: only the policy, adapted.
        vision: how its models see images; None: they read text.
        files: of a policy that has no weights yet (`load.unfilled`), where each is; a team reads them, a part each.

    `model` is the policy with its adapter; `actor`, `critic` and `reference` (None where there is none) are there after
    `train`, and so are the `teachers` that no server has, by name, where the actor is. Raises ConfigError for an
    adapter that cannot be made.
    """

    actor: Actor | None = None
    critic: Critic | None = None
    reference: Reference | BaseOfAdapter | None = None
    _sending: Iterator[dict[str, Tensor]] = iter(())

    def __init__(
        self,
        config: Config,
        policy: Any,
        roles: Collection[Role],
        vision: ModelVision | None = None,
        files: Mapping[str, Path] | None = None,
    ) -> None:
        self.config = config
        self._vision = vision
        self.roles = frozenset(roles)
        self._fills: dict[int, Callable[[nn.Module], None]] = {}  # by the model's identity
        self._warned: set[str] = set()
        self._pad_id: int = policy.config.get_text_config().pad_token_id or 0
        parameter = next(policy.parameters())
        self._device = torch.device("cpu") if parameter.is_meta else parameter.device
        self.teachers: dict[str, FrozenTeacher | PolicyAsTeacher] = {}
        model = config.actor_rollout_ref.model
        self._team: ProcessGroup | None = None
        self._files, self._read_as = files, parameter.dtype
        self._values = self._value_model(policy) if "critic" in roles else None
        if self.roles and "actor" not in self.roles:
            self.model: nn.Module = nn.Identity()  # others train the policy, and the critic has made its copy
        else:
            self.model = self._adapted(policy) if model.lora_rank else policy
        if files is not None:
            self._fills[id(self.model)] = partial(shards.fill, files=files, dtype=parameter.dtype)
        if model.enable_gradient_checkpointing and "actor" in self.roles:
            checkpoint_activations(self.model)
        self._value_head = value_head(self.model) if "value head" in roles else None

    def train(self, folder: Path, training_steps: int, team: ProcessGroup | None = None) -> None:
        """Make what the roles ask for, for a run of so many steps.

        Args:
            folder: the model that training began with: the reference's weights.
            team: those who hold the models with this process, which ask the same of the same rows.
        """
        config, self._team = self.config, team
        if "actor" in self.roles:
            forward = self._forward(self.model, config.actor_rollout_ref.actor.fsdp_config, self._vision)
            head, of_actor = self._value_head, resolved_config.actor_config(config, training_steps)
            if head is not None and team is not None:
                team.shard(head, config.actor_rollout_ref.actor.fsdp_config.fsdp_size)
            self.actor = Actor(self.model, of_actor, self._pad_id, forward, head)
            if "reference" in self.roles and config.actor_rollout_ref.model.lora_rank:
                self.reference = BaseOfAdapter(self.model, self._pad_id, forward=forward, **self._bounds())
            self.teachers = {
                name: self._teacher(teacher, folder, forward)
                for name, teacher in config.distillation.teachers().items()
                if not teacher.server_urls
            }
        if self._values is not None:
            of_values = self._forward(self._values.trunk, config.critic.fsdp_config, self._vision)
            if team is not None:
                team.shard(self._values.head, config.critic.fsdp_config.fsdp_size)
            of_critic = resolved_config.critic_config(config, training_steps)
            self.critic = Critic(self._values, of_critic, self._pad_id, of_values)
        if "reference" in self.roles and self.reference is None:
            self.reference = self._frozen(folder)

    def update_actor(
        self, plan: list[MiniBatch], *, values_alone: bool = False
    ) -> tuple[dict[str, float], list[tuple[Tensor | None, NDArray[np.float32] | None]]]:
        """`Actor.update` of a copy of the plan: its metrics, and the `entropies` and `old_log_probs` of its
        sequences."""
        assert self.actor is not None
        metrics = self.actor.update(plan, values_alone=values_alone)
        return metrics, [(s.entropies, s.old_log_probs) for s in sequences_of(plan)]

    def average_teachers(self) -> None:
        """Have the teachers that are the policy's average follow its last update."""
        for teacher in self.averaged.values():
            teacher.follow(self.model)

    @property
    def averaged(self) -> dict[str, AveragedTeacher]:
        """The teachers that change, by name."""
        return {name: teacher for name, teacher in self.teachers.items() if isinstance(teacher, AveragedTeacher)}

    def teacher_scores(self, name: str, sequences: list[TrainingSequence], top: int) -> list[Scores]:
        """What one of the teachers says (`Teacher.score`)."""
        return self.teachers[name].score(sequences, top)

    def free_unused_memory(self) -> None:
        """Give back what this process keeps for later."""
        free_unused_memory()

    def weights(self) -> dict[str, Tensor]:
        """The policy's weights that are trained, whole, by their names; in a team only the first process has them."""
        by_name: dict[str, Tensor] = shards.whole({name: p.detach() for name, p in trained(self.model).items()})
        return by_name

    def weight_stream(self, form: Form) -> WeightStream:
        """The policy's weights one by one; a team goes through it together, and each process has them whole."""
        adapted = bool(self.config.actor_rollout_ref.model.lora_rank)
        if form == "changed":
            return lora.changed(self.model)
        if form == "adapter":
            return lora.low_rank(self.model)
        own: Any = self.model.get_base_model() if adapted else self.model  # type: ignore[operator]
        stream = lora.merged(self.model) if adapted else stream_of(self.model, shards.full)
        return stream if form == "model" else as_saved(own, stream)

    def begin_sending(self, form: Form) -> dict[str, Described]:
        """What is known of the weights that `next_bucket` gives from now on."""
        stream = self.weight_stream(form)
        self._sending = buckets(((name, tensor.cpu()) for name, tensor in stream), BUCKET_BYTES)
        return dict(stream.described)

    def next_bucket(self) -> dict[str, Tensor]:
        """Some more weights, whole, on the CPU; {} when there are no more. A team asks together."""
        with torch.no_grad():
            return next(self._sending, {})

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the exported policy; None for what is not here. In a team each process has its
        part of it."""
        adapted = self.actor is not None and self.config.actor_rollout_ref.model.lora_rank
        head = self._value_head
        return {
            "actor": None if self.actor is None else self.actor.state_dict(),
            "critic": None if self.critic is None else self.critic.state_dict(),
            "value head": None if head is None else head.state_dict(),
            "adapter": {name: p.detach() for name, p in trained(self.model).items()} if adapted else None,
            "teachers": self._averaged_weights() or None,
        }

    def _averaged_weights(self) -> dict[str, Tensor]:
        return {
            f"{name}.{weight}": value.detach()
            for name, teacher in self.averaged.items()
            for weight, value in teacher.weights.items()
        }

    def write_state(self, part: str, folder: Path) -> None:
        """Write a part of `state_dict` to a new folder; a team calls this together, and each process writes what it
        has."""
        states.write(folder, {states.PART: self.state_dict()[part]}, None if self._team is None else self._team.talk)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, as far as it is of what is here."""
        if self.actor is not None:
            self.actor.load_state_dict(state["actor"])
            if state["adapter"] is not None:
                shards.put(state["adapter"], trained(self.model))
            if averaged := self._averaged_weights():
                shards.put(state["teachers"], averaged)
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        if self._value_head is not None:
            shards.put(state["value head"], dict(self._value_head.named_parameters()))

    def _adapted(self, policy: nn.Module) -> nn.Module:
        """`policy` with an adapter in it."""
        model = self.config.actor_rollout_ref.model
        try:
            return lora.adapted(
                policy,
                rank=model.lora_rank,
                alpha=model.lora_alpha,
                targets=model.target_modules,
                exclude=model.exclude_modules,
                adapter_path=model.lora_adapter_path,
                seed=self.config.data.seed,
            )
        except ValueError as error:
            raise ConfigError(f"actor_rollout_ref.model: {error}") from error

    def _value_model(self, policy: nn.Module) -> ValueModel:
        critic = self.config.critic
        held, attention = (
            FORMATS[critic.fsdp_config.model_dtype],
            self.config.actor_rollout_ref.model.attn_implementation,
        )
        like, files, read_as = policy, self._files, self._read_as
        if critic.model.path is not None and files is not None:
            (like, files), read_as = by_slices(model_folder(critic.model.path), held, attention), held
        if critic.model.path is None or self._files is not None:
            values = ValueModel.like(like, held)
        else:
            values = ValueModel.load(model_folder(critic.model.path), held, self._device, attention)
        if files is not None:
            prefix = f"{like.base_model_prefix}."
            self._fills[id(values.trunk)] = partial(shards.fill, files=files, dtype=read_as, prefix=prefix)
        if critic.model.enable_gradient_checkpointing:
            checkpoint_activations(values.trunk)
        return values

    def _frozen(self, folder: Path) -> Reference:
        model, forward = self._frozen_model(folder)
        offload = self.config.actor_rollout_ref.ref.fsdp_config.param_offload
        return Reference(model, self._pad_id, offload=offload, forward=forward, **self._bounds())

    def _teacher(self, teacher: TeacherModel, begun: Path, policy: Forward) -> FrozenTeacher | PolicyAsTeacher:
        """A teacher in this process: one in a folder is held and run as the reference is; the policy itself is what is
        trained, without its adapter where it is to be as it began (in the folder `begun`), or a copy in float32."""
        vocabulary, bounds = self._vocabulary(begun), self._bounds()
        if teacher.weights == "present":
            return PolicyAsTeacher(policy, vocabulary, **bounds)
        if teacher.weights == "initial" and self.config.actor_rollout_ref.model.lora_rank:
            disabled: Any = self.model.disable_adapter
            return PolicyAsTeacher(policy, vocabulary, within=disabled, **bounds)
        bounds["offload"] = self.config.actor_rollout_ref.ref.fsdp_config.param_offload
        if teacher.weights == "averaged":
            formats = self.config.actor_rollout_ref.actor.fsdp_config
            model, forward = self._frozen_model(begun, formats, torch.float32)
            rate = AVERAGED_RATE if teacher.rate is None else teacher.rate
            return AveragedTeacher(model, self._pad_id, vocabulary, rate, forward=forward, **bounds)
        path = teacher.model_path
        model, forward = self._frozen_model(begun if path is None else self._teachers_folder(path))
        return FrozenTeacher(model, self._pad_id, vocabulary, forward=forward, **bounds)

    def _teachers_folder(self, path: str) -> Path:
        """Where the model is, from the hub if need be."""
        return model_folder(path)

    def _vocabulary(self, folder: Path) -> int | None:
        """Tokens that the tokenizer of a model has."""
        return vocabulary_size(folder)

    def _frozen_model(
        self, folder: Path, formats: Fsdp | None = None, held: torch.dtype | None = None
    ) -> tuple[nn.Module, Forward]:
        formats = self.config.actor_rollout_ref.ref.fsdp_config if formats is None else formats
        attention = self.config.actor_rollout_ref.model.attn_implementation
        held = FORMATS[formats.model_dtype] if held is None else held
        if self._team is None:
            model: nn.Module = load_model(folder, held, self._device, attention)
        else:
            model, files = by_slices(folder, held, attention)
            if files is not None:
                self._fills[id(model)] = partial(shards.fill, files=files, dtype=held)
        return model, self._forward(model, formats, vision_of(folder, model))

    def _bounds(self) -> dict[str, Any]:
        """What the reference computes at once."""
        rows, actor = (
            self.config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu,
            resolved_config.actor_config(self.config, 1),
        )
        return {"rows": rows or actor.micro_batch_rows, "tokens": None if rows else actor.micro_batch_tokens}

    def _forward(self, model: nn.Module, formats: Fsdp, vision: ModelVision | None) -> Forward:
        packed = self.config.actor_rollout_ref.model.use_remove_padding
        forward = self._made_forward(model, formats, vision, packed=packed)
        if packed and forward.unpacked_because is not None:
            self._warn_once(
                "actor_rollout_ref.model.use_remove_padding has no effect, so what rows begin with alike is computed "
                f"in each of them: {forward.unpacked_because}"
            )
        if forward.whole_logits_because is not None:
            self._warn_once(
                "the logits of all tokens of a micro-batch are in memory at once; where that is too much, lower "
                f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu: {forward.whole_logits_because}"
            )
        return forward

    def _warn_once(self, warning: str) -> None:
        """The models of a run are of one kind, mostly."""
        if warning not in self._warned:
            self._warned.add(warning)
            _log.warning("%s", warning)

    def _made_forward(self, model: nn.Module, formats: Fsdp, vision: ModelVision | None, *, packed: bool) -> Forward:
        autocast = torch.bfloat16 if formats.dtype == "bfloat16" else None
        if self._team is not None:
            return self._team.forward(
                model,
                self._pad_id,
                packed=packed,
                autocast=autocast,
                vision=vision,
                fsdp_size=formats.fsdp_size,
                reshard_after_forward=formats.reshard_after_forward,
                sequence_parallel=resolved_config.sequence_parallel(self.config, formats),
                fill=self._fills.get(id(model), _is_filled),
            )
        return Forward(model, self._pad_id, packed=packed, autocast=autocast, vision=vision)


def by_slices(folder: Path, held: torch.dtype, attention: str | None) -> tuple[nn.Module, Mapping[str, Path] | None]:
    """The model in `folder` before its weights are read, and where they are; or, said in a warning, whole, and None."""
    try:
        return unfilled(folder, held, attention)
    except NotBySlices as reason:
        _log.warning("each worker reads the whole model before it is cut: %s", reason)
        return load_model(folder, held, attention=attention), None


def _is_filled(model: nn.Module) -> None:
    """Its weights are there."""


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def checkpoint_activations(model: Any) -> None:
    """Have the model's layers keep no activations, and compute them again for the backward pass."""
    new = getattr(model, "activation_checkpointing_enable", None)  # transformers has renamed it between 5.16 and 5.24
    (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
