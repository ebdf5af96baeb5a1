"""The memory of the fullest GPU in each phase of a run, part by part, beside what the card has.

A run's models take turns, and so do trainer and engine (`WeightSync`). What a phase holds is: what everybody holds
between its uses, what its own model holds while it computes, and the engine, awake or asleep.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from lightning_rl.config import ConfigError
from lightning_rl.config.policies import base_of_adapter, engine_of_adapters, samples_adapter
from lightning_rl.config.schema import Config, Fsdp
from lightning_rl.inference.cache import at_first, grown
from lightning_rl.inference.engine import DEFAULT_MAX_MODEL_LEN
from lightning_rl.inference.weights.stream import BUCKET_BYTES
from lightning_rl.memory.engine import VllmMemory, cache_bytes, sampled_dtype, vllm_engine
from lightning_rl.memory.gpus import CONTEXT, FRAGMENTATION, GIB, Hardware
from lightning_rl.memory.traced_step import Held, TracedStep, model_config
from lightning_rl.ppo.local_workers import FORMATS, Role
from lightning_rl.ppo.ray_workers import groups
from lightning_rl.training.distributed.placement import Placement, place, sleeps

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "kv cache", "engine", "others")


@dataclass(frozen=True)
class Phase:
    """Bytes of each of `PARTS` on the fullest GPU."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Budget:
    """The phases of a run on its hardware; `engine` is vLLM, on the trainer's GPUs or its own as `placement` says, and
    `at_once` how many rows of full length its cache has room for (0: none, so nothing is sampled). `misplaced`: why
    nobody can be placed on this hardware; the phases are then those of one GPU that all share."""

    hardware: Hardware
    phases: list[Phase]
    engine: VllmMemory | None = None
    at_once: int = 0
    problems: list[str] = field(default_factory=list)
    placement: Placement = field(default_factory=Placement)
    misplaced: str | None = None

    @property
    def fullest(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether every phase has room."""
        return not self.problems


def budget(
    config: Config, model: Any, traced: TracedStep, hardware: Hardware, beside: int = 0, *, sampled: bool = True
) -> Budget:
    """What `traced` takes on `hardware` as the config places it; `beside`: bytes that other policies of the run hold on
    the trainer's GPU all the time; `sampled`: there is an engine."""
    placed, refused = _placed(config, traced, hardware)
    count = _Count(config, model, traced, hardware, placed, beside=beside, sampled=sampled)
    phases, engine = count.phases(), count.engine
    length = config.data.max_tokens
    at_once = 0 if engine is None else engine.tokens // length
    problems = [
        f"{phase.name}: {phase.total / GIB:.1f} GiB of {hardware.gpu.memory / GIB:.1f} GiB"
        for phase in phases
        if phase.total > hardware.gpu.memory
    ]
    if engine is not None and at_once < 1:
        problems.append(
            f"vLLM's share ({engine.share / GIB:.1f} GiB) has no room for its weights "
            f"({engine.weights / GIB:.1f} GiB) and a row of {length} tokens"
        )
    problems += [] if refused is None else [refused]
    return Budget(hardware, phases, engine, at_once, problems, placed, refused)


def at_rest(config: Config, model: Any, traced: TracedStep, hardware: Hardware) -> int:
    """Bytes that a policy holds on a GPU of its trainer while another one computes there."""
    placed, _ = _placed(config, traced, hardware)
    return sum(_Count(config, model, traced, hardware, placed).between().values())


def shared_at_rest(config: Config, model: Any, traced: TracedStep, hardware: Hardware) -> dict[tuple[Any, ...], int]:
    """Of the bytes of `at_rest`, those under an adapter, which other policies over the same have no second time: by
    what is equal for these policies, in trainer and engine."""
    placed, _ = _placed(config, traced, hardware)
    return _Count(config, model, traced, hardware, placed).shared_between()


def _placed(config: Config, traced: TracedStep, hardware: Hardware) -> tuple[Placement, str | None]:
    """Who is on which GPU, and why that cannot be, where it cannot: then all are counted on one."""
    roles: set[Role] = {"actor"}
    roles |= {"critic"} if traced.critic is not None else set()
    roles |= {"reference"} if traced.reference is not None else set()
    apart = len(groups(config, frozenset(roles))) if config.trainer.workers > 1 else 1
    try:
        return place(config, hardware.count, apart), None
    except ConfigError as error:
        return Placement((0,), ((0,),)), str(error)


def _of_reward_model(config: Config) -> int:
    """Bytes of a reward model on a GPU while it scores; it waits in main memory."""
    model = config.reward.reward_model
    if not model.enable or model.model_path is None or model.device == "cpu":
        return 0
    config_of_it = model_config(model.model_path, "reward.reward_model.model_path")
    try:
        with torch.device("meta"):
            made = AutoModelForSequenceClassification.from_config(config_of_it)
    except ValueError as error:
        raise ConfigError(f"reward.reward_model.model_path={model.model_path!r}: {error}") from error
    return int(made.num_parameters()) * FORMATS[model.dtype].itemsize


class _Count:
    """Adds up the phases of a run."""

    def __init__(
        self,
        config: Config,
        model: Any,
        traced: TracedStep,
        hardware: Hardware,
        placement: Placement,
        *,
        beside: int = 0,
        sampled: bool = True,
    ) -> None:
        self._beside = beside
        self._sampled = sampled
        self._shared = placement.shared
        self._config, self._model, self._traced = config, model, traced
        self._workers = config.trainer.workers
        self._gpu = hardware.gpu
        asleep = sleeps(config, placement)
        # What is trained has a gradient of its own size, in float32.
        adapter = traced.actor.gradients // 4 if samples_adapter(config) else 0
        self.engine = None
        if sampled:
            self.engine = vllm_engine(config, model, traced.parameters, hardware.gpu, sleeps=asleep, adapter=adapter)

    def phases(self) -> list[Phase]:
        """All of them, in the order of a step."""
        policy, critic, traced = self._config.actor_rollout_ref, self._config.critic, self._traced
        in_order = [self._phase("rollouts", {}, awake=True)] if self._sampled else []
        if self.engine is not None and not self._shared:
            in_order = [self._of_engine(self.engine)]
        if self._sampled and (scorer := _of_reward_model(self._config)):  # while vLLM may still hold its share
            in_order.append(self._phase("reward model", {"weights": scorer}, awake=True))
        computing = {
            "weights": self._held(traced.actor, "weights", policy.actor.fsdp_config)
            * policy.actor.fsdp_config.param_offload
        }
        if self._sampled:
            in_order.append(self._computing("log probabilities", traced.actor, policy.actor.fsdp_config, scoring=True))
        if traced.reference is not None:
            in_order.append(
                self._computing("reference", traced.reference, policy.ref.fsdp_config, computing, scoring=True)
            )
        if traced.critic is not None:
            in_order.append(self._computing("update of the critic", traced.critic, critic.fsdp_config, computing))
        in_order.append(self._computing("update of the policy", traced.actor, policy.actor.fsdp_config))
        if self.engine is not None and self.engine.asleep is not None:
            in_order.append(self._sending(self.engine))
        return in_order

    def _computing(
        self,
        name: str,
        held: Held,
        place: Fsdp,
        beside: Mapping[str, int] | None = None,
        *,
        scoring: bool = False,
    ) -> Phase:
        """A phase in which one model computes."""
        weights, optimizer = (self._held(held, part, place) for part in ("weights", "optimizer"))
        more = dict(beside or {})
        more["weights"] = more.get("weights", 0) + weights * place.param_offload
        passing = held.scoring - held.weights - held.optimizer
        if not scoring:
            more["gradients"] = self._held(held, "gradients", place)
            more["optimizer"] = optimizer * place.optimizer_offload
            more["logits"] = held.logits
            step = held.step - held.weights - held.optimizer - held.gradients
            passing = max(held.activations, step - held.logits)
        more["activations"] = max(0, passing) + self._gathered(place)
        return self._phase(name, more, awake=False)

    def _sending(self, engine: VllmMemory) -> Phase:
        """New weights on their way: vLLM has room for its weights, and not yet for its cache."""
        policy = self._config.actor_rollout_ref
        by_file = policy.rollout.weight_transfer == "file"
        more = {"engine": engine.weights}
        merges = bool(policy.model.lora_rank) and not samples_adapter(self._config)
        if (merges or self._workers > 1) and not policy.actor.fsdp_config.param_offload:
            more["others"] = self._largest_tensor()  # merged or gathered, one at a time
        if not by_file:  # they are sent from the GPU, by a buffer that the largest tensor fits in
            more["weights"] = (
                self._held(self._traced.actor, "weights", policy.actor.fsdp_config)
                * policy.actor.fsdp_config.param_offload
            )
            more["others"] = more.get("others", 0) + max(BUCKET_BYTES, self._largest_tensor())
        return self._phase("new weights for vLLM", more, awake=False)

    def _phase(self, name: str, more: Mapping[str, int], *, awake: bool) -> Phase:
        parts = dict.fromkeys(PARTS, 0) | self.between()
        for part, size in more.items():
            parts[part] += size
        parts["others"] += (
            self._beside + CONTEXT + round(FRAGMENTATION * (sum(parts.values()) - parts["engine"] - parts["kv cache"]))
        )
        if (engine := self.engine) is not None and self._shared:
            if awake:
                parts["kv cache"] += max(0, engine.cache)
                parts["engine"] += engine.share - max(0, engine.cache)
            else:
                parts["engine"] += engine.resting
        return Phase(name, parts)

    def _of_engine(self, engine: VllmMemory) -> Phase:
        """A GPU that vLLM has alone."""
        cache = max(0, engine.cache)
        return Phase("rollouts", dict.fromkeys(PARTS, 0) | {"kv cache": cache, "engine": engine.share - cache})

    def between(self) -> dict[str, int]:
        """What every phase finds: models and optimizers that do not wait in main memory, and the embedded engine."""
        policy, critic, traced = self._config.actor_rollout_ref, self._config.critic, self._traced
        parts = dict.fromkeys(PARTS, 0)
        for held, fsdp in (
            (traced.actor, policy.actor.fsdp_config),
            (traced.critic, critic.fsdp_config),
            (traced.reference, policy.ref.fsdp_config),
        ):
            if held is not None:
                parts["weights"] += self._held(held, "weights", fsdp) * (not fsdp.param_offload)
                parts["optimizer"] += self._held(held, "optimizer", fsdp) * (not fsdp.optimizer_offload)
        if policy.rollout.name == "embedded" and self._sampled:
            rows = min(policy.rollout.max_num_seqs, self._config.data.train_batch_size * policy.rollout.n)
            parts["engine"] += traced.parameters * sampled_dtype(self._config).itemsize
            parts["kv cache"] += 2 * self._cells(rows) * cache_bytes(self._config, self._model)
        return parts

    def _cells(self, rows: int) -> int:
        """Tokens that the embedded engine has memory for where it writes so many rows, and again where it keeps them
        for the next turn."""
        length, rollout = self._config.data.max_tokens, self._config.actor_rollout_ref.rollout
        limits = rollout.max_num_seqs, rollout.max_model_len or max(length, DEFAULT_MAX_MODEL_LEN)
        return math.prod(grown(*at_first(*limits), rows, min(length, limits[1]), *limits))

    def shared_between(self) -> dict[tuple[Any, ...], int]:
        """Of `between`, what is under an adapter."""
        policy = self._config.actor_rollout_ref
        actor, place = self._traced.actor, policy.actor.fsdp_config
        sizes: dict[tuple[Any, ...], int] = {}
        if (base := base_of_adapter(self._config)) is not None and not place.param_offload:
            # What is trained has a gradient of its own size.
            sizes["trainer", *base] = self._held(actor, "weights", place) - self._held(actor, "gradients", place)
        if policy.rollout.name == "embedded" and (engine := engine_of_adapters(self._config)) is not None:
            sizes["engine", *engine] = self._traced.parameters * sampled_dtype(self._config).itemsize
        return sizes

    def _held(self, held: Held, part: str, place: Fsdp) -> int:
        """A worker's share of it: of those that hold a whole model together (`fsdp_size`)."""
        together = self._workers if place.fsdp_size == -1 else min(place.fsdp_size, self._workers)
        return -(-int(getattr(held, part)) // together)

    def _gathered(self, place: Fsdp) -> int:
        """What FSDP gathers of shards at once: two units whole, or all, and the gradient of one, summed in float32."""
        if self._workers == 1:
            return 0
        text = self._model.get_text_config()
        layers = text.num_hidden_layers
        outside = text.vocab_size * text.hidden_size * (1 if text.tie_word_embeddings else 2)
        unit: int = max((self._traced.parameters - outside) // layers, outside)
        each = 2 if place.dtype == "bfloat16" else 4
        return (2 * unit if place.reshard_after_forward else max(2 * unit, self._traced.parameters)) * each + 4 * unit

    def _largest_tensor(self) -> int:
        text = self._model.get_text_config()
        return int(text.vocab_size * text.hidden_size * sampled_dtype(self._config).itemsize)
