"""Random batches in verl's shape and in ours: B rows of R columns with a mask there, flat trained tokens here.

A row is a rollout; where its mask has holes, tools spoke, and each run of trained tokens is a call.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lightning_rl.rl.aggregation import MODES, token_weights
from lightning_rl.rl.token_advantages import TokenTree

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Float64 [B, R] each but `groups` [B] and `scores` [B]; `mask` is 1 where a token is trained."""

    mask: Floats
    groups: NDArray[np.int64]
    scores: Floats
    old: Floats
    new: Floats
    reference: Floats
    advantages: Floats
    values: Floats

    @property
    def which(self) -> NDArray[np.bool_]:
        return self.mask.astype(bool)

    @property
    def rollout(self) -> NDArray[np.int64]:
        """Of each trained token its row, [K]."""
        return np.nonzero(self.which)[0]

    @property
    def lengths(self) -> list[int]:
        return [int(count) for count in self.mask.sum(1)]

    def rewards(self) -> Floats:
        """The scores at the last trained token of each row, [B, R]."""
        placed = np.zeros_like(self.mask)
        for row, score in enumerate(self.scores):
            placed[row, np.flatnonzero(self.mask[row])[-1]] = score
        return placed

    def runs(self, row: int) -> list[slice]:
        """The calls of a row: its runs of trained tokens."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.mask[row], [0]])))
        return [slice(int(start), int(end)) for start, end in edges.reshape(-1, 2)]

    def trees(self) -> list[TokenTree]:
        """Every row as a conversation of calls."""
        rewards, trees = self.rewards(), []
        for row in range(len(self.mask)):
            runs = self.runs(row)
            pi = np.exp(self.old[row])
            trees.append(
                TokenTree(
                    parents=[None, *range(len(runs) - 1)],
                    context=[0, *(later.start - run.stop for run, later in pairwise(runs))],
                    rewards=[rewards[row, run] for run in runs],
                    log_probs=[self.old[row, run] for run in runs],
                    sum_pi_squared=[(pi**2 + (1 - pi) ** 2)[run] for run in runs],
                    values=[self.values[row, run] for run in runs],
                )
            )
        return trees

    def whole(self, of_rows: list[list[Floats]]) -> Floats:
        """Numbers per row and call at their columns, 0 where nothing is trained."""
        placed = np.zeros_like(self.mask)
        for row, of_calls in enumerate(of_rows):
            for run, numbers in zip(self.runs(row), of_calls, strict=True):
                placed[row, run] = numbers
        return placed

    def weights(self, mode: str) -> Tensor:
        """Our weight of each trained token in the loss, [K]; verl's scale factor is R where none is given."""
        return torch.from_numpy(token_weights(self.lengths, mode, scale_factor=self.mask.shape[1])[self.rollout])


def tensor(array: NDArray[Any], *, grad: bool = False) -> Tensor:
    return torch.from_numpy(np.array(array)).requires_grad_(grad)


def batch(seed: int, *, holes: bool = True, least: int = 1, one_advantage: bool = False) -> Batch:
    """A batch of groups of `least` to 4 rollouts. The policy is at times far from the old one, scores are at times
    alike."""
    random = np.random.default_rng(seed)
    groups = np.concatenate([np.full(random.integers(least, 5), group) for group in range(random.integers(2, 4))])
    rows, columns = len(groups), int(random.integers(2, 8))
    mask = np.arange(columns) < random.integers(1, columns + 1, size=(rows, 1))
    if holes:
        mask[:, 1:] &= random.random((rows, columns - 1)) < 0.8
    if mask.sum() < 2:
        mask[0] = True  # nothing can be whitened alone
    old = np.log(random.uniform(0.05, 0.8, size=mask.shape))
    apart = random.choice([0.05, 0.5, 1.5])
    advantages = random.normal(size=(rows, 1 if one_advantage else columns)) * np.ones(mask.shape)
    return Batch(
        mask=mask.astype(float),
        groups=groups,
        scores=random.choice([random.normal(size=rows), random.integers(0, 3, size=rows) / 2]),
        old=old,
        new=np.minimum(old + random.normal(size=mask.shape) * apart, -1e-3),
        reference=np.minimum(old + random.normal(size=mask.shape), -1e-3),
        advantages=advantages,
        values=random.normal(size=mask.shape),
    )


SEEDS = st.integers(0, 2**32 - 1)
AGGREGATIONS = st.sampled_from(MODES)
