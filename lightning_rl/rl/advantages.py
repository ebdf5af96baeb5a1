"""Advantages: of rollouts and of calls, against their group; of tokens, against a critic.

The rollout is the unit, whatever it was cut into: a rollout of many calls or rows has one voice in its group's mean.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_rl_adapters.credit import GROUP, Credit


class Estimate(NamedTuple):
    """advantage = (credit - baseline) / scale."""

    advantage: float
    baseline: float
    scale: float


class _Peers(NamedTuple):
    """Those who are compared with each other: mean, unbiased standard deviation (0 for one), and how many."""

    mean: float
    std: float
    size: int

    def estimate(self, credit: float, *, norm_by_std: bool, lone_raw: bool, epsilon: float) -> Estimate:
        if self.size == 1:
            return Estimate(credit, 0.0, 1.0) if lone_raw else Estimate(0.0, credit, 1.0)
        scale = self.std + epsilon if norm_by_std else 1.0
        return Estimate((credit - self.mean) / scale, self.mean, scale)


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
    peers = _peers(rewards, groups)
    return np.array(
        [
            peers[group].estimate(reward, norm_by_std=norm_by_std, lone_raw=False, epsilon=epsilon).advantage
            for reward, group in zip(rewards, groups, strict=True)
        ],
        dtype=np.float64,
    )


def grpo_of_calls(
    credits: Sequence[Mapping[str, Credit]],
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    *,
    norm_by_std: bool = True,
    lone_raw: bool = False,
    epsilon: float = 1e-6,
) -> list[dict[str, Estimate]]:
    """`grpo` for calls that have credits of their own.

    A call's credit is compared with the mean over the rollouts of the group of what each of them scored: the mean
    credit of its calls that are compared with the same (`Credit.compared_with`), and its reward where no call of it has
    any. This baseline is one number for a whole group, so it says nothing of what happened after the call; one by the
    place of the call (the second with the second) would, since whether there is a second depends on the first.

    Args:
        credits: per rollout, call id -> credit. Length N.
        rewards: the rollouts' own rewards, shape [N].
        groups: the group of each rollout, length N.
        lone_raw: whether a credit without others to compare it with is its advantage (as in verl), or 0 is.

    Returns: per rollout, call id -> estimate; with credit `final` each is that of `grpo`.
    """
    scores: defaultdict[tuple[Hashable, str], list[float]] = defaultdict(list)
    for of_calls, reward, group in zip(credits, rewards, groups, strict=True):
        compared: defaultdict[str, list[float]] = defaultdict(list)
        for credit in of_calls.values():
            if credit.compared_with is not None:
                compared[credit.compared_with].append(credit.reward)
        compared.setdefault(GROUP, [reward])
        for name, given in compared.items():
            scores[group, name].append(_mean(given))
    peers = {place: _of(values) for place, values in scores.items()}
    return [
        {
            call_id: Estimate(credit.reward, 0.0, 1.0)
            if credit.compared_with is None
            else peers[group, credit.compared_with].estimate(
                credit.reward, norm_by_std=norm_by_std, lone_raw=lone_raw, epsilon=epsilon
            )
            for call_id, credit in of_calls.items()
        }
        for of_calls, group in zip(credits, groups, strict=True)
    ]


def gae(
    parents: Sequence[int | None],
    rewards: Sequence[NDArray[np.float64]],
    values: Sequence[NDArray[np.float64]],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Generalized advantage estimation (arXiv 1506.02438) over a forest of calls.

    Along a branch, over sampled tokens alone, delta_t = r_t + gamma V_(t+1) - V_t, A_t = delta_t + gamma lam A_(t+1).
    At a fork V_(t+1) and A_(t+1) are the means over the branches' first tokens; a leaf ends with 0.

    Args:
        parents: the index of the call that each of C calls continues, or None; parents come before their children.
        rewards, values: per call, float64 [K] of its K sampled tokens.

    Returns: advantages (not whitened) and returns (advantage + value), per call [K] each.
    """
    children: list[list[int]] = [[] for _ in parents]
    for call, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(call)
    advantages = [np.zeros(len(of_call)) for of_call in values]
    first: list[tuple[float, float]] = [(0.0, 0.0)] * len(parents)  # value and advantage where the call begins
    for call in reversed(range(len(parents))):
        after = [first[child] for child in children[call]]
        value = _mean([v for v, _ in after]) if after else 0.0
        advantage = _mean([a for _, a in after]) if after else 0.0
        for t in reversed(range(len(values[call]))):
            delta = rewards[call][t] + gamma * value - values[call][t]
            advantage = delta + gamma * lam * advantage
            value = float(values[call][t])
            advantages[call][t] = advantage
        first[call] = value, advantage
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def _peers(scores: Sequence[float], groups: Sequence[Hashable]) -> dict[Hashable, _Peers]:
    members: defaultdict[Hashable, list[float]] = defaultdict(list)
    for score, group in zip(scores, groups, strict=True):
        members[group].append(score)
    return {group: _of(values) for group, values in members.items()}


def _of(scores: list[float]) -> _Peers:
    values = np.asarray(scores, dtype=np.float64)
    alike = bool((values == values[0]).all())  # rounding must not make a difference of none
    std = 0.0 if alike or len(values) == 1 else float(values.std(ddof=1))
    return _Peers(scores[0] if alike else float(values.mean()), std, len(scores))


def _mean(values: Sequence[float]) -> float:
    """The mean; exactly the number where all are the same."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)
