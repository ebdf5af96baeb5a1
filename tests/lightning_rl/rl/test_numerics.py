"""Advantages, losses and weights against verl 0.9.1's numbers on one small batch, and against their own formulas."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.rl.advantages import grpo
from lightning_rl.rl.aggregation import MODES, token_weights
from lightning_rl.rl.losses import entropy, ppo_clip

MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
OLD = torch.tensor(
    [[0.5, 0.4, 0.3, 0.6], [0.9, 0.2, 0.5, 0.5], [0.3, 0.5, 0.8, 0.5], [0.25, 0.5, 0.75, 0.9], [0.6, 0.7, 0.5, 0.5]]
).log()
NEW = torch.tensor(
    [[0.6, 0.35, 0.3, 0.95], [0.5, 0.4, 0.5, 0.5], [0.9, 0.5, 0.6, 0.5], [0.25, 0.1, 0.75, 0.3], [0.7, 0.7, 0.5, 0.5]]
).log()
ADVANTAGES = torch.tensor(
    [[1, 1, 0, 1], [-1, -1, -1, 0], [0.5, 0, 0.5, 0], [-2, -2, -2, -2], [1, 1, 0, 0]], dtype=torch.float32
)
LOSSES = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3], [1, 1, 1, 1], [2, 2, 9, 9]], dtype=float)
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


def test_ppo_clip_equals_verl() -> None:
    new = NEW[MASK].clone().requires_grad_()
    policy = ppo_clip(new, OLD[MASK], ADVANTAGES[MASK], clip_low=0.2, clip_high=0.28, clip_c=3.0)
    loss = policy.loss.mean()
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(0.318810, abs=1e-6)
    assert policy.clipped.float().mean().item() == pytest.approx(0.357143, abs=1e-6)
    gradient = torch.zeros(5, 4).masked_scatter(MASK, new.grad if new.grad is not None else new)
    assert gradient[0].tolist() == pytest.approx([-0.085714, -0.0625, 0, 0], abs=1e-6)
    assert gradient[3].tolist() == pytest.approx([0.142857, 0, 0.142857, 0], abs=1e-6)


def test_dual_clip_equals_verl() -> None:
    old, new = torch.tensor([0.1, 0.1, 0.5]).log(), torch.tensor([0.5, 0.5, 0.1]).log().requires_grad_()
    policy = ppo_clip(new, old, torch.tensor([-1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.28, clip_c=3.0)
    policy.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert policy.loss.sum().item() == pytest.approx(2.52, abs=1e-5)
    assert new.grad is not None
    assert new.grad.tolist() == [0, 0, 0]
    assert policy.clipped_lower.tolist() == [True, False, False]


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
    assert (weights[:, None] * LOSSES * mask).sum() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_without_trained_tokens_weighs_nothing(mode: str) -> None:
    with_empty = token_weights([3, 0, 2], mode, scale_factor=4.0)
    assert with_empty[1] == 0
    assert with_empty[[0, 2]] == pytest.approx(token_weights([3, 2], mode, scale_factor=4.0))


def test_entropy_of_a_uniform_distribution() -> None:
    assert entropy(torch.zeros(2, 8)).tolist() == pytest.approx([np.log(8)] * 2)


def test_unknown_modes_are_named() -> None:
    with pytest.raises(ValueError, match="'mean' is unknown; there are token-mean"):
        token_weights([1], "mean")
