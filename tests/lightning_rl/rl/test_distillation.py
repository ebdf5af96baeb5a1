"""Losses against a teacher: golden numbers, their gradients, the class of all other tokens."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rl.rl.distillation import (
    DistillationOptions,
    Taught,
    check,
    distillation_loss,
    forward_kl,
    jensen_shannon,
    policy_gradient,
    reverse_kl,
)
from lightning_rl.rl.losses import LossInputs
from tests.random_examples import examples

# Three distributions over five tokens; of each, numbers that TRL's and verl's own functions were compared with.
STUDENT = [[1, 0.5, 0, -0.5, -1], [2, 1.5, 0.5, 0, 0.3], [0, 0, 3, -2, 1]]
TEACHER = [[0, 2, 0.5, -1, 0], [1, 0.8, 0.6, 0.4, 0.2], [1.5, -0.5, 2.5, 0, -1]]
SAMPLED = [0, 0, 4]
GOLDEN = {
    "k1": [1.5870077980, 0.4847086394, 1.7087953110],
    "k2": [1.2592968754, 0.1174712326, 1.4599907074],
    "k3": [0.7915445102, 0.1005852522, 0.8898791219],
    "forward_kl_topk": [0.5788968668, 0.0, 0.2942268670],
    "forward_kl_tail": [0.3647788378, 0.1244471139, 0.2542337971],
}
WHOLE: dict[Callable[[Tensor, Tensor], Tensor], list[float]] = {
    forward_kl: [0.4409036373, 0.1334689677, 0.3766329400],
    reverse_kl: [0.5366382386, 0.1209267548, 0.2785284115],
    jensen_shannon: [0.1139956206, 0.0312099269, 0.0722873228],
}


def taught(student: Tensor, teacher: Tensor, sampled: list[int], top: int = 2) -> Taught:
    q, p = student.log_softmax(-1), teacher.log_softmax(-1)
    own, likely = torch.tensor(sampled)[:, None], p.topk(top).indices
    return Taught(q.gather(-1, own)[:, 0], p.gather(-1, own)[:, 0], q.gather(-1, likely), p.gather(-1, likely))


def logits(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("mode", "expected"), GOLDEN.items())
def test_golden_numbers_of_a_loss(mode: str, expected: list[float]) -> None:
    tokens = taught(logits(STUDENT), logits(TEACHER), SAMPLED)
    found = distillation_loss(tokens, DistillationOptions(loss_mode=mode, use_policy_gradient=True))
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


def test_a_gate_weighs_tokens_by_how_much_likelier_the_teacher_finds_them() -> None:
    student = logits(STUDENT)
    tokens = taught(student, logits(TEACHER), SAMPLED)
    found = distillation_loss(tokens, DistillationOptions(loss_mode="k2", gate=5.0))
    weights = torch.tensor([0.0003578499, 0.0813949381, 0.0001946765], dtype=torch.float64)
    plain = distillation_loss(taught(student, logits(TEACHER), SAMPLED), DistillationOptions(loss_mode="k2"))
    torch.testing.assert_close(found, weights * plain, rtol=1e-6, atol=1e-10)
    gated, ungated = (torch.autograd.grad(each.sum(), student, retain_graph=True)[0] for each in (found, plain))
    torch.testing.assert_close(gated, weights[:, None] * ungated, rtol=1e-6, atol=1e-10)  # none flows through the gate


@pytest.mark.parametrize(("divergence", "expected"), WHOLE.items())
def test_golden_numbers_over_the_whole_vocabulary(divergence: Callable[..., Tensor], expected: list[float]) -> None:
    q, p = logits(STUDENT).log_softmax(-1), logits(TEACHER).log_softmax(-1)
    assert divergence(q, p).tolist() == pytest.approx(expected, abs=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 7), st.sampled_from(["forward_kl", "reverse_kl", "jsd"]))
def test_one_class_for_all_other_tokens_is_a_bound_from_below_and_exact_where_it_holds_one(
    seed: int, top: int, name: str
) -> None:
    made = torch.Generator().manual_seed(seed)
    student, teacher = (2 * torch.randn(5, 8, generator=made, dtype=torch.float64) for _ in range(2))
    whole = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jensen_shannon}[name]
    expected = whole(student.log_softmax(-1), teacher.log_softmax(-1))
    found = distillation_loss(
        taught(student, teacher, [0] * 5, top), DistillationOptions(loss_mode=f"{name}_tail", topk=top)
    )
    assert (found >= -1e-12).all()
    assert (found <= expected + 1e-9).all()
    if top == 7:
        torch.testing.assert_close(found, expected)


def test_golden_numbers_of_the_advantage_with_a_control_variate() -> None:
    tokens = taught(logits(STUDENT), logits(TEACHER), SAMPLED, top=4)  # all others are one token: the sum is whole
    options = DistillationOptions(loss_mode="k1", use_policy_gradient=True, control_variate=True)
    inputs = LossInputs(tokens.student, tokens.student.detach(), torch.zeros(3), torch.arange(3))
    found = policy_gradient(tokens, distillation_loss(tokens, options), inputs, options).loss
    assert (-found).tolist() == pytest.approx([-1.0503695594, -0.3637818846, -1.4302668995], abs=1e-9)


def test_the_coefficient_goes_linearly_from_the_first_step_to_the_last() -> None:
    options = DistillationOptions(distillation_loss_coef=0.8, distillation_loss_coef_end=0.2)
    assert [options.coef(progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx([0.8, 0.5, 0.2])
    assert DistillationOptions(distillation_loss_coef=0.8).coef(1.0) == 0.8
    alone = DistillationOptions(distillation_loss_coef_end=0.2, use_task_rewards=False)
    assert alone.coef(1.0) == 1.0


def test_golden_numbers_at_another_temperature() -> None:
    q, p = ((logits(one) / 2).log_softmax(-1) for one in (STUDENT, TEACHER))
    assert forward_kl(q, p).tolist() == pytest.approx([0.1168150970, 0.0346719013, 0.1756859008], abs=1e-9)


@pytest.mark.parametrize("control_variate", [False, True])
def test_the_policy_gradient_is_that_of_the_reverse_divergence(control_variate: bool) -> None:
    student, teacher = logits(STUDENT), logits(TEACHER)
    options = DistillationOptions(loss_mode="k1", use_policy_gradient=True, control_variate=control_variate)
    probs = student.log_softmax(-1).exp().detach()
    loss = torch.zeros((), dtype=torch.float64)
    for token in range(5):  # the expectation over what is sampled
        tokens = taught(student, teacher, [token] * 3, top=4)
        inputs = LossInputs(tokens.student, tokens.student.detach(), torch.zeros(3), torch.arange(3))
        found = policy_gradient(tokens, distillation_loss(tokens, options), inputs, options).loss
        loss = loss + (probs[:, token] * found).sum()
    expected = reverse_kl(student.log_softmax(-1), teacher.log_softmax(-1)).sum()
    torch.testing.assert_close(*(torch.autograd.grad(one, student, retain_graph=True)[0] for one in (loss, expected)))


def test_the_gradient_of_a_divergence_is_its_own() -> None:
    teacher = torch.tensor(TEACHER, dtype=torch.float64)
    for mode in ("forward_kl_tail", "reverse_kl_tail", "jsd_tail"):
        options = DistillationOptions(loss_mode=mode)
        assert torch.autograd.gradcheck(
            lambda at, options=options: distillation_loss(taught(at, teacher, SAMPLED), options), logits(STUDENT)
        )


@pytest.mark.parametrize("mode", ["k3", "forward_kl_tail", "forward_kl_topk"])
def test_a_token_without_a_teacher_has_no_loss_and_no_gradient(mode: str) -> None:
    student = logits(STUDENT)
    tokens = taught(student, logits(TEACHER), SAMPLED)
    nothing = torch.tensor([False, True, False])
    assert tokens.teacher_top is not None
    tokens = tokens._replace(
        teacher=tokens.teacher.masked_fill(nothing, torch.nan),
        teacher_top=tokens.teacher_top.masked_fill(nothing[:, None], torch.nan),
    )
    found = distillation_loss(tokens, DistillationOptions(loss_mode=mode))
    assert found[1] == 0
    [gradient] = torch.autograd.grad(found.sum(), student)
    assert gradient[1].abs().sum() == 0
    assert gradient[0].abs().sum() > 0
    assert gradient.isfinite().all()


def test_a_token_without_a_teacher_has_no_advantage_where_a_control_variate_is_added() -> None:
    student = logits(STUDENT)
    tokens = taught(student, logits(TEACHER), SAMPLED, top=4)
    nothing = torch.tensor([False, True, False])
    assert tokens.teacher_top is not None
    without = tokens._replace(
        teacher=tokens.teacher.masked_fill(nothing, torch.nan),
        teacher_top=tokens.teacher_top.masked_fill(nothing[:, None], torch.nan),
    )
    options = DistillationOptions(loss_mode="k1", use_policy_gradient=True, control_variate=True)
    inputs = LossInputs(tokens.student, tokens.student.detach(), torch.zeros(3), torch.arange(3))
    whole, found = (
        policy_gradient(each, distillation_loss(each, options), inputs, options).loss for each in (tokens, without)
    )
    torch.testing.assert_close(found, torch.where(nothing, 0.0, whole))


def test_the_policy_gradient_is_clipped_by_the_options_own_ratios() -> None:
    ratio = torch.tensor([0.5, 1.5], dtype=torch.float64)
    options = DistillationOptions(loss_mode="k1", use_policy_gradient=True, clip_ratio_low=0.1, clip_ratio_high=0.3)
    inputs = LossInputs(ratio.log(), torch.zeros(2), torch.zeros(2), torch.arange(2))
    advantages = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    found = policy_gradient(Taught(inputs.log_probs, torch.zeros(2)), -advantages, inputs, options)
    assert found.loss.tolist() == pytest.approx([0.9, -1.3])


def test_clamps_bound_a_tokens_loss_and_the_log_probabilities_of_topk() -> None:
    tokens = taught(logits(STUDENT), logits(TEACHER), SAMPLED)
    loss = distillation_loss(tokens, DistillationOptions(loss_mode="k1", use_policy_gradient=True, loss_max_clamp=0.5))
    assert loss.tolist() == pytest.approx([0.5, 0.4847086394, 0.5])
    clamped = DistillationOptions(loss_mode="forward_kl_topk", log_prob_min_clamp=-0.1)
    assert distillation_loss(tokens, clamped).tolist() == [0, 0, 0]  # all log probabilities are -0.1
    top = Taught(*torch.tensor([[-2.0], [-2.0]]), torch.tensor([[-2.0, -9.0]]), torch.tensor([[-1.0, -4.0]]))
    clamped = DistillationOptions(loss_mode="forward_kl_topk", log_prob_min_clamp=-3.0)
    assert distillation_loss(top, clamped).tolist() == pytest.approx([math.exp(-1)])  # of the second both are -3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_mode": "k9"}, "loss_mode=k9 is unknown"),
        ({"loss_mode": "k1"}, "set use_policy_gradient=true, or take k2"),
        ({"loss_mode": "k2", "control_variate": True}, "variance of a policy gradient"),
        ({"loss_mode": "k2", "control_variate": True, "use_policy_gradient": True}, "of loss_mode=k1, not of k2"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(DistillationOptions(**options))  # type: ignore[arg-type]
