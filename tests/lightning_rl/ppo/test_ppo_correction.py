"""PPO through the real parts, a step: what the correction rejects is accounted for, and weights reach the batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightning_rl as lrl
from lightning_rl.ppo.batch import StepBatch
from lightning_rl.ppo.policy_learner import PolicyLearner
from lightning_rl.telemetry.metrics.jsonl import read
from lightning_rl.trajectories import step_record
from tests.lightning_rl.ppo.agents import two_calls
from tests.lightning_rl.ppo.test_ppo import config

pytestmark = pytest.mark.e2e


class DriftedLearner(PolicyLearner):
    """Its trainer holds every token of each second rollout for 1.5 times as likely as its sampler did."""

    accounted: StepBatch

    def set_old_log_probs(self, batch: StepBatch) -> dict[str, float]:
        self.accounted = batch
        metrics = super().set_old_log_probs(batch)
        for sequence in batch.sequences:
            if sequence.rollout % 2 and sequence.old_log_probs is not None:
                sequence.old_log_probs = sequence.old_log_probs + np.float32(np.log(1.5))
        return metrics


class Drifted(lrl.PPO):
    learner = DriftedLearner

    @property
    def accounted(self) -> StepBatch:
        [learner] = self.learners
        assert isinstance(learner, DriftedLearner)
        return learner.accounted


def trained(
    tmp_path: Path, *, mini_batch: int = 4, estimator: str = "grpo", **keys: Any
) -> tuple[Drifted, dict[str, Any], step_record.StepRecord]:
    algorithm_keys = {"adv_estimator": estimator, "norm_adv_by_std_in_grpo": False, "rollout_correction": keys}
    given = {"algorithm": algorithm_keys}
    algorithm = Drifted(config() | given | {"actor_rollout_ref.actor.ppo_mini_batch_size": mini_batch})
    lrl.Trainer(two_calls, n_runners=4, run_dir=tmp_path).fit(algorithm, [0, 1, 2, 3])
    [metrics] = read(tmp_path / "metrics.jsonl")
    [record] = step_record.read_all(tmp_path)
    return algorithm, metrics, record


def test_rejected_rollouts_are_accounted_for_and_stay_in_their_groups(tmp_path: Path) -> None:
    _, metrics, record = trained(tmp_path, rollout_rs="seq_mean_k1", rollout_rs_threshold=1.25)
    rejected = [rollout for rollout in record.rollouts if rollout.left_out == "rejected"]
    assert [rollout.rollout_id.partition(".")[0][-1] for rollout in rejected] == ["1"] * 4
    assert metrics["tokens/excluded/rejected"] > 0
    assert metrics["tokens/received"] == metrics["tokens/trained"] + metrics["tokens/excluded/rejected"]
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5
    kept = [rollout for rollout in record.rollouts if rollout.left_out is None]
    assert metrics["tokens/trained"] == sum(c.trained_tokens for rollout in kept for c in rollout.calls.values())
    for one, other in zip(kept, rejected, strict=True):
        assert one.reward is not None
        assert other.reward is not None
        assert {call.baseline for call in one.calls.values()} == {(one.reward + other.reward) / 2}
        assert {call.left_out for call in other.calls.values()} == {"rejected"}
    weights = {call.weight for rollout in kept for call in rollout.calls.values()}
    assert weights == {1 / metrics["tokens/trained"]}


@pytest.mark.smoke
def test_advantages_are_whitened_over_what_was_not_rejected(tmp_path: Path) -> None:
    algorithm, metrics, _ = trained(
        tmp_path, estimator="reinforce_plus_plus", rollout_rs="seq_mean_k1", rollout_rs_threshold=1.25
    )
    assert metrics["tokens/excluded/rejected"] > 0
    found = np.concatenate([sequence.advantages for sequence in algorithm.accounted.sequences])
    assert found.mean() == pytest.approx(0, abs=1e-6)
    assert found.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_importance_weights_are_on_the_tokens_that_are_trained(tmp_path: Path) -> None:
    algorithm, metrics, _ = trained(tmp_path, rollout_is="token")
    for sequence in algorithm.accounted.sequences:
        assert sequence.weights == pytest.approx(1.5 if sequence.rollout % 2 else 1.0, abs=1e-3)
    assert metrics["tokens/received"] == metrics["tokens/trained"]
    assert 1 < metrics["rollout_corr/rollout_is_mean"] < 1.5


def test_how_far_sampler_and_trainer_are_apart_is_always_told(tmp_path: Path) -> None:
    _, metrics, _ = trained(tmp_path, mini_batch=2)  # with several, the update does not find the old log probabilities
    assert metrics["rollout_corr/kl"] < 0 < metrics["rollout_corr/k3_kl"]
    assert metrics["tokens/received"] == metrics["tokens/trained"]
