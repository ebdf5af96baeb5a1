"""How sure a measured reward is: a mean with its confidence interval. Pure arithmetic.

The task is the unit: several rollouts of one task are not independent, so they are averaged first.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, variance

import msgspec

EVALUATIONS = "evaluations.json"  # in the folder of the run that measured them
_Z = NormalDist().inv_cdf(0.975)


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of one dataset: `mean`, with `low` and `high` the ends of its 95 % confidence interval.

    `accuracy` says that every reward is 0 or 1. Counts are of rollouts: `failed` in the agent (they count as 0),
    `left_out` where infrastructure failed on every attempt, `without_calls` to the model.
    """

    dataset: str
    tasks: int
    rollouts: int
    mean: float
    low: float
    high: float
    accuracy: bool
    failed: int = 0
    left_out: int = 0
    without_calls: int = 0

    def __str__(self) -> str:
        counts = [
            f"{count} {label}"
            for count, label in (
                (self.failed, "failed"),
                (self.left_out, "left out"),
                (self.without_calls, "without a call"),
            )
            if count
        ]
        if not math.isfinite(self.mean):
            return f"{self.dataset}: nothing was measured ({', '.join(counts) or 'no rollout'})"
        label = "accuracy" if self.accuracy else "mean reward"
        interval = (
            f"{self.low:.3f} to {self.high:.3f}" if math.isfinite(self.low) else "unknown of fewer than two tasks"
        )
        of = [_counted(self.tasks, "task"), _counted(self.rollouts, "rollout"), *counts]
        return f"{self.dataset}: {label} {self.mean:.3f}, 95 % confidence {interval} ({', '.join(of)})"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def evaluate(dataset: str, rewards: Mapping[str, Sequence[float]], **counts: int) -> Evaluation:
    """The rewards of each task's rollouts as an `Evaluation`; `counts` are its counts of what went wrong."""
    values = [value for task in rewards.values() for value in task]
    means = [fmean(task) for task in rewards.values()]
    zero_one = all(value in (0.0, 1.0) for value in values)
    if zero_one and len(values) == len(means):
        low, high = wilson(sum(values), len(values))
    else:
        low, high = of_tasks(means)
        if zero_one and low == high:  # all tasks went alike, which a few may do by chance
            low, high = wilson(sum(means), len(means))
        elif zero_one:
            low, high = max(0.0, low), min(1.0, high)
    return Evaluation(
        dataset=dataset,
        tasks=len(rewards),
        rollouts=len(values) + counts.get("left_out", 0),
        mean=fmean(means) if means else math.nan,
        low=low,
        high=high,
        accuracy=zero_one,
        **counts,
    )


def wilson(successes: float, n: int) -> tuple[float, float]:
    """The score interval of a share (Wilson 1927): right for few samples, and near 0 and 1."""
    if n == 0:
        return math.nan, math.nan
    share, z2 = successes / n, _Z**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def of_tasks(means: Sequence[float]) -> tuple[float, float]:
    """The interval of a mean of task means, by the standard error over tasks (Miller 2024, arXiv:2411.00640), which few
    tasks tell only roughly: so by Student's t."""
    if len(means) < 2:
        return math.nan, math.nan
    half = students_t(len(means) - 1) * math.sqrt(variance(means) / len(means))
    return fmean(means) - half, fmean(means) + half


def students_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: exact for 1 and 2 degrees of freedom, for more to 0.2 % (Abramowitz and
    Stegun, Handbook of Mathematical Functions, 26.7.5)."""
    if freedom < 3:
        return {1: math.tan(0.475 * math.pi), 2: 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))}[freedom]
    polynomials = [
        (_Z**3 + _Z) / 4,
        (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96,
        (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384,
        (79 * _Z**9 + 776 * _Z**7 + 1482 * _Z**5 - 1920 * _Z**3 - 945 * _Z) / 92160,
    ]
    return _Z + sum(term / float(freedom) ** power for power, term in enumerate(polynomials, start=1))
