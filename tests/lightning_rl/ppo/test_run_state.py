"""What a checkpoint has of a policy beside its weights, and what of it a run that goes on takes."""

import pytest

from lightning_rl.ppo.run_state import PolicyState
from lightning_rl.rl.kl import AdaptiveKL, FixedKL


def adaptive(value: float) -> AdaptiveKL:
    return AdaptiveKL(value, target=0.1, horizon=1000)


@pytest.mark.parametrize(
    ("before", "now", "after"),
    [
        (None, FixedKL(0.05), 0.05),
        (None, adaptive(0.05), 0.05),
        (FixedKL(0.05), FixedKL(0.2), 0.2),
        (FixedKL(0.05), adaptive(0.2), 0.2),
        (adaptive(0.05), FixedKL(0.2), 0.2),
        (adaptive(0.05), adaptive(0.2), 0.05),
        (adaptive(0.05), None, 0.0),
    ],
)
def test_an_adapted_coefficient_goes_on_and_a_fixed_one_is_that_of_now(
    before: FixedKL | AdaptiveKL | None, now: FixedKL | AdaptiveKL | None, after: float
) -> None:
    state = PolicyState(now, "policy")
    state.load_state_dict(PolicyState(before, "policy").state_dict())
    assert state.kl_coef == after
