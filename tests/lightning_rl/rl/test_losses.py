"""Every loss: verl's numbers, the gradient of its own formula, and where it is right and verl is not."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rl.rl.losses import (
    LOSSES,
    Loss,
    LossInputs,
    LossOptions,
    PolicyLoss,
    clip_cov,
    entropy,
    loss_named,
    value_loss,
)
from tests.lightning_rl.rl.golden import ADVANTAGES, MASK, NEW, OPTIONS, golden_tokens, weights_of
from tests.random_examples import examples


def computed(name: str, tokens: LossInputs, options: LossOptions = OPTIONS, seed: int = 0) -> PolicyLoss:
    """The token losses, with what the loss wants to know of the whole mini-batch."""
    loss = loss_named(name)
    if loss.prepare is not None:
        detached = tokens._replace(log_probs=tokens.log_probs.detach())
        tokens = tokens._replace(constants=loss.prepare(detached, options, torch.Generator().manual_seed(seed)))
    return loss.token_loss(tokens, options)


def gradient(loss: Tensor, tokens: LossInputs) -> Tensor:
    [found] = torch.autograd.grad(loss.sum(), tokens.log_probs)
    return found


# verl's numbers


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        ("vanilla", "token-mean", 0.318810),
        ("dppo_tv", "token-mean", -0.241267),
        ("dppo_kl", "token-mean", -0.241267),
        ("gspo", "token-mean", 0.179504),
        ("gspo", "seq-mean-token-mean", -0.053804),
        ("sapo", "seq-mean-token-mean", -0.087916),
        ("gpg", "token-mean", -0.716448),
        ("kl_cov", "token-mean", 0.077369),
        ("geo_mean", "seq-mean-token-mean", 0.058861),
        ("dro", "token-mean", -0.694309),
        ("cispo", "token-mean", -0.624083),
        ("cispo", "seq-mean-token-mean", -0.398352),
        ("ppo_clip", "token-mean", 0.318810),
        ("reinforce", "token-mean", -0.716448),
    ],
)
def test_it_equals_verl(name: str, mode: str, expected: float) -> None:
    tokens = golden_tokens()
    loss = (weights_of(tokens.sequence, mode) * computed(name, tokens).loss).sum()
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_every_loss_of_verl_is_there() -> None:
    verl = {"vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo"}
    assert verl | {"reinforce", "ppo_clip"} == LOSSES.keys()


def test_the_gradient_of_vanilla_equals_verl() -> None:
    tokens = golden_tokens()
    policy = computed("vanilla", tokens)
    found = torch.zeros(5, 4).masked_scatter(MASK, gradient(policy.loss / 14, tokens))
    assert policy.clipped.float().mean().item() == pytest.approx(0.357143, abs=1e-6)
    assert found[0].tolist() == pytest.approx([-0.085714, -0.0625, 0, 0], abs=1e-6)
    assert found[3].tolist() == pytest.approx([0.142857, 0, 0.142857, 0], abs=1e-6)


def test_the_gradient_of_gspo_equals_verl() -> None:
    tokens = golden_tokens()
    found = gradient(computed("gspo", tokens).loss / 14, tokens)
    assert found[:3].tolist() == pytest.approx([-0.084617] * 3, abs=1e-6)


def test_dual_clip_equals_verl() -> None:
    old, new = torch.tensor([0.1, 0.1, 0.5]).log(), torch.tensor([0.5, 0.5, 0.1]).log().requires_grad_()
    tokens = LossInputs(new, old, torch.tensor([-1.0, 1.0, -1.0]), torch.zeros(3, dtype=torch.int64))
    policy = computed("vanilla", tokens)
    assert policy.loss.sum().item() == pytest.approx(2.52, abs=1e-5)
    assert gradient(policy.loss, tokens).tolist() == [0, 0, 0]
    assert policy.clipped_lower.tolist() == [True, False, False]


def test_the_value_loss_equals_verl() -> None:
    values = torch.tensor([0.1, 0.2, 0.5])
    found = value_loss(values + 0.8, values, values + 0.3, clip=0.5)
    assert found.loss.mean().item() == pytest.approx(0.125, abs=1e-6)
    assert not found.clipped.any()


def test_values_that_moved_too_far_lose_their_gradient_where_that_is_the_worse() -> None:
    values = torch.tensor([2.0, 2.0], requires_grad=True)
    found = value_loss(values, torch.zeros(2), torch.tensor([5.0, -5.0]), clip=0.5)
    found.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert found.clipped.tolist() == [True, False]
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 7.0]


# Gradients: each loss against its formula, by finite differences in float64

DIRECT = ["vanilla", "sapo", "gpg", "dro", "ppo_clip", "clip_cov", "kl_cov"]
WITH_CONSTANTS = OPTIONS.__class__(
    clip_ratio_high=0.28, dro_beta=0.1, kl_cov_ratio=0.3, clip_cov_ratio=0.3, clip_cov_lb=-9, rollout_is="sequence"
)


def random_tokens(seed: int, spread: float = 0.4) -> LossInputs:
    """Twelve tokens of four rollouts in mixed order, one advantage per rollout, in float64."""
    made = torch.Generator().manual_seed(seed)
    sequence = torch.randint(0, 4, (12,), generator=made)
    old = -0.05 - torch.rand(12, generator=made, dtype=torch.float64)
    new = (old + spread * torch.randn(12, generator=made, dtype=torch.float64)).clamp(max=-0.01)
    advantages = torch.randn(4, generator=made, dtype=torch.float64)[sequence]
    return LossInputs(new.requires_grad_(), old, advantages, sequence)


def numerical(objective: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """The gradient of a number by central differences."""
    moves = step * torch.eye(len(at), dtype=at.dtype)
    return torch.stack([(objective(at + move) - objective(at - move)) / (2 * step) for move in moves]).detach()


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_is_that_of_the_value(name: str, seed: int) -> None:
    tokens = random_tokens(seed)
    loss = LOSSES[name]
    if loss.prepare is not None:
        constants = loss.prepare(tokens, WITH_CONSTANTS, torch.Generator().manual_seed(seed))
        tokens = tokens._replace(constants=constants.detach())
    found = gradient(loss.token_loss(tokens, WITH_CONSTANTS).loss, tokens)
    expected = numerical(
        lambda at: loss.token_loss(tokens._replace(log_probs=at), WITH_CONSTANTS).loss.sum(), tokens.log_probs.detach()
    )
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


def per_rollout(name: str, log_probs: Tensor, tokens: LossInputs, weights: Tensor) -> Tensor:
    """The papers' losses of whole rollouts: GSPO's equations and GMPO's, a rollout at a time."""
    total = torch.zeros((), dtype=torch.float64)
    low, high = WITH_CONSTANTS.clip_ratio_low, WITH_CONSTANTS.clip_ratio_high
    for rollout in tokens.sequence.unique():  # type: ignore[no-untyped-call]
        own = tokens.sequence == rollout
        log_ratio, advantage = (log_probs - tokens.old_log_probs)[own], tokens.advantages[own][0]
        if name == "gspo":
            ratio = log_ratio.mean().exp()
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
        else:
            ratios, limits = log_ratio.exp(), log_ratio.clamp(-low, high).exp()
            chosen = torch.minimum(ratios, limits) if advantage > 0 else torch.maximum(ratios, limits)
            loss = -advantage * chosen.prod() ** (1 / len(chosen))
        total = total + weights[own].sum() * loss
    return total


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("seed", range(5))
def test_value_and_gradient_are_those_of_whole_rollouts(name: str, mode: str, seed: int) -> None:
    tokens = random_tokens(seed)
    weights = weights_of(tokens.sequence, mode)
    loss = weights * computed(name, tokens, WITH_CONSTANTS).loss
    assert loss.sum().item() == pytest.approx(per_rollout(name, tokens.log_probs, tokens, weights).item(), abs=1e-12)
    expected = numerical(lambda at: per_rollout(name, at, tokens, weights), tokens.log_probs.detach())
    torch.testing.assert_close(gradient(loss, tokens), expected, atol=1e-7, rtol=1e-6)


def coefficient(name: str, tokens: LossInputs) -> Tensor:
    """What -A log_prob is multiplied with, by the papers' formulas, of each token on its own."""
    found = []
    for new, old, advantage, rollout in zip(
        tokens.log_probs.tolist(),
        tokens.old_log_probs.tolist(),
        tokens.advantages.tolist(),
        tokens.sequence,
        strict=True,
    ):
        p, q, ratio = math.exp(new), math.exp(old), math.exp(new - old)
        limit = 0.28 if advantage > 0 else 0.2
        away = (p - q) * (1 if advantage > 0 else -1)
        binary_kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        own = tokens.sequence == rollout
        product = (tokens.log_probs - tokens.old_log_probs)[own].sum().exp().item()
        found.append(
            {
                "dppo_tv": min(ratio, 3.0) * (away <= limit),
                "dppo_kl": min(ratio, 3.0) * (away <= 0 or binary_kl <= limit),
                "cispo": min(max(ratio, 0.8), 1.28),
                "reinforce": min(product, 2.0),
            }[name]
        )
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "cispo", "reinforce"])
@pytest.mark.parametrize("seed", range(5))
def test_a_weighted_policy_gradient_has_the_weight_of_its_paper(name: str, seed: int) -> None:
    tokens = random_tokens(seed, spread=0.9)
    found = gradient(computed(name, tokens, WITH_CONSTANTS).loss, tokens)
    torch.testing.assert_close(found, -tokens.advantages * coefficient(name, tokens))


# Where verl is not right


def test_gmpo_follows_the_aggregation_mode_and_counts_no_empty_rollout() -> None:
    """verl takes the mean over rows whatever the mode is, and fully masked rows too."""
    tokens = golden_tokens()
    loss = computed("geo_mean", tokens).loss
    of_verl = 0.058861  # for any mode
    assert (weights_of(tokens.sequence, "token-mean") * loss).sum().item() != pytest.approx(of_verl, abs=1e-2)
    with_empty = weights_of(tokens.sequence * 2, "seq-mean-token-mean")  # rollouts 1, 3, 5... have no tokens
    assert (with_empty * loss).sum().item() == pytest.approx(of_verl, abs=1e-6)


def test_gmpo_keeps_the_credit_of_single_calls() -> None:
    """verl takes a row's mean advantage: two calls with opposite credit teach nothing."""
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    new = torch.full((4,), -1.0, requires_grad=True)
    tokens = LossInputs(new, torch.full((4,), -1.0), advantages, torch.zeros(4, dtype=torch.int64))
    assert gradient(computed("geo_mean", tokens).loss, tokens).tolist() == (-advantages).tolist()


@pytest.mark.parametrize("name", ["gspo", "sapo"])
def test_gspo_and_sapo_follow_the_aggregation_mode(name: str) -> None:
    """verl's main branch forces seq-mean-token-mean on gspo, 0.9.1 and main on sapo."""
    tokens = golden_tokens()
    loss = computed(name, tokens).loss
    by_mode = [
        (weights_of(tokens.sequence, mode) * loss).sum().item() for mode in ("token-mean", "seq-mean-token-mean")
    ]
    assert by_mode[0] != pytest.approx(by_mode[1], abs=1e-2)


def test_a_ratio_far_out_is_clamped_in_every_loss_that_has_one() -> None:
    """verl's clip_cov and kl_cov exponentiate without a bound: infinite from a difference of 89 nats on."""
    for name in LOSSES:
        tokens = LossInputs(
            torch.tensor([-0.1, -0.2, -200.0], requires_grad=True), torch.tensor([-150.0, -0.2, -0.1]),
            torch.tensor([-1.0, 1.0, 2.0]), torch.tensor([0, 1, 1]),
        )  # fmt: skip
        loss = computed(name, tokens).loss
        assert torch.isfinite(loss).all(), name
        assert torch.isfinite(gradient(loss, tokens)).all(), name


def test_clip_cov_draws_from_the_generator_alone() -> None:
    """verl draws from torch's global state: another number drawn anywhere makes another run."""
    options = LossOptions(clip_cov_ratio=0.3, clip_cov_lb=-9.0)
    tokens = random_tokens(0, spread=0.05)
    before = torch.get_rng_state()
    drawn = [computed("clip_cov", tokens, options, seed).clipped.tolist() for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1] != drawn[2]
    assert sum(drawn[0]) == 3


def test_clip_cov_drops_only_tokens_within_the_bounds_that_the_clip_leaves_alone() -> None:
    options = LossOptions(clip_ratio_high=0.28, clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=0.8)
    tokens = golden_tokens()
    advantages, new = ADVANTAGES[MASK], NEW[MASK]
    covariance = (advantages - advantages.mean()) * (new - new.mean())
    expected = (covariance > 0.1) & (covariance < 0.8) & ~computed("vanilla", tokens, options).clipped
    assert expected.any()
    policy = computed("clip_cov", tokens, options)
    assert policy.clipped.tolist() == expected.tolist()
    assert (policy.loss[expected] == 0).all()


def test_kl_cov_changes_the_chosen_tokens_alone() -> None:
    """verl writes into the loss without the penalty, under another name."""
    tokens = golden_tokens()
    policy = computed("kl_cov", tokens)
    ratio = (tokens.log_probs - tokens.old_log_probs).exp()
    penalty = 0.1 * (tokens.log_probs - tokens.old_log_probs).abs()
    assert int(policy.clipped.sum()) == 2  # int(0.2 x 14)
    expected = -tokens.advantages * ratio + torch.where(policy.clipped, penalty, 0.0)
    torch.testing.assert_close(policy.loss, expected)


def test_kl_cov_does_not_choose_among_equals() -> None:
    """verl takes one of them: rounding and the order of rows decide what is learned."""
    tokens = LossInputs(
        torch.tensor([-0.1] * 6 + [-3.0, -3.000001, -2.999999, -3.0], requires_grad=True), torch.full((10,), -0.5),
        torch.tensor([2.0] * 6 + [1.0] * 4), torch.arange(10),
    )  # fmt: skip
    chosen = computed("kl_cov", tokens, LossOptions(kl_cov_ratio=0.1)).clipped
    assert chosen.tolist() == [False] * 6 + [True] * 4


# All of them

ALL = LossOptions(dro_beta=0.1, clip_cov_ratio=0.3, clip_cov_lb=-9, kl_cov_ratio=0.3, rollout_is="token")


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_make_no_loss(name: str) -> None:
    none = torch.zeros(0, requires_grad=True)
    tokens = LossInputs(none, torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    policy = computed(name, tokens, ALL)
    assert [len(part) for part in policy] == [0, 0, 0]
    assert gradient(policy.loss, tokens).tolist() == []


@settings(max_examples=examples(100), deadline=None)
@given(
    st.sampled_from(list(LOSSES)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(st.tuples(st.floats(-1e4, 0), st.floats(-1e4, 0), st.floats(-1e3, 1e3), st.integers(0, 2)), min_size=1),
)
def test_extremes_stay_finite(name: str, dtype: torch.dtype, drawn: list[tuple[float, float, float, int]]) -> None:
    new, old, advantages = (torch.tensor([row[i] for row in drawn], dtype=dtype) for i in range(3))
    tokens = LossInputs(new.requires_grad_(), old, advantages, torch.tensor([row[3] for row in drawn]))
    loss = computed(name, tokens, ALL).loss
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient(loss, tokens)).all()


@settings(max_examples=examples(50), deadline=None)
@given(st.sampled_from(list(LOSSES)), st.permutations(range(12)), st.integers(0, 99))
def test_a_token_does_not_care_who_it_is_computed_with(name: str, order: list[int], seed: int) -> None:
    """With its constants, in any order and any part."""
    tokens = random_tokens(seed)
    if (prepare := LOSSES[name].prepare) is not None:
        detached = tokens._replace(log_probs=tokens.log_probs.detach())
        tokens = tokens._replace(constants=prepare(detached, ALL, torch.Generator().manual_seed(0)))
    whole = LOSSES[name].token_loss(tokens, ALL).loss
    for part in (order[:5], order[5:]):
        torch.testing.assert_close(LOSSES[name].token_loss(tokens.take(torch.tensor(part)), ALL).loss, whole[part])


def test_one_of_your_own_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def squared(tokens: LossInputs, options: LossOptions) -> PolicyLoss:
        never = torch.zeros_like(tokens.sequence, dtype=torch.bool)
        return PolicyLoss(-tokens.advantages * tokens.log_probs.square(), never, never)

    monkeypatch.setitem(LOSSES, "mine", Loss(squared))
    assert loss_named("mine").token_loss is squared


def test_unknown_losses_are_named() -> None:
    with pytest.raises(ValueError, match="loss_mode 'ppo' is unknown; there are vanilla, dppo_tv"):
        loss_named("ppo")


def test_dro_wants_its_beta() -> None:
    with pytest.raises(ValueError, match=r"needs actor\.policy_loss\.dro_beta above 0; it is None"):
        computed("dro", golden_tokens(), LossOptions())


def test_a_loss_without_its_constants_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set Tokens\.constants"):
        clip_cov(golden_tokens(), OPTIONS)


def test_entropy_of_uniform_and_of_masked_logits() -> None:
    assert entropy(torch.zeros(2, 8)).tolist() == pytest.approx([math.log(8)] * 2)
    assert entropy(torch.tensor([[0.0, 0.0, -math.inf]])).item() == pytest.approx(math.log(2))
