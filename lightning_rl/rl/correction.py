"""Rollout correction: what to do about a sampler that is not quite the trainer.

The sampler (another engine, another precision, older weights) drew a token with probability mu, the trainer gives it
pi. The ratio is rho = pi / mu, trainer to sampler, everywhere: in weights, in bounds, in the veto. Pure functions of
flat arrays: `log_ratio` float [K] is log rho of the K tokens of a batch, `rollout` int [K] says whose token each is;
a *sequence* in verl's names is a rollout, whatever rows it was cut into. Weights are numbers: no gradient flows
through them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

LEVELS = ("token", "sequence", "geometric")
CRITERIA = (
    *(f"token_{kind}" for kind in ("k1", "k2", "k3")),
    *(f"seq_{of}_{kind}" for of in ("sum", "mean") for kind in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)
_LOG_RATIO = 20.0  # a ratio beyond exp(20) says no more than that it is out of all bounds
_EXPONENT = 700.0  # the largest whose exponential is a float64

T = TypeVar("T", bound=np.generic)
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Bounds(NamedTuple):
    """Where a ratio or a divergence is let through; `low` None: there is no lower bound."""

    low: float | None
    high: float


_TRUNCATED_AT_2 = Bounds(None, 2.0)


@dataclass(frozen=True, kw_only=True)
class CorrectionRules:
    """verl's `algorithm.rollout_correction`, read.

    `level` and `bounds` are rollout_is and rollout_is_threshold, `criteria` rollout_rs with its thresholds, `veto`
    rollout_token_veto_threshold.
    """

    level: str | None = None
    bounds: Bounds = _TRUNCATED_AT_2
    batch_normalize: bool = False
    criteria: Mapping[str, Bounds] = field(default_factory=dict)
    veto: float | None = None

    @property
    def active(self) -> bool:
        """Whether anything is corrected, and not measured alone."""
        return bool(self.level or self.criteria or self.veto)


class Corrected(NamedTuple):
    """`weights` float64 [K] (None: there is no importance weight), `keep` bool [K], verl's `rollout_corr/...`."""

    weights: Floats | None
    keep: Bools
    metrics: dict[str, float]


def weight_bounds(threshold: float | str) -> Bounds:
    """verl's `rollout_is_threshold`: a number x truncates weights at x, "low_high" zeroes those outside.

    Raises ValueError for anything else, and for an x below 1, which would truncate the weight of a token that sampler
    and trainer agree on (0.5_2 without quotes is 0.52 to YAML and to Hydra).
    """
    low, high = _range("rollout_is_threshold", threshold)
    if low is None and high < 1:
        raise ValueError(
            f"rollout_is_threshold {threshold!r} is below 1, the ratio of equals: write bounds as quoted text, "
            "'0.5_2.0'"
        )
    return Bounds(low, high)


def criteria(names: str, thresholds: float | str | None) -> dict[str, Bounds]:
    """verl's `rollout_rs` and `rollout_rs_threshold`: comma lists, one threshold for all criteria or one for each.

    Bounds of `k1` criteria are of the ratio: "low_high", or x for 1/x to x. Those of `k2` and `k3` are a largest
    divergence. Raises ValueError naming the criterion.
    """
    named = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    texts = [part.strip() for part in str("" if thresholds is None else thresholds).split(",") if part.strip()]
    if unknown := [name for name in named if name not in CRITERIA]:
        raise ValueError(f"rollout_rs {unknown[0]!r} is unknown; there are {', '.join(CRITERIA)}")
    if not named:
        raise ValueError(f"rollout_rs names no criterion; there are {', '.join(CRITERIA)}")
    if len(texts) not in (1, len(named)):
        raise ValueError(
            f"rollout_rs_threshold {thresholds!r} has {len(texts)} thresholds for {len(named)} criteria of rollout_rs: "
            "give one for all of them, or one for each, with commas between"
        )
    if len(texts) == 1:
        texts *= len(named)
    return {name: _criterion_bounds(name, text) for name, text in zip(named, texts, strict=True)}


def importance_weights(
    log_ratio: Floats, rollout: Ints, *, level: str, bounds: Bounds, batch_normalize: bool = False
) -> tuple[Floats, dict[str, float]]:
    """Importance weights of tokens, and verl's `rollout_is_...` metrics.

    The raw weight is, by `level`, `token`: rho of the token; `sequence`: the product of rho over its rollout;
    `geometric`: that product to the power 1 / tokens of the rollout (the ratio of GSPO, arXiv 2507.18071); exponents
    are clamped to +-20. Then without a lower bound min(raw, high) (truncated importance sampling,
    https://fengyao.notion.site/off-policy-rl), with one 0 outside of low..high (IcePop, arXiv 2510.18855).

    Args:
        log_ratio, rollout: [K].
        batch_normalize: divide by the mean weight: over tokens, or over rollouts where they have one weight each.

    Returns: float64 [K], and metrics (none where K is 0). Raises ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"rollout_is {level!r} is unknown; there are {', '.join(LEVELS)}")
    if not len(log_ratio):
        return np.zeros(0), {}
    rollouts = _RolloutGroups.of(rollout)
    of_tokens = level == "token"
    exponent = log_ratio if of_tokens else rollouts.sum(log_ratio) if level == "sequence" else rollouts.mean(log_ratio)
    raw = np.exp(exponent.clip(-_LOG_RATIO, _LOG_RATIO))
    each = np.minimum(raw, bounds.high)
    if bounds.low is not None:
        each = np.where((raw >= bounds.low) & (raw <= bounds.high), raw, 0.0)
    weights = each if of_tokens else each[rollouts.of_token]
    metrics = _weight_metrics(weights, raw if of_tokens else raw[rollouts.of_token], bounds, rollouts)
    extremes = each if of_tokens else _exp(np.minimum(exponent, _LOG_RATIO))
    metrics["rollout_is_max"], metrics["rollout_is_min"] = float(extremes.max()), float(extremes.min())
    low = 1 / bounds.high if bounds.low is None else bounds.low
    metrics["rollout_is_ratio_fraction_high"] = float((raw > bounds.high).mean())
    metrics["rollout_is_ratio_fraction_low"] = float((raw < low).mean())
    if batch_normalize:
        mean = float(each.mean())
        factor = mean if mean > 1e-8 else 1.0
        weights, metrics["rollout_is_batch_norm_factor"] = weights / factor, factor
    return weights, metrics


def accepted(log_ratio: Floats, rollout: Ints, criteria: Mapping[str, Bounds]) -> tuple[Bools, dict[str, float]]:
    """Which tokens every criterion lets through, and verl's `rollout_rs_...` metrics.

    A criterion is `token_`, `seq_sum_`, `seq_mean_` or `seq_max_` (of a rollout, which stands or falls as a whole) and
    an estimator of the divergence, with log rho clamped to +-20 (http://joschu.net/blog/kl-approx.html): `k1` log rho,
    `k2` log(rho)^2 / 2, `k3` rho - 1 - log rho. Bounds of k1 are of the ratio, so log low <= k1 <= log high (in verl
    they are of mu / pi).

    Args:
        log_ratio, rollout: [K].

    Returns: bool [K], and metrics (none where K is 0).
    """
    keep = np.ones(len(log_ratio), dtype=bool)
    metrics: dict[str, float] = {}
    if not len(log_ratio) or not criteria:
        return keep, metrics
    rollouts = _RolloutGroups.of(rollout)
    for name, bounds in criteria.items():
        statistic = _statistic(name, log_ratio, rollouts)
        below, above = _outside(name, statistic, bounds)
        of_token = slice(None) if name.startswith("token_") else rollouts.of_token
        rejected = (below | above)[of_token]
        keep &= ~rejected
        statistics = {
            "mean": statistic[of_token].mean(),
            "max": statistic.max(),
            "min": statistic.min(),
            "fraction_high": above.mean(),
            "fraction_low": below.mean(),
            "masked_fraction": rejected.mean(),
            "seq_masked_fraction": rollouts.any(rejected).mean(),
        }
        metrics |= {f"rollout_rs_{name}_{measure}": float(value) for measure, value in statistics.items()}
    metrics["rollout_rs_masked_fraction"] = float((~keep).mean())
    metrics["rollout_rs_seq_masked_fraction"] = float(rollouts.any(~keep).mean())
    return keep, metrics


def not_vetoed(log_ratio: Floats, rollout: Ints, threshold: float) -> tuple[Bools, dict[str, float]]:
    """Which tokens are of rollouts without one that the trainer holds for next to impossible: rho < `threshold`.

    One such token says that the sampler was somewhere where the trainer would not have gone, and the rest of the
    rollout comes after it (https://richardli.xyz/rl-collapse).

    Returns: bool [K], and metrics (none where K is 0).
    """
    if not len(log_ratio):
        return np.ones(0, dtype=bool), {}
    rollouts = _RolloutGroups.of(rollout)
    hopeless = log_ratio < math.log(threshold)
    vetoed = rollouts.any(hopeless)
    metrics = {
        "rollout_is_veto_fraction": float(vetoed.mean()),
        "rollout_is_catastrophic_token_fraction": float(hopeless.mean()),
    }
    return ~vetoed[rollouts.of_token], metrics


def mismatch(trainer: Floats, sampler: Floats, rollout: Ints) -> dict[str, float]:
    """How far sampler and trainer are apart, under verl's names; nothing for no tokens.

    `kl` and `k3_kl` estimate KL(mu || pi) over tokens; perplexities are means over rollouts of exp(-mean log
    probability), `ppl_ratio` of trainer's over sampler's; `chi2_token` and `chi2_seq` are E[rho^2] - 1 over tokens and,
    with the product of rho, over rollouts. Exponents are clamped, so that all are finite.

    Args:
        trainer, sampler: log probabilities (nats) of the tokens, [K].
        rollout: [K].
    """
    if not len(trainer):
        return {}
    rollouts = _RolloutGroups.of(rollout)
    log_ratio = trainer - sampler
    clamped = log_ratio.clip(-_LOG_RATIO, _LOG_RATIO)
    of_trainer, of_sampler = -rollouts.mean(trainer), -rollouts.mean(sampler)
    difference = of_trainer - of_sampler
    product = rollouts.sum(log_ratio).clip(-_LOG_RATIO, _LOG_RATIO)
    return {
        "kl": float(-log_ratio.mean()),
        "k3_kl": float(_k3(clamped).mean()),
        "training_ppl": float(_exp(of_trainer).mean()),
        "training_log_ppl": float(of_trainer.mean()),
        "rollout_ppl": float(_exp(of_sampler).mean()),
        "rollout_log_ppl": float(of_sampler.mean()),
        "log_ppl_diff": float(difference.mean()),
        "log_ppl_abs_diff": float(np.abs(difference).mean()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": float(_exp(difference).mean()),
        "chi2_token": float(np.expm1(2 * clamped).mean()),
        "chi2_seq": float(np.expm1(2 * product).mean()),
    }


def correct(
    trainer: NDArray[np.floating], sampler: NDArray[np.floating], rollout: Ints, rules: CorrectionRules
) -> Corrected:
    """Weights, rejections and metrics of a batch of K tokens.

    A token without the sampler's log probability (NaN) is left out: it is in no statistic, its weight is 0, it is not
    kept; `rollout_corr/tokens_without_log_prob` counts them.

    Args:
        trainer, sampler: log probabilities (nats), [K]; sampler's may be NaN.
        rollout: the rollout of each token, [K].

    Raises ValueError where a log probability is not finite, which no rule can mend.
    """
    trainer, sampler = np.asarray(trainer, np.float64), np.asarray(sampler, np.float64)
    known = ~np.isnan(sampler)
    for name, values in (("trainer", trainer), ("sampler", sampler[known])):
        if not np.isfinite(values).all():
            raise ValueError(
                f"{np.count_nonzero(~np.isfinite(values))} of {len(values)} log probabilities of the {name} are not "
                "finite: look at its weights and its precision"
            )
    log_ratio, of_known = (trainer - sampler)[known], np.asarray(rollout)[known]
    metrics = mismatch(trainer[known], sampler[known], of_known)
    metrics["tokens_without_log_prob"] = float(np.count_nonzero(~known))
    weights = None
    if rules.level:
        known_weights, of_weights = importance_weights(
            log_ratio, of_known, level=rules.level, bounds=rules.bounds, batch_normalize=rules.batch_normalize
        )
        weights = _spread(known_weights, known)
        metrics |= of_weights
    keep, of_criteria = accepted(log_ratio, of_known, rules.criteria)
    metrics |= of_criteria
    if rules.veto:
        spared, of_veto = not_vetoed(log_ratio, of_known, rules.veto)
        keep &= spared
        metrics |= of_veto
    return Corrected(weights, _spread(keep, known), {f"rollout_corr/{name}": value for name, value in metrics.items()})


class _RolloutGroups(NamedTuple):
    """Which of the G rollouts each token is of, [K], and how many tokens each has, [G]."""

    of_token: Ints
    tokens: Ints

    @classmethod
    def of(cls, rollout: Ints) -> "_RolloutGroups":
        _, of_token, tokens = np.unique(rollout, return_inverse=True, return_counts=True)
        return cls(of_token, tokens)

    def sum(self, values: Floats) -> Floats:
        return np.bincount(self.of_token, weights=values, minlength=len(self.tokens)).astype(np.float64)

    def mean(self, values: Floats) -> Floats:
        return self.sum(values) / self.tokens

    def max(self, values: Floats) -> Floats:
        largest = np.full(len(self.tokens), -np.inf)
        np.maximum.at(largest, self.of_token, values)
        return largest

    def any(self, which: Bools) -> Bools:
        return self.sum(which.astype(np.float64)) > 0


def _weight_metrics(weights: Floats, raw: Floats, bounds: Bounds, rollouts: _RolloutGroups) -> dict[str, float]:
    """Statistics of the tokens' weights, before and after the bounds; the effective sample size is a share of K."""
    low = 1 / bounds.high if bounds.low is None else bounds.low
    mean, square = float(weights.mean()), float(np.square(weights).mean())
    of_rollouts, raw_of_rollouts = rollouts.mean(weights), rollouts.mean(raw)
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_std": float(weights.std()),
        "rollout_is_eff_sample_size": mean**2 / square if square else 0.0,
        "rollout_is_seq_mean": float(of_rollouts.mean()),
        "rollout_is_seq_std": float(of_rollouts.std(ddof=1)) if len(of_rollouts) > 1 else 0.0,
        "rollout_is_seq_max": float(of_rollouts.max()),
        "rollout_is_seq_min": float(of_rollouts.min()),
        "rollout_is_seq_max_deviation": float(np.abs(of_rollouts - 1).max()),
        "rollout_is_seq_fraction_high": float((raw_of_rollouts > bounds.high).mean()),
        "rollout_is_seq_fraction_low": float((raw_of_rollouts < low).mean()),
    }
    if bounds.low is not None:
        metrics["rollout_is_oob_ratio"] = float(((raw < bounds.low) | (raw > bounds.high)).mean())
    return metrics


def _statistic(name: str, log_ratio: Floats, rollouts: _RolloutGroups) -> Floats:
    """What a criterion bounds: [K] for one of tokens, [G] for one of rollouts."""
    scope, _, kind = name.rpartition("_")
    clamped = log_ratio.clip(-_LOG_RATIO, _LOG_RATIO)
    tokens: Floats = {"k1": clamped, "k2": np.square(clamped) / 2, "k3": _k3(clamped)}[kind]
    of_rollouts = {"seq_sum": rollouts.sum, "seq_mean": rollouts.mean, "seq_max": rollouts.max}
    return tokens if scope == "token" else of_rollouts[scope](tokens)


def _outside(name: str, statistic: Floats, bounds: Bounds) -> tuple[Bools, Bools]:
    """Where a criterion's statistic is below its bounds, and where above."""
    if not name.endswith("k1"):
        return np.zeros(len(statistic), dtype=bool), statistic > bounds.high
    low = -math.inf if bounds.low is None else math.log(bounds.low)
    return statistic < low, statistic > math.log(bounds.high)


def _k3(log_ratio: Floats) -> Floats:
    divergence: Floats = np.expm1(log_ratio) - log_ratio
    return divergence


def _exp(exponent: Floats) -> Floats:
    finite: Floats = np.exp(exponent.clip(-_EXPONENT, _EXPONENT))
    return finite


def _spread(values: NDArray[T], known: Bools) -> NDArray[T]:
    """The values of the known tokens at their places among all; 0 elsewhere."""
    spread = np.zeros(len(known), dtype=values.dtype)
    spread[known] = values
    return spread


def _criterion_bounds(name: str, threshold: str) -> Bounds:
    low, high = _range(f"rollout_rs_threshold of {name}", threshold)
    if not name.endswith("k1"):
        if low is not None:
            raise ValueError(
                f"rollout_rs_threshold of {name} is {threshold!r}: a divergence has one bound, its largest"
            )
        return Bounds(None, high)
    if low is None and high < 1:
        raise ValueError(
            f"rollout_rs_threshold of {name} is {threshold!r}: one number x stands for 1/x to x, so it is 1 or more; "
            "write other bounds as quoted text, '0.5_2.0'"
        )
    return Bounds(1 / high if low is None else low, high)


def _range(key: str, threshold: float | str) -> Bounds:
    """A number, or two with an underscore between, all above 0."""
    first, underscore, second = str(threshold).strip().partition("_")
    try:
        low, high = (float(first), float(second)) if underscore else (None, float(first))
    except ValueError:
        raise ValueError(f"{key} is {threshold!r}, and must be a number or 'low_high'") from None
    if not high > 0 or (low is not None and not 0 < low <= high):
        raise ValueError(f"{key} is {threshold!r}: bounds are above 0, the lower one first")
    return Bounds(low, high)
