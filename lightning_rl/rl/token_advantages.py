"""Token estimators: advantages of sampled tokens, over the forest of a rollout's calls.

Only sampled tokens are there: what tools and users said is neither rewarded nor a step of time. Along a branch a call's
tokens follow its parent's; at a fork the future is the mean over the branches, so that a prompt sampled three times
over has one future. Nothing here knows of rows.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_rl.rl.baselines import BaselineSettings, EstimatorError, Floats, mean, standard_deviation


@dataclass(frozen=True, kw_only=True)
class TokenTree:
    """The C calls of one rollout in order of arrival; the lists have length C, their arrays [K], K of each call.

    `parents` are the indices of the calls that each continues, or None; parents come before their children. `context`
    counts the tokens that a call's prompt adds to its parent. `rewards` stand on tokens. `log_probs` are natural logs,
    NaN where unknown. `sum_pi_squared` is the sum of the squared probabilities of all tokens at each place, where it is
    known; `values` are a critic's.
    """

    parents: Sequence[int | None]
    context: Sequence[int]
    rewards: Sequence[Floats]
    log_probs: Sequence[Floats]
    sum_pi_squared: Sequence[Floats] | None = None
    values: Sequence[Floats] | None = None


class TokenEstimate(NamedTuple):
    """Per call [K]: `returns`, and the `baselines` that they are compared with; advantage = return - baseline."""

    returns: list[Floats]
    baselines: list[Floats]


TokenEstimator = Callable[[Sequence[TokenTree], Sequence[Hashable], BaselineSettings], list[TokenEstimate]]


def reinforce_plus_plus(
    trees: Sequence[TokenTree], groups: Sequence[Hashable], settings: BaselineSettings
) -> list[TokenEstimate]:
    """REINFORCE++ (arXiv 2501.03262): G_t = r_t + gamma G_(t+1), then whitened over the batch's tokens.

    `algorithm.gamma` discounts per sampled token. Groups play no part, so a group of one is like any other.
    """
    estimates = []
    for tree in trees:
        returns = discounted_returns(tree.parents, tree.rewards, settings.gamma)
        estimates.append(TokenEstimate(returns, [np.zeros(len(of_call)) for of_call in returns]))
    return estimates


def optimal_token_baseline(
    trees: Sequence[TokenTree], groups: Sequence[Hashable], settings: BaselineSettings
) -> list[TokenEstimate]:
    """The optimal token baseline (Li et al., PMLR 306): B_t = sum_i W_it G_it / sum_i W_it over the group, column by
    column, with G the reward to come and W_t = sum_(j <= t) (1 - 2 pi_j + sum_a pi_j(a)^2) along the branch.

    Column t is a token's place on its branch behind the first prompt, tokens of others included. In a column a rollout
    has one voice: the mean over its tokens there. A column of one rollout has baseline 0, for nobody is to compare it
    with. Where `sum_pi_squared` is unknown, 1 - pi_j stands for the summand: its mean over sampled tokens is the same.
    A token of unknown probability counts as an unlikely one.
    """
    return _token_baseline(trees, groups, settings, [_places(tree, tree.context) for tree in trees])


def tir_optimal_token_baseline(
    trees: Sequence[TokenTree], groups: Sequence[Hashable], settings: BaselineSettings
) -> list[TokenEstimate]:
    """`optimal_token_baseline` with column t = the t-th sampled token of a branch, for rollouts with tools."""
    return _token_baseline(trees, groups, settings, [_places(tree, [0] * len(tree.context)) for tree in trees])


def gae_of_trees(
    trees: Sequence[TokenTree], groups: Sequence[Hashable], settings: BaselineSettings
) -> list[TokenEstimate]:
    """`gae` of each rollout, then whitened over the batch's tokens; baselines are the critic's values.

    Raises EstimatorError where there are none.
    """
    estimates = []
    for tree in trees:
        if tree.values is None:
            raise EstimatorError("the estimator gae needs a critic's value of every sampled token")
        _, returns = gae(tree.parents, tree.rewards, tree.values, gamma=settings.gamma, lam=settings.lam)
        estimates.append(TokenEstimate(returns, list(tree.values)))
    return estimates


def gae(
    parents: Sequence[int | None],
    rewards: Sequence[Floats],
    values: Sequence[Floats],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[list[Floats], list[Floats]]:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16) over a forest of calls.

    Along a branch, over sampled tokens alone, delta_t = r_t + gamma V_(t+1) - V_t, A_t = delta_t + gamma lam A_(t+1).
    At a fork V_(t+1) and A_(t+1) are the means over the branches' first tokens; a leaf ends with 0.

    Args:
        parents: the index of the call that each of C calls continues, or None; parents come before their children.
        rewards, values: per call, float64 [K] of its K sampled tokens.

    Returns: advantages (not whitened) and returns (advantage + value), per call [K] each.
    """
    children = _children(parents)
    advantages = [np.zeros(len(of_call)) for of_call in values]
    first: list[tuple[float, float]] = [(0.0, 0.0)] * len(parents)  # value and advantage where the call begins
    for call in reversed(range(len(parents))):
        after = [first[child] for child in children[call]]
        value, advantage = _mean([v for v, _ in after]), _mean([a for _, a in after])
        from_end = []
        for reward, own in zip(reversed(rewards[call].tolist()), reversed(values[call].tolist()), strict=True):
            advantage = reward + gamma * value - own + gamma * lam * advantage
            value = own
            from_end.append(advantage)
        advantages[call][:] = from_end[::-1]
        first[call] = value, advantage
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def discounted_returns(parents: Sequence[int | None], rewards: Sequence[Floats], gamma: float = 1.0) -> list[Floats]:
    """G_t = r_t + gamma G_(t+1) along every branch, per call [K]; at a fork the mean over the branches, at a leaf 0."""
    children = _children(parents)
    returns = [np.zeros(len(of_call)) for of_call in rewards]
    first = [0.0] * len(parents)  # the return where the call begins
    for call in reversed(range(len(parents))):
        later = _mean([first[child] for child in children[call]])
        sums = rewards[call].tolist()
        for t in reversed(range(len(sums))):
            sums[t] = later = sums[t] + gamma * later
        returns[call][:] = sums
        first[call] = later
    return returns


def whitening(values: Floats, counts: Floats | None = None) -> tuple[float, float]:
    """Mean and divisor that whiten values over a batch: sqrt(unbiased variance + 1e-8), as verl's `masked_whiten`.

    A value stands for `counts` tokens. Of one token, as of many alike, the whitened value is 0: there is nothing to
    compare it with.
    """
    return mean(values, counts), math.hypot(standard_deviation(values, counts), 1e-4)


def _token_baseline(
    trees: Sequence[TokenTree],
    groups: Sequence[Hashable],
    settings: BaselineSettings,
    columns: Sequence[Sequence[NDArray[np.int64]]],
) -> list[TokenEstimate]:
    returns = [discounted_returns(tree.parents, tree.rewards) for tree in trees]
    energies = [_energies(tree) for tree in trees]
    baselines: list[list[Floats]] = [[] for _ in trees]
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    for group_members in members.values():
        if len(group_members) == 1 and not settings.lone_raw:
            [lone] = group_members
            baselines[lone] = [of_call.copy() for of_call in returns[lone]]  # advantage 0
            continue
        by_column = _by_column([(columns[i], returns[i], energies[i]) for i in group_members])
        for i in group_members:
            baselines[i] = [by_column[places] for places in columns[i]]
    return [TokenEstimate(*pair) for pair in zip(returns, baselines, strict=True)]


def _by_column(
    rollouts: Sequence[tuple[Sequence[NDArray[np.int64]], Sequence[Floats], Sequence[Floats]]],
) -> Floats:
    """The baseline of every column of a group, from the columns, returns and energies of each rollout's tokens."""
    flat = [tuple(np.concatenate([*of_calls, np.zeros(0)]) for of_calls in rollout) for rollout in rollouts]
    width = max((int(places.max()) + 1 for places, _, _ in flat if len(places)), default=0)
    live, weights, weighted, plain = (np.zeros(width) for _ in range(4))
    for places, returns, energies in flat:
        column = places.astype(np.int64)
        tokens = np.bincount(column, minlength=width)
        share = 1 / np.maximum(tokens, 1)
        live += tokens > 0
        weights += np.bincount(column, energies, width) * share
        weighted += np.bincount(column, energies * returns, width) * share
        plain += np.bincount(column, returns, width) * share
    # Where no token could have been another, nothing pulls on the weights, and any baseline will do.
    baseline = np.where(weights > 0, weighted / np.where(weights > 0, weights, 1), plain / np.maximum(live, 1))
    return np.where(live > 1, baseline, 0.0)


def _energies(tree: TokenTree) -> list[Floats]:
    """W of every token: the squared gradient norms of the logits, summed along its branch."""
    ends = [0.0] * len(tree.parents)
    energies = []
    for call, parent in enumerate(tree.parents):
        pi = np.exp(np.minimum(np.nan_to_num(tree.log_probs[call], nan=-np.inf), 0.0))
        step = 1 - pi if tree.sum_pi_squared is None else 1 - 2 * pi + tree.sum_pi_squared[call]
        energies.append((0.0 if parent is None else ends[parent]) + np.cumsum(step))
        ends[call] = float(energies[call][-1]) if len(step) else 0.0 if parent is None else ends[parent]
    return energies


def _places(tree: TokenTree, context: Sequence[int]) -> list[NDArray[np.int64]]:
    """The place of every token on its branch, with `context` tokens before each call but the first."""
    ends = [0] * len(tree.parents)
    places = []
    for call, parent in enumerate(tree.parents):
        start = 0 if parent is None else ends[parent] + context[call]
        places.append(np.arange(start, start + len(tree.rewards[call])))
        ends[call] = start + len(tree.rewards[call])
    return places


def _children(parents: Sequence[int | None]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for call, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(call)
    return children


def _mean(values: Sequence[float]) -> float:
    return mean(np.asarray(values, dtype=np.float64))
