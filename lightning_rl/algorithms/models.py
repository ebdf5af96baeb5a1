"""The models of a PPO run: policy with its engine, reference, critic; built, saved and sent to the engine here.

With an adapter (`lora_rank`) the policy's own weights never change: the adapter is trained, kept in checkpoints and
sent, and the reference is the policy without it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_rl.algorithms import settings
from lightning_rl.algorithms.credits import needs_reference
from lightning_rl.config import ConfigError
from lightning_rl.config.schema import Config, Fsdp
from lightning_rl.inference.embedded import EmbeddedPolicy
from lightning_rl.inference.load import load_model, model_folder
from lightning_rl.inference.sglang import SGLangPolicy
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.training import checkpoint, lora
from lightning_rl.training.actor import Actor
from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.critic import Critic, ValueModel, value_head
from lightning_rl.training.forward import Forward
from lightning_rl.training.reference import BaseOfAdapter, Reference
from lightning_rl.vision import vision_of

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Models:
    """What a run trains and asks.

    Args:
        config: the run's.
        run_dir: its folder, where an engine with processes of its own has its logs.
        with_critic: whether a critic is trained.
        resumed: the checkpoint that it goes on from; None: it begins.

    `policy` is there at once, `actor`, `critic` and `reference` (None where nothing needs them) after `train`. With a
    shared trunk the actor has the critic's head, and there is no `critic`.
    Raises ConfigError for an adapter that cannot be made.
    """

    actor: Actor
    critic: Critic | None = None
    reference: Reference | BaseOfAdapter | None = None

    def __init__(self, config: Config, run_dir: Path, *, with_critic: bool, resumed: Path | None = None) -> None:
        self.config = config
        model = config.actor_rollout_ref.model
        self.policy = _policy(config, run_dir, None if model.lora_rank else resumed)
        self.model: nn.Module = self.policy.model
        self._pad_id: int = self.policy.model.config.get_text_config().pad_token_id or 0
        self._device = next(self.model.parameters()).device
        self._vision = vision_of(self.policy.folder, self.model)
        shared = with_critic and config.critic.shared_trunk
        self._values = self._value_model() if with_critic and not shared else None
        if model.lora_rank:
            self._adapt()
        if model.enable_gradient_checkpointing:
            _checkpoint_activations(self.model)
        self._value_head = value_head(self.model) if shared else None

    def start(self) -> None:
        """Start the engine, and give it the weights that training begins with as version 0. Whoever calls this closes
        `policy`, whatever comes between."""
        self.policy.start()
        self.send_weights(0)

    def train(self, training_steps: int) -> None:
        """Make actor, critic and reference, for a run of so many steps."""
        config = self.config
        actor, critic = config.actor_rollout_ref.actor, config.critic
        forward = self._forward(self.model, actor.fsdp_config)
        self.actor = Actor(
            self.model, settings.actor_config(config, training_steps), self._pad_id, forward, self._value_head
        )
        if self._values is not None:
            of_values = self._forward(self._values.trunk, critic.fsdp_config)
            self.critic = Critic(self._values, settings.critic_config(config, training_steps), self._pad_id, of_values)
        if needs_reference(config):
            self.reference = self._reference(forward)

    def set_reference_log_probs(self, sequences: list[TrainingSequence]) -> None:
        """Ask the reference, which must be there."""
        assert self.reference is not None
        for sequence, values in zip(sequences, self.reference.log_probs(sequences), strict=True):
            sequence.reference_log_probs = values

    @property
    def has_values(self) -> bool:
        """Whether there is a critic, or a head on the policy that stands for one."""
        return self.critic is not None or self._value_head is not None

    def set_values(self, sequences: list[TrainingSequence]) -> None:
        """Ask the critic, or the policy's head of values; one must be there."""
        source = self.actor if self.critic is None else self.critic
        for sequence, values in zip(sequences, source.values(sequences), strict=True):
            sequence.values = values

    def send_weights(self, version: int) -> None:
        """Give the engine what was trained, as policy version `version`; returns when it samples with it."""
        if not self.config.actor_rollout_ref.model.lora_rank:
            self.policy.update_weights(self.model, version)
        elif self.policy.takes_changes:
            self.policy.update_weights(lora.changed(self.model), version, partial=True)
        else:
            self.policy.update_weights(lora.merged(self.model), version)

    def export(self, folder: Path) -> None:
        """Write policy and tokenizer to `folder`, as `transformers` (or, an adapter alone, `peft`) loads them."""
        model = self.config.actor_rollout_ref.model
        if model.lora_rank:
            lora.export(self.model, folder, model.lora_export)
            checkpoint.copy_tokenizer(self.policy.folder, folder)
        else:
            checkpoint.export_model(self.model, self.policy.folder, folder)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the exported policy."""
        adapted = self.config.actor_rollout_ref.model.lora_rank
        return {
            "actor": self.actor.state_dict(),
            "critic": None if self.critic is None else self.critic.state_dict(),
            "value head": None if self._value_head is None else self._value_head.state_dict(),
            "adapter": dict(_trained(self.model)) if adapted else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises ConfigError where the config now asks for other models."""
        asked = {"critic": self.critic, "value head": self._value_head}
        for what, there in (asked | {"adapter": self.config.actor_rollout_ref.model.lora_rank or None}).items():
            if (there is not None) != (state[what] is not None):
                raise ConfigError(
                    f"the checkpoint has {'no' if state[what] is None else 'its'} {what}, the config says otherwise: "
                    "resume with the config.yaml of the run's folder"
                )
        self.actor.load_state_dict(state["actor"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        if self._value_head is not None:
            self._value_head.load_state_dict(state["value head"])
        if state["adapter"] is not None:
            with torch.no_grad():
                for name, parameter in _trained(self.model).items():
                    parameter.copy_(state["adapter"][name])

    def _adapt(self) -> None:
        """Put an adapter into the policy."""
        model = self.config.actor_rollout_ref.model
        try:
            self.model = lora.adapted(
                self.policy.model,
                rank=model.lora_rank,
                alpha=model.lora_alpha,
                targets=model.target_modules,
                adapter_path=model.lora_adapter_path,
                seed=self.config.data.seed,
            )
        except ValueError as error:
            raise ConfigError(f"actor_rollout_ref.model: {error}") from error

    def _value_model(self) -> ValueModel:
        critic = self.config.critic
        held = _FORMATS[critic.fsdp_config.model_dtype]
        if critic.model.path is None:
            values = ValueModel.like(self.policy.model, held)
        else:
            values = ValueModel.load(model_folder(critic.model.path), held, self._device)
        if critic.model.enable_gradient_checkpointing:
            _checkpoint_activations(values.trunk)
        return values

    def _reference(self, forward: Forward) -> Reference | BaseOfAdapter:
        ref, actor = self.config.actor_rollout_ref.ref, self.actor.config
        rows = ref.log_prob_micro_batch_size_per_gpu
        bounds = {"rows": rows or actor.micro_batch_rows, "tokens": None if rows else actor.micro_batch_tokens}
        if self.config.actor_rollout_ref.model.lora_rank:
            return BaseOfAdapter(self.model, self._pad_id, forward=forward, **bounds)
        model = load_model(self.policy.folder, _FORMATS[ref.fsdp_config.model_dtype], self._device)
        return Reference(
            model,
            self._pad_id,
            offload=ref.fsdp_config.param_offload,
            forward=self._forward(model, ref.fsdp_config),
            **bounds,
        )

    def _forward(self, model: nn.Module, formats: Fsdp) -> Forward:
        return Forward(
            model,
            self._pad_id,
            packed=self.config.actor_rollout_ref.model.use_remove_padding,
            autocast=torch.bfloat16 if formats.dtype == "bfloat16" else None,
            vision=self._vision,
        )


def _policy(config: Config, run_dir: Path, weights: Path | None) -> EmbeddedPolicy | VllmPolicy | SGLangPolicy:
    """The policy with the engine that the config names."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    held = _FORMATS[config.actor_rollout_ref.actor.fsdp_config.model_dtype]
    if rollout.name == "embedded":
        return EmbeddedPolicy(
            model.path,
            weights=weights,
            trained=True,
            device=config.trainer.device,
            dtype=held if rollout.dtype is None else _FORMATS[rollout.dtype],
            train_dtype=held,
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=rollout.max_model_len,
            threads=rollout.num_threads,
        )
    urls = rollout.server_urls or ()
    common: dict[str, Any] = {
        "weights": weights,
        "device": config.trainer.device,
        "train_dtype": held,
        "tolerance": settings.sampler_tolerance(config),
    }
    if rollout.name == "sglang":
        return SGLangPolicy(model.path, run_dir, urls=urls, **common)
    return VllmPolicy(model.path, settings.vllm_options(config), run_dir, urls=urls, **common)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _checkpoint_activations(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
