"""Advantage estimators over rollouts: the rollout is the unit, whatever rows it was cut into."""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray


def grpo(
    rewards: Sequence[float], groups: Sequence[Hashable], *, norm_by_std: bool = True, epsilon: float = 1e-6
) -> NDArray[np.float64]:
    """Group-relative advantages (GRPO, arXiv 2402.03300; without the division: Dr. GRPO, arXiv 2503.20783).

    A_i = (r_i - mean_g) / (std_g + epsilon), with the unbiased standard deviation over the rollouts of i's group g. A
    group of one says nothing about its rollout: advantage 0.

    Args:
        rewards: one final reward per rollout, shape [N].
        groups: the group of each rollout, length N.
        norm_by_std: divide by the group's standard deviation.

    Returns: float64 [N].
    """
    values = np.asarray(rewards, dtype=np.float64)
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    advantages = np.zeros_like(values)
    for indices in members.values():
        if len(indices) > 1:
            centred = values[indices] - values[indices].mean()
            advantages[indices] = centred / (values[indices].std(ddof=1) + epsilon) if norm_by_std else centred
    return advantages
