"""A step's batch against its sampler: the comparison of log probabilities, importance weights, rejected tokens.

The comparison gives the batch its old log probabilities. The correction comes after the advantages, but before these
are whitened: a rejected token is excluded like any other that is not trained, changes no group's statistics, and counts
neither in those of whitening nor in the means of the loss.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import RolloutCorrection
from lightning_rl.errors import Explained
from lightning_rl.inference.weights.check import Tolerance, largest_and_mean
from lightning_rl.ppo.batch import StepBatch
from lightning_rl.rl import correction
from lightning_rl.rl.correction import CorrectionRules
from lightning_rl.training.batch import TrainingSequence

_KEY = "algorithm.rollout_correction"


class SamplerMismatch(Explained, RuntimeError):
    """The engine's log probabilities are not the trainer's: training on them would be wrong in silence."""


class SamplerCheck:
    """Sets old log probabilities, and compares the sampler's with the trainer's.

    Args:
        bypass: take the sampler's as the old ones; then only the first batch is compared.
        off_policy: the schedule trains tokens of older weights, too.
        tolerance: how far the two may be apart on the first batch that the current weights sampled.
        began_ns: when this session began, since the epoch.
        began_version: the policy version that this session began with.
    """

    def __init__(
        self, *, bypass: bool, off_policy: bool, tolerance: Tolerance, began_ns: int, began_version: int
    ) -> None:
        self._bypass = bypass
        self._off_policy = off_policy
        self._tolerance = tolerance
        self._began_ns = began_ns
        self._began_version = began_version
        self.compared = False  # a batch that the current weights sampled

    def set_old_log_probs(
        self, batch: StepBatch, trainers: Callable[[list[TrainingSequence]], list[NDArray[np.float32]]], version: int
    ) -> dict[str, float]:
        """Set them for a step on the weights `version`; returns how far sampler and trainer are apart.

        `trainers` computes the trainer's own log probabilities. Raises SamplerMismatch.
        """
        sequences = batch.sequences
        if self._bypass:
            batch.put(old_log_probs=[sequence.rollout_log_probs for sequence in sequences])
            if self.compared:
                return {}
        own = trainers(sequences)
        if not self._bypass:
            batch.put(old_log_probs=own)
        return self.compare(batch, own, version)

    def compare(self, batch: StepBatch, own: list[NDArray[np.float32]], version: int) -> dict[str, float]:
        """How far the sampler's log probabilities are from the trainer's `own`, per sequence, under the weights
        `version`. Raises SamplerMismatch on the first batch that these sampled."""
        sequences, first = batch.sequences, not self.compared
        of_these_weights = [np.zeros(0, np.float32)]
        for sequence, log_probs in zip(sequences, own, strict=True):
            if not sequence.cut_context:
                gaps = np.abs(log_probs - sequence.rollout_log_probs)
                of_these_weights.append(gaps[self._sampled_by(version, batch, sequence)])
        self.compared = self.compared or any(map(len, of_these_weights))
        if first and (apart := self._tolerance.exceeded_by(np.concatenate(of_these_weights))) is not None:
            raise SamplerMismatch(
                f"on the first batch the log probabilities of sampler and trainer are {apart}: the engine does not run "
                "the model that is trained; check its weights, its dtype (actor_rollout_ref.rollout.dtype, which is "
                "best the trainer's), chat format and cache"
            )
        return differences(sequences, own)

    def _sampled_by(self, version: int, batch: StepBatch, sequence: TrainingSequence) -> NDArray[np.bool_]:
        """Which trained tokens of a sequence the weights `version` sampled, [K].

        Under `sync` these are all that this session has sampled. A version that an earlier session made after the
        checkpoint has the same number as another one that this session makes. Off-policy, even the checkpoint's own
        version may: a step that was done again took what had ended meanwhile.
        """
        same = np.ones(len(sequence.trained), dtype=bool)
        nodes = batch.parts[sequence.rollout].trajectory.forest.nodes
        for call_id, where, places in sequence.trained_by_call():
            call = nodes[call_id].call
            if call.end_ns < self._began_ns and (self._off_policy or version != self._began_version):
                same[where] = False
            elif self._off_policy:
                versions = call.policy_versions()
                same[where] = [versions[place] == version for place in places]
        return same


def differences(sequences: Sequence[TrainingSequence], own: Sequence[NDArray[np.float32]]) -> dict[str, float]:
    """verl's metrics of how far the sampler's log probabilities are from the trainer's `own`. Rows whose context was
    cut are not compared."""
    gaps = [
        np.abs(log_probs - sequence.rollout_log_probs)
        for sequence, log_probs in zip(sequences, own, strict=True)
        if not sequence.cut_context
    ]
    largest, mean = largest_and_mean(_flat(gaps))
    return {"training/rollout_probs_diff_max": largest, "training/rollout_probs_diff_mean": mean}


def update_metrics(batch: StepBatch, rules: CorrectionRules) -> dict[str, float]:
    """The metrics of a batch whose old log probabilities its update has found; `rules` correct nothing."""
    sequences = batch.sequences
    return differences(sequences, [_old(sequence) for sequence in sequences]) | correct(batch, rules)


def rules_of(section: RolloutCorrection, *, overlong: str = "drop_row", loss_mode: str = "vanilla") -> CorrectionRules:
    """What `algorithm.rollout_correction` says. Raises ConfigError where it cannot be honoured.

    In bypass mode the loss `reinforce` makes the weights of `rollout_is` itself, so there are none here. `auto` is a
    matter of the schedule, and none here.
    """
    by_the_loss = section.bypass_mode and "reinforce" in (loss_mode, section.loss_type)
    try:
        rules = CorrectionRules(
            level=None if by_the_loss or section.rollout_is == "auto" else section.rollout_is,
            bounds=correction.weight_bounds(section.rollout_is_threshold),
            batch_normalize=section.rollout_is_batch_normalize,
            criteria={}
            if section.rollout_rs is None
            else correction.criteria(section.rollout_rs, section.rollout_rs_threshold),
            veto=section.rollout_token_veto_threshold,
        )
    except ValueError as error:
        raise ConfigError(f"{_KEY}: {error}") from error
    weighted = section.rollout_is not in (None, "auto") if by_the_loss else rules.level is not None
    if section.rollout_is_batch_normalize and not weighted:
        raise ConfigError(f"{_KEY}.rollout_is_batch_normalize has no weights to normalize: set {_KEY}.rollout_is")
    if section.rollout_rs is None and section.rollout_rs_threshold is not None:
        raise ConfigError(f"{_KEY}.rollout_rs_threshold bounds nothing: name criteria in {_KEY}.rollout_rs")
    if rules.active and section.bypass_mode:
        raise ConfigError(
            f"{_KEY}.bypass_mode=true takes the sampler's log probabilities for the old ones, so there are none of the "
            "trainer's to compare them with: set it to false, or leave rollout_is (but with loss_type reinforce), "
            "rollout_rs and rollout_token_veto_threshold null"
        )
    if rules.active and overlong == "truncate_left":
        raise ConfigError(
            f"data.overlong=truncate_left shows the trainer less than the sampler saw, so {_KEY} would correct for the "
            "cut: set another data.overlong, or leave rollout_is, rollout_rs and rollout_token_veto_threshold null"
        )
    return rules


def correct(batch: StepBatch, rules: CorrectionRules) -> dict[str, float]:
    """Set the weights of a batch whose old log probabilities are the trainer's, and take rejected tokens out of it.

    Returns verl's `rollout_corr/...` metrics. Rows whose context was cut are not compared.
    """
    compared = [sequence for sequence in batch.sequences if not sequence.cut_context]
    tokens = [len(sequence.trained) for sequence in compared]
    corrected = correction.correct(
        _flat([_old(sequence) for sequence in compared]),
        _flat([sequence.rollout_log_probs for sequence in compared]),
        np.repeat(np.asarray([sequence.rollout for sequence in compared], dtype=np.int64), tokens),
        rules,
    )
    if rules.active:
        ends = np.cumsum(tokens)[:-1]
        weights = None if corrected.weights is None else np.split(corrected.weights.astype(np.float32), ends)
        keep = dict(zip(map(id, compared), np.split(corrected.keep, ends), strict=True)) if compared else {}
        if weights is not None:
            by_sequence = dict(zip(map(id, compared), weights, strict=True)) if compared else {}
            batch.put(weights=[by_sequence.get(id(sequence)) for sequence in batch.sequences])
        for part in batch.parts:
            part.keep([keep[id(sequence)] for sequence in part.sequences], "rejected")
    return corrected.metrics


def _old(sequence: TrainingSequence) -> NDArray[np.float32]:
    if sequence.old_log_probs is None:
        raise ValueError("old_log_probs are not set; compute them before the correction")
    return sequence.old_log_probs


def _flat(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
