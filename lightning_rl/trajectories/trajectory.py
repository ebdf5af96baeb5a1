"""Finished rollouts as the trainer sees them: rewards, forest, rows, and what became of every sampled token.

Only the counting attempt of a rollout has rows; the tokens of its other attempts are excluded, by reason.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from lightning_rl.store.contract import AttemptTrace, ErrorInfo, RolloutTrace
from lightning_rl.store.rewards import added_up, rewards_by_call
from lightning_rl.trajectories.termination import ended_by
from lightning_rl.trajectories.token_account import ConservationError
from lightning_rl.trajectories.trace_views import why_excluded
from lightning_rl_adapters import credit, forest, rows
from lightning_rl_adapters.call import Call, calls_of
from lightning_rl_adapters.call_names import names_of
from lightning_rl_adapters.credit import Rewards
from lightning_rl_adapters.forest import Forest
from lightning_rl_adapters.media import media_of
from lightning_rl_adapters.rows import Row


class Trajectory(msgspec.Struct, kw_only=True):
    """One ended rollout.

    `reward` is what it counts with in its group: the final reward, else the sum of those of its calls; None where it
    takes no part (infrastructure failed, or `agent_failure: exclude`). `rewards` are what credit is given from.
    `left_out` counts tokens of its calls that no row trains, by reason, `excluded` those of its other attempts; the
    masks of `rows` hold all others. `why_left_out` has the reason of every call that is left out for itself.
    `other_calls` went to other models than the policy. `lost_rewards` were for calls that are not there. `ended_by` is
    what ended it, where an agent loop says it (`loops.limits`). `media` has the images that its rows show, by their
    SHA-256. `earlier_tokens` are those of all its attempts that were sampled before the present run of the trainer
    began.
    """

    rollout_id: str
    group_id: str
    reward: float | None
    rewards: Rewards
    forest: Forest
    rows: list[Row]
    calls: int
    sampled_tokens: int
    excluded: dict[str, int]
    agent_failed: bool
    left_out: dict[str, int] = {}
    why_left_out: dict[str, str] = {}
    other_calls: int = 0
    lost_rewards: int = 0
    error: ErrorInfo | None = None
    earlier_tokens: int = 0
    ended_by: str | None = None
    media: dict[str, bytes] = {}

    def check(self) -> None:
        """Law 2 within a rollout: every sampled token stands in one mask, or is left out. Raises ConservationError."""
        masked = sum(sum(row.loss_mask) for row in self.rows)
        left_out = sum(self.left_out.values())
        if masked + left_out != self.sampled_tokens:
            raise ConservationError(
                f"rollout {self.rollout_id}: its calls hold {self.sampled_tokens} sampled tokens, but its rows train "
                f"{masked} and {left_out} are left out ({self.left_out}): `lightning-rl explain {self.rollout_id}`"
            )


def trajectory_of(
    trace: RolloutTrace,
    *,
    agent_failure: float | None,
    max_tokens: int | None = None,
    began_ns: int = 0,
    model: str | None = None,
    select: Callable[[Call], bool] | None = None,
    weights: Mapping[str, float] | None = None,
    whole: bool = False,
) -> Trajectory:
    """Read a rollout's trace.

    `agent_failure` is the reward of a rollout whose agent failed or gave none (None: it is left out); rows longer than
    `max_tokens` are excluded as overlong, with `whole` all the others of the rollout too; calls that ended before
    `began_ns` (since the epoch) count as earlier.
    With a `model` only its calls are read: the token account is per model, and helpers have no place in the policy's.
    Of these, calls that `select` is false of are context: `not_selected`. `weights` make the final reward of the named
    ones.

    Raises ForestError and ConservationError where the records do not fit together.
    """
    rollout = trace.rollout
    excluded: Counter[str] = Counter()
    counting = forest.build([])
    rewards, lost_rewards = Rewards(), 0
    earlier = others = 0
    ended: str | None = None
    media: dict[str, bytes] = {}
    for attempt in trace.attempts:
        recorded = calls_of(attempt.spans)
        calls = [call for call in recorded if model is None or call.model == model]
        others += len(recorded) - len(calls)
        earlier += sum(call.sampled_tokens for call in calls if call.end_ns < began_ns)
        if attempt.attempt.attempt_id == rollout.counting_attempt_id:
            media = media_of(attempt.spans)
            counting = forest.build(calls if rollout.mode != "train" else map(_with_known_logprobs, calls))
            ended = ended_by(attempt.spans)
            rewards, lost_rewards = _rewards(attempt, rollout.rewards, rollout.reward, {c.call_id for c in recorded})
        elif reason := why_excluded(rollout, attempt.attempt):
            excluded[reason] += sum(call.sampled_tokens for call in calls)
    if weights is not None:
        rewards = credit.weighed(rewards, weights)
    infrastructure = rollout.counting_attempt_id is None
    given = _given(rewards)
    agent_failed = not infrastructure and (rollout.status == "failed" or given is None)
    if agent_failed:
        rewards = msgspec.structs.replace(rewards, final=agent_failure)
    calls = [node.call for node in counting.nodes.values()]
    left_out = {call.call_id: "not_selected" for call in calls if select is not None and not select(call)}
    if rollout.mode == "train":
        # A greedy answer is no sample of the policy, whatever its logprobs.
        left_out |= {c.call_id: "greedy_logprobs" for c in calls if c.logprob_kind == "greedy" and c.trainable}
    why = {call.call_id: reason for call in calls if (reason := rows.why_left_out(call, left_out))}
    tokens: Counter[str] = Counter({"overshoot": sum(call.overshoot for call in calls)})
    for call in calls:
        if call.call_id in why:
            tokens[why[call.call_id]] += len(call.response_ids)
    reward = None if infrastructure else agent_failure if agent_failed else given
    cut = rows.cut(counting, credit.final_values(counting, reward), max_tokens=max_tokens, left_out=left_out)
    if whole and any(row.excluded == "overlong" for row in cut):
        for row in cut:
            row.excluded = row.excluded or "overlong"
    trajectory = Trajectory(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id or rollout.rollout_id,
        reward=reward,
        rewards=rewards,
        forest=counting,
        rows=cut,
        calls=len(calls),
        sampled_tokens=sum(call.sampled_tokens for call in calls),
        excluded=dict(excluded),
        agent_failed=agent_failed,
        left_out={reason: count for reason, count in tokens.items() if count},
        why_left_out=why,
        other_calls=others,
        lost_rewards=lost_rewards,
        error=rollout.error,
        earlier_tokens=earlier,
        ended_by=ended,
        media=media,
    )
    for row in cut:
        forest.check_held(row.media, media, f"rollout {rollout.rollout_id}")
    trajectory.check()
    return trajectory


def informative(trajectories: Sequence[Trajectory], metric: str) -> list[list[Trajectory]]:
    """The groups whose rollouts differ in a reward, in their order: the one that they count with (`reward`), or one by
    name. Rollouts that take no part stay with their group."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return [group for group in groups.values() if len({_metric(t, metric) for t in group if t.reward is not None}) > 1]


def _metric(trajectory: Trajectory, metric: str) -> float | None:
    return trajectory.reward if metric == "reward" else trajectory.rewards.named.get(metric)


def _rewards(
    trace: AttemptTrace, named: Mapping[str, float], final: float | None, calls: set[str]
) -> tuple[Rewards, int]:
    """What the attempt was given, and how many rewards were for calls that it did not make."""
    given = rewards_by_call(trace.rewards, names_of(trace.spans))
    of_calls = {call_id: added_up(rewards) for call_id, rewards in given.items() if call_id in calls}
    lost = sum(len(rewards) for call_id, rewards in given.items() if call_id not in calls)
    return Rewards(final=final, named=dict(named), of_calls=of_calls), lost


def _given(rewards: Rewards) -> float | None:
    """What a rollout counts with: the final reward, else the sum of its calls'; None where it was given nothing."""
    if rewards.final is not None or not rewards.of_calls:
        return rewards.final
    return sum(value for named in rewards.of_calls.values() for value in named.values())


def _with_known_logprobs(call: Call) -> Call:
    """The call without logprobs that it was not sampled with: the trainer recomputes them, or leaves its tokens out."""
    return call if call.logprob_kind != "raw" else msgspec.structs.replace(call, logprobs=None)
