"""Losses, their gradients, their aggregation, divergences: ours and verl's on random batches."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lightning_rl.rl.correction import importance_weights, weight_bounds
from lightning_rl.rl.kl import KINDS, AdaptiveKL, kl_penalty
from lightning_rl.rl.losses import LossInputs, LossOptions, entropy, loss_named, value_loss
from tests.oracle.batches import AGGREGATIONS, SEEDS, Batch, batch, tensor

core: Any = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)

pytestmark = pytest.mark.oracle

OPTIONS = LossOptions(
    clip_ratio_high=0.28, clip_cov_ratio=1.0, clip_cov_lb=-0.5, kl_cov_ratio=0.3, dro_beta=0.1, rollout_is="token"
)
# As verl has them. Of clip_cov all candidates are taken, since verl draws them from the global generator.
ANY_AGGREGATION = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "gpg", "clip_cov", "kl_cov", "dro", "cispo")
# verl aggregates these by rows, whatever the mode, and geo_mean with one advantage per row.
BY_ROWS = ("sapo", "geo_mean")


def config(correction: dict[str, Any] | None = None) -> Any:
    """verl's, with the options above."""
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    names = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
    policy_loss = PolicyLossConfig(
        **{name: getattr(OPTIONS, name) for name in names}, **({"rollout_correction": correction} if correction else {})
    )
    made = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=policy_loss,
        **{
            name: getattr(OPTIONS, name)
            for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
        },
    )
    made.global_batch_info.clear()
    return made


def ours(
    given: Batch, name: str, mode: str, weights: Tensor | float = 1.0, options: LossOptions | None = None
) -> tuple[Tensor, Tensor]:
    """Loss, and its gradient at the trained tokens."""
    options = options or OPTIONS
    new = tensor(given.new[given.which], grad=True)
    tokens = LossInputs(
        new, tensor(given.old[given.which]), tensor(given.advantages[given.which]), torch.from_numpy(given.rollout)
    )
    loss = loss_named(name)
    if loss.prepare is not None:
        with torch.no_grad():
            tokens = tokens._replace(constants=loss.prepare(tokens, options, torch.Generator().manual_seed(0)))
    total = (given.weights(mode) * weights * loss.token_loss(tokens, options).loss).sum()
    [gradient] = torch.autograd.grad(total, new, allow_unused=True)
    return total.detach(), torch.zeros_like(new) if gradient is None else gradient


def verls(
    given: Batch, name: str, mode: str, weights: Tensor | None = None, **correction: Any
) -> tuple[Tensor, Tensor]:
    new = tensor(given.new, grad=True)
    total, _ = core.get_policy_loss_fn(name)(
        tensor(given.old),
        new,
        tensor(given.advantages),
        tensor(given.mask),
        loss_agg_mode=mode,
        config=config(correction),
        rollout_is_weights=weights,
    )
    [gradient] = torch.autograd.grad(total, new)
    return total.detach(), gradient[given.which]


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-6, abs=1e-6)
    assert found[1].tolist() == pytest.approx(expected[1].tolist(), rel=1e-6, abs=1e-6)


def tied(given: Batch) -> bool:
    """Whether there is a choice between equals for kl_cov: ours takes all of them, verl any."""
    advantages, log_probs = given.advantages[given.which], given.new[given.which]
    covariances = np.sort((advantages - advantages.mean()) * (log_probs - log_probs.mean()))[::-1]
    taken = max(1, int(len(covariances) * OPTIONS.kl_cov_ratio))
    return bool(covariances[taken - 1] - covariances[taken] < 1e-3)


def alike(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Whether log probabilities of a token are so near that ours take their difference for rounding; verl does not."""
    return bool((np.abs(one - other) < 2e-4).any())


@pytest.mark.parametrize("name", ANY_AGGREGATION)
@given(SEEDS, AGGREGATIONS)
def test_policy_losses(name: str, seed: int, mode: str) -> None:
    random = batch(seed)
    assume(name != "kl_cov" or not (tied(random) or alike(random.new, random.old)))
    assert_same(ours(random, name, mode), verls(random, name, mode))


@pytest.mark.parametrize("name", BY_ROWS)
@given(SEEDS)
def test_policy_losses_that_verl_aggregates_by_rows(name: str, seed: int) -> None:
    random = batch(seed, one_advantage=name == "geo_mean")
    assert_same(ours(random, name, "seq-mean-token-mean"), verls(random, name, "seq-mean-token-mean"))


@given(SEEDS, AGGREGATIONS)
def test_a_policy_loss_with_importance_weights(seed: int, mode: str) -> None:
    random = batch(seed)
    weights = np.random.default_rng(seed).uniform(0, 2, size=random.mask.shape)
    found = ours(random, "vanilla", mode, tensor(weights[random.which]))
    assert_same(found, verls(random, "vanilla", mode, tensor(weights)))


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@given(SEEDS, AGGREGATIONS)
def test_the_losses_of_bypass_mode(loss_type: str, seed: int, mode: str) -> None:
    random = batch(seed)
    expected = verls(random, "bypass_mode", mode, loss_type=loss_type, rollout_is="token", rollout_is_threshold=2.0)
    assert_same(ours(random, loss_type, mode), expected)


@given(SEEDS, st.sampled_from(["0.5_2.0", 1.5]))
def test_reinforce_has_the_weights_of_the_policy_as_it_is_now(seed: int, threshold: Any) -> None:
    """By hand: sg(w) of the current ratio, bounded as in IcePop or truncated."""
    random = batch(seed)
    log_ratio = (random.new - random.old)[random.which]
    weights, _ = importance_weights(log_ratio, random.rollout, level="sequence", bounds=weight_bounds(threshold))
    assume(weights.any())  # where all are 0 verl divides by zero
    expected = verls(
        random,
        "bypass_mode",
        "token-mean",
        loss_type="reinforce",
        rollout_is="sequence",
        rollout_is_threshold=threshold,
    )
    assert_same(ours(random, "gpg", "token-mean", tensor(weights)), expected)


@given(SEEDS, st.sampled_from(["token", "sequence"]))
def test_reinforce_has_weights_of_mean_one(seed: int, level: str) -> None:
    random = batch(seed)
    keys: dict[str, Any] = {"rollout_is": level, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True}
    expected = verls(random, "bypass_mode", "token-mean", loss_type="reinforce", **keys)
    assert_same(ours(random, "reinforce", "token-mean", options=LossOptions(**keys)), expected)


@given(SEEDS, AGGREGATIONS)
def test_aggregation(seed: int, mode: str) -> None:
    random = batch(seed)
    expected = core.agg_loss(tensor(random.values), tensor(random.mask), mode)
    found = (random.weights(mode) * tensor(random.values[random.which])).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)


@given(SEEDS, AGGREGATIONS, st.sampled_from([0.1, 0.5, 2.0]))
def test_value_loss(seed: int, mode: str, clip: float) -> None:
    random = batch(seed)
    at, returns = random.which, random.values + random.advantages
    values, theirs = tensor((random.values + random.new)[at], grad=True), tensor(random.values + random.new, grad=True)
    found = value_loss(values, tensor(random.values[at]), tensor(returns[at]), clip=clip)
    total = (random.weights(mode) * found.loss).sum()
    expected, clipped = core.compute_value_loss(
        theirs, tensor(returns), tensor(random.values), tensor(random.mask), clip, mode
    )
    [own], [other] = torch.autograd.grad(total, values), torch.autograd.grad(expected, theirs)
    assert_same((total.detach(), own), (expected.detach(), other[at]))
    assert found.clipped.double().mean().item() == pytest.approx(clipped.item(), abs=1e-6)


@given(SEEDS, st.sampled_from([*KINDS, *(f"{kind}+" for kind in KINDS)]))
def test_divergences(seed: int, kind: str) -> None:
    random = batch(seed)
    assume(kind != "abs" or not alike(random.new, random.reference))
    own, theirs = (tensor(random.new, grad=True) for _ in range(2))
    found = kl_penalty(own, tensor(random.reference), kind)
    expected = core.kl_penalty(theirs, tensor(random.reference), kind)
    gradients = torch.autograd.grad(found.sum(), own)[0], torch.autograd.grad(expected.sum(), theirs)[0]
    assert found.flatten().tolist() == pytest.approx(expected.flatten().tolist(), rel=1e-6, abs=1e-6)
    assert gradients[0].flatten().tolist() == pytest.approx(gradients[1].flatten().tolist(), rel=1e-6, abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 10_000)), max_size=10), st.floats(0.1, 10))
def test_the_adaptive_coefficient(steps: list[tuple[float, int]], target: float) -> None:
    """Up to as many rollouts as the horizon: beyond it ours does not jump."""
    found, expected = AdaptiveKL(0.2, target, 10_000), core.AdaptiveKLController(0.2, target, 10_000)
    for kl, rollouts in steps:
        found.update(kl, rollouts)
        expected.update(kl, rollouts)
        assert found.value == pytest.approx(expected.value, rel=1e-9)


@given(SEEDS, AGGREGATIONS)
def test_entropy(seed: int, mode: str) -> None:
    random = batch(seed)
    logits = np.random.default_rng(seed).normal(size=(*random.mask.shape, 5)) * 3
    expected = core.compute_entropy_loss(tensor(logits), tensor(random.mask), mode)
    found = (random.weights(mode) * entropy(tensor(logits[random.which]))).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
