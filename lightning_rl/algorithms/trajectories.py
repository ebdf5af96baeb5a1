"""Finished rollouts as the trainer sees them: reward, rows, and what became of every sampled token.

Only the counting attempt of a rollout has rows; the tokens of its other attempts are excluded, by reason.
"""

from collections import Counter
from collections.abc import Callable

import msgspec

from lightning_rl.store.contract import ErrorInfo, Rollout, RolloutTrace
from lightning_rl_adapters import credit, forest, rows
from lightning_rl_adapters.call import Call, calls_of
from lightning_rl_adapters.rows import Row


class Trajectory(msgspec.Struct, kw_only=True):
    """One ended rollout.

    `reward` is None where it takes no part in its group (infrastructure failed, or `agent_failure: exclude`).
    `left_out` counts tokens of its calls that no row trains, by reason, `excluded` those of its other attempts; the
    masks of `rows` hold all others. `other_calls` went to other models than the policy.
    `earlier_tokens` are those of all its attempts that were sampled before the present run of the trainer began.
    """

    rollout_id: str
    group_id: str
    reward: float | None
    rows: list[Row]
    calls: int
    sampled_tokens: int
    excluded: dict[str, int]
    agent_failed: bool
    left_out: dict[str, int] = {}
    other_calls: int = 0
    error: ErrorInfo | None = None
    earlier_tokens: int = 0


def trajectory_of(
    trace: RolloutTrace,
    *,
    agent_failure: float | None,
    max_tokens: int | None = None,
    began_ns: int = 0,
    model: str | None = None,
    select: Callable[[Call], bool] | None = None,
) -> Trajectory:
    """Read a rollout's trace.

    `agent_failure` is the reward of a rollout whose agent failed or gave none (None: it is left out); rows longer than
    `max_tokens` are excluded as overlong; calls that ended before `began_ns` (since the epoch) count as earlier.
    With a `model` only its calls are read: the token account is per model, and helpers have no place in the policy's.
    Of these, calls that `select` is false of are context: `not_selected`.
    """
    rollout = trace.rollout
    excluded: Counter[str] = Counter()
    counting = forest.build([])
    earlier = others = 0
    for attempt in trace.attempts:
        recorded = calls_of(attempt.spans)
        calls = [call for call in recorded if model is None or call.model == model]
        others += len(recorded) - len(calls)
        earlier += sum(call.sampled_tokens for call in calls if call.end_ns < began_ns)
        if attempt.attempt.attempt_id == rollout.counting_attempt_id:
            counting = forest.build(calls)
        else:
            excluded[_why_not_counting(rollout)] += sum(call.sampled_tokens for call in calls)
    infrastructure = rollout.counting_attempt_id is None
    agent_failed = not infrastructure and (rollout.status == "failed" or rollout.reward is None)
    reward = agent_failure if agent_failed else rollout.reward
    calls = [node.call for node in counting.nodes.values()]
    unselected = {call.call_id: "not_selected" for call in calls if select is not None and not select(call)}
    if rollout.mode == "train":
        unselected |= _without_their_probabilities(calls)
    left_out: Counter[str] = Counter({"overshoot": sum(call.overshoot for call in calls)})
    for call in calls:
        if call.response_ids and (reason := rows.why_left_out(call, unselected)):
            left_out[reason] += len(call.response_ids)
    return Trajectory(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id or rollout.rollout_id,
        reward=None if infrastructure else reward,
        rows=rows.cut(counting, credit.final(counting, reward or 0.0), max_tokens=max_tokens, left_out=unselected),
        calls=len(calls),
        sampled_tokens=sum(call.sampled_tokens for call in calls),
        excluded=dict(excluded),
        agent_failed=agent_failed,
        left_out={reason: tokens for reason, tokens in left_out.items() if tokens},
        other_calls=others,
        error=rollout.error,
        earlier_tokens=earlier,
    )


def _without_their_probabilities(calls: list[Call]) -> dict[str, str]:
    """The calls whose logprobs are not those that they were sampled with: a ratio to them means nothing."""
    return {
        call.call_id: f"{call.logprob_kind}_logprobs"
        for call in calls
        if call.logprob_kind != "sampled" and call.trainable
    }


def _why_not_counting(rollout: Rollout) -> str:
    if rollout.counting_attempt_id is not None:
        return "superseded"
    return "cancelled" if rollout.status == "cancelled" else "infrastructure"
