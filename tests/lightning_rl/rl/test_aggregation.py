"""The weight of a token by the lengths of the rollouts, also of those that have one token or none."""

import pytest

from lightning_rl.rl.aggregation import token_weights


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token-mean", [0.25, 0.25, 0]),
        ("token-sum", [1, 1, 0]),
        ("seq-mean-token-sum", [0.5, 0.5, 0]),
        ("seq-mean-token-sum-norm", [0.05, 0.05, 0]),
        ("seq-mean-token-mean", [0.5, 1 / 6, 0]),
    ],
)
def test_a_rollout_of_one_token_counts_and_one_of_none_does_not(mode: str, weights: list[float]) -> None:
    assert token_weights([1, 3, 0], mode, scale_factor=10.0).tolist() == pytest.approx(weights)
    assert token_weights([0, 0], mode, scale_factor=10.0).tolist() == [0, 0]


def test_what_a_mode_needs_is_asked_for() -> None:
    for nothing in (None, 0.0):
        with pytest.raises(ValueError, match=r"needs actor\.loss_scale_factor"):
            token_weights([1], "seq-mean-token-sum-norm", scale_factor=nothing)
    with pytest.raises(ValueError, match="'mean' is unknown; there are token-mean, "):
        token_weights([1], "mean")
