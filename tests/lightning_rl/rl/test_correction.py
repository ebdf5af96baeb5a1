"""Weights and rejections by the ratio of trainer to sampler: verl's numbers on a small batch, and what always holds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.rl.correction import (
    CRITERIA,
    LEVELS,
    Bounds,
    Corrected,
    CorrectionRules,
    correct,
    criteria,
    weight_bounds,
)

MASK = np.array([[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=bool)
OLD = [[0.5, 0.4, 0.3, 0.6], [0.9, 0.2, 0.5, 0.5], [0.3, 0.5, 0.8, 0.5], [0.25, 0.5, 0.75, 0.9], [0.6, 0.7, 0.5, 0.5]]
NEW = [[0.6, 0.35, 0.3, 0.95], [0.5, 0.4, 0.5, 0.5], [0.9, 0.5, 0.6, 0.5], [0.25, 0.1, 0.75, 0.3], [0.7, 0.7, 0.5, 0.5]]
TRAINER, SAMPLER = np.log(np.array(OLD)[MASK]), np.log(np.array(NEW)[MASK])
ROLLOUT = np.nonzero(MASK)[0]


def corrected(
    level: Any = None,
    threshold: float | str = 2.0,
    rs: str | None = None,
    rs_threshold: float | str | None = None,
    *,
    batch_normalize: bool = False,
    veto: float | None = None,
) -> Corrected:
    """The small batch, corrected by verl's keys."""
    rules = CorrectionRules(
        level=level,
        bounds=weight_bounds(threshold),
        batch_normalize=batch_normalize,
        criteria={} if rs is None else criteria(rs, rs_threshold),
        veto=veto,
    )
    return correct(TRAINER, SAMPLER, ROLLOUT, rules)


def row(values: np.ndarray[Any, Any] | None, index: int) -> list[float]:
    """A rollout's values at their columns, 0 where nothing is trained."""
    assert values is not None
    whole = np.zeros((5, 4))
    whole[MASK] = values
    return whole[index].tolist()  # type: ignore[no-any-return]


def kept(rs: str, threshold: float | str) -> list[list[float]]:
    keep = corrected(rs=rs, rs_threshold=threshold).keep
    return [row(keep, index) for index in range(5)]


def test_truncated_weights_equal_verl() -> None:
    assert row(corrected("token").weights, 3) == pytest.approx([1, 2, 1, 2], abs=1e-6)
    of_rollouts = corrected("sequence").weights
    first = [row(of_rollouts, index)[0] for index in range(5)]
    assert first == pytest.approx([0.601504, 0.9, 0.444444, 2.0, 0.857143], abs=1e-6)


def test_normalized_weights_have_mean_one_over_what_has_one_weight_each() -> None:
    tokens = corrected("token", batch_normalize=True)
    assert tokens.weights is not None
    assert tokens.weights.mean() == pytest.approx(1)
    assert tokens.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.102256, abs=1e-6)
    rollouts = corrected("sequence", batch_normalize=True).weights
    assert np.mean([row(rollouts, index)[0] for index in range(5)]) == pytest.approx(1)


def test_bounds_make_weights_outside_of_them_zero_as_in_icepop() -> None:
    weights = corrected("token", "0.51_2").weights
    assert row(weights, 1) == pytest.approx([1.8, 0, 1, 0], abs=1e-6)
    assert row(weights, 2) == pytest.approx([0, 0, 1.333333, 0], abs=1e-6)


def test_a_geometric_weight_is_the_mean_ratio_of_its_rollout() -> None:
    weights = corrected("geometric", 100.0).weights
    assert row(weights, 1) == pytest.approx([0.9 ** (1 / 3)] * 3 + [0], abs=1e-6)


def test_divergences_reject_as_in_verl() -> None:
    every = [m.tolist() for m in MASK.astype(float)]
    none = [0.0] * 4
    assert kept("seq_mean_k3", 0.1) == [every[0], none, none, none, every[4]]
    assert kept("token_k1", "0.49_2.01") == [[1, 1, 0, 1], [1, 1, 1, 0], [0, 0, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0]]
    assert kept("seq_mean_k1", "0.8_1.25") == [every[0], every[1], none, none, every[4]]


def test_bounds_of_k1_are_of_the_ratio_that_weights_are_bounded_by() -> None:
    """verl's would keep the token with ratio 5 and reject the one with 0.83: its k1 is the inverse."""
    keep = corrected(rs="token_k1", rs_threshold="0.1_1.2").keep
    ratio = np.exp(TRAINER - SAMPLER)
    assert keep.tolist() == ((ratio >= 0.1) & (ratio <= 1.2)).tolist()
    assert not keep[ratio > 4.9].any()
    assert keep[np.isclose(ratio, 5 / 6)].all()
    weights = corrected("token", "0.1_1.2").weights
    assert weights is not None
    assert keep.tolist() == (weights > 0).tolist()


def test_all_criteria_must_let_a_token_through() -> None:
    both = corrected(rs="token_k1, seq_mean_k3", rs_threshold="0.49_2.01,0.1")
    one = corrected(rs="token_k1", rs_threshold="0.49_2.01").keep & corrected(rs="seq_mean_k3", rs_threshold=0.1).keep
    assert both.keep.tolist() == one.tolist()
    assert both.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx((~one).mean())
    assert both.metrics["rollout_corr/rollout_rs_seq_mean_k3_seq_masked_fraction"] == pytest.approx(3 / 5)


def test_a_token_that_the_trainer_would_not_have_drawn_vetoes_its_rollout() -> None:
    found = corrected(veto=0.4)  # the lowest ratio is 1/3, of rollout 2
    assert found.keep.tolist() == (ROLLOUT != 2).tolist()
    assert found.metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(1 / 5)
    assert found.metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 14)
    assert corrected(veto=0.3).keep.all()


def test_the_distance_of_sampler_and_trainer_equals_verl() -> None:
    expected = {
        "kl": -0.080663,
        "k3_kl": 0.307307,
        "training_ppl": 1.939711,
        "rollout_ppl": 2.061344,
        "ppl_ratio": 1.061729,
        "chi2_token": 2.32236,
        "chi2_seq": 44.420811,
    }
    found = corrected().metrics
    assert {name: found[f"rollout_corr/{name}"] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)


LOG_3, LOG_4 = np.log([3, 4]).tolist()
LOG_K2 = [np.log(ratio) ** 2 / 2 for ratio in (6, 0.5, 0.25)]
METRICS: dict[str, tuple[CorrectionRules, dict[str, float]]] = {
    "distance": (
        CorrectionRules(),
        {
            "rollout_log_ppl": 4 / 3,
            "training_log_ppl": 4 / 3 + (LOG_4 - LOG_3 / 2) / 3,
            "log_ppl_diff": (LOG_4 - LOG_3 / 2) / 3,
            "log_ppl_abs_diff": (LOG_4 + LOG_3 / 2) / 3,
            "log_ppl_diff_max": LOG_4,
            "log_ppl_diff_min": -LOG_3 / 2,
        },
    ),
    "truncated": (  # weights 2.5, 0.5; 0.25; 1
        CorrectionRules(level="token", bounds=weight_bounds(2.5)),
        {
            "rollout_is_mean": 1.0625,
            "rollout_is_std": 0.872765,
            "rollout_is_eff_sample_size": 0.597107,
            "rollout_is_max": 2.5,
            "rollout_is_min": 0.25,
            "rollout_is_ratio_fraction_high": 1 / 4,
            "rollout_is_ratio_fraction_low": 1 / 4,
            "rollout_is_seq_mean": 2.75 / 3,
            "rollout_is_seq_std": 0.629153,
            "rollout_is_seq_max": 1.5,
            "rollout_is_seq_min": 0.25,
            "rollout_is_seq_max_deviation": 0.75,
            "rollout_is_seq_fraction_high": 1 / 3,
            "rollout_is_seq_fraction_low": 1 / 3,
        },
    ),
    "zero outside": (  # 0, 0.5; 0; 1
        CorrectionRules(level="token", bounds=weight_bounds("0.4_2.5")),
        {
            "rollout_is_mean": 0.375,
            "rollout_is_max": 1,
            "rollout_is_min": 0,
            "rollout_is_oob_ratio": 1 / 2,
            "rollout_is_seq_max": 1,
            "rollout_is_seq_fraction_high": 1 / 3,
            "rollout_is_seq_fraction_low": 1 / 3,
        },
    ),
    "zero above": (  # 0, 0.5; 0.25; 1
        CorrectionRules(level="token", bounds=weight_bounds("0.2_2.5")),
        {"rollout_is_min": 0, "rollout_is_seq_min": 0.25},
    ),
    "of rollouts": (  # 3, truncated to 2.5; 0.25; 1
        CorrectionRules(level="sequence", bounds=weight_bounds(2.5)),
        {
            "rollout_is_mean": 6.25 / 4,
            "rollout_is_max": 3,
            "rollout_is_min": 0.25,
            "rollout_is_ratio_fraction_high": 1 / 3,
            "rollout_is_ratio_fraction_low": 1 / 3,
        },
    ),
    "criteria": (  # the first rejects the ratio 6, the second the rollout of 0.25
        CorrectionRules(criteria=criteria("token_k1, seq_mean_k2", "0.2_2.5, 0.95")),
        {
            "rollout_rs_token_k1_mean": (LOG_3 - LOG_4) / 4,
            "rollout_rs_token_k1_max": np.log(6),
            "rollout_rs_token_k1_min": -LOG_4,
            "rollout_rs_token_k1_fraction_high": 1 / 4,
            "rollout_rs_token_k1_fraction_low": 0,
            "rollout_rs_token_k1_seq_masked_fraction": 1 / 3,
            "rollout_rs_seq_mean_k2_mean": sum(LOG_K2) / 4,
            "rollout_rs_seq_mean_k2_max": LOG_K2[2],
            "rollout_rs_seq_mean_k2_min": 0,
            "rollout_rs_seq_mean_k2_fraction_high": 1 / 3,
            "rollout_rs_seq_mean_k2_masked_fraction": 1 / 4,
            "rollout_rs_seq_mean_k2_seq_masked_fraction": 1 / 3,
            "rollout_rs_masked_fraction": 1 / 2,
            "rollout_rs_seq_masked_fraction": 2 / 3,
        },
    ),
}


@pytest.mark.parametrize("of", METRICS)
def test_metrics_of_the_ratios_6_and_a_half_a_quarter_and_1_of_three_rollouts(of: str) -> None:
    rules, expected = METRICS[of]
    sampler = np.array([-2.0, -2.0, -1.0, -1.0])
    found = correct(sampler + np.log([6, 0.5, 0.25, 1]), sampler, np.array([0, 0, 1, 2]), rules).metrics
    assert {name: found[f"rollout_corr/{name}"] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_a_ratio_beyond_all_bounds_is_clamped_to_e_to_the_20() -> None:
    rules = CorrectionRules(level="token", bounds=Bounds(None, np.inf))
    weights = correct(np.array([-1.0, -1000.0]), np.array([-1000.0, -1.0]), np.arange(2), rules).weights
    assert weights == pytest.approx(np.exp([20, -20]))


def test_tokens_without_the_samplers_log_prob_are_left_out_and_counted() -> None:
    sampler = SAMPLER.copy()
    sampler[[0, 5]] = np.nan
    rules = CorrectionRules(level="sequence", criteria=criteria("seq_mean_k1", 100.0))
    found = correct(TRAINER, sampler, ROLLOUT, rules)
    known = ~np.isnan(sampler)
    without = correct(TRAINER[known], sampler[known], ROLLOUT[known], rules)
    assert found.weights is not None
    assert without.weights is not None
    assert found.weights[known].tolist() == without.weights.tolist()
    assert found.weights[~known].tolist() == [0, 0]
    assert found.keep.tolist() == known.tolist()
    assert found.metrics == without.metrics | {"rollout_corr/tokens_without_log_prob": 2.0}


@pytest.mark.parametrize("level", LEVELS)
def test_no_tokens_are_no_error(level: str) -> None:
    nothing = np.zeros(0)
    found = correct(
        nothing,
        nothing,
        np.zeros(0, np.int64),
        CorrectionRules(level=level, criteria=criteria("token_k1", 2), veto=0.1),
    )
    assert found.weights is not None
    assert (len(found.weights), len(found.keep)) == (0, 0)
    assert found.metrics == {"rollout_corr/tokens_without_log_prob": 0.0}


def test_weights_that_are_all_zero_are_finite_and_not_normalized() -> None:
    rules = CorrectionRules(level="token", bounds=Bounds(0.9, 1.1), batch_normalize=True)
    found = correct(np.full(3, -9.0), np.full(3, -1.0), np.arange(3), rules)
    assert found.weights is not None
    assert found.weights.tolist() == [0, 0, 0]
    assert found.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0
    assert found.metrics["rollout_corr/rollout_is_oob_ratio"] == 1


@pytest.mark.parametrize(("trainer", "sampler", "whose"), [(np.nan, -1.0, "trainer"), (-1.0, -np.inf, "sampler")])
def test_log_probs_that_are_not_finite_are_named(trainer: float, sampler: float, whose: str) -> None:
    with pytest.raises(ValueError, match=f"1 of 1 log probabilities of the {whose} are not finite"):
        correct(np.array([trainer]), np.array([sampler]), np.zeros(1, np.int64), CorrectionRules())


LOG_PROBS = st.one_of(st.floats(-5, 0), st.floats(-1e4, 0))
BATCHES = st.lists(st.tuples(LOG_PROBS, LOG_PROBS, st.integers(0, 4)), min_size=1, max_size=30)
RULES = st.builds(
    CorrectionRules,
    level=st.sampled_from([None, *LEVELS]),
    bounds=st.sampled_from([Bounds(None, 2.0), Bounds(0.5, 2.0), Bounds(1.0, 1.0), Bounds(None, float("inf"))]),
    batch_normalize=st.booleans(),
    criteria=st.builds(
        lambda names, threshold: criteria(",".join(names), threshold) if names else {},
        st.lists(st.sampled_from(CRITERIA), max_size=3, unique=True),
        st.sampled_from([1.0, 1.5]),
    ),
    veto=st.sampled_from([None, 1e-4, 1.0]),
)


def arrays(batch: list[tuple[float, float, int]]) -> tuple[Any, Any, Any]:
    return (*np.array([of_token[:2] for of_token in batch]).T, np.array([of_token[2] for of_token in batch]))


@given(BATCHES, RULES)
def test_whatever_the_ratios_all_numbers_are_finite_and_weights_are_within_bounds(
    batch: Any, rules: CorrectionRules
) -> None:
    found = correct(*arrays(batch), rules)
    assert np.isfinite(list(found.metrics.values())).all()
    assert (found.weights is None) == (rules.level is None)
    if found.weights is not None:
        assert np.isfinite(found.weights).all()
        assert (found.weights >= 0).all()
        if not rules.batch_normalize:
            assert (found.weights <= rules.bounds.high).all()
    fractions = [v for name, v in found.metrics.items() if "fraction" in name or "eff_sample" in name]
    assert all(0 <= value <= 1 + 1e-9 for value in fractions)


EXACT = st.integers(-100, 0).map(lambda eighths: eighths / 8)  # their sums are the same in any order


@given(st.lists(st.tuples(EXACT, EXACT, st.integers(0, 4)), min_size=1, max_size=30), RULES, st.randoms())
def test_neither_order_nor_numbering_of_rollouts_matters(batch: Any, rules: CorrectionRules, random: Any) -> None:
    trainer, sampler, rollout = arrays(batch)
    order = list(range(len(batch)))
    random.shuffle(order)
    found = correct(trainer, sampler, rollout, rules)
    other = correct(trainer[order], sampler[order], 100 - rollout[order], rules)
    assert other.keep.tolist() == found.keep[order].tolist()
    assert other.metrics == pytest.approx(found.metrics, rel=1e-6, abs=1e-6)
    if found.weights is not None:
        assert other.weights == pytest.approx(found.weights[order], rel=1e-6)


@given(BATCHES, RULES)
def test_criteria_of_rollouts_keep_or_reject_them_whole(batch: Any, rules: CorrectionRules) -> None:
    if any(name.startswith("token") for name in rules.criteria):
        return
    trainer, sampler, rollout = arrays(batch)
    keep = correct(trainer, sampler, rollout, rules).keep
    assert all(len(set(keep[rollout == one])) == 1 for one in set(rollout))


@given(st.lists(st.tuples(LOG_PROBS, st.integers(0, 4)), min_size=1, max_size=30), RULES)
def test_where_sampler_and_trainer_agree_nothing_is_changed(batch: Any, rules: CorrectionRules) -> None:
    trainer, sampler, rollout = arrays([(value, value, whose) for value, whose in batch])
    found = correct(trainer, sampler, rollout, rules)
    assert found.keep.all()
    assert found.weights is None or (found.weights == 1).all()
    assert found.metrics["rollout_corr/kl"] == found.metrics["rollout_corr/chi2_seq"] == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [(2.0, (None, 2)), (1, (None, 1)), ("5", (None, 5)), ("0.5_5.0", (0.5, 5)), (" 1_1 ", (1, 1))],
)
def test_a_threshold_is_a_number_or_two(given: float | str, expected: tuple[float | None, float]) -> None:
    assert weight_bounds(given) == expected


def test_criteria_take_one_threshold_or_one_each() -> None:
    assert criteria("token_k1,seq_max_k2", 2.0) == {"token_k1": (0.5, 2), "seq_max_k2": (None, 2)}
    assert criteria("token_k1", 1.0) == {"token_k1": (1, 1)}
    assert criteria("token_k1, seq_sum_k3", "0.5_4,9") == {"token_k1": (0.5, 4), "seq_sum_k3": (None, 9)}


@pytest.mark.parametrize(
    ("threshold", "message"),
    [
        (0.52, "0.52 is below 1, the ratio of equals"),
        ("2_1", "the lower one first"),
        ("0_1", "above 0"),
        (-1.0, "above 0"),
        ("nan", "above 0"),
        ("", "must be a number or 'low_high'"),
        ("a_b", "must be a number or 'low_high'"),
    ],
)
def test_thresholds_that_bound_nothing_are_named(threshold: float | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weight_bounds(threshold)


@pytest.mark.parametrize(
    ("names", "thresholds", "message"),
    [
        ("seq_max_k1", 2.0, "'seq_max_k1' is unknown; there are token_k1"),
        (" , ", 2.0, "names no criterion"),
        ("token_k1", None, "None has 0 thresholds for 1 criteria"),
        ("token_k1,token_k2,token_k3", "1,2", "has 2 thresholds for 3 criteria"),
        ("token_k1,token_k1", "2,3", "has 2 thresholds for 1 criteria"),
        ("token_k2", "1_2", "of token_k2 is '1_2': a divergence has one bound"),
        ("token_k1", 0.52, "stands for 1/x to x"),
        ("token_k1", "x", "of token_k1 is 'x', and must be a number"),
    ],
)
def test_criteria_that_cannot_be_read_are_named(names: str, thresholds: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        criteria(names, thresholds)


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(ValueError, match="rollout_is 'row' is unknown; there are token, sequence, geometric"):
        correct(TRAINER, SAMPLER, ROLLOUT, CorrectionRules(level="row"))
