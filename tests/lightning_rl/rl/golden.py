"""One small batch of five rollouts, for which verl 0.9.1's numbers are known; flat, as our losses take it."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_rl.rl import baselines
from lightning_rl.rl.aggregation import token_weights
from lightning_rl.rl.baselines import BaselineSettings, Floats, Outcomes
from lightning_rl.rl.losses import LossInputs, LossOptions
from lightning_rl.rl.token_advantages import whitening

MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
OLD = torch.tensor(
    [[0.5, 0.4, 0.3, 0.6], [0.9, 0.2, 0.5, 0.5], [0.3, 0.5, 0.8, 0.5], [0.25, 0.5, 0.75, 0.9], [0.6, 0.7, 0.5, 0.5]]
).log()
NEW = torch.tensor(
    [[0.6, 0.35, 0.3, 0.95], [0.5, 0.4, 0.5, 0.5], [0.9, 0.5, 0.6, 0.5], [0.25, 0.1, 0.75, 0.3], [0.7, 0.7, 0.5, 0.5]]
).log()
ADVANTAGES = torch.tensor(
    [[1, 1, 0, 1], [-1, -1, -1, 0], [0.5, 0, 0.5, 0], [-2, -2, -2, -2], [1, 1, 0, 0]], dtype=torch.float32
)
ROLLOUTS = torch.arange(5)[:, None].expand(5, 4)
OPTIONS = LossOptions(clip_ratio_low=0.2, clip_ratio_high=0.28, kl_cov_ratio=0.2, dro_beta=0.1)


def golden_tokens(dtype: torch.dtype = torch.float32) -> LossInputs:
    """Its 14 trained tokens; the log probabilities are a leaf that takes a gradient."""
    new, old, advantages = (part[MASK].to(dtype) for part in (NEW, OLD, ADVANTAGES))
    return LossInputs(new.requires_grad_(), old, advantages, ROLLOUTS[MASK])


def whiten(values: Sequence[Floats]) -> list[Floats]:
    """Arrays of tokens whitened over all of them together; [K] each."""
    centre, scale = whitening(np.concatenate([*values, np.zeros(0)]))
    return [(of_call - centre) / scale for of_call in values]


def weights_of(sequence: Tensor, mode: str) -> Tensor:
    """The weight of each token under `mode`, float64 [K]."""
    _, index, counts = torch.unique(sequence, return_inverse=True, return_counts=True)
    return torch.from_numpy(token_weights(counts.tolist(), mode, scale_factor=4.0))[index]


def grpo(rewards: Sequence[float], groups: Sequence[Hashable], *, norm_by_std: bool = True) -> NDArray[np.float64]:
    """GRPO's advantages of rollouts whose calls all have their reward, float64 [N]."""
    outcomes = Outcomes.of(rewards, groups)
    return baselines.grpo(outcomes, BaselineSettings(norm_by_std=norm_by_std)).advantages(outcomes.scores)
