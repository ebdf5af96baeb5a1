"""A step's rollouts as one batch: rows ready to train, then credit and advantages. Pure.

`read` makes the rows, for which old and reference log probabilities and values are computed; `estimate` needs those.
No rollout is dropped before the advantages: a group's statistics are over all its rollouts that have a reward. Every
sampled token ends as trained or as excluded by a reason, rollout by rollout.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lightning_rl.ppo.estimators import tree_of
from lightning_rl.rl.advantages import ESTIMATORS, Estimate, Estimator, OfOutcomes, OfTokens, of_calls
from lightning_rl.rl.baselines import (
    BaselineSettings,
    EstimatorError,
    Floats,
    OutcomeEstimator,
    mean,
    standard_deviation,
)
from lightning_rl.rl.kl import reward_penalty
from lightning_rl.rl.shaping import OverlongBuffer
from lightning_rl.rl.token_advantages import whitening
from lightning_rl.training.batch import MiniBatch, TrainingSequence, sequence_of
from lightning_rl.trajectories.step_record import CallRecord, PlusRecord, RolloutRecord
from lightning_rl.trajectories.token_account import ConservationError
from lightning_rl.trajectories.trajectory import Trajectory
from lightning_rl_adapters import credit
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.credit import GROUP, Credit, CreditError, Rewards, Strategy
from lightning_rl_adapters.span import pack_logprobs

_OVERLONG, _KL = "overlong_penalty", "kl_penalty"  # among the named rewards
_PENALTIES = (_OVERLONG, _KL)


@dataclass(frozen=True, kw_only=True)
class BatchRules:
    """How a batch is built; the config's keys of the same names.

    `estimator` is one of `rl.advantages.ESTIMATORS`, or an outcome estimator of one's own (`rl.baselines`). One of
    tokens gives credit itself, and leaves `strategy` alone. `gamma` is its discount, `reward_weights` are gdpo's.
    `lam` is gae's. `kl_coef`: rewards are lowered by so many times the distance from the reference, of kind
    `kl_penalty` (`rl.kl`). `need_log_probs`: tokens without the sampler's log probability cannot be trained
    (`bypass_mode`, and every rollout correction).
    """

    strategy: Strategy = credit.final
    estimator: Estimator | OutcomeEstimator = ESTIMATORS["grpo"]
    norm_by_std: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    kl_coef: float = 0.0
    kl_penalty: str = "kl"
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    overlong_buffer: OverlongBuffer | None = None
    min_successful_rollouts: int = 0
    groups_of_one: str = "zero"
    groups_without_variance: str = "keep"
    overlong: str = "drop_row"
    max_tokens: int | None = None
    need_log_probs: bool = False

    @property
    def settings(self) -> BaselineSettings:
        """What estimators read of them."""
        return BaselineSettings(
            norm_by_std=self.norm_by_std,
            lone_raw=self.groups_of_one == "raw",
            gamma=self.gamma,
            lam=self.lam,
            reward_weights=self.reward_weights,
        )


@dataclass
class RolloutPart:
    """What became of one rollout.

    `reward` and `rewards` are what it counts with: the `penalty` for its length is in both, `kl_penalty` (for its
    distance from the reference) in the first, and in the second unless single tokens bear it (`of_tokens`). `left_out`
    is why it is left out whole (None: it is not). Of its calls there are credits and estimates, under an estimator of
    tokens the advantage of each token, and its return where a critic is to learn it. `excluded` counts its tokens that
    are not trained, by reason; `calls_left_out` has the reason of calls that were read, and of which nothing is left.
    `alike`: its group says nothing of which of its rollouts is better.
    """

    trajectory: Trajectory
    reward: float | None
    rewards: Rewards
    penalty: float = 0.0
    kl_penalty: float = 0.0
    of_tokens: dict[str, Floats] = field(default_factory=dict)
    left_out: str | None = None
    alike: bool = False
    credits: dict[str, Credit] = field(default_factory=dict)
    estimates: dict[str, Estimate] = field(default_factory=dict)
    tokens: dict[str, Floats] = field(default_factory=dict)
    returns: dict[str, Floats] = field(default_factory=dict)
    sequences: list[TrainingSequence] = field(default_factory=list)
    excluded: Counter[str] = field(default_factory=Counter)
    calls_left_out: dict[str, str] = field(default_factory=dict)

    @property
    def trained(self) -> int:
        return sum(len(sequence.trained) for sequence in self.sequences)

    def keep(self, masks: Sequence[NDArray[np.bool_]], reason: str) -> None:
        """Train only the tokens of its sequences that their `masks` hold; the others are excluded by the reason, as are
        calls and a rollout of which nothing is left."""
        before = self._trained_calls
        for sequence, mask in zip(self.sequences, masks, strict=True):
            self.excluded[reason] += int((~mask).sum())
            sequence.keep(mask)
        self.sequences = [sequence for sequence in self.sequences if len(sequence.trained)]
        self.excluded = +self.excluded
        self.calls_left_out |= dict.fromkeys(before - self._trained_calls, reason)
        if before and not self.sequences:
            self.left_out = reason

    @property
    def _trained_calls(self) -> set[str]:
        return {call_id for sequence in self.sequences for call_id, _, _ in sequence.trained_by_call()}

    def of_calls(self, numbers: Sequence[NDArray[Any]]) -> dict[str, tuple[NDArray[np.int64], Floats]]:
        """Numbers [K] of each sequence's trained tokens by call id, with their places in the call's answer."""
        return {
            call_id: (places, of_sequence[where].astype(np.float64))
            for sequence, of_sequence in zip(self.sequences, numbers, strict=True)
            for call_id, where, places in sequence.trained_by_call()
        }


@dataclass
class StepBatch:
    """One part per rollout, in their order. `groups_of_one`, `groups_without_variance` and `groups_of_few_successes`
    are counts of groups; `overlong_penalty` is the mean over the rollouts with a reward, None where there is no such
    rule. `kl` is the distance from the reference that rewards were lowered by `kl_coef` times: the mean over rollouts
    of the mean over their trained tokens, None where they were not."""

    parts: list[RolloutPart]
    overlong_penalty: float | None = None
    kl: float | None = None
    kl_coef: float = 0.0
    groups_of_one: int = 0
    groups_without_variance: int = 0
    groups_of_few_successes: int = 0

    @property
    def sequences(self) -> list[TrainingSequence]:
        return [sequence for part in self.parts for sequence in part.sequences]

    @property
    def rewarded(self) -> list[RolloutPart]:
        """Those that take part in their groups."""
        return [part for part in self.parts if part.reward is not None]

    def put(self, **of_tokens: Sequence[NDArray[np.float32] | None]) -> None:
        """Give the sequences numbers of their trained tokens, by field: one array [K] per sequence, in their order."""
        for name, arrays in of_tokens.items():
            for sequence, values in zip(self.sequences, arrays, strict=True):
                setattr(sequence, name, values)

    def metrics(self) -> dict[str, float]:
        """Rewards before and after the distance from the reference, advantages and values, how many groups say nothing,
        and what length cost."""
        summary = {
            "rollouts/groups_of_one": float(self.groups_of_one),
            "rollouts/groups_without_variance": float(self.groups_without_variance),
            "rollouts/groups_of_few_successes": float(self.groups_of_few_successes),
        }
        if self.overlong_penalty is not None:
            summary["rollouts/overlong_penalty"] = self.overlong_penalty
        if self.kl is not None:
            summary |= {"actor/reward_kl_penalty": self.kl, "actor/reward_kl_penalty_coeff": self.kl_coef}
        summary |= _summary("critic/rewards", np.asarray([part.reward for part in self.rewarded]))
        sequences = self.sequences
        summary |= _summary(
            "critic/advantages", _joined([s.advantages for s in sequences] or [np.zeros(1, np.float32)])
        )
        values, returns = _joined([s.values for s in sequences]), _joined([s.returns for s in sequences])
        summary |= _summary("critic/values", values) | _summary("critic/returns", returns)
        if 0 < len(values) == len(returns):
            unexplained, variance = standard_deviation(returns - values) ** 2, standard_deviation(returns) ** 2
            summary["critic/vf_explained_var"] = 1 - unexplained / (variance + 1e-5)
        return summary


def _joined(of_tokens: Sequence[NDArray[np.float32] | None]) -> Floats:
    return np.concatenate([np.zeros(0), *(part for part in of_tokens if part is not None)])


def _summary(name: str, values: NDArray[Any]) -> dict[str, float]:
    if not len(values):
        return {}
    mean_of_all, largest, smallest = float(values.mean()), float(values.max()), float(values.min())
    return {f"{name}/mean": mean_of_all, f"{name}/max": largest, f"{name}/min": smallest}


def read(trajectories: Sequence[Trajectory], rules: BatchRules) -> StepBatch:
    """The rows of a step, with advantages of 0.

    Raises ConservationError naming a rollout whose tokens do not add up.
    """
    batch = StepBatch([_shaped(trajectory, rules.overlong_buffer) for trajectory in trajectories])
    if rules.overlong_buffer is not None:
        batch.overlong_penalty = mean(np.asarray([part.penalty for part in batch.rewarded]))
    for index, part in enumerate(batch.parts):
        if part.reward is None:
            part.left_out = "no_reward"
        _fill(part, index, rules)
        _check_conserved(part)
    return batch


def counted(trajectory: Trajectory, rules: BatchRules) -> float | None:
    """What a rollout counts with, its penalty in it; None where it has no reward."""
    return _shaped(trajectory, rules.overlong_buffer).reward


def estimate(batch: StepBatch, rules: BatchRules, greedy: Mapping[str, float] | None = None) -> None:
    """Give the rows their advantages, and under an estimator with a critic their returns; take out what `rules` drop.
    `whiten` comes after it.

    `greedy` has, by group id, what a greedy rollout of the group's task counts with (`counted`), for an estimator that
    asks for it; it lacks groups whose greedy rollout gave nothing.
    Once for a batch. Its sequences need `values` for an estimator with a critic, `old_log_probs` and
    `reference_log_probs` for a `kl_coef`.

    Raises CreditError naming the rollout that a strategy fails on, EstimatorError where the estimator fails or lacks
    something, and ValueError where log probabilities are missing.
    """
    either, rewarded = rules.estimator, batch.rewarded
    estimator = either if isinstance(either, OfOutcomes | OfTokens) else OfOutcomes(either)
    if rules.kl_coef:
        _lower_by_kl(batch, rules, by_token=isinstance(estimator, OfTokens))
    if isinstance(estimator, OfTokens):
        _estimate_tokens(rewarded, estimator, rules.settings)
    else:
        _estimate_calls(rewarded, estimator, rules, greedy)
    compares = isinstance(estimator, OfOutcomes) or estimator.compared_with == GROUP
    _judge_groups(batch, rewarded, rules, compares=compares)
    for part in rewarded:
        if part.left_out is not None and part.sequences:
            part.excluded[part.left_out] += part.trained
            part.sequences = []
        _check_conserved(part)
        with np.errstate(over="ignore"):  # what float32 cannot hold `whiten` names
            _place(part)


def whiten(batch: StepBatch, rules: BatchRules) -> None:
    """Whiten the advantages over all tokens that are trained, where the estimator asks for it: once for a batch, behind
    whatever takes tokens out of it.

    Raises CreditError naming a rollout whose advantages are too large to train on.
    """
    estimator = rules.estimator
    if isinstance(estimator, OfOutcomes | OfTokens) and estimator.whitened:
        _whiten(batch.parts)
    for part in batch.parts:
        _check_finite(part)


def _shaped(trajectory: Trajectory, buffer: OverlongBuffer | None) -> RolloutPart:
    """The rollout with what it counts with. A penalty stands among the named rewards, too, for estimators that compare
    those. Of an agent that raised an error nothing else counts."""
    rewards = trajectory.rewards
    if trajectory.agent_failed and trajectory.error is not None:
        rewards = replace(rewards, named={})
    if buffer is None or trajectory.reward is None:
        return RolloutPart(trajectory, trajectory.reward, rewards)
    penalty = buffer.penalty(trajectory.forest)
    rewards = credit.with_penalty(rewards, _OVERLONG, penalty)
    return RolloutPart(trajectory, trajectory.reward + penalty, rewards, penalty)


def _compared(parts: Sequence[RolloutPart], names: Collection[str]) -> list[dict[str, float]]:
    """The rewards of each that an estimator may compare, those of `names` and others. An agent that failed counts as
    failures do; one that raised an error does under every name."""
    given = {name for part in parts for name in part.rewards.named} | {*names, credit.FINAL}
    compared = []
    for part in parts:
        final, failed = part.trajectory.rewards.final, part.trajectory.agent_failed
        filled: set[str] = set()
        if failed and final is not None:
            filled = {credit.FINAL} if part.trajectory.error is None else given.difference(_PENALTIES)
        compared.append(part.rewards.named | dict.fromkeys(sorted(filled), final or 0.0))
    return compared


def _lower_by_kl(batch: StepBatch, rules: BatchRules, *, by_token: bool) -> None:
    """Lower the rewards of tokens, or the final rewards of rollouts, by the distance from the reference.

    Only tokens in a sequence have one. For estimators that compare named rewards it stands among these.
    """
    means = []
    for part in batch.rewarded:
        if not part.sequences or part.reward is None:
            continue
        distances = [_distance(part, sequence, rules.kl_penalty) for sequence in part.sequences]
        whole = np.concatenate(distances)
        means.append(mean(whole))
        part.kl_penalty = -rules.kl_coef * math.fsum(whole)
        part.reward += part.kl_penalty
        if by_token:
            part.of_tokens = _on_answers(part, part.of_calls([-rules.kl_coef * distance for distance in distances]))
        else:
            part.rewards = credit.with_penalty(part.rewards, _KL, part.kl_penalty)
    batch.kl, batch.kl_coef = mean(np.asarray(means)) if means else None, rules.kl_coef


def _distance(part: RolloutPart, sequence: TrainingSequence, kind: str) -> Floats:
    name = part.trajectory.rollout_id
    if sequence.old_log_probs is None or sequence.reference_log_probs is None:
        raise ValueError(f"rollout {name}: a kl_coef needs old_log_probs and reference_log_probs; compute them before")
    distance = reward_penalty(sequence.old_log_probs, sequence.reference_log_probs, kind)
    if not np.isfinite(distance).all():
        raise ValueError(f"rollout {name}: old or reference log probabilities of trained tokens are no numbers")
    return distance


def _on_answers(part: RolloutPart, of_calls: Mapping[str, tuple[NDArray[np.int64], Floats]]) -> dict[str, Floats]:
    """By call id a number for every token that the call sampled; 0 for those that have none."""
    by_call = {}
    for call_id, (places, numbers) in of_calls.items():
        by_call[call_id] = np.zeros(len(part.trajectory.forest.nodes[call_id].call.response_ids))
        by_call[call_id][places] = numbers
    return by_call


def _estimate_calls(
    rewarded: Sequence[RolloutPart], estimator: OfOutcomes, rules: BatchRules, greedy: Mapping[str, float] | None
) -> None:
    for part in rewarded:
        try:
            part.credits = credit.assign(rules.strategy, part.trajectory.forest, part.rewards)
        except CreditError as error:
            raise CreditError(f"rollout {part.trajectory.rollout_id}: {error}") from error
        except Exception as error:
            error.add_note(f"while the credit strategy was asked about rollout {part.trajectory.rollout_id}")
            raise
    groups = [part.trajectory.group_id for part in rewarded]
    for part, resolved in zip(rewarded, credit.resolved([part.credits for part in rewarded], groups), strict=True):
        part.credits = resolved
    estimates = of_calls(
        [part.credits for part in rewarded],
        [part.reward or 0.0 for part in rewarded],
        groups,
        estimator=estimator.function,
        settings=rules.settings,
        tokens=[
            {call_id: len(node.call.response_ids) for call_id, node in part.trajectory.forest.nodes.items()}
            for part in rewarded
        ],
        named=_compared(rewarded, rules.settings.reward_weights),
        greedy=None if greedy is None else [greedy.get(part.trajectory.group_id, math.nan) for part in rewarded],
    )
    for part, of_rollout in zip(rewarded, estimates, strict=True):
        part.estimates = of_rollout


def _estimate_tokens(rewarded: Sequence[RolloutPart], estimator: OfTokens, settings: BaselineSettings) -> None:
    """Advantages of tokens; the credit and the estimate of a call are the means over its tokens."""
    steps = [_steps(part, estimator.needs_values) for part in rewarded]
    trees = [
        tree_of(part.trajectory.forest, part.rewards, places, of_tokens=part.of_tokens, values=values)
        for part, (places, values) in zip(rewarded, steps, strict=True)
    ]
    estimates = estimator.function(trees, [part.trajectory.group_id for part in rewarded], settings)
    for part, (places, _), (returns, baselines) in zip(rewarded, steps, estimates, strict=True):
        tokens, later_on = {}, {}
        for call_id, at, later, baseline in zip(part.trajectory.forest.nodes, places, returns, baselines, strict=True):
            if len(later):
                tokens[call_id], later_on[call_id] = (at, later - baseline), (at, later)
                part.credits[call_id] = Credit(mean(later), estimator.compared_with)
                part.estimates[call_id] = Estimate(mean(later - baseline), mean(baseline), 1.0)
        part.tokens = _on_answers(part, tokens)
        if estimator.needs_values:
            part.returns = _on_answers(part, later_on)


def _steps(part: RolloutPart, needs_values: bool) -> tuple[list[NDArray[np.int64]], list[Floats] | None]:
    """Of each call the places in its answer that are steps of time, and a critic's values there, where they are needed.

    Tokens in no sequence have no value, so to the critic they are what context is.
    """
    nodes = part.trajectory.forest.nodes
    if not needs_values:
        return [np.arange(len(node.call.response_ids)) for node in nodes.values()], None
    values = [sequence.values for sequence in part.sequences if sequence.values is not None]
    if len(values) < len(part.sequences):
        raise EstimatorError(
            f"rollout {part.trajectory.rollout_id}: the estimator needs a critic's value of every trained token"
        )
    none = (np.zeros(0, np.int64), np.zeros(0))
    of_calls = part.of_calls(values)
    steps = [of_calls.get(call_id, none) for call_id in nodes]
    return [places for places, _ in steps], [numbers for _, numbers in steps]


def _whiten(parts: Sequence[RolloutPart]) -> None:
    """Whiten the advantages over the trained tokens of the batch, each of which stands in one sequence. Calls without
    credit, or with nobody to compare with, stay at 0 and do not count; those without a trained token stay as they are.
    """
    trained = list(_trained_advantages(parts))
    centre, divisor = whitening(np.concatenate([np.zeros(0), *(values for _, _, values in trained)]))
    for sequence, where, values in trained:
        sequence.advantages[where] = (values - centre) / divisor
    for part in parts:
        own = {call_id for sequence in part.sequences for call_id, _, _ in sequence.trained_by_call()}
        part.estimates |= {
            call_id: of_call.whitened(centre, divisor) for call_id, of_call in part.estimates.items() if call_id in own
        }
        part.tokens |= {
            call_id: (values - centre) / divisor for call_id, values in part.tokens.items() if call_id in own
        }


def _trained_advantages(
    parts: Sequence[RolloutPart],
) -> Iterator[tuple[TrainingSequence, NDArray[np.int64], Floats]]:
    """Where trained tokens of calls with an estimate stand, and their advantages."""
    for part in parts:
        for sequence in part.sequences:
            for call_id, where, places in sequence.trained_by_call():
                of_call = part.estimates.get(call_id)
                if of_call is not None and not of_call.silent:
                    of_tokens = part.tokens.get(call_id)
                    alike = np.full(len(where), of_call.advantage)
                    yield sequence, where, alike if of_tokens is None else of_tokens[places]


def _check_finite(part: RolloutPart) -> None:
    for sequence in part.sequences:
        returns = sequence.advantages if sequence.returns is None else sequence.returns
        if not (np.isfinite(sequence.advantages).all() and np.isfinite(returns).all()):
            raise CreditError(
                f"rollout {part.trajectory.rollout_id}: with a reward of {part.reward} its advantages are too large "
                "for float32; scale its rewards down, or divide by the standard deviation "
                "(algorithm.norm_adv_by_std_in_grpo=true)"
            )


def _judge_groups(batch: StepBatch, rewarded: Sequence[RolloutPart], rules: BatchRules, *, compares: bool) -> None:
    """Count the groups that say nothing of their rollouts, and those in which too few agents ended well, and leave
    them out where the rules do. Where the estimator `compares` no rollouts of a group, equal ones say something, too.
    """
    groups: defaultdict[str, list[RolloutPart]] = defaultdict(list)
    for part in rewarded:
        groups[part.trajectory.group_id].append(part)
    for parts in groups.values():
        if sum(not part.trajectory.agent_failed for part in parts) < rules.min_successful_rollouts:
            batch.groups_of_few_successes += 1
            for part in parts:
                part.left_out = "few_successes"
        elif len(parts) == 1:
            batch.groups_of_one += 1
            if rules.groups_of_one == "drop":
                parts[0].left_out = "group_of_one"
        elif compares and not any(map(_says_something, parts)):
            batch.groups_without_variance += 1
            for part in parts:
                part.alike = True
                if rules.groups_without_variance == "drop":
                    part.left_out = "zero_variance"


def _says_something(part: RolloutPart) -> bool:
    return any(of_call.advantage for of_call in part.estimates.values()) or any(map(np.any, part.tokens.values()))


def _fill(part: RolloutPart, index: int, rules: BatchRules) -> None:
    """The rollout's sequences, and where its other tokens went."""
    part.excluded.update(part.trajectory.left_out)
    for row in part.trajectory.rows:
        if reason := row.excluded or part.left_out:
            part.excluded[reason] += sum(row.loss_mask)
            continue
        sequence = sequence_of(row, index, media=part.trajectory.media)
        if rules.max_tokens is not None and len(sequence) > rules.max_tokens:
            from_left = rules.overlong == "truncate_left"
            cut = sequence.truncate_left if from_left else sequence.truncate_response
            part.excluded["truncated"] += cut(rules.max_tokens)
        if rules.need_log_probs:
            has_log_prob = ~np.isnan(sequence.rollout_log_probs)
            part.excluded["no_logprob"] += int((~has_log_prob).sum())
            sequence.keep(has_log_prob)
        if len(sequence.trained):
            part.sequences.append(sequence)
    part.excluded = +part.excluded


def _check_conserved(part: RolloutPart) -> None:
    trajectory = part.trajectory
    if part.trained + part.excluded.total() != trajectory.sampled_tokens:
        raise ConservationError(
            f"rollout {trajectory.rollout_id}: of {trajectory.sampled_tokens} sampled tokens {part.trained} are in the "
            f"batch and {part.excluded.total()} are excluded ({dict(part.excluded)}): look at it with "
            f"`lightning-rl explain {trajectory.rollout_id}`"
        )


def _place(part: RolloutPart) -> None:
    """Put advantages, and returns where there are any, on the rollout's sequences."""
    advantages = {call_id: of_call.advantage for call_id, of_call in part.estimates.items()} | part.tokens
    for sequence in part.sequences:
        sequence.advantages = sequence.spread(advantages)
        if part.returns:
            sequence.returns = sequence.spread(part.returns)


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
        record = _credited(part.credits.get(call_id), part.estimates.get(call_id))
        if call_id in trained:
            sequence, where, places = trained[call_id]
            old = sequence.old_log_probs
            calls[call_id] = replace(
                record,
                weight=weight,
                mini_batch=mini_batch,
                trained_tokens=len(places),
                kept=None if len(places) == len(node.call.response_ids) else places.tolist(),
                old_log_probs=b"" if old is None else pack_logprobs(old[where].tolist()),
                advantages=pack_logprobs(sequence.advantages[where].tolist()) if part.tokens else b"",
                entropies=b"" if sequence.entropies is None else _packed_entropies(sequence.entropies, where),
                cut_context=sequence.cut_context,
            )
        else:
            own_reason = why.get(call_id) or part.calls_left_out.get(call_id)
            reason = own_reason or part.left_out or _why_nothing_is_left(node.call)
            calls[call_id] = replace(record, left_out=reason)
    return RolloutRecord(
        rollout_id=trajectory.rollout_id,
        group_id=trajectory.group_id,
        reward=part.reward,
        rewards=trajectory.rewards.named,
        agent_failed=trajectory.agent_failed,
        left_out=part.left_out,
        alike=part.alike,
        calls=calls,
        overlong_penalty=part.penalty,
        kl_penalty=part.kl_penalty,
    )


def _packed_entropies(entropies: Any, where: NDArray[np.int64]) -> bytes:
    return pack_logprobs(entropies.float().cpu().numpy()[where].tolist())


def _credited(call_credit: Credit | None, estimate: Estimate | None) -> CallRecord:
    """How a call's advantage came about; compared with nobody, its baseline is itself."""
    if call_credit is None or estimate is None:
        return CallRecord()
    plus = None
    if call_credit.plus is not None and estimate.plus is not None:
        second = _credited(call_credit.plus, estimate.plus)
        plus = PlusRecord(
            credit=call_credit.plus.reward,
            compared_with=second.compared_with,
            baseline=second.baseline,
            scale=second.scale,
            advantage=second.advantage,
        )
    alone = math.isinf(estimate.scale)
    return CallRecord(
        credit=call_credit.reward,
        compared_with=call_credit.compared_with,
        advantage=estimate.advantage,
        baseline=call_credit.reward if alone else estimate.baseline,
        scale=1.0 if alone else estimate.scale,
        plus=plus,
    )


def _why_nothing_is_left(call: Call) -> str:
    """Why a call is in no sequence, although neither it nor its row nor its rollout was left out."""
    if not call.response_ids:
        return "no_tokens"
    return "no_logprob" if call.logprobs is None else "truncated"
