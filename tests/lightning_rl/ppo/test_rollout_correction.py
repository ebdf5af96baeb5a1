"""A batch against its sampler: weights on tokens, rejected tokens out of it, every token still accounted for."""

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_rl.config.schema import RolloutCorrection
from lightning_rl.inference.weights.check import Tolerance
from lightning_rl.ppo.batch import BatchRules, StepBatch, records
from lightning_rl.ppo.rollout_correction import SamplerCheck, SamplerMismatch, correct, rules_of, update_metrics
from lightning_rl.training.batch import mini_batches
from tests.adapters.forests import make_call
from tests.lightning_rl.ppo.test_batch import advantages, build, excluded, rollout


def step(ratios: Sequence[Sequence[float]]) -> StepBatch:
    """Rollouts a, b, ... of one group and of two calls with two tokens each, the trainer's probabilities over the
    sampler's as given; a's reward is 1, that of the others 0."""
    found = [
        rollout(name, make_call(0, None), make_call(1, 0), reward=float(name == "a"))
        for name, _ in zip("abcd", ratios, strict=False)
    ]
    batch = build(found, BatchRules(norm_by_std=False, need_log_probs=True))
    for sequence, of_tokens in zip(batch.sequences, ratios, strict=True):
        sequence.old_log_probs = sequence.rollout_log_probs + np.log(of_tokens).astype(np.float32)
    return batch


REJECT_TOKENS = rules_of(RolloutCorrection(rollout_rs="token_k1", rollout_rs_threshold=2.0))
REJECT_ROLLOUTS = rules_of(RolloutCorrection(rollout_rs="seq_mean_k1", rollout_rs_threshold=2.0))


def test_without_a_correction_a_batch_is_only_measured() -> None:
    batch = step([[1, 1, 1, 1], [1, 9, 1, 1]])
    metrics = correct(batch, rules_of(RolloutCorrection()))
    assert metrics["rollout_corr/kl"] == pytest.approx(-np.log(9) / 8, rel=1e-5)
    assert [sequence.weights for sequence in batch.sequences] == [None, None]
    assert [part.trained for part in batch.parts] == [4, 4]


def test_a_rejected_token_is_excluded_and_its_neighbours_keep_what_is_theirs() -> None:
    batch = step([[1, 1, 1, 1], [1, 9, 1.5, 1]])
    rules = rules_of(RolloutCorrection(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=2.0))
    before = batch.sequences[1].trained.tolist()
    metrics = correct(batch, rules)
    sequence = batch.sequences[1]
    assert sequence.trained.tolist() == [before[0], *before[2:]]
    assert sequence.weights is not None
    assert sequence.weights.dtype == np.float32
    assert sequence.weights.tolist() == pytest.approx([1, 1.5, 1])
    assert sequence.old_log_probs is not None
    assert sequence.old_log_probs - sequence.rollout_log_probs == pytest.approx(np.log([1, 1.5, 1]), abs=1e-6)
    assert excluded(batch) == {"rejected": 1}
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1 / 8
    part = batch.parts[1]
    assert part.trained + part.excluded.total() == part.trajectory.sampled_tokens
    assert part.left_out is None


def test_rejection_changes_no_group_statistics_and_comes_before_the_means_of_the_loss() -> None:
    batch = step([[1, 1, 1, 1], [9, 9, 9, 9]])
    correct(batch, REJECT_ROLLOUTS)
    assert advantages(batch) == [{0.5}, set()]
    plan = mini_batches(batch.sequences, rollouts=2, rollouts_each=2, mode="token-mean", scale_factor=None)
    assert [mini.weights for mini in plan] == [{0: 1 / 4}]
    kept, gone = records(batch, plan)
    assert (kept.left_out, gone.left_out, gone.reward) == (None, "rejected", 0.0)
    assert {call.left_out for call in gone.calls.values()} == {"rejected"}
    assert {call.baseline for call in gone.calls.values()} == {0.5}


def test_a_call_that_nothing_is_left_of_says_why() -> None:
    batch = step([[9, 9, 1, 1], [1, 9, 1, 1]])
    correct(batch, REJECT_TOKENS)
    plan = mini_batches(batch.sequences, rollouts=2, rollouts_each=2, mode="token-mean", scale_factor=None)
    first, second = records(batch, plan)
    assert [call.left_out for call in first.calls.values()] == ["rejected", None]
    assert [call.kept for call in second.calls.values()] == [[0], None]
    assert first.left_out is None


def test_a_batch_of_which_everything_is_rejected_trains_nothing() -> None:
    batch = step([[9, 9, 9, 9], [9, 9, 9, 9]])
    correct(batch, REJECT_ROLLOUTS)
    assert batch.sequences == []
    assert excluded(batch) == {"rejected": 8}
    assert np.isfinite(list(batch.metrics().values())).all()


def test_a_batch_without_tokens_is_no_error() -> None:
    batch = build([rollout("a")], BatchRules())
    assert correct(batch, REJECT_ROLLOUTS) == {"rollout_corr/tokens_without_log_prob": 0.0}
    assert batch.parts[0].left_out is None


def test_rows_whose_context_was_cut_are_not_compared() -> None:
    batch = step([[1, 1, 1, 1], [9, 9, 9, 9]])
    batch.sequences[1].cut_context = True
    assert correct(batch, rules_of(RolloutCorrection()))["rollout_corr/kl"] == 0


def test_old_log_probs_must_be_there() -> None:
    with pytest.raises(ValueError, match="compute them before the correction"):
        correct(build([rollout("a", make_call(0, None))], BatchRules()), REJECT_TOKENS)


@pytest.mark.parametrize(
    ("off_policy", "ended_ns", "version", "compared"),
    [
        pytest.param(True, 5, 4, False, id="off-policy, of an earlier session"),
        pytest.param(True, 11, 4, True, id="off-policy, of this session"),
        pytest.param(True, 11, 5, False, id="off-policy, of an older version"),
        pytest.param(False, 5, 4, True, id="sync: a step done again is the same"),
        pytest.param(False, 5, 5, False, id="sync: of another version than the session began with"),
    ],
)
def test_the_first_batch_is_compared_where_the_present_weights_have_sampled(
    off_policy: bool, ended_ns: int, version: int, compared: bool
) -> None:
    """An earlier session, killed between two checkpoints, may have made another version of the same number."""
    call = SimpleNamespace(end_ns=ended_ns, policy_versions=lambda: [4, 4])
    nodes = {"c": SimpleNamespace(call=call)}
    part = SimpleNamespace(trajectory=SimpleNamespace(forest=SimpleNamespace(nodes=nodes)))
    sequence = SimpleNamespace(
        rollout=0,
        trained=[0, 1],
        cut_context=False,
        rollout_log_probs=np.full(2, -1.0, np.float32),
        trained_by_call=lambda: [("c", np.array([0, 1]), np.array([0, 1]))],
    )
    batch: Any = SimpleNamespace(sequences=[sequence], parts=[part], put=lambda **_: None)
    check = SamplerCheck(
        bypass=False, off_policy=off_policy, tolerance=Tolerance(largest=1e-4), began_ns=10, began_version=4
    )
    with pytest.raises(SamplerMismatch) if compared else nullcontext():
        check.set_old_log_probs(batch, lambda _: [np.full(2, -2.0, np.float32)], version)
    assert check.compared == compared  # else the next batch is the first


def of_the_trainer(batch: StepBatch, apart: float = 0.25) -> list[Any]:
    """Log probabilities that are so far from the sampler's, of two of four tokens."""
    return [
        (sequence.rollout_log_probs + np.array([apart, -apart, 0, 0])).astype(np.float32)
        for sequence in batch.sequences
    ]


def check_of(*, bypass: bool, largest: float = 1.0) -> SamplerCheck:
    tolerance = Tolerance(largest=largest)
    return SamplerCheck(bypass=bypass, off_policy=False, tolerance=tolerance, began_ns=0, began_version=0)


@pytest.mark.parametrize("bypass", [True, False])
def test_old_log_probs_are_the_trainers_or_with_bypass_the_samplers_which_are_compared_once(bypass: bool) -> None:
    batch, check, asked = step([[9, 9, 9, 9]]), check_of(bypass=bypass), list[int]()

    def trainers(sequences: list[Any]) -> list[Any]:
        asked.append(len(sequences))
        return of_the_trainer(batch)

    [sequence] = batch.sequences
    [expected] = [sequence.rollout_log_probs] if bypass else of_the_trainer(batch)
    found = []
    for _ in range(2):
        found.append(check.set_old_log_probs(batch, trainers, 0))
        assert sequence.old_log_probs is not None
        assert sequence.old_log_probs.tolist() == expected.tolist()
    told = {"training/rollout_probs_diff_max": 0.25, "training/rollout_probs_diff_mean": 0.125}
    assert found == [pytest.approx(told), {} if bypass else pytest.approx(told)]
    assert asked == ([1] if bypass else [1, 1])


def test_old_log_probs_that_an_update_finds_are_compared_and_measured() -> None:
    told = update_metrics(step([[1, 9, 1, 1]]), rules_of(RolloutCorrection()))
    assert told["training/rollout_probs_diff_max"] == pytest.approx(np.log(9), rel=1e-5)
    assert told["rollout_corr/kl"] == pytest.approx(-np.log(9) / 4, rel=1e-5)


def test_only_the_first_batch_with_its_whole_context_must_agree() -> None:
    batch, check = step([[1, 1, 1, 1]]), check_of(bypass=False, largest=0.1)
    [sequence] = batch.sequences
    sequence.cut_context = True
    nothing = {"training/rollout_probs_diff_max": 0.0, "training/rollout_probs_diff_mean": 0.0}
    assert check.compare(batch, of_the_trainer(batch), 0) == nothing
    assert not check.compared
    sequence.cut_context = False
    check.compare(batch, of_the_trainer(batch, 0.05), 0)
    sequence.cut_context = True
    check.compare(batch, of_the_trainer(batch), 0)
    sequence.cut_context = False
    assert check.compare(batch, of_the_trainer(batch), 0)["training/rollout_probs_diff_max"] == pytest.approx(0.25)
