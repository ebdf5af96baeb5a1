"""Keys that make a run fit: each step gives up some speed or precision for memory, until it is enough.

The order is the one in which the price rises. What needs the same tensors is traced once.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import msgspec

from lightning_rl.config import changed_keys
from lightning_rl.config.schema import Config
from lightning_rl.memory.budget import Budget, budget
from lightning_rl.memory.gpus import Hardware
from lightning_rl.memory.traced_step import TracedStep, trace
from lightning_rl.ppo.local_workers import FORMATS

_ACTOR, _MODEL, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
_LOW_BIT = {
    f"{_ACTOR}fsdp_config.model_dtype": "bf16",
    f"{_ACTOR}optim.optimizer_impl": "torchao.optim",
    f"{_ACTOR}optim.optimizer": "AdamW8bit",
    f"{_ACTOR}optim.override_optimizer_config": {"bf16_stochastic_round": True},
}
_KEPT = {*_LOW_BIT, f"{_ACTOR}fsdp_config.dtype", f"{_ROLLOUT}dtype"}
Keys = dict[str, Any]


class MemoryPlanner:
    """Budgets of a model on some hardware, under changes of a configuration.

    Args:
        config: the run's; what it says other than the defaults is not changed.
        model: the config of the policy, of transformers.
        beside: bytes that other policies of the run hold on the trainer's GPU.
    """

    def __init__(self, config: Config, model: Any, hardware: Hardware, beside: int = 0) -> None:
        self._config, self._model, self._hardware, self._beside = config, model, hardware, beside
        self._changed_keys = changed_keys(config)
        self._traced: dict[str, TracedStep] = {}
        self._parameters = 0

    def config(self, changes: Mapping[str, Any]) -> Config:
        """The configuration with changes."""
        return with_keys(self._config, changes)

    def traced(self, config: Config) -> TracedStep:
        """What a step of it takes."""
        policy = config.actor_rollout_ref
        same = repr((policy.model, policy.actor.optim, policy.actor.fsdp_config.model_dtype,
                     policy.actor.fsdp_config.dtype, policy.actor.ppo_max_token_len_per_gpu,
                     policy.actor.ppo_micro_batch_size_per_gpu))  # fmt: skip
        if same not in self._traced:
            lengths = config.data.max_prompt_length, config.data.max_response_length
            self._traced[same] = trace(config, self._model, lengths, on_gpu=True)
            self._parameters = self._traced[same].parameters
        return self._traced[same]

    def budget(self, config: Config) -> Budget:
        """What it takes."""
        return budget(config, self._model, self.traced(config), self._hardware, self._beside)

    def fitting(self) -> Keys | None:
        """The changes that make the run fit; {}: it fits as it is; None: none of those known here do."""
        changes: Keys = {}
        for step in self._steps():
            changes |= {key: value for key, value in step.items() if key not in self._changed_keys}
            config = self.config(changes)
            if self._least(config) < self._hardware.gpu.memory and self.budget(config).fits:
                return self._tidied(changes)
        return None

    def _least(self, config: Config) -> int:
        """Bytes below which an update cannot be, known without tracing it: weights, and what Adam makes of them."""
        policy = config.actor_rollout_ref
        held = FORMATS[policy.actor.fsdp_config.model_dtype].itemsize
        low_bit = policy.actor.optim.optimizer_impl.startswith("torchao.")
        frozen = 0.5 if policy.model.load_in_4bit else held
        each = frozen if policy.model.lora_rank else 2 * held + (1 if low_bit else 2 * held)
        return int(self._parameters * each) // config.trainer.workers if "Adam" in policy.actor.optim.optimizer else 0

    def _tidied(self, changes: Keys) -> Keys:
        """Without those that turn out not to be needed, the dearest first."""
        for key in reversed(list(changes)):
            if key in _KEPT:
                continue
            fewer = {name: value for name, value in changes.items() if name != key}
            if self.budget(self.config(fewer)).fits:
                changes = fewer
        return changes

    def _takes_low_bit(self) -> bool:
        """Whether nothing that was chosen stands against the optimizer of torchao, whose keys go together."""
        chosen = _LOW_BIT.keys() & self._changed_keys
        return all(attrgetter(key)(self._config) == _LOW_BIT[key] for key in chosen)

    def _steps(self) -> Iterator[Keys]:
        """What to change, and then what more."""
        config = self.config({})
        policy, shares_gpu = config.actor_rollout_ref, config.actor_rollout_ref.rollout.name == "vllm"
        yield {}
        if policy.model.lora_rank:  # its weights are never trained, so their format costs nothing
            yield {f"{_ACTOR}fsdp_config.model_dtype": "bf16"}
        else:
            yield {f"{_ACTOR}fsdp_config.dtype": "bfloat16", f"{_ROLLOUT}dtype": "bfloat16"}
        yield {f"{_MODEL}enable_gradient_checkpointing": True}
        shares: list[Keys] = [{f"{_ROLLOUT}gpu_memory_utilization": share} for share in (0.5, 0.6, 0.7, 0.8)]
        yield from shares if shares_gpu else []
        yield {f"{_ACTOR}ppo_max_token_len_per_gpu": max(config.data.max_tokens, 4096)}
        yield {f"{_ACTOR}fsdp_config.optimizer_offload": True}
        yield from shares if shares_gpu else []
        if self._takes_low_bit() and not policy.model.lora_rank and config.trainer.workers == 1:
            yield {**_LOW_BIT, f"{_ACTOR}fsdp_config.dtype": "float32"}
            yield from shares if shares_gpu else []
        yield {f"{_ACTOR}fsdp_config.param_offload": True}
        yield from shares if shares_gpu else []
        if policy.model.lora_rank and config.trainer.workers == 1:
            yield {f"{_MODEL}load_in_4bit": True}
            yield from shares if shares_gpu else []


def advice(config: Config) -> str:
    """What is left where no keys help."""
    if not config.actor_rollout_ref.model.lora_rank:
        return f"train an adapter ({_MODEL}lora_rank=16), use more GPUs (trainer.n_gpus_per_node), or a smaller model"
    return "use a larger GPU, a smaller model, or shorter rows (data.max_prompt_length, data.max_response_length)"


def with_keys(config: Config, changes: Mapping[str, Any]) -> Config:
    """A configuration with other values of some dotted keys."""
    plain = msgspec.to_builtins(config)
    for key, value in changes.items():
        *outer, last = key.split(".")
        place = plain
        for name in outer:
            place = place[name]
        place[last] = value
    return msgspec.convert(plain, type(config))
