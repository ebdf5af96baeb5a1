"""Finished rollouts as the trainer sees them: rewards, forest, rows, and what became of every sampled token.

Only the counting attempt of a rollout has rows; the tokens of its other attempts are excluded, by reason.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lightning_rl.store.contract import AttemptTrace, ErrorInfo, Rollout, RolloutTrace
from lightning_rl.store.rewards import added_up, rewards_by_call
from lightning_rl.trajectories.call_filter import context_of
from lightning_rl.trajectories.conversation import SpokenCall, spoken_calls
from lightning_rl.trajectories.termination import ended_by
from lightning_rl.trajectories.token_account import ConservationError
from lightning_rl.trajectories.trace_views import log_of, why_excluded
from lightning_rl_adapters import conventions, credit, forest, rows
from lightning_rl_adapters.call import Call, calls_of
from lightning_rl_adapters.call_names import names_of
from lightning_rl_adapters.conventions import OtelCalls
from lightning_rl_adapters.credit import Rewards
from lightning_rl_adapters.forest import Forest
from lightning_rl_adapters.media import media_of
from lightning_rl_adapters.rows import Row

ACCURACY = "acc"  # verl's name of what a reward function gives as a number
_PRINTED = 400  # characters at the end of what a rollout without a call printed


class Trajectory(msgspec.Struct, kw_only=True):
    """One ended rollout.

    `reward` is what it counts with in its group: the final reward, else the sum of those of its calls; None where it
    takes no part (infrastructure failed, it was `cancelled`, or `agent_failure: exclude`). `rewards` are what credit is
    given from. `left_out` counts tokens of its calls that no row trains, by reason, `excluded` those of its other
    attempts; the masks of `rows` hold all others. `why_left_out` has the reason of every call that is left out for
    itself. `other_calls` went to other models than the policy. `lost_rewards` were for calls that are not there.
    `ended_by` is what ended it, where an agent loop says it (`termination`). `media` has the images that its rows show,
    by their SHA-256. Where the agent asked several policies, `of_policies` has by name what each of them learns from,
    and the rows here are only to be counted. `recorded_tokens` are those that its gateways recorded for each of its
    attempts, by attempt id; `span_tokens` are those of all its attempts that agents' spans tell of: no gateway counted
    them. Of one without any call, `printed` is the end of what it printed. `task` is what it ran on. `spoken` has its
    calls as messages, by call id, where they were asked for. `unrewarded`: it was given no reward, and counts with 0,
    since the run needs none.
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
    recorded_tokens: dict[str, int] = {}
    span_tokens: int = 0
    ended_by: str | None = None
    printed: str = ""
    media: dict[str, bytes] = {}
    task: Any = None
    spoken: dict[str, SpokenCall] = {}
    unrewarded: bool = False
    cancelled: bool = False
    of_policies: "dict[str, Trajectory]" = {}

    @property
    def given_reward(self) -> float | None:
        """`reward`, but for one that nobody gave."""
        return None if self.unrewarded else self.reward

    @property
    def lost(self) -> bool:
        """Whether infrastructure failed on every attempt."""
        return self.error is not None and self.error.infrastructure

    def of(self, policy: str) -> "Trajectory":
        """What a policy learns from: of several the part of that name, else the whole."""
        return self.of_policies.get(policy, self)

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
    model: str | Collection[str] | None = None,
    select: Callable[[Call], bool] | None = None,
    weights: Mapping[str, float] | None = None,
    whole: bool = False,
    spans: bool = False,
    reward: str | None = None,
    messages: bool = False,
    rewards_count: bool = True,
) -> Trajectory:
    """Read a rollout's trace.

    `agent_failure` is the reward of a rollout whose agent failed or gave none (None: it is left out); rows longer than
    `max_tokens` are excluded as overlong, with `whole` all the others of the rollout too.
    With a `model` (or several) only its calls are read: the token account is per model, and helpers have no place in
    the policy's. A named reward `reward`, where the rollout has one, takes the place of the final one.
    Of these, calls that `select` is false of are context (`not_selected`), and so is `housekeeping`. `weights` make the
    final reward of the named ones. With `spans` the calls that agents' own spans tell of with token ids are read beside
    the gateway's; with `messages` the messages of calls are kept. Where no `rewards_count`, an agent that gives
    none has not failed for it.

    Raises ForestError and ConservationError where the records do not fit together.
    """
    records = _read(trace, {model} if isinstance(model, str) else model, spans=spans, messages=messages)
    rewards = records.rewards if weights is None else credit.weighed(records.rewards, weights)
    if reward is not None and reward in rewards.named:
        rewards = msgspec.structs.replace(rewards, final=rewards.named[reward])
    unrewarded = not rewards_count and trace.rollout.status == "succeeded" and credit.counting(rewards) is None
    if unrewarded:
        rewards = msgspec.structs.replace(rewards, final=0.0)
    judged = _judge(records, rewards, agent_failure, select)
    cut = _cut(records, judged, max_tokens, whole=whole)
    rollout, calls = trace.rollout, records.calls
    trajectory = Trajectory(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id or rollout.rollout_id,
        reward=judged.reward,
        rewards=judged.rewards,
        forest=records.forest,
        rows=cut,
        calls=len(calls),
        sampled_tokens=sum(call.sampled_tokens for call in calls),
        excluded=dict(records.excluded),
        agent_failed=judged.agent_failed,
        left_out=judged.left_out,
        why_left_out=judged.why_left_out,
        other_calls=records.other_calls,
        lost_rewards=records.lost_rewards,
        error=rollout.error,
        recorded_tokens=records.recorded_tokens,
        span_tokens=records.span_tokens,
        ended_by=records.ended_by,
        printed=records.printed,
        media=records.media,
        task=rollout.task,
        spoken=records.spoken,
        unrewarded=unrewarded,
        cancelled=rollout.status == "cancelled",
    )
    trajectory.check()
    return trajectory


@dataclass
class _Records:
    """What the spans of a rollout say: of its counting attempt, and of the tokens of its other attempts."""

    rollout: Rollout
    forest: Forest
    rewards: Rewards = field(default_factory=Rewards)
    excluded: Counter[str] = field(default_factory=Counter)
    other_calls: int = 0
    lost_rewards: int = 0
    recorded_tokens: dict[str, int] = field(default_factory=dict)
    span_tokens: int = 0
    ended_by: str | None = None
    printed: str = ""
    media: dict[str, bytes] = field(default_factory=dict)
    spoken: dict[str, SpokenCall] = field(default_factory=dict)

    @property
    def calls(self) -> list[Call]:
        return [node.call for node in self.forest.nodes.values()]


@dataclass(frozen=True)
class _Judgement:
    """What a rollout counts with, and which of its calls are not trained; `context` are those that were chosen out."""

    reward: float | None
    rewards: Rewards
    agent_failed: bool
    context: dict[str, str]
    why_left_out: dict[str, str]
    left_out: dict[str, int]


def _read(trace: RolloutTrace, models: Collection[str] | None, *, spans: bool, messages: bool) -> _Records:
    """The calls, rewards and forest of the counting attempt, and the tokens of the others, by reason."""
    rollout = trace.rollout
    records = _Records(rollout, forest.build([]))
    for attempt in trace.attempts:
        recorded, from_spans = _calls_of(attempt, spans=spans)
        names = names_of(attempt.spans) | from_spans.answer_ids
        calls = [call for call in recorded if models is None or call.model in models]
        by_spans = {call.call_id for call in from_spans.calls}
        of_gateway = [call for call in calls if call.call_id not in by_spans]
        records.other_calls += len(recorded) - len(calls)
        recorded_tokens = sum(call.sampled_tokens for call in of_gateway)
        span_tokens = sum(call.sampled_tokens for call in calls if call.call_id in by_spans)
        records.recorded_tokens[attempt.attempt.attempt_id] = recorded_tokens
        records.span_tokens += span_tokens
        if attempt.attempt.attempt_id == rollout.counting_attempt_id:
            records.media = media_of(attempt.spans)
            records.forest = forest.build(calls if rollout.mode != "train" else map(_with_known_logprobs, calls))
            records.ended_by = ended_by(attempt.spans)
            if not recorded:
                log = log_of(attempt)
                records.printed = "\n".join((log.stdout, log.stderr)).strip()[-_PRINTED:]
            records.spoken = spoken_calls(attempt.spans, calls) if messages else {}
            ids = {call.call_id for call in recorded}
            records.rewards, records.lost_rewards = _rewards(attempt, rollout, names, ids)
        elif reason := why_excluded(rollout, attempt.attempt):
            records.excluded[reason] += recorded_tokens + span_tokens
    return records


def _calls_of(attempt: AttemptTrace, *, spans: bool) -> tuple[list[Call], OtelCalls]:
    """The calls of an attempt, and those of them that its agent's spans tell of."""
    recorded = calls_of(attempt.spans)
    if not spans:
        return recorded, OtelCalls([], [], [])
    from_spans = conventions.told_of(attempt.spans)
    return conventions.calls_with_otel(recorded, from_spans.calls), from_spans


def _judge(
    records: _Records, rewards: Rewards, agent_failure: float | None, select: Callable[[Call], bool] | None
) -> _Judgement:
    """What the rollout counts with, and which calls are left out for which reason."""
    rollout, calls = records.rollout, records.calls
    infrastructure = rollout.counting_attempt_id is None
    reward = credit.counting(rewards)
    agent_failed = not infrastructure and (rollout.status == "failed" or reward is None)
    if agent_failed:  # what its calls were given before counts for nothing
        rewards = msgspec.structs.replace(rewards, final=agent_failure, of_calls={})
    context = context_of(calls, select, training=rollout.mode == "train")
    why = {call.call_id: reason for call in calls if (reason := rows.why_left_out(call, context))}
    tokens: Counter[str] = Counter({"overshoot": sum(call.overshoot for call in calls)})
    for call in calls:
        if call.call_id in why:
            tokens[why[call.call_id]] += len(call.response_ids)
    return _Judgement(
        reward=None if infrastructure else agent_failure if agent_failed else reward,
        rewards=rewards,
        agent_failed=agent_failed,
        context=context,
        why_left_out=why,
        left_out={reason: count for reason, count in tokens.items() if count},
    )


def _cut(records: _Records, judged: _Judgement, max_tokens: int | None, *, whole: bool) -> list[Row]:
    """The rows of the rollout; those that are too long are excluded, with `whole` all others too."""
    values = credit.final_values(records.forest, judged.reward)
    cut = rows.cut(records.forest, values, max_tokens=max_tokens, left_out=judged.context)
    if whole and any(row.excluded == "overlong" for row in cut):
        for row in cut:
            row.excluded = row.excluded or "overlong"
    for row in cut:
        forest.check_held(row.media, records.media, f"rollout {records.rollout.rollout_id}")
    return cut


def informative(trajectories: Sequence[Trajectory], metric: str) -> list[list[Trajectory]]:
    """The groups whose rollouts differ in a reward, in their order: the one that they count with (`reward`), or one by
    name; `acc` is the first one where none is named so. Rollouts that take no part stay with their group."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    if metric == ACCURACY and not any(ACCURACY in trajectory.rewards.named for trajectory in trajectories):
        metric = "reward"
    return [group for group in groups.values() if len({_metric(t, metric) for t in group if t.reward is not None}) > 1]


def _metric(trajectory: Trajectory, metric: str) -> float | None:
    return trajectory.reward if metric == "reward" else trajectory.rewards.named.get(metric)


def _rewards(trace: AttemptTrace, rollout: Rollout, names: Mapping[str, str], calls: set[str]) -> tuple[Rewards, int]:
    """What the attempt was given, and how many rewards were for calls that it did not make; `names` lead to `calls`."""
    by_call = rewards_by_call(trace.rewards, names)
    of_calls = {call_id: added_up(rewards) for call_id, rewards in by_call.items() if call_id in calls}
    lost = sum(len(rewards) for call_id, rewards in by_call.items() if call_id not in calls)
    return Rewards(final=rollout.reward, named=dict(rollout.rewards), of_calls=of_calls), lost


def _with_known_logprobs(call: Call) -> Call:
    """The call without logprobs that it was not sampled with: the trainer recomputes them, or leaves its tokens out."""
    return call if call.logprob_kind != "raw" else msgspec.structs.replace(call, logprobs=None)
