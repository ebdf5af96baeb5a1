"""Policy losses, one number per token; weighting and summing is `aggregation`'s."""

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    """Per token: the loss, where the ratio's clip was active, and where the dual clip was. All shaped [N]."""

    loss: Tensor
    clipped: Tensor
    clipped_lower: Tensor


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347) with dual clip (arXiv 1912.09729), as verl's `vanilla`.

    With rho = exp(clamp(log_probs - old_log_probs, -20, 20)):
    L1 = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); where A < 0 the loss is min(-A clip_c, L1).

    Args:
        log_probs, old_log_probs, advantages: float [N]; the gradient flows through `log_probs` alone.
        clip_c: the dual clip's bound, > 1.
    """
    ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(bound, surrogate), surrogate)
    return PolicyLoss(loss, clipped > unclipped, negative & (bound < surrogate))


def entropy(logits: Tensor) -> Tensor:
    """The entropy (nats) of softmax(logits), [N, V] -> [N]."""
    log_probs = torch.log_softmax(logits, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)
