"""Advantages and weights against verl 0.9.1's numbers on one small batch, and against their own formulas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.rl.aggregation import MODES, token_weights
from tests.lightning_rl.rl.golden import MASK, grpo

TOKEN_LOSSES = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3], [1, 1, 1, 1], [2, 2, 9, 9]], dtype=float)
GROUPS = ["a", "a", "b", "b", "c"]
REWARDS = [1.0, 0.0, 2.0, 0.5, 1.0]


def test_grpo_equals_verl_except_for_a_group_of_one() -> None:
    """verl gives a group of one its bare reward; it says nothing about the policy, so ours is 0."""
    assert grpo(REWARDS, GROUPS) == pytest.approx([0.707106, -0.707106, 0.707106, -0.707106, 0.0], abs=1e-6)


def test_dr_grpo_leaves_the_spread_in() -> None:
    assert grpo(REWARDS, GROUPS, norm_by_std=False) == pytest.approx([0.5, -0.5, 0.75, -0.75, 0.0])


def test_eight_rollouts_three_right() -> None:
    found = grpo([1, 1, 1, 0, 0, 0, 0, 0], ["g"] * 8)
    assert found == pytest.approx([1.207612] * 3 + [-0.724567] * 5, abs=1e-5)


@given(st.lists(st.tuples(st.floats(-10, 10), st.sampled_from("abc")), max_size=20))
def test_advantages_of_a_group_sum_to_zero(rollouts: list[tuple[float, str]]) -> None:
    rewards, groups = [r for r, _ in rollouts], [g for _, g in rollouts]
    found = grpo(rewards, groups)
    for group in set(groups):
        assert sum(found[i] for i, g in enumerate(groups) if g == group) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 3.142857),
        ("token-sum", 44.0),
        ("seq-mean-token-sum", 8.8),
        ("seq-mean-token-sum-norm", 2.2),
        ("seq-mean-token-mean", 3.366666),
    ],
)
def test_aggregation_equals_verl_with_one_row_per_rollout(mode: str, expected: float) -> None:
    mask = MASK.numpy()
    weights = token_weights(mask.sum(1).tolist(), mode, scale_factor=4.0)
    assert (weights[:, None] * TOKEN_LOSSES * mask).sum() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_without_trained_tokens_weighs_nothing(mode: str) -> None:
    with_empty = token_weights([3, 0, 2], mode, scale_factor=4.0)
    assert with_empty[1] == 0
    assert with_empty[[0, 2]] == pytest.approx(token_weights([3, 2], mode, scale_factor=4.0))


def test_unknown_modes_are_named() -> None:
    with pytest.raises(ValueError, match="'mean' is unknown; there are token-mean"):
        token_weights([1], "mean")
