"""Advantages: ours and verl's on random batches of one row per rollout.

verl's bare reward for a group of one is our `groups_of_one: raw`.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_rl.rl import baselines, token_advantages
from lightning_rl.rl.baselines import BaselineSettings, OutcomeEstimator, Outcomes
from lightning_rl.rl.token_advantages import TokenEstimator, whitening
from tests.lightning_rl.rl.golden import whiten
from tests.oracle.batches import SEEDS, Batch, batch, tensor

core: Any = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)

pytestmark = pytest.mark.oracle

RAW = BaselineSettings(lone_raw=True)
ALIKE = 0.1  # of a smaller spread what verl adds to its means (1e-8) is more than the sixth decimal


def verls(given: Batch, name: str, **more: Any) -> list[list[float]]:
    arguments = {
        "token_level_rewards": tensor(given.rewards()),
        "response_mask": tensor(given.mask),
        "index": given.groups,
        "config": {"norm_adv_by_std_in_grpo": True},
    }
    advantages, _ = core.get_adv_estimator_fn(name)(**(arguments | more))
    return (advantages * tensor(given.mask)).tolist()  # type: ignore[no-any-return]


def of_scores(
    given: Batch, estimator: OutcomeEstimator, settings: BaselineSettings = RAW, **more: Any
) -> np.ndarray[Any, Any]:
    outcomes = Outcomes.of(given.scores.tolist(), given.groups.tolist(), lengths=given.lengths, **more)
    return estimator(outcomes, settings).advantages(outcomes.scores)


def assert_same(
    given: Batch, found: np.ndarray[Any, Any], expected: list[list[float]], *, within: float = 1e-6
) -> None:
    """`found` [B] of rows, or [B, R]."""
    whole = (found if found.ndim == 2 else found[:, None]) * given.mask
    assert whole.flatten().tolist() == pytest.approx(np.ravel(expected).tolist(), rel=within, abs=within)


@given(SEEDS, st.booleans())
def test_grpo(seed: int, by_std: bool) -> None:
    """To 2e-6, since verl divides the bare reward of a group of one by 1 + 1e-6."""
    random = batch(seed)
    found = of_scores(random, baselines.grpo, BaselineSettings(lone_raw=True, norm_by_std=by_std))
    assert_same(random, found, verls(random, "grpo", norm_adv_by_std_in_grpo=by_std), within=2e-6)


@given(SEEDS, st.booleans())
def test_grpo_vectorized(seed: int, by_std: bool) -> None:
    """verl's is in float32, so for scores that are not close together, and to 1e-5."""
    random = batch(seed)
    random = replace(random, scores=np.round(2 * random.scores) / 2)
    found = of_scores(random, baselines.grpo, BaselineSettings(lone_raw=True, norm_by_std=by_std))
    assert_same(random, found, verls(random, "grpo_vectorized", norm_adv_by_std_in_grpo=by_std), within=1e-5)


@pytest.mark.parametrize("name", ["rloo", "opo", "gpg"])
@given(SEEDS)
def test_outcome_estimators(name: str, seed: int) -> None:
    random = batch(seed)
    assert_same(random, of_scores(random, getattr(baselines, name)), verls(random, name))


@given(SEEDS)
def test_rloo_vectorized_gives_a_group_of_one_nothing(seed: int) -> None:
    random = batch(seed)
    assert_same(random, of_scores(random, baselines.rloo, BaselineSettings()), verls(random, "rloo_vectorized"))


@given(SEEDS, st.booleans())
def test_grpo_passk(seed: int, by_std: bool) -> None:
    random = batch(seed, least=2)  # verl raises for a group of one
    found = of_scores(random, baselines.grpo_passk, BaselineSettings(norm_by_std=by_std))
    assert_same(random, found, verls(random, "grpo_passk", config={"norm_adv_by_std_in_grpo": by_std}))


@pytest.mark.parametrize("name", ["reinforce_plus_plus_baseline", "gdpo"])
@given(SEEDS)
def test_outcome_estimators_that_are_whitened_over_tokens(name: str, seed: int) -> None:
    random = batch(seed, least=2 if name == "gdpo" else 1)  # see test_grpo for groups of one
    found = of_scores(random, getattr(baselines, name))
    centre, divisor = whitening(found, np.asarray(random.lengths, dtype=float))
    assume(divisor > ALIKE)
    assert_same(random, (found - centre) / divisor, verls(random, name))


@given(SEEDS)
def test_remax(seed: int) -> None:
    random = batch(seed)
    greedy = np.random.default_rng(seed).normal(size=len(random.scores))
    found = of_scores(random, baselines.remax, greedy=greedy)
    assert_same(random, found, verls(random, "remax", reward_baselines=tensor(greedy)))


@given(SEEDS, st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.95, 0.0]))
def test_gae(seed: int, gamma: float, lam: float) -> None:
    random = batch(seed)
    found = [
        token_advantages.gae(tree.parents, tree.rewards, tree.values or [], gamma=gamma, lam=lam)
        for tree in random.trees()
    ]
    expected, returns = core.compute_gae_advantage_return(
        tensor(random.rewards()), tensor(random.values), tensor(random.mask), gamma, lam
    )
    assert_same(random, random.whole([r for _, r in found]), (returns * tensor(random.mask)).tolist())
    flat = iter(whiten([of_call for advantages, _ in found for of_call in advantages]))
    whitened = [[next(flat) for _ in advantages] for advantages, _ in found]
    assert_same(random, random.whole(whitened), (expected * tensor(random.mask)).tolist())


@given(SEEDS, st.sampled_from([1.0, 0.5]))
def test_reinforce_plus_plus(seed: int, gamma: float) -> None:
    random = batch(seed)
    settings = BaselineSettings(gamma=gamma)
    found = token_advantages.reinforce_plus_plus(random.trees(), random.groups.tolist(), settings)
    returns = [of_call for estimate in found for of_call in estimate.returns]
    assume(whitening(np.concatenate(returns))[1] > ALIKE)
    flat = iter(whiten(returns))
    whitened = [[next(flat) for _ in estimate.returns] for estimate in found]
    expected = verls(random, "reinforce_plus_plus", config=SimpleNamespace(gamma=gamma))
    assert_same(random, random.whole(whitened), expected)


def token_baseline(given: Batch, estimator: TokenEstimator) -> np.ndarray[Any, Any]:
    found = estimator(given.trees(), given.groups.tolist(), RAW)
    return given.whole([[r - b for r, b in zip(*estimate, strict=True)] for estimate in found])


@given(SEEDS)
def test_optimal_token_baseline(seed: int) -> None:
    """Rows without holes: in a column where only one row is trained verl's baseline is that row's own return, and ours
    is 0; without holes such a column is the tail of the longest row, where verl's is 0 too."""
    random = batch(seed, holes=False)
    pi = np.exp(random.old)
    more = {"old_log_probs": tensor(random.old), "sum_pi_squared": tensor(pi**2 + (1 - pi) ** 2)}
    found = token_baseline(random, token_advantages.optimal_token_baseline)
    assert_same(random, found, verls(random, "optimal_token_baseline", **more))


@given(SEEDS)
def test_tir_optimal_token_baseline(seed: int) -> None:
    random = batch(seed)
    pi = np.exp(random.old)
    more = {"old_log_probs": tensor(random.old), "sum_pi_squared": tensor(pi**2 + (1 - pi) ** 2)}
    found = token_baseline(random, token_advantages.tir_optimal_token_baseline)
    assert_same(random, found, verls(random, "tir_optimal_token_baseline", **more))
