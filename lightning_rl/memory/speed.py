"""How fast a run may be on its cards: floating-point operations and bytes that must be read, over what cards reach.

A matrix of p weights takes 2p operations a token forward and 4p backward (Kaplan et al., arXiv 2001.08361), 2p more
where activations are computed again; an adapter leaves out the 2p of the weights' own gradients. Sampling reads all
weights and the cache for each token of a batch, and vLLM schedules, samples and answers in between (`_BETWEEN`). Both
ends of a range are guesses of the share that is reached (`_REACHED`, `_READ`), for the slowest and the fastest card of
a size. Measured on an H200 with a model of 1.5B: 0.18 of its operations in an update; 10 ms for a token of each of 128
rows, with CUDA graphs, where its whole bandwidth would allow 1.6 (docs/gpu.md).
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from lightning_rl.config.schema import Config
from lightning_rl.memory.budget import Budget
from lightning_rl.memory.engine import cache_bytes, sampled_dtype
from lightning_rl.memory.traced_step import TracedStep

_REACHED: Final = (0.2, 0.45)  # of a card's operations, in training
_READ: Final = (0.4, 0.8)  # of its bandwidth, in sampling
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")  # what families call their number
_BETWEEN: Final = (0.008, 0.002)  # seconds, between two tokens of a batch


@dataclass(frozen=True)
class Speed:
    """Lowest and highest: tokens a second that are sampled and trained, and the seconds of a step."""

    sampled: tuple[float, float]
    trained: tuple[float, float]
    step: tuple[float, float]


def speed(config: Config, model: Any, traced: TracedStep, budget: Budget) -> Speed:
    """What to expect of a run that fits."""
    rollout, length = config.actor_rollout_ref.rollout, config.data.max_tokens
    rollouts = config.data.train_batch_size * rollout.n
    servers = rollout.data_parallel_size if rollout.name == "vllm" else 1
    at_once = max(1, min(rollout.max_num_seqs, -(-rollouts // servers), budget.at_once or rollouts))
    training, scoring = _operations(config, model, traced)
    sampled, trained = [], []
    for end in (0, 1):
        gpu = budget.hardware.gpu
        cards = rollout.tensor_model_parallel_size
        read = traced.parameters * sampled_dtype(config).itemsize + at_once * length / 2 * cache_bytes(config, model)
        seconds = max(
            read / (gpu.bandwidth[end] * _READ[end] * cards),
            2 * _passed(model, traced.parameters) * at_once / (gpu.flops[end] * _REACHED[end] * cards),
        )
        seconds += _BETWEEN[end]
        sampled.append(at_once * servers / seconds)
        trained.append(config.trainer.workers * gpu.flops[end] * _REACHED[end] / (training + scoring))
    of_response, of_all = rollouts * config.data.max_response_length, rollouts * length
    slow, fast = (of_response / sampled[end] + of_all / trained[end] for end in (0, 1))
    return Speed((sampled[0], sampled[1]), (trained[0], trained[1]), (fast, slow))


def _operations(config: Config, model: Any, traced: TracedStep) -> tuple[float, float]:
    """Floating-point operations of a token: in an update, and where its log probabilities are computed."""
    policy, text = config.actor_rollout_ref, model.get_text_config()
    attention = 2 * text.num_hidden_layers * text.hidden_size * config.data.max_tokens  # causal: half of the square
    forward = 2 * _passed(model, traced.parameters) + attention
    times = 2 if policy.model.lora_rank else 3
    times += policy.model.enable_gradient_checkpointing
    scored = 1 + (traced.reference is not None) + (traced.critic is not None)
    updates = times * policy.actor.ppo_epochs
    if traced.critic is not None:  # a second model, of the same size as far as is known here
        updates += (3 + config.critic.model.enable_gradient_checkpointing) * (
            config.critic.ppo_epochs or policy.actor.ppo_epochs
        )
    return updates * forward, scored * forward


def _passed(model: Any, parameters: int) -> float:
    """How many parameters a token goes through: of the experts of a mixture those that are chosen for it."""
    text = model.get_text_config()
    experts = next((count for name in _EXPERTS if (count := getattr(text, name, None))), None)
    chosen = getattr(text, "num_experts_per_tok", None)
    if not experts or not chosen:
        return parameters
    with torch.device("meta"):  # which of its layers have experts is said differently by each family
        made = AutoModelForCausalLM.from_config(model)
    of_experts = sum(weight.numel() for name, weight in made.named_parameters() if ".experts." in name)
    return float(parameters - of_experts * (1 - chosen / experts))
