"""How far log probabilities of sampler and trainer may be apart: by the worst token, or by the mean."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lightning_rl.inference.load import load_model
from lightning_rl.inference.weights.check import FLOAT32, EngineMismatch, SampledTokens, Tolerance, log_probs_of, prove

CHECKPOINT = Path(__file__).parents[4] / "examples" / "sql_agent" / "checkpoint"

ROUNDED = Tolerance(mean=0.1)
# What engines in bfloat16 show beside a trainer in it: mostly 0.01 to 0.05, single tokens 0.3 and more.
HEALTHY = np.abs(np.random.default_rng(0).normal(0, 0.03, 2000)).astype(np.float32)
HEALTHY[[3, 700]] = 0.32, 0.9


def test_a_healthy_run_in_bfloat16_is_not_stopped_for_single_tokens() -> None:
    assert ROUNDED.exceeded_by(HEALTHY) is None
    assert FLOAT32.exceeded_by(HEALTHY) == "up to 0.9 apart (trainer.sampler_tolerance is 0.001)"


@pytest.mark.parametrize("mean", [0.2, 0.8])
def test_weights_that_are_old_or_wrong_are_seen_in_the_mean(mean: float) -> None:
    stale = np.abs(np.random.default_rng(0).normal(0, 1.25 * mean, 2000))
    assert "apart in the mean, up to" in (ROUNDED.exceeded_by(stale) or "")


def test_tokens_without_a_log_probability_are_not_judged() -> None:
    some = np.asarray([np.nan, 1e-4, np.nan])
    assert FLOAT32.exceeded_by(some) is None
    assert FLOAT32.exceeded_by(10 * some + 1e-3) is not None
    for nothing in (np.full(3, np.nan), np.zeros(0)):
        assert FLOAT32.exceeded_by(nothing) is None
        assert ROUNDED.exceeded_by(nothing) is None


@pytest.mark.parametrize("tolerance", [FLOAT32, ROUNDED])
def test_an_engine_that_gives_no_numbers_does_not_compute_what_is_trained(tolerance: Tolerance) -> None:
    def sample(prompt: list[int], n: int) -> SampledTokens:
        return SampledTokens([5] * n, [math.nan] * n)

    with pytest.raises(EngineMismatch, match="inf apart"):
        prove(partial(log_probs_of, load_model(CHECKPOINT)), 997, sample, engine="vLLM", version=1, tolerance=tolerance)
