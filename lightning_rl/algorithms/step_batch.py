"""A step's rollouts as one batch: credit, advantages, what is left out and why, rows ready to train. Pure.

Nothing is dropped before the advantages: a group's statistics are over all its rollouts that have a reward. Every
sampled token ends as trained or as excluded by a reason, rollout by rollout.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from lightning_rl.algorithms.conservation import ConservationError
from lightning_rl.algorithms.step_record import CallRecord, RolloutRecord
from lightning_rl.algorithms.trajectories import Trajectory
from lightning_rl.rl.advantages import Estimate, grpo_of_calls
from lightning_rl.training.batch import MiniBatch, TrainingSequence, sequence_of
from lightning_rl_adapters import credit
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.credit import Credit, CreditError, Strategy
from lightning_rl_adapters.span import pack_logprobs


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a batch is built; the config's keys of the same names.

    `need_log_probs`: tokens without the sampler's log probability cannot be trained (`bypass_mode`).
    """

    strategy: Strategy = credit.final
    norm_by_std: bool = True
    groups_of_one: str = "zero"
    groups_without_variance: str = "keep"
    overlong: str = "drop_row"
    max_tokens: int | None = None
    need_log_probs: bool = False


@dataclass
class RolloutPart:
    """What became of one rollout: why it is `left_out` whole (None: it is not), its calls' credits and estimates, its
    sequences, and its tokens that are not trained, by reason."""

    trajectory: Trajectory
    left_out: str | None = None
    credits: dict[str, Credit] = field(default_factory=dict)
    estimates: dict[str, Estimate] = field(default_factory=dict)
    sequences: list[TrainingSequence] = field(default_factory=list)
    excluded: Counter[str] = field(default_factory=Counter)

    @property
    def trained(self) -> int:
        return sum(len(sequence.trained) for sequence in self.sequences)


@dataclass
class StepBatch:
    """One part per rollout, in their order. `groups_of_one` and `groups_without_variance` are counts of groups."""

    parts: list[RolloutPart]
    groups_of_one: int = 0
    groups_without_variance: int = 0

    @property
    def sequences(self) -> list[TrainingSequence]:
        return [sequence for part in self.parts for sequence in part.sequences]

    def metrics(self) -> dict[str, float]:
        """What advantages came out, and how many groups say nothing."""
        advantages = np.concatenate([s.advantages for s in self.sequences]) if self.sequences else np.zeros(1)
        return {
            "critic/advantages/mean": float(advantages.mean()),
            "critic/advantages/max": float(advantages.max()),
            "critic/advantages/min": float(advantages.min()),
            "rollouts/groups_of_one": float(self.groups_of_one),
            "rollouts/groups_without_variance": float(self.groups_without_variance),
        }


def build(trajectories: Sequence[Trajectory], rules: Rules) -> StepBatch:
    """The batch of a step.

    Raises CreditError naming the rollout that a strategy fails on, and ConservationError one whose tokens do not add
    up.
    """
    batch = StepBatch([RolloutPart(trajectory) for trajectory in trajectories])
    rewarded = [part for part in batch.parts if part.trajectory.reward is not None]
    for part in rewarded:
        try:
            part.credits = credit.assign(rules.strategy, part.trajectory.forest, part.trajectory.rewards)
        except CreditError as error:
            raise CreditError(f"rollout {part.trajectory.rollout_id}: {error}") from error
    estimates = grpo_of_calls(
        [part.credits for part in rewarded],
        [part.trajectory.reward or 0.0 for part in rewarded],
        [part.trajectory.group_id for part in rewarded],
        norm_by_std=rules.norm_by_std,
        lone_raw=rules.groups_of_one == "raw",
    )
    for part, of_calls in zip(rewarded, estimates, strict=True):
        part.estimates = of_calls
    _judge_groups(batch, rewarded, rules)
    for index, part in enumerate(batch.parts):
        if part.trajectory.reward is None:
            part.left_out = "no_reward"
        _fill(part, index, rules)
    return batch


def _judge_groups(batch: StepBatch, rewarded: Sequence[RolloutPart], rules: Rules) -> None:
    """Count the groups that say nothing of their rollouts, and leave them out where the rules do."""
    groups: defaultdict[str, list[RolloutPart]] = defaultdict(list)
    for part in rewarded:
        groups[part.trajectory.group_id].append(part)
    for parts in groups.values():
        if len(parts) == 1:
            batch.groups_of_one += 1
            if rules.groups_of_one == "drop":
                parts[0].left_out = "group_of_one"
        elif not any(estimate.advantage for part in parts for estimate in part.estimates.values()):
            batch.groups_without_variance += 1
            if rules.groups_without_variance == "drop":
                for part in parts:
                    part.left_out = "zero_variance"


def _fill(part: RolloutPart, index: int, rules: Rules) -> None:
    """The rollout's sequences, and where its other tokens went."""
    trajectory = part.trajectory
    part.excluded.update(trajectory.left_out)
    advantages = {call_id: estimate.advantage for call_id, estimate in part.estimates.items()}
    for row in trajectory.rows:
        if reason := row.excluded or part.left_out:
            part.excluded[reason] += sum(row.loss_mask)
            continue
        of_row = {call_id: advantages.get(call_id, 0.0) for call_id in row.call_ids if call_id is not None}
        sequence = sequence_of(row, index, of_row)
        if rules.max_tokens is not None and len(sequence) > rules.max_tokens:
            left = rules.overlong == "truncate_left"
            cut = sequence.truncate_left if left else sequence.truncate_response
            part.excluded["truncated"] += cut(rules.max_tokens)
        if rules.need_log_probs:
            known = ~np.isnan(sequence.rollout_log_probs)
            part.excluded["no_logprob"] += int((~known).sum())
            sequence.keep(known)
        if len(sequence.trained):
            part.sequences.append(sequence)
    part.excluded = +part.excluded
    if part.trained + part.excluded.total() != trajectory.sampled_tokens:
        raise ConservationError(
            f"rollout {trajectory.rollout_id}: of {trajectory.sampled_tokens} sampled tokens {part.trained} are in the "
            f"batch and {part.excluded.total()} are excluded ({dict(part.excluded)}): look at it with "
            f"`lightning-rl explain {trajectory.rollout_id}`"
        )


def records(batch: StepBatch, plan: Sequence[MiniBatch]) -> list[RolloutRecord]:
    """What the step made of each rollout and call, once the old log probabilities are known."""
    place = {rollout: (number, mini.weights[rollout]) for number, mini in enumerate(plan) for rollout in mini.weights}
    return [_record(part, *place.get(index, (None, 0.0))) for index, part in enumerate(batch.parts)]


def _record(part: RolloutPart, mini_batch: int | None, weight: float) -> RolloutRecord:
    trajectory = part.trajectory
    trained = {
        call_id: (sequence, where, places)
        for sequence in part.sequences
        for call_id, where, places in sequence.trained_by_call()
    }
    why = trajectory.why_left_out | {
        call_id: row.excluded for row in trajectory.rows if row.excluded for call_id in row.call_ids if call_id
    }
    calls = {}
    for call_id, node in trajectory.forest.nodes.items():
        given, estimate = part.credits.get(call_id), part.estimates.get(call_id, Estimate(0.0, 0.0, 1.0))
        found = CallRecord(
            credit=None if given is None else given.reward,
            compared_with=None if given is None else given.compared_with,
            advantage=estimate.advantage,
            baseline=estimate.baseline,
            scale=estimate.scale,
        )
        if call_id in trained:
            sequence, where, places = trained[call_id]
            old = sequence.old_log_probs
            calls[call_id] = replace(
                found,
                weight=weight,
                mini_batch=mini_batch,
                trained_tokens=len(places),
                kept=None if len(places) == len(node.call.response_ids) else places.tolist(),
                old_log_probs=b"" if old is None else pack_logprobs(old[where].tolist()),
            )
        else:
            reason = why.get(call_id) or part.left_out or _why_nothing_is_left(node.call)
            calls[call_id] = replace(found, left_out=reason)
    return RolloutRecord(
        rollout_id=trajectory.rollout_id,
        group_id=trajectory.group_id,
        reward=trajectory.reward,
        rewards=trajectory.rewards.named,
        agent_failed=trajectory.agent_failed,
        left_out=part.left_out,
        calls=calls,
    )


def _why_nothing_is_left(call: Call) -> str:
    """Why a call is in no sequence, although neither it nor its row nor its rollout was left out."""
    if not call.response_ids:
        return "no_tokens"
    return "no_logprob" if call.logprobs is None else "truncated"
