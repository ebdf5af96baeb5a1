"""KL estimators against verl's numbers and against the divergence itself; controllers step by step."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl.rl.kl import KINDS, AdaptiveKL, FixedKL, check_kind, kl_penalty, reward_penalty
from tests.lightning_rl.rl.golden import MASK, NEW, OLD

SAME = [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0.182322, -0.133531, 0, 0.459532]),
        ("abs", [0.182322, 0.133531, 0, 0.459532]),
        ("k2", [0.016621, 0.008915, 0, 0.105585]),
        ("k3", [0.015655, 0.009326, 0, 0.091111]),
    ],
)
def test_it_equals_verl(kind: str, expected: list[float]) -> None:
    assert (kl_penalty(NEW[0], OLD[0], kind) * MASK[0]).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("short", "long"), SAME)
def test_two_names_are_one_kind(short: str, long: str) -> None:
    for plus in ("", "+"):
        assert torch.equal(kl_penalty(NEW, OLD, short + plus), kl_penalty(NEW, OLD, long + plus))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: str) -> None:
    new = NEW[0].clone().requires_grad_()
    penalty = kl_penalty(new, OLD[0], f"{kind}+")
    torch.testing.assert_close(penalty, kl_penalty(NEW[0], OLD[0], kind), rtol=0, atol=1e-7)
    [found] = torch.autograd.grad(penalty.sum(), new)
    torch.testing.assert_close(found, NEW[0] - OLD[0])


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_the_gradient_is_that_of_the_value(kind: str) -> None:
    new, old = NEW[MASK].double().requires_grad_(), OLD[MASK].double() + 0.01  # no d = 0, the kink of abs
    assert torch.autograd.gradcheck(lambda at: kl_penalty(at, old, kind), new)


def test_the_gradient_of_a_distance_does_not_follow_the_sign_of_rounding() -> None:
    """Two passes over the same tokens differ by rounding, so in the first mini-batch that would be all there is."""
    new = torch.tensor([-1.0 + 3e-7, -1.0 - 3e-7, -0.9, -1.1], requires_grad=True)
    penalty = kl_penalty(new, torch.full((4,), -1.0), "abs")
    torch.testing.assert_close(penalty, torch.tensor([3e-7, 3e-7, 0.1, 0.1]), rtol=0, atol=1e-6)
    [slopes] = torch.autograd.grad(penalty.sum(), new)
    assert slopes[:2].abs().max() < 0.01
    assert slopes[2:].tolist() == [1.0, -1.0]
    far = torch.tensor([math.inf, -math.inf], requires_grad=True)
    assert kl_penalty(far, torch.zeros(2), "abs").tolist() == [math.inf, math.inf]


def test_k3_loses_its_gradient_far_out_and_its_plus_does_not() -> None:
    """As in verl: the value is clamped to 10, so what is 13 times less likely than it was is not pulled back."""
    new, old = torch.tensor([-4.0], requires_grad=True), torch.tensor([-1.0])
    for kind, slope in (("k3", 0.0), ("k3+", -3.0)):
        penalty = kl_penalty(new, old, kind)
        assert penalty.item() == 10.0
        assert torch.autograd.grad(penalty.sum(), new)[0].item() == pytest.approx(slope)


@given(st.sampled_from([kind + plus for kind in KINDS for plus in ("", "+")]), st.floats(-1e4, 0), st.floats(-1e4, 0))
def test_extremes_stay_finite(kind: str, new: float, old: float) -> None:
    at = torch.tensor([new], requires_grad=True)
    penalty = kl_penalty(at, torch.tensor([old]), kind)
    penalty.sum().backward()  # type: ignore[no-untyped-call]
    assert penalty.isfinite().all()
    assert at.grad is not None
    assert at.grad.isfinite().all()


def divergence(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (new.exp() * (new - old)).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_estimates_of_the_whole_divergence(kind: str) -> None:
    logits = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    new, old = logits.log_softmax(-1)
    expected = divergence(new, old)
    assert (new.exp() * kl_penalty(new, old, kind)).sum().item() == pytest.approx(expected.item(), abs=1e-12)


def test_the_gradient_of_a_plus_is_that_of_the_whole_divergence() -> None:
    own, other = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own.requires_grad_()
    [expected] = torch.autograd.grad(divergence(own.log_softmax(-1), other.log_softmax(-1)), own)
    new = own.log_softmax(-1)
    estimate = (new.detach().exp() * kl_penalty(new, other.log_softmax(-1), "k3+")).sum()
    torch.testing.assert_close(torch.autograd.grad(estimate, own)[0], expected)


@pytest.mark.parametrize(
    ("kind", "message"), [("full", "needs the logits of both models"), ("k4", "'k4' is unknown; there are k1, kl, abs")]
)
def test_what_it_cannot_estimate_is_named(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kl_penalty(NEW, OLD, kind)


def test_a_kind_can_be_asked_after_before_there_are_tokens() -> None:
    assert [check_kind(kind) for kind in ("kl", "mse+", "low_var_kl", "abs+")] == ["k1", "k2", "k3", "abs"]
    with pytest.raises(ValueError, match="'kl3' is unknown"):
        check_kind("kl3")


@pytest.mark.parametrize("kind", KINDS)
def test_what_rewards_are_lowered_by_is_the_same_penalty(kind: str) -> None:
    found = reward_penalty(NEW[0].numpy(), OLD[0].numpy(), kind)
    assert found == pytest.approx(kl_penalty(NEW[0], OLD[0], kind).numpy(), abs=1e-6)
    assert found.dtype == np.float64


def test_the_adaptive_controller_equals_verl() -> None:
    controller = AdaptiveKL(0.2, target=6.0, horizon=10_000)
    controller.update(12.0, 256)
    assert controller.value == pytest.approx(0.201024, abs=1e-9)
    controller.update(1.0, 256)
    assert controller.value == pytest.approx(0.199994757, abs=1e-9)


def test_the_adaptive_controller_never_turns_negative() -> None:
    """In verl six times `horizon` rollouts in one step do: penalty becomes reward."""
    controller = AdaptiveKL(0.2, target=6.0, horizon=100)
    controller.update(0.0, 600)
    assert controller.value == pytest.approx(0.16)


def test_the_controllers_refuse_what_is_no_number_and_stay_fixed() -> None:
    for kl in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"the divergence of the step is {kl}"):
            AdaptiveKL(0.2, target=6.0, horizon=100).update(kl, 1)
    fixed = FixedKL(0.2)
    fixed.update(100.0, 1)
    assert fixed.value == 0.2
