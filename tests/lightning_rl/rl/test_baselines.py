"""Outcome estimators against verl's numbers on one small batch, where it is right, and what they must keep."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.rl import baselines
from lightning_rl.rl.advantages import ESTIMATORS, OfOutcomes
from lightning_rl.rl.baselines import BaselineSettings, EstimatorError, OutcomeEstimator, Outcomes
from lightning_rl.rl.token_advantages import whitening

GROUPS = list("aabbc")
OUTCOMES = Outcomes.of([1.0, 0.0, 2.0, 0.5, 1.0], GROUPS, lengths=[3, 3, 2, 4, 2], greedy=[0.5] * 5)
RAW = BaselineSettings(lone_raw=True)
NAMES = [name for name, found in ESTIMATORS.items() if isinstance(found, OfOutcomes)]
COMPARING = [name for name in NAMES if name != "remax"]


def advantages(name: str, outcomes: Outcomes = OUTCOMES, settings: BaselineSettings = RAW) -> list[float]:
    """With the whitening, where there is one, over the tokens of rollouts that have somebody to compare with."""
    estimator = ESTIMATORS[name]
    assert isinstance(estimator, OfOutcomes)
    found = estimator.function(outcomes, settings)
    advantages = found.advantages(outcomes.scores)
    if estimator.whitened:
        compared = np.isfinite(found.scale)
        centre, divisor = whitening(advantages[compared], outcomes.lengths[compared])
        advantages[compared] = (advantages[compared] - centre) / divisor
    return advantages.tolist()


VERL = {
    "grpo": [0.707106, -0.707106, 0.707106, -0.707106, 0.999999],
    "grpo_vectorized": [0.707106, -0.707106, 0.707106, -0.707106, 0.999999],
    "rloo": [1.0, -1.0, 1.5, -1.5, 1.0],
    "opo": [0.5, -0.5, 1.0, -0.5, 1.0],
    "gpg": [0.625, -0.625, 0.9375, -0.9375, 1.25],
    "reinforce_plus_plus_baseline": [0.639272, -0.737621, 0.983495, -1.081844, 1.327718],
    "gdpo": [0.849351, -0.956192, 0.849352, -0.956192, 1.223292],
    "remax": [0.5, -0.5, 1.5, 0.0, 0.5],
}


@pytest.mark.parametrize("name", VERL)
def test_with_raw_groups_of_one_it_equals_verl(name: str) -> None:
    assert advantages(name) == pytest.approx(VERL[name], abs=1.1e-6)


@pytest.mark.parametrize(
    "name", [name for name in VERL if name not in ("remax", "gdpo", "reinforce_plus_plus_baseline")]
)
def test_a_group_of_one_says_nothing_and_moves_no_other(name: str) -> None:
    """verl's estimators disagree: rloo gives its reward, rloo_vectorized 0, grpo_passk raises."""
    assert advantages(name, settings=BaselineSettings()) == pytest.approx([*VERL[name][:4], 0.0], abs=1e-6)


@pytest.mark.parametrize("name", ["gdpo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_takes_no_part_in_whitening(name: str) -> None:
    without = Outcomes.of([1.0, 0.0, 2.0, 0.5], GROUPS[:4], lengths=[3, 3, 2, 4])
    assert advantages(name, settings=BaselineSettings()) == pytest.approx([*advantages(name, without), 0.0])


def test_the_vectorized_estimators_are_the_same_ones() -> None:
    """In verl `rloo` and `rloo_vectorized` differ for a group of one: 1.0 and 0.0."""
    for settings in (RAW, BaselineSettings()):
        assert advantages("rloo_vectorized", settings=settings) == advantages("rloo", settings=settings)
    assert advantages("rloo_vectorized", settings=BaselineSettings()) == [1.0, -1.0, 1.5, -1.5, 0.0]


def test_pass_at_k_rewards_only_the_best_of_a_group() -> None:
    four = Outcomes.of([1.0, 0.0, 2.0, 0.5], GROUPS[:4])
    assert advantages("grpo_passk", four) == pytest.approx([1.414212, 0, 1.414212, 0], abs=1e-6)
    plain = BaselineSettings(norm_by_std=False)
    assert advantages("grpo_passk", four, plain) == [1.0, 0.0, 1.5, 0.0]
    assert advantages("grpo_passk", Outcomes.of([1.0, 1.0, 0.0], "ggg"), plain) == [0.0, 0.0, 0.0]
    assert advantages("grpo_passk", settings=BaselineSettings())[4] == 0.0  # verl raises


def test_dr_grpo_leaves_the_spread_in() -> None:
    assert advantages("grpo", settings=BaselineSettings(norm_by_std=False)) == pytest.approx(
        [0.5, -0.5, 0.75, -0.75, 0.0]
    )


def test_eight_rollouts_three_right() -> None:
    outcomes = Outcomes.of([1, 1, 1, 0, 0, 0, 0, 0], "g" * 8)
    assert advantages("grpo", outcomes) == pytest.approx([1.207612] * 3 + [-0.724567] * 5, abs=1e-6)
    assert advantages("rloo", outcomes) == pytest.approx([0.714286] * 3 + [-0.428571] * 5, abs=1e-6)


def test_gdpo_compares_each_reward_for_itself() -> None:
    """A reward a hundred times larger does not drown the other; one that was not given counts as 0."""
    named = {"right": [1.0, 0.0, 1.0, 0.0], "short": [0.0, 100.0, 0.0, 100.0]}
    outcomes = Outcomes.of([0.0] * 4, "gggg", named=named)
    both = BaselineSettings(reward_weights={"right": 1.0, "short": 1.0})
    assert advantages("gdpo", outcomes, both) == pytest.approx([0.0] * 4, abs=0.02)  # but for epsilon
    one = BaselineSettings(reward_weights={"right": 1.0, "short": 0.5, "absent": 7.0})
    found = advantages("gdpo", outcomes, one)
    assert found[0] > 0
    assert found == pytest.approx([found[0], -found[0]] * 2)


def test_without_a_greedy_rollout_a_task_says_nothing() -> None:
    found = baselines.remax(Outcomes.of([1.0, 3.0], "gh", greedy=[0.5, float("nan")]), RAW)
    assert ((np.asarray([1.0, 3.0]) - found.baseline) / found.scale).tolist() == [0.5, 0.0]


def test_remax_says_what_it_lacks() -> None:
    with pytest.raises(EstimatorError, match="remax needs the score of a greedy rollout"):
        baselines.remax(Outcomes.of([1.0], "g"), RAW)


def test_lengths_of_zero_weigh_alike() -> None:
    assert advantages("opo", Outcomes.of([1.0, 0.0], "gg", lengths=[0, 0])) == [0.5, -0.5]


SCORES = st.lists(st.tuples(st.floats(-5, 5), st.sampled_from("abc"), st.integers(0, 9)), max_size=12)
FUNCTIONS = st.sampled_from(COMPARING)


@given(SCORES, FUNCTIONS)
def test_a_reward_that_all_have_more_changes_nothing(rollouts: list[tuple[float, str, int]], name: str) -> None:
    """But for gpg, which counts the scores that are 0."""
    groups, lengths = [g for _, g, _ in rollouts], [n for _, _, n in rollouts]

    def shifted(by: float) -> list[float]:
        # Sixteenths add up without rounding, which would part ties.
        scores = [round(16 * s) / 16 + by for s, _, _ in rollouts]
        return advantages(name, Outcomes.of(scores, groups, lengths=lengths), BaselineSettings())

    if name != "gpg":
        assert shifted(4.0) == pytest.approx(shifted(0.0), abs=1e-6)


@given(SCORES, st.sampled_from(["grpo", "rloo", "gpg"]))
def test_advantages_of_a_group_sum_to_zero(rollouts: list[tuple[float, str, int]], name: str) -> None:
    groups = [g for _, g, _ in rollouts]
    found = advantages(name, Outcomes.of([s for s, _, _ in rollouts], groups), BaselineSettings())
    for group in set(groups):
        assert sum(a for a, g in zip(found, groups, strict=True) if g == group) == pytest.approx(0, abs=1e-5)


@given(st.lists(st.tuples(st.floats(-1e300, 1e300), st.sampled_from("ab")), max_size=6), FUNCTIONS, st.booleans())
def test_extreme_rewards_stay_finite(rollouts: list[tuple[float, str]], name: str, lone_raw: bool) -> None:
    outcomes = Outcomes.of([s for s, _ in rollouts], [g for _, g in rollouts], lengths=[7.0] * len(rollouts))
    assert np.isfinite(advantages(name, outcomes, BaselineSettings(lone_raw=lone_raw))).all()


@given(st.floats(-1e6, 1e6), st.integers(2, 9), FUNCTIONS)
def test_rollouts_that_score_alike_have_no_advantage(score: float, n: int, name: str) -> None:
    outcomes = Outcomes.of([score] * n, "g" * n, lengths=list(range(n)))
    assert advantages(name, outcomes) == [0.0] * n


@pytest.mark.parametrize("name", NAMES)
def test_nothing_at_all(name: str) -> None:
    assert advantages(name, Outcomes.of([], [], greedy=[])) == []


def test_the_mean_and_spread_of_large_numbers() -> None:
    assert baselines.mean(np.array([1e300, 3e300])) == pytest.approx(2e300)
    assert baselines.standard_deviation(np.array([1e300, 3e300])) == pytest.approx(math.sqrt(2) * 1e300)
    weights = np.array([2.0, 0.0, 1.0])
    assert baselines.mean(np.array([1.0, 9.0, 4.0]), weights) == 2.0
    assert baselines.standard_deviation(np.array([1.0, 9.0, 4.0]), weights) == pytest.approx(math.sqrt(3))


def test_one_of_ones_own_is_a_function() -> None:
    def best_of_all(outcomes: Outcomes, settings: BaselineSettings) -> baselines.Baselines:
        return baselines.Baselines(np.full(len(outcomes.scores), outcomes.scores.max()), np.ones(len(outcomes.scores)))

    mine: OutcomeEstimator = best_of_all
    assert mine(OUTCOMES, RAW).advantages(OUTCOMES.scores).tolist() == [-1.0, -2.0, 0.0, -1.5, -1.0]
