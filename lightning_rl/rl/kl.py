"""How far two policies are apart: estimates from a token's log probabilities; and the controllers of the coefficient
that such a penalty gets.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROUNDING = 1e-4  # nats: two passes over the same tokens are this far apart at most, in float32
_SAME = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")


def kl_penalty(log_probs: Tensor, reference_log_probs: Tensor, kind: str) -> Tensor:
    """A penalty per token for d = log_probs - reference_log_probs (http://joschu.net/blog/kl-approx.html), as verl's.

    `k1` or `kl`: d, an unbiased estimate of the KL divergence from the reference. `abs`: |d|. `k2` or `mse`: d^2 / 2.
    `k3` or `low_var_kl`: exp(-d) - 1 + d, unbiased too and of less variance. The expected gradient of k1 is 0, that of
    k3 the one of the reverse divergence; only k2's is that of the divergence itself. So any kind with a `+` after it
    has its own value and k2's gradient.

    As in verl, k3 clamps -d to +-20 and then the value to +-10: where a token is 13 times less likely than under the
    reference its gradient is 0, just where it should pull hardest. `k3+` has no such hole.

    Args:
        log_probs, reference_log_probs: float [K]; the gradient flows through `log_probs` alone.

    Returns: float [K]. Raises ValueError as `check_kind` does.
    """
    base = check_kind(kind)
    gap = log_probs - reference_log_probs
    squared = 0.5 * gap.square()
    if base == "k1":
        value = gap
    elif base == "abs":
        value = absolute(gap)
    elif base == "k2":
        return squared
    else:
        log_ratio = (-gap).clamp(-20.0, 20.0)
        value = (log_ratio.exp() - log_ratio - 1).clamp(-10.0, 10.0)
    return squared - squared.detach() + value.detach() if kind.endswith("+") else value


def absolute(gap: Tensor) -> Tensor:
    """|gap|, of differences of log probabilities; the gradient goes from -1 to 1 within 1e-4 nats of 0.

    The sign of what is rounding alone says nothing, and in the first mini-batch of a step all gaps are that (in
    float32; in bfloat16 rounding is larger).
    """
    near = gap.clamp(-_ROUNDING, _ROUNDING).square() / (2 * _ROUNDING)
    return torch.where(gap.abs() < _ROUNDING, near + (gap.abs() - near).detach(), gap.abs())


def check_kind(kind: str) -> str:
    """The one of k1, abs, k2, k3 that `kind` means. Raises ValueError for another, and for `full`."""
    base = kind.removesuffix("+")
    if base == "full":
        raise ValueError(
            "the exact divergence `full` needs the logits of both models, and rows hold log probabilities: take "
            "low_var_kl+"
        )
    if base not in KINDS:
        raise ValueError(f"the penalty {kind!r} is unknown; there are {', '.join(KINDS)}, each with a + or without")
    return _SAME.get(base, base)


def reward_penalty(
    old_log_probs: NDArray[np.float32], reference_log_probs: NDArray[np.float32], kind: str
) -> NDArray[np.float64]:
    """`kl_penalty` as a number that rewards are lowered by: float64 [K], of log probabilities [K] without gradient."""
    own, reference = (torch.from_numpy(part.astype(np.float64)) for part in (old_log_probs, reference_log_probs))
    penalty: NDArray[np.float64] = kl_penalty(own, reference, kind).numpy()
    return penalty


@dataclass
class FixedKL:
    """A coefficient that stays (verl's `kl_ctrl.type: fixed`)."""

    value: float

    def update(self, kl: float, rollouts: int) -> None:
        """Nothing: the coefficient is fixed."""


@dataclass
class AdaptiveKL:
    """A coefficient that steers the divergence to `target` (arXiv 1909.08593, section 2.2; `kl_ctrl.type: adaptive`).

    After a step with mean divergence kl over n rollouts: value *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon. The
    step's own penalty is computed before, with the old value. n counts as at most `horizon`, so that the coefficient
    cannot jump or turn negative.
    """

    value: float
    target: float
    horizon: int

    def update(self, kl: float, rollouts: int) -> None:
        """Take note of a step. Raises ValueError where its divergence is not a number."""
        if not math.isfinite(kl):
            raise ValueError(f"the divergence of the step is {kl}; the coefficient stays {self.value:g}")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * min(rollouts, self.horizon) / self.horizon
