"""How token losses become one number: loss = sum over tokens of weight x token loss.

The weight of a token depends on its rollout and its mini-batch alone. So neither the rows that a rollout was cut into,
nor their order, nor the micro-batches that they are computed in can change loss or gradient.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def token_weights(tokens: Sequence[int], mode: str, *, scale_factor: float | None = None) -> NDArray[np.float64]:
    """The weight of each token of each rollout of a mini-batch, verl's `loss_agg_mode` with sequence read as rollout.

    With T all trained tokens and G the rollouts that have any: `token-mean` 1/T, `token-sum` 1, `seq-mean-token-sum`
    1/G, `seq-mean-token-sum-norm` 1/(G x scale_factor), `seq-mean-token-mean` 1/(G x tokens of the rollout).

    Args:
        tokens: trained tokens per rollout, length N.
        scale_factor: the divisor of `seq-mean-token-sum-norm`.

    Returns: float64 [N]; 0 for a rollout without trained tokens. Raises ValueError for an unknown mode.
    """
    counts = np.asarray(tokens, dtype=np.float64)
    live = counts > 0
    total, rollouts = counts.sum(), live.sum()
    if mode == "token-mean":
        weight = np.full_like(counts, 1 / max(total, 1))
    elif mode == "token-sum":
        weight = np.ones_like(counts)
    elif mode == "seq-mean-token-sum":
        weight = np.full_like(counts, 1 / max(rollouts, 1))
    elif mode == "seq-mean-token-sum-norm":
        if not scale_factor:
            raise ValueError("loss_agg_mode seq-mean-token-sum-norm needs actor.loss_scale_factor")
        weight = np.full_like(counts, 1 / (max(rollouts, 1) * scale_factor))
    elif mode == "seq-mean-token-mean":
        weight = 1 / (max(rollouts, 1) * np.maximum(counts, 1))
    else:
        raise ValueError(f"loss_agg_mode {mode!r} is unknown; there are {', '.join(MODES)}")
    return np.where(live, weight, 0.0)
