"""A step's rollouts as one batch: credit, advantages, what is left out and why, rows ready to train. Pure.

Nothing is dropped before the advantages: a group's statistics are over all its rollouts that have a reward. Every
sampled token ends as trained or as excluded by a reason, rollout by rollout.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lightning_rl.algorithms.conservation import ConservationError
from lightning_rl.algorithms.step_record import CallRecord, PlusRecord, RolloutRecord
from lightning_rl.algorithms.trajectories import Trajectory
from lightning_rl.rl.advantages import ESTIMATORS, Estimate, Estimator, OfOutcomes, OfTokens, of_calls
from lightning_rl.rl.baselines import OutcomeEstimator, Settings, mean
from lightning_rl.rl.shaping import OverlongBuffer
from lightning_rl.rl.token_advantages import TokenTree, whitening
from lightning_rl.training.batch import MiniBatch, TrainingSequence, sequence_of
from lightning_rl_adapters import credit
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.credit import Credit, CreditError, Rewards, Strategy
from lightning_rl_adapters.span import pack_logprobs


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a batch is built; the config's keys of the same names.

    `estimator` is one of `rl.advantages.ESTIMATORS`, or an outcome estimator of one's own (`rl.baselines`). One of
    tokens gives credit itself, and leaves `strategy` alone. `gamma` is its discount, `reward_weights` are gdpo's.
    `need_log_probs`: tokens without the sampler's log probability cannot be trained (`bypass_mode`, and every rollout
    correction).
    """

    strategy: Strategy = credit.final
    estimator: Estimator | OutcomeEstimator = ESTIMATORS["grpo"]
    norm_by_std: bool = True
    gamma: float = 1.0
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    overlong_buffer: OverlongBuffer | None = None
    groups_of_one: str = "zero"
    groups_without_variance: str = "keep"
    overlong: str = "drop_row"
    max_tokens: int | None = None
    need_log_probs: bool = False

    @property
    def settings(self) -> Settings:
        """What estimators read of them."""
        return Settings(
            norm_by_std=self.norm_by_std,
            lone_raw=self.groups_of_one == "raw",
            gamma=self.gamma,
            reward_weights=self.reward_weights,
        )


@dataclass
class RolloutPart:
    """What became of one rollout.

    `reward` and `rewards` are what it counts with, the `penalty` in both. `left_out` is why it is left out whole (None:
    it is not). Of its calls there are credits and estimates, and under an estimator of tokens the advantage of each
    token. `excluded` counts its tokens that are not trained, by reason; `rejected` are the calls that a correction left
    nothing of.
    """

    trajectory: Trajectory
    reward: float | None
    rewards: Rewards
    penalty: float = 0.0
    left_out: str | None = None
    credits: dict[str, Credit] = field(default_factory=dict)
    estimates: dict[str, Estimate] = field(default_factory=dict)
    tokens: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    sequences: list[TrainingSequence] = field(default_factory=list)
    excluded: Counter[str] = field(default_factory=Counter)
    rejected: set[str] = field(default_factory=set)

    @property
    def trained(self) -> int:
        return sum(len(sequence.trained) for sequence in self.sequences)


@dataclass
class StepBatch:
    """One part per rollout, in their order. `groups_of_one` and `groups_without_variance` are counts of groups;
    `overlong_penalty` is the mean over the rollouts with a reward, None where there is no such rule."""

    parts: list[RolloutPart]
    overlong_penalty: float | None = None
    groups_of_one: int = 0
    groups_without_variance: int = 0

    @property
    def sequences(self) -> list[TrainingSequence]:
        return [sequence for part in self.parts for sequence in part.sequences]

    def metrics(self) -> dict[str, float]:
        """What advantages came out, how many groups say nothing, and what length cost."""
        advantages = np.concatenate([s.advantages for s in self.sequences]) if self.sequences else np.zeros(1)
        penalty = {} if self.overlong_penalty is None else {"rollouts/overlong_penalty": self.overlong_penalty}
        return penalty | {
            "critic/advantages/mean": float(advantages.mean()),
            "critic/advantages/max": float(advantages.max()),
            "critic/advantages/min": float(advantages.min()),
            "rollouts/groups_of_one": float(self.groups_of_one),
            "rollouts/groups_without_variance": float(self.groups_without_variance),
        }


def build(trajectories: Sequence[Trajectory], rules: Rules) -> StepBatch:
    """The batch of a step.

    Raises CreditError naming the rollout that a strategy fails on or whose advantages are too large to train on,
    EstimatorError where the estimator fails, and ConservationError naming a rollout whose tokens do not add up.
    """
    batch = StepBatch([_shaped(trajectory, rules.overlong_buffer) for trajectory in trajectories])
    rewarded = [part for part in batch.parts if part.reward is not None]
    if rules.overlong_buffer is not None:
        batch.overlong_penalty = mean(np.asarray([part.penalty for part in rewarded]))
    given = rules.estimator
    estimator = given if isinstance(given, OfOutcomes | OfTokens) else OfOutcomes(given)
    if isinstance(estimator, OfTokens):
        _estimate_tokens(rewarded, estimator, rules.settings)
    else:
        _estimate_calls(rewarded, estimator, rules)
    _judge_groups(batch, rewarded, rules)
    for index, part in enumerate(batch.parts):
        if part.reward is None:
            part.left_out = "no_reward"
        with np.errstate(over="ignore"):  # what float32 cannot hold is named below
            _fill(part, index, rules)
    if estimator.whitened:
        _whiten(batch.parts)
    for part in batch.parts:
        _check_finite(part)
    return batch


def _shaped(trajectory: Trajectory, buffer: OverlongBuffer | None) -> RolloutPart:
    """The rollout with what it counts with. A penalty falls on the final reward, which is 0 where there was none, and
    stands among the named ones for estimators that compare those."""
    if buffer is None or trajectory.reward is None:
        return RolloutPart(trajectory, trajectory.reward, trajectory.rewards)
    penalty, given = buffer.penalty(trajectory.forest), trajectory.rewards
    named = given.named | {"overlong_penalty": penalty}
    rewards = replace(given, final=(given.final or 0.0) + penalty, named=named)
    return RolloutPart(trajectory, trajectory.reward + penalty, rewards, penalty)


def _estimate_calls(rewarded: Sequence[RolloutPart], estimator: OfOutcomes, rules: Rules) -> None:
    for part in rewarded:
        try:
            part.credits = credit.assign(rules.strategy, part.trajectory.forest, part.rewards)
        except CreditError as error:
            raise CreditError(f"rollout {part.trajectory.rollout_id}: {error}") from error
        except Exception as error:
            error.add_note(f"while the credit strategy was asked about rollout {part.trajectory.rollout_id}")
            raise
    estimates = of_calls(
        [part.credits for part in rewarded],
        [part.reward or 0.0 for part in rewarded],
        [part.trajectory.group_id for part in rewarded],
        estimator=estimator.function,
        settings=rules.settings,
        tokens=[
            {call_id: len(node.call.response_ids) for call_id, node in part.trajectory.forest.nodes.items()}
            for part in rewarded
        ],
        named=[part.rewards.named for part in rewarded],
    )
    for part, found in zip(rewarded, estimates, strict=True):
        part.estimates = found


def _estimate_tokens(rewarded: Sequence[RolloutPart], estimator: OfTokens, settings: Settings) -> None:
    """Advantages of tokens; the credit and the estimate of a call are the means over its tokens."""
    trees = [_tree(part) for part in rewarded]
    estimates = estimator.function(trees, [part.trajectory.group_id for part in rewarded], settings)
    for part, (returns, baselines) in zip(rewarded, estimates, strict=True):
        for call_id, later, baseline in zip(part.trajectory.forest.nodes, returns, baselines, strict=True):
            if len(later):
                part.tokens[call_id] = later - baseline
                part.credits[call_id] = Credit(mean(later), estimator.compared_with)
                part.estimates[call_id] = Estimate(mean(part.tokens[call_id]), mean(baseline), 1.0)


def _tree(part: RolloutPart) -> TokenTree:
    """A rollout for estimators of tokens. A call's rewards stand on its last token, and every branch ends with the
    final one: a fork takes the mean of its branches, so before it there is the final reward once."""
    nodes = list(part.trajectory.forest.nodes.values())
    place = {node.call.call_id: number for number, node in enumerate(nodes)}
    parents = [None if node.parent is None else place[node.parent.call.call_id] for node in nodes]
    ends = [math.fsum(part.rewards.of_calls.get(node.call.call_id, {}).values()) for node in nodes]
    rewards = [np.zeros(len(node.call.response_ids)) for node in nodes]
    for number in reversed(range(len(nodes))):
        if not nodes[number].children:
            ends[number] += part.rewards.final or 0.0
        parent = parents[number]
        if len(rewards[number]):
            rewards[number][-1] = ends[number]
        elif parent is not None:  # no token of its own to stand on
            ends[parent] += ends[number] / len(nodes[parent].children)
    return TokenTree(
        parents=parents,
        context=[len(node.call.prompt_ids) for node in nodes],
        rewards=rewards,
        log_probs=[_log_probs(node.call) for node in nodes],
    )


def _log_probs(call: Call) -> NDArray[np.float64]:
    if call.logprobs is None or call.logprob_kind != "sampled":
        return np.full(len(call.response_ids), np.nan)
    return np.asarray(call.logprobs, dtype=np.float64)


def _whiten(parts: Sequence[RolloutPart]) -> None:
    """Whiten the advantages over the trained tokens of the batch, each of which stands in one sequence. Calls without
    credit, or with nobody to compare with, stay at 0 and do not count."""
    trained = list(_trained_advantages(parts))
    centre, divisor = whitening(np.concatenate([np.zeros(0), *(values for _, _, values in trained)]))
    for sequence, where, values in trained:
        sequence.advantages[where] = (values - centre) / divisor
    for part in parts:
        part.estimates = {call_id: found.whitened(centre, divisor) for call_id, found in part.estimates.items()}
        part.tokens = {call_id: (values - centre) / divisor for call_id, values in part.tokens.items()}


def _trained_advantages(
    parts: Sequence[RolloutPart],
) -> Iterator[tuple[TrainingSequence, NDArray[np.int64], NDArray[np.float64]]]:
    """Where trained tokens of calls with an estimate stand, and their advantages."""
    for part in parts:
        for sequence in part.sequences:
            for call_id, where, places in sequence.trained_by_call():
                found = part.estimates.get(call_id)
                if found is not None and not found.silent:
                    of_tokens = part.tokens.get(call_id)
                    alike = np.full(len(where), found.advantage)
                    yield sequence, where, alike if of_tokens is None else of_tokens[places]


def _check_finite(part: RolloutPart) -> None:
    for sequence in part.sequences:
        if not np.isfinite(sequence.advantages).all():
            raise CreditError(
                f"rollout {part.trajectory.rollout_id}: with a reward of {part.reward} its advantages are too large "
                "for float32; scale its rewards down, or divide by the standard deviation "
                "(algorithm.norm_adv_by_std_in_grpo=true)"
            )


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
        elif not any(map(_says_something, parts)):
            batch.groups_without_variance += 1
            if rules.groups_without_variance == "drop":
                for part in parts:
                    part.left_out = "zero_variance"


def _says_something(part: RolloutPart) -> bool:
    return any(found.advantage for found in part.estimates.values()) or any(map(np.any, part.tokens.values()))


def _fill(part: RolloutPart, index: int, rules: Rules) -> None:
    """The rollout's sequences, and where its other tokens went."""
    trajectory = part.trajectory
    part.excluded.update(trajectory.left_out)
    advantages = {call_id: estimate.advantage for call_id, estimate in part.estimates.items()} | part.tokens
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
        found = _credited(part.credits.get(call_id), part.estimates.get(call_id))
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
            rejected = "rejected" if call_id in part.rejected else None
            reason = why.get(call_id) or rejected or part.left_out or _why_nothing_is_left(node.call)
            calls[call_id] = replace(found, left_out=reason)
    return RolloutRecord(
        rollout_id=trajectory.rollout_id,
        group_id=trajectory.group_id,
        reward=part.reward,
        rewards=trajectory.rewards.named,
        agent_failed=trajectory.agent_failed,
        left_out=part.left_out,
        calls=calls,
        overlong_penalty=part.penalty,
    )


def _credited(given: Credit | None, estimate: Estimate | None) -> CallRecord:
    """How a call's advantage came about; compared with nobody, its baseline is itself."""
    if given is None or estimate is None:
        return CallRecord()
    plus = None
    if given.plus is not None and estimate.plus is not None:
        second = _credited(given.plus, estimate.plus)
        plus = PlusRecord(
            credit=given.plus.reward,
            compared_with=second.compared_with,
            baseline=second.baseline,
            scale=second.scale,
            advantage=second.advantage,
        )
    alone = math.isinf(estimate.scale)
    return CallRecord(
        credit=given.reward,
        compared_with=given.compared_with,
        advantage=estimate.advantage,
        baseline=given.reward if alone else estimate.baseline,
        scale=1.0 if alone else estimate.scale,
        plus=plus,
    )


def _why_nothing_is_left(call: Call) -> str:
    """Why a call is in no sequence, although neither it nor its row nor its rollout was left out."""
    if not call.response_ids:
        return "no_tokens"
    return "no_logprob" if call.logprobs is None else "truncated"
