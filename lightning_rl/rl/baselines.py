"""Outcome estimators: from one score per voice to a baseline and a scale; advantage = (score - baseline) / scale.

A voice is a rollout, whatever it was cut into (at a shared state: a call). All statistics are over its group, and each
voice counts once. A group of one has nobody to compare with: its scale is infinite, so its advantage is 0, or with
`lone_raw` (as in verl) the baseline is 0. A group of like scores has scale 1, lest a standard deviation of 0 should
make something of nothing. Names are verl's.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_ALIKE = 1e-12  # relative spread below which scores differ by rounding alone


class EstimatorError(ValueError):
    """An estimator lacks what it needs, or gave what no call can be trained on."""


@dataclass(frozen=True, kw_only=True)
class BaselineSettings:
    """What estimators read of the configuration.

    `norm_by_std`: `algorithm.norm_adv_by_std_in_grpo`; `lone_raw`: `algorithm.groups_of_one: raw`; `gamma` and `lam`:
    discounts per sampled token; `reward_weights`: of gdpo, `algorithm.gdpo_reward_keys` and `gdpo_reward_weights`;
    `epsilon` is added to standard deviations.
    """

    norm_by_std: bool = True
    lone_raw: bool = False
    gamma: float = 1.0
    lam: float = 1.0
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    epsilon: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """N voices: their `scores` [N], the group of each, `lengths` [N] in sampled tokens, `named` rewards [N] each, and
    `greedy` [N], the score of a greedy rollout of the same task."""

    scores: Floats
    groups: Sequence[Hashable]
    lengths: Floats
    named: Mapping[str, Floats] = field(default_factory=dict)
    greedy: Floats | None = None

    @staticmethod
    def of(
        scores: Sequence[float],
        groups: Sequence[Hashable],
        *,
        lengths: Sequence[float] | None = None,
        named: Mapping[str, Sequence[float]] | None = None,
        greedy: Sequence[float] | None = None,
    ) -> "Outcomes":
        """From plain lists; without `lengths` all are 1."""
        return Outcomes(
            scores=np.asarray(scores, dtype=np.float64),
            groups=groups,
            lengths=np.ones(len(scores)) if lengths is None else np.asarray(lengths, dtype=np.float64),
            named={name: np.asarray(values, dtype=np.float64) for name, values in (named or {}).items()},
            greedy=None if greedy is None else np.asarray(greedy, dtype=np.float64),
        )

    def members(self) -> list[NDArray[np.int64]]:
        """The indices of each group's voices."""
        by_group: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index, group in enumerate(self.groups):
            by_group[group].append(index)
        return [np.asarray(indices, dtype=np.int64) for indices in by_group.values()]


class Baselines(NamedTuple):
    """Float64 [N] each."""

    baseline: Floats
    scale: Floats

    def advantages(self, scores: Floats) -> Floats:
        """(score - baseline) / scale, [N]."""
        advantages: Floats = (scores - self.baseline) / self.scale
        return advantages


OutcomeEstimator = Callable[[Outcomes, BaselineSettings], Baselines]


def grpo(outcomes: Outcomes, settings: BaselineSettings) -> Baselines:
    """GRPO (arXiv 2402.03300, section 4.1.2): A_i = (s_i - mean_g) / (std_g + epsilon), unbiased std.

    Without `norm_adv_by_std_in_grpo` no division: Dr. GRPO (arXiv 2503.20783). Also `grpo_vectorized`.
    """
    return _by_group(outcomes, settings, lambda of_group: (mean(of_group.scores), _spread(of_group, settings)))


def rloo(outcomes: Outcomes, settings: BaselineSettings) -> Baselines:
    """Leave-one-out (arXiv 2402.14740): A_i = s_i - the mean of the others' scores. Also
    `rloo_vectorized`."""

    def of_group(group: Outcomes) -> tuple[Floats, float]:
        centre = mean(group.scores)
        return centre - (group.scores - centre) / (len(group.scores) - 1), 1.0

    return _by_group(outcomes, settings, of_group)


def opo(outcomes: Outcomes, settings: BaselineSettings) -> Baselines:
    """OPO (arXiv 2505.23585): A_i = s_i - sum_j l_j s_j / sum_j l_j, with l the length in sampled tokens."""
    return _by_group(outcomes, settings, lambda of_group: (mean(of_group.scores, of_group.lengths), 1.0))


def gpg(outcomes: Outcomes, settings: BaselineSettings) -> Baselines:
    """GPG (arXiv 2504.02546): A_i = alpha (s_i - mean_g), alpha = N / number of scores that are not 0."""
    unscaled = _by_group(outcomes, settings, lambda of_group: (mean(of_group.scores), 1.0))
    share = max(1, int(np.count_nonzero(outcomes.scores))) / max(1, len(outcomes.scores))
    return Baselines(unscaled.baseline, unscaled.scale * share)


def grpo_passk(outcomes: Outcomes, settings: BaselineSettings) -> Baselines:
    """Pass@k (arXiv 2503.19595): the group's best has A = (best - second best) / (std_g + epsilon), all others 0.

    `norm_adv_by_std_in_grpo` as in `grpo`.
    """

    def of_group(group: Outcomes) -> tuple[Floats, Floats]:
        best = int(group.scores.argmax())
        second = float(np.delete(group.scores, best).max())
        scale = np.full(len(group.scores), math.inf)
        if group.scores[best] > second:  # of several best, none is
            scale[best] = _spread(group, settings)
        return np.full(len(group.scores), second), scale

    return _by_group(outcomes, settings, of_group)


def reinforce_plus_plus_baseline(outcomes: Outcomes, settings: BaselineSettings) -> Baselines:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): s_i - mean_g, then whitened over tokens."""
    return _by_group(outcomes, settings, lambda of_group: (mean(of_group.scores), 1.0))


def gdpo(outcomes: Outcomes, settings: BaselineSettings) -> Baselines:
    """GDPO (arXiv 2601.05242): A_i = sum_k w_k A_ik with `grpo` of each named reward k, then whitened over tokens.

    `algorithm.gdpo_reward_keys` names the rewards, `gdpo_reward_weights` their weights; without names the score is the
    one reward. A reward that a rollout was not given counts as 0.
    """
    weights = settings.reward_weights or {"": 1.0}
    none = np.zeros(len(outcomes.scores))
    total = none
    for name, weight in weights.items():
        scores = outcomes.named.get(name, none) if name else outcomes.scores
        total = total + weight * grpo(replace(outcomes, scores=scores), settings).advantages(scores)
    says_something = np.isfinite(grpo(outcomes, settings).scale)
    return Baselines(outcomes.scores - total, np.where(says_something, 1.0, math.inf))


def remax(outcomes: Outcomes, settings: BaselineSettings) -> Baselines:
    """ReMax (arXiv 2310.10505): A_i = s_i - the score of a greedy rollout of the same task; 0 where that is NaN.

    Raises EstimatorError where there are no greedy rollouts.
    """
    if outcomes.greedy is None:
        raise EstimatorError("the estimator remax needs the score of a greedy rollout of every task")
    has_greedy = ~np.isnan(outcomes.greedy)
    return Baselines(np.where(has_greedy, outcomes.greedy, 0.0), np.where(has_greedy, 1.0, math.inf))


def mean(values: Floats, weights: Floats | None = None) -> float:
    """The mean, or with `weights` (not all 0: else they are alike) the weighted mean; exact where all are the same."""
    if len(values) == 0:
        return 0.0
    low, high = float(values.min()), float(values.max())
    if low == high:
        return low
    scale = _power_of_two(max(abs(low), abs(high)))
    shares = values / scale if weights is None or not weights.sum() else values / scale * weights
    total = len(values) if weights is None or not weights.sum() else float(weights.sum())
    return math.fsum(shares) / total * scale


def standard_deviation(values: Floats, weights: Floats | None = None) -> float:
    """The unbiased standard deviation, of values that each stand for `weights` of them; 0 for fewer than two."""
    count = float(len(values) if weights is None else weights.sum())
    if count < 2:
        return 0.0
    scale = _power_of_two(float(np.abs(values).max()))
    scaled = values / scale
    squares = (scaled - mean(scaled, weights)) ** 2
    total = math.fsum(squares if weights is None else squares * weights)
    return math.sqrt(total / (count - 1)) * scale


def _by_group(
    outcomes: Outcomes,
    settings: BaselineSettings,
    of_group: Callable[[Outcomes], tuple[Floats | float, Floats | float]],
) -> Baselines:
    """Baseline and scale of each group of two and more by `of_group`, of each group of one by the settings."""
    baseline, scale = np.zeros(len(outcomes.scores)), np.ones(len(outcomes.scores))
    for members in outcomes.members():
        if len(members) == 1:
            scale[members] = 1.0 if settings.lone_raw else math.inf
        else:
            group = Outcomes(scores=outcomes.scores[members], groups=(), lengths=outcomes.lengths[members])
            baseline[members], scale[members] = of_group(group)
    return Baselines(baseline, scale)


def _spread(group: Outcomes, settings: BaselineSettings) -> float:
    """What a group's differences are divided by."""
    low, high = float(group.scores.min()), float(group.scores.max())
    if not settings.norm_by_std or high / 2 - low / 2 <= _ALIKE * max(abs(low), abs(high)):
        return 1.0
    return standard_deviation(group.scores) + settings.epsilon


def _power_of_two(size: float) -> float:
    """A divisor that keeps squares and sums finite, and rounds nothing: 1 for numbers of everyday size."""
    return 1.0 if size < 1e100 else math.ldexp(1.0, math.frexp(size)[1] - 1)
