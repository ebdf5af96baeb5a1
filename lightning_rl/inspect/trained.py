"""How a run cuts rows from rollouts, and what training made of one, as its step's record says it.

Pure: records in, views out. Invariant: nothing is computed anew; where no record says it, it is not told.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from lightning_rl.trajectories.step_record import CallRecord, PlusRecord, RolloutRecord, StepRecord
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.rows import Row

TrainingRecord = tuple[StepRecord, RolloutRecord]  # a step's record, and its part of one rollout


class TrainedBy(NamedTuple):
    """What is known of the run that a rollout is from; nothing of one that was no training.

    Its rows have up to `max_tokens` and the calls that `select` takes; None: all. `record` is that of the step
    that trained the rollout, or `not_recorded` says why there is none. With `sampler_is_old` training took the
    sampler's logprobs for its own.
    """

    max_tokens: int | None = None
    select: Callable[[Call], bool] | None = None
    record: TrainingRecord | None = None
    not_recorded: str | None = None
    sampler_is_old: bool = False


UNKNOWN = TrainedBy()


class CallTraining(msgspec.Struct, frozen=True, kw_only=True):
    """What a step made of one call: `CallRecord` for people. `rule` gave the credit, `estimator` made an advantage of
    it; `left_out` is why none of the call is trained, be it for itself or with its whole rollout."""

    rule: str
    credit: float | None
    compared_with: str | None
    baseline: float
    scale: float
    advantage: float
    weight: float
    mini_batch: int | None
    trained_tokens: int
    left_out: str | None
    estimator: str = "grpo"
    plus: PlusRecord | None = None


class RolloutTraining(msgspec.Struct, frozen=True, kw_only=True):
    """The step that a rollout was trained in. `reward` is the one it counted with in its group; `policy_version` is
    that of the weights that the step updated."""

    step: int
    policy_version: int
    rule: str
    loss_agg_mode: str
    group_id: str
    reward: float | None
    rewards: dict[str, float]
    agent_failed: bool
    left_out: str | None
    overlong_penalty: float = 0.0
    kl_penalty: float = 0.0


def rollout_training(record: TrainingRecord) -> RolloutTraining:
    """The rollout's part of the record."""
    step, rollout = record
    return RolloutTraining(
        step=step.step,
        policy_version=step.policy_version,
        rule=step.rule,
        loss_agg_mode=step.loss_agg_mode,
        group_id=rollout.group_id,
        reward=rollout.reward,
        rewards=rollout.rewards,
        agent_failed=rollout.agent_failed,
        left_out=rollout.left_out,
        overlong_penalty=rollout.overlong_penalty,
        kl_penalty=rollout.kl_penalty,
    )


def call_training(record: TrainingRecord, call_id: str) -> CallTraining | None:
    """A call's part of the record; None for one that is no call of the policy."""
    step, rollout = record
    call = rollout.calls.get(call_id)
    if call is None:
        return None
    return CallTraining(
        rule=step.rule,
        credit=call.credit,
        compared_with=call.compared_with,
        baseline=call.baseline,
        scale=call.scale,
        advantage=call.advantage,
        weight=call.weight,
        mini_batch=call.mini_batch,
        trained_tokens=call.trained_tokens,
        left_out=why_left_out(rollout, call),
        estimator=step.estimator,
        plus=call.plus,
    )


def why_left_out(rollout: RolloutRecord, call: CallRecord) -> str | None:
    """Why nothing of a call was trained, or None."""
    return None if call.trained_tokens else call.left_out or rollout.left_out


def left_out_calls(record: TrainingRecord | None) -> dict[str, str]:
    """The calls of which nothing was trained, each with its reason."""
    if record is None:
        return {}
    calls = record[1].calls
    return {call_id: reason for call_id, call in calls.items() if (reason := why_left_out(record[1], call))}


def leave_out_tokens(cut: Iterable[Row], record: TrainingRecord | None) -> None:
    """Make context of those tokens that the step left out of calls that it trained, as a rollout correction or
    `max_response_length` does."""
    calls = {} if record is None else record[1].calls
    kept_places = {
        call_id: set(call.kept) for call_id, call in calls.items() if call.trained_tokens and call.kept is not None
    }
    for row in cut if kept_places else ():
        next_place: Counter[str] = Counter()
        for at, call_id in enumerate(row.call_ids):
            if call_id in kept_places:
                if next_place[call_id] not in kept_places[call_id]:
                    row.loss_mask[at] = 0
                    row.logprobs[at] = row.policy_versions[at] = row.call_ids[at] = row.temperature[at] = None
                next_place[call_id] += 1


def places(call: CallRecord, sampled: int) -> list[int]:
    """The places of a call's trained tokens among the `sampled` ones of its answer."""
    if not call.trained_tokens:
        return []
    return list(range(sampled)) if call.kept is None else call.kept
