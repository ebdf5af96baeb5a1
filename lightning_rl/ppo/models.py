"""The models of a PPO run: policy with its engine, reference, critic; built, saved and sent to the engine here.

With an adapter (`lora_rank`) the policy's own weights never change: the adapter is trained, kept in checkpoints and
sent, and the reference is the policy without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakSet

import msgspec
import numpy as np
import torch
from torch import nn

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import Config
from lightning_rl.inference.embedded import EmbeddedPolicy, Unsampled
from lightning_rl.inference.load import (
    ModelConfigRefused,
    ModelSource,
    device_of,
    load_model,
    located,
    skeleton,
    with_config,
)
from lightning_rl.inference.sglang import SGLangPolicy
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.inference.weights import four_bit
from lightning_rl.inference.weights.stream import WeightStream, stream_of_files
from lightning_rl.ppo import resolved_config
from lightning_rl.ppo.cards import Cards
from lightning_rl.ppo.local_workers import FORMATS, Form, LocalWorkers, register_model_code, roles_of, trained
from lightning_rl.ppo.ray_workers import RayWorkers, need
from lightning_rl.ppo.teachers import served_teachers
from lightning_rl.processes.gpus import free_unused_memory
from lightning_rl.training import checkpoint, lora, shards
from lightning_rl.training.actor import Actor
from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.chat_template import with_template
from lightning_rl.training.critic import Critic
from lightning_rl.training.distributed.remote import OfTokens, RemoteActor, RemoteCritic, RemoteReference
from lightning_rl.training.reference import BaseOfAdapter, Reference
from lightning_rl.training.teacher import ServedTeacher, Teacher
from lightning_rl.vision import vision_of

_NOT_BESIDE = (
    "this model cannot be sampled so: it reads images, has experts that are modules of their own, is held in 4 bits "
    "(load_in_4bit), or has an adapter on its embedding or its output layer"
)
AnyPolicy = EmbeddedPolicy | VllmPolicy | SGLangPolicy


@dataclass(frozen=True)
class SharedEngine:
    """The policies of a run whose adapters one engine may sample: the ranks of all, and the models of those that are
    made already."""

    ranks: Sequence[int]
    made: "Sequence[Models]"


_ALIVE: "WeakSet[Models]" = WeakSet()


class Models:
    """What a run trains and asks.

    Args:
        config: the run's.
        run_dir: its folder, where an engine with processes of its own has its logs.
        with_critic: whether a critic is trained.
        sampled: whether there is an engine; without one there is nothing to `start`.
        resumed: the checkpoint that it goes on from; None: it begins.
        shared: who else is sampled by the same engine, where that can be; None: nobody.

    `teachers` are there after `train` too, by their names in the config.

    `config` has the learning rate that goes with the policy (`learning_rate_by_size`: the config gave none);
    `tokenizer` is the folder of its tokenizer and chat format. `policy` is there at once, `actor`, `critic` and
    `reference` (None where nothing needs them) after `train`. With a shared trunk the actor has the critic's head, and
    there is no `critic`. Where several processes train, these three stand for what the processes hold, and `model` is
    the policy without its weights. `cards` are the GPUs, and who is on which. Raises ConfigError
    for an adapter that cannot be made, and for GPUs that are too few.
    """

    actor: Actor | RemoteActor
    critic: Critic | RemoteCritic | None = None
    reference: Reference | BaseOfAdapter | RemoteReference | None = None
    teachers: Mapping[str, Teacher] = MappingProxyType({})

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        with_critic: bool,
        resumed: Path | None = None,
        sampled: bool = True,
        shared: "SharedEngine | None" = None,
    ) -> None:
        if _ALIVE:  # of an earlier run: a run is full of cycles, so its models stay when nobody holds them any more
            free_unused_memory()
        _ALIVE.add(self)
        resolved_config.check_paths(config, with_critic=with_critic)
        located(config.actor_rollout_ref.model.path)  # from the hub, if need be
        register_model_code(config)
        self._roles = roles_of(config, with_critic=with_critic)
        self._resumed = None if config.actor_rollout_ref.model.lora_rank else resumed
        self.cards = Cards(config, self._roles)
        self.policy: AnyPolicy = _policy(config, run_dir, self._resumed, self.cards, sampled=sampled, shared=shared)
        template = config.actor_rollout_ref.model.chat_template
        self.tokenizer = with_template(self.policy.folder, template, run_dir / "tokenizer")
        parameters = four_bit.count(self.policy.model)
        self.learning_rate_by_size = config.actor_rollout_ref.actor.optim.lr is None
        self.config = config = resolved_config.with_learning_rate(config, parameters)
        self._crew: RayWorkers | None = None
        self._held = FORMATS[config.actor_rollout_ref.actor.fsdp_config.model_dtype]
        vision = vision_of(self.policy.folder, self.policy.model)
        resolved_config.check_spans(config, sees=vision is not None)
        resolved_config.check_sequence_parallel(config, self.policy.model.config, sees=vision is not None)
        if isinstance(self.policy, VllmPolicy):
            self.policy.make_room = self._make_room
        self._own = LocalWorkers(config, self.policy.model, () if config.trainer.workers > 1 else self._roles, vision)
        self.model: nn.Module = self._own.model
        self._device = device_of(_device(config, self.cards))

    def start(self, version: int = 0) -> None:
        """Start the engine, and give it the weights that training begins with, those of this policy version. Whoever
        calls this closes `policy`, whatever comes between.

        Engines beside the trainer's process are known by version 0 until they are given the next weights, and so is an
        adapter that is loaded later.
        """
        in_process = isinstance(self.policy, EmbeddedPolicy) and not self.config.actor_rollout_ref.model.lora_rank
        offload = self.config.actor_rollout_ref.actor.fsdp_config.param_offload
        alone = self.config.trainer.workers == 1
        if isinstance(self.policy, VllmPolicy) and offload and not self._sent_from_gpu and alone:
            self.model.to("cpu")  # until `train`: the engine may need its room
            free_unused_memory()
        self.policy.start()
        if alone:
            self.send_weights(version if in_process else 0)
        else:
            self._send_first(version if in_process else 0)

    def train(self, training_steps: int) -> None:
        """Make actor, critic, reference and teachers, for a run of so many steps. Whoever calls this calls `close`.

        Raises ConfigError for a teacher with another tokenizer than the policy's.
        """
        served = served_teachers(self.config, self.policy.folder)
        if self.config.trainer.workers > 1:
            weights = self._resumed or self.policy.folder
            self._crew = RayWorkers(
                self.config,
                self._roles,
                weights,
                self.policy.folder,
                training_steps,
                gpus=self.cards.of_trainer,
                room=self.cards.room,
            )
            self.actor, self.critic, self.reference = self._crew.actor, self._crew.critic, self._crew.reference
            self.teachers = served | self._crew.teachers
            if isinstance(self.policy, VllmPolicy | SGLangPolicy):
                self.policy.score = self._score
        else:
            self.model.to(self._device)
            self._own.train(self.policy.folder, training_steps)
            assert self._own.actor is not None
            self.actor, self.critic, self.reference = self._own.actor, self._own.critic, self._own.reference
            self.teachers = served | self._own.teachers
        self.actor.offload()  # until the first step asks for it

    def worker_need(self) -> tuple[int, int]:
        """What several workers need of a Ray of our own: see `ray_workers.need`."""
        return need(self.config, self._roles, self._resumed or self.policy.folder)

    def close(self) -> None:
        """End the processes that train, where there are any beside this one, and wait for no teacher."""
        for teacher in self.teachers.values():
            if isinstance(teacher, ServedTeacher):
                teacher.close()
        if self._crew is not None:
            self._crew.close()
        self.cards.close()

    @property
    def has_values(self) -> bool:
        """Whether there is a critic, or a head on the policy that stands for one."""
        return bool(self._roles & {"critic", "value head"})

    def values(self, sequences: list[TrainingSequence]) -> OfTokens:
        """Values of the critic, or of the policy's value head; one must be there."""
        return (self.actor if self.critic is None else self.critic).values(sequences)

    def average_teachers(self) -> None:
        """Have the teachers that are the policy's average follow its last update."""
        (self._own if self._crew is None else self._crew).average_teachers()

    def send_weights(self, version: int) -> None:
        """Give the engine what was trained, as policy version `version`; returns when it samples with it."""
        if isinstance(self.policy, VllmPolicy) and not self._sent_from_gpu and hasattr(self, "actor"):
            self.actor.offload()  # with param_offload the file is written from main memory
        form = self._form
        self.policy.update_weights(self._weight_stream(form), version, partial=form == "changed")

    def _weight_stream(self, form: Form) -> WeightStream:
        return self._own.weight_stream(form) if self._crew is None else self._crew.weight_stream(form, self._device)

    @property
    def _form(self) -> Form:
        """How the engine wants weights."""
        if self.policy.takes_adapter:
            return "adapter"
        if not isinstance(self.policy, EmbeddedPolicy):
            return "saved"
        return "changed" if self.config.actor_rollout_ref.model.lora_rank else "model"

    def _send_first(self, version: int) -> None:
        """Give the engine what training begins with while no worker is there yet: from the model's files, or, where an
        adapter goes on or the files are no safetensors, by way of a model that is given up again."""
        model, form = self.config.actor_rollout_ref.model, self._form
        folder = self._resumed or self.policy.folder
        itself = isinstance(self.policy, EmbeddedPolicy) and model.lora_adapter_path is None
        if form == "model" or itself:
            first = WeightStream({}, lambda: iter(()))  # the engine has read them itself
        elif (
            form == "saved"
            and model.lora_adapter_path is None
            and (stream := stream_of_files(folder, self.policy.model)) is not None
        ):
            first = stream.held_as(self._held)
        elif form == "adapter" and model.lora_adapter_path is None:
            first = _zeros_like(self._own.weight_stream(form))  # the model's weights are elsewhere
        else:
            whole = load_model(folder, self._held, attention=model.attn_implementation)
            first = LocalWorkers(self.config, whole, ()).weight_stream(form)
        on_device = WeightStream(
            first.described, lambda: ((name, t.to(self._device)) for name, t in first), self._device
        )
        self.policy.update_weights(on_device, version, partial=isinstance(self.policy, EmbeddedPolicy))

    def _score(self, token_ids: list[int], first: int) -> list[float]:
        """What the workers' policy says of the tokens from `first` on, log probabilities in nats at temperature 1."""
        some = np.ones(len(token_ids) - first, np.float32)
        row = TrainingSequence(
            rollout=0,
            token_ids=np.asarray(token_ids),
            trained=np.arange(first, len(token_ids)),
            rollout_log_probs=-some,
            advantages=some,
            temperature=some,
        )
        log_probs: list[float] = self.actor.log_probs([row])[0].tolist()
        return log_probs

    @property
    def _sent_from_gpu(self) -> bool:
        """Whether weights go from GPU to GPU, and by no file."""
        return self.config.actor_rollout_ref.rollout.weight_transfer != "file"

    def _make_room(self, memory: str) -> None:
        """Before an engine on the same GPUs takes memory: with `param_offload` the weights wait in main memory,
        unless they are sent from the GPU now; and no allocator keeps what it does not use."""
        if hasattr(self, "actor"):
            if memory == "weights" and self._sent_from_gpu:
                self.actor.onload()
            else:
                self.actor.offload()
        if self._crew is not None:
            self._crew.free_unused_memory()
        free_unused_memory()

    def export(self, folder: Path) -> None:
        """Write policy and tokenizer to `folder`, as `transformers` (or, an adapter alone, `peft`) loads them."""
        model = self.config.actor_rollout_ref.model
        if model.lora_rank and model.lora_export == "adapter":
            if self._crew is not None:
                shards.put(self._crew.weights(), trained(self.model))
            lora.save(self.model, folder)
            checkpoint.copy_tokenizer(self.tokenizer, folder)
        else:
            own: Any = self.model.get_base_model() if model.lora_rank else self.model  # type: ignore[operator]
            checkpoint.export_model(own, self._weight_stream("saved"), self.tokenizer, folder)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the exported policy."""
        return (self._own if self._crew is None else self._crew).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises ConfigError where the config now asks for other models."""
        expected = {part: part in self._roles for part in ("critic", "value head")}
        expected |= {"adapter": bool(self.config.actor_rollout_ref.model.lora_rank)}
        expected |= {"teachers": self.config.distillation.averages}
        for part, there in expected.items():
            saved = state.get(part)  # earlier releases had no teachers in it
            if there != (saved is not None):
                raise ConfigError(
                    f"the checkpoint has {'no' if saved is None else 'its'} {part}, the config says otherwise: "
                    "resume with the config.yaml of the run's folder"
                )
        (self._own if self._crew is None else self._crew).load_state_dict(state)


def _zeros_like(weights: WeightStream) -> WeightStream:
    """An adapter of that shape that changes nothing, as every new one."""
    described = weights.described
    return WeightStream(described, lambda: ((name, torch.zeros(each.shape)) for name, each in described.items()))


def _policy(
    config: Config,
    run_dir: Path,
    weights: Path | None,
    cards: Cards,
    *,
    sampled: bool,
    shared: SharedEngine | None,
) -> AnyPolicy:
    """The policy, with the engine that the config names where it is sampled."""
    model = config.actor_rollout_ref.model
    path, name = _read_from(config, run_dir)
    source = ModelSource(
        path,
        name,
        weights,
        device=_device(config, cards),
        dtype=FORMATS[config.actor_rollout_ref.actor.fsdp_config.model_dtype],
        attention=model.attn_implementation,
        load_in_4bit=model.load_in_4bit,
        elsewhere=config.trainer.workers > 1,
    )
    policy: AnyPolicy = _sampled(config, source, run_dir, cards, shared) if sampled else Unsampled(source)
    alone = shared is not None and len(shared.ranks) == 1
    if alone and not policy.takes_adapter:
        raise ConfigError(
            f"actor_rollout_ref.model.lora.merge=false has the engine sample the adapter beside the model, and "
            f"{_NOT_BESIDE}: leave it out"
        )
    return policy


def _read_from(config: Config, run_dir: Path) -> tuple[str | Path | None, str | None]:
    """Where the model is read from; and the name by which its renderer is found, where its config is overridden and it
    is read from a folder of the run."""
    path, changes = config.actor_rollout_ref.model.path, config.actor_rollout_ref.model.override_config
    if not changes:
        return path, None
    folder, name = located(path)
    try:
        return with_config(folder, changes, run_dir / "model-config" / folder.name), name
    except ModelConfigRefused as error:
        raise ConfigError(f"config key actor_rollout_ref.model.override_config: {error}") from error


def _sampled(
    config: Config, source: ModelSource, run_dir: Path, cards: Cards, shared: SharedEngine | None
) -> AnyPolicy:
    """The model with the engine that the config names."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "embedded":
        return EmbeddedPolicy(
            source,
            trained=True,
            dtype=None if rollout.dtype is None else FORMATS[rollout.dtype],
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=rollout.max_model_len,
            expected_len=config.data.max_tokens,
            threads=rollout.num_threads or _cores(config),
            beside=_of_kind(EmbeddedPolicy, shared),
        )
    urls = rollout.server_urls or ()
    tolerance = resolved_config.sampler_tolerance(config)
    if rollout.name == "sglang":
        return SGLangPolicy(source, run_dir, urls=urls, tolerance=tolerance)
    options = resolved_config.vllm_options(config, cards.placement, cards.names)
    beside = None if _adapts_ends(config, source) else _of_kind(VllmPolicy, shared)
    if shared is not None:
        versions = resolved_config.versions_at_once(config)
        options = msgspec.structs.replace(
            options, adapters=len(shared.ranks), adapter_rank=max(shared.ranks), adapter_versions=versions
        )
    make = None if beside else cards.server_maker()  # the servers are there already
    policy = VllmPolicy(source, options, run_dir, urls=urls, make=make, tolerance=tolerance, beside=beside)
    several = shared is not None and len(shared.ranks) > 1
    if several and not policy.takes_adapter and (urls or options.device == "cuda"):
        raise ConfigError(
            f"policies with adapters over one model would share vLLM's servers, and {_NOT_BESIDE}, or vLLM sleeps on "
            "the GPU of the trainer; give each policy actor_rollout_ref.rollout.devices, or server_urls, of its own"
        )
    return policy


def _adapts_ends(config: Config, source: ModelSource) -> bool:
    """Whether the embedding or the output layer gets an adapter, for which vLLM is left no room."""
    model = config.actor_rollout_ref.model
    if not model.lora_rank or (model.target_modules == "all-linear" and model.lora_adapter_path is None):
        return False
    return lora.adapts_ends(LocalWorkers(config, skeleton(source.located[0]), ()).model)


def _cores(config: Config) -> int:
    """Of the embedded engine on a CPU, where none are named: the trainer computes with as many as torch takes."""
    cores = torch.get_num_threads()
    return cores if config.trainer.schedule == "sync" else max(1, cores // 2)


P = TypeVar("P", EmbeddedPolicy, VllmPolicy)


def _of_kind(kind: type[P], shared: SharedEngine | None) -> list[P] | None:
    """The policies that are made already; None where nobody shares an engine."""
    return None if shared is None else [each.policy for each in shared.made if isinstance(each.policy, kind)]


def _device(config: Config, cards: Cards) -> str:
    """Where the policy is in this process; where several workers train, the weights that are on their way."""
    rollout = config.actor_rollout_ref.rollout
    from_memory = rollout.name != "embedded" and rollout.weight_transfer == "file"
    return "cpu" if config.trainer.workers > 1 and from_memory else cards.device
