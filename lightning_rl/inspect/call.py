"""One recorded call in full: who sampled it, what it added and answered, what it was given, each of its tokens.

Pure: a trace and a step's record in, a record out; `draw` makes text of it. Places of tokens are counted from 0 in the
call's answer; logprobs are natural logs.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from lightning_rl.errors import Explained
from lightning_rl.inspect import trained
from lightning_rl.inspect.explain import marks_of, numbers_of, row_views, rows_of
from lightning_rl.inspect.trained import UNKNOWN, CallTraining, RolloutTraining, TrainedBy, TrainingRecord
from lightning_rl.store.contract import AttemptTrace, RolloutTrace
from lightning_rl.store.rewards import added_up, rewards_by_call
from lightning_rl.trajectories.step_record import CallRecord
from lightning_rl.trajectories.trace_views import why_excluded
from lightning_rl_adapters import forest, semconv
from lightning_rl_adapters.call import Call, VersionRange, calls_of
from lightning_rl_adapters.call_names import names_of
from lightning_rl_adapters.media import Placed
from lightning_rl_adapters.span import unpack_logprobs

Decode = Callable[[list[int]], str]

_PART_OF_AN_ID = 6  # a shorter number is meant as that of a call


class NoSuchCall(Explained):
    """The rollout has no such call, or the call no such token."""


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token; of its logprobs those that are known. `logprob` was recorded as it was sampled,
    `trainer_logprob` is the trainer's before the update, `difference` the latter less the former, `now_logprob` that of
    the run's newest checkpoint."""

    place: int
    token_id: int
    text: str | None
    trained: bool
    policy_version: int | None
    logprob: float | None
    trainer_logprob: float | None = None
    difference: float | None = None
    now_logprob: float | None = None


class CallDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A call in full.

    `excluded` is why nothing of its attempt is trained. `rows` are the numbers of the rows that hold it, `trained_in`
    that of the one that trains it. `rewards` are those of its attempt, `call_rewards` its own, by name.
    `sampler_is_old`: training took the sampler's logprobs for its own (`bypass_mode`), so the two cannot differ.
    `media` are the images among the tokens that its prompt adds. `checkpoint` is the one that `now_logprob` is of.
    `run_dir` is the run's folder, None where it was read elsewhere.
    """

    rollout_id: str
    attempt_id: str
    attempt: int
    excluded: str | None
    number: int
    call_id: str
    continues: int | None
    agent: str | None
    model: str
    dialect: str | None
    finish_reason: str
    temperature: float
    sampling_requested: dict[str, Any]
    sampling_effective: dict[str, Any]
    ignored_fields: list[str]
    logprob_kind: str
    policy_versions: list[VersionRange]
    marks: list[str]
    prompt_tokens: int
    sampled_tokens: int
    overshoot: int
    messages: list[dict[str, Any]]
    answer: list[dict[str, Any]]
    rewards: dict[str, float]
    call_rewards: dict[str, float]
    training: CallTraining | None
    rollout_training: RolloutTraining | None
    not_recorded: str | None
    sampler_is_old: bool
    rows: list[int]
    trained_in: int | None
    row_excluded: str | None
    tokens: list[TokenView]
    checkpoint: str | None = None
    media: list[Placed] = []
    run_dir: str | None = None


def find(trace: RolloutTrace, name: str) -> tuple[AttemptTrace, str]:
    """The attempt and id of the one call that is `name`: its number in the attempt that counts (the latest, where none
    does), or one of the names that its answer went by, or how its id begins or ends. Raises NoSuchCall."""
    counting = trace.rollout.counting_attempt_id
    shown = next((each for each in trace.attempts if each.attempt.attempt_id == counting), None)
    shown = shown or (trace.attempts[-1] if trace.attempts else None)
    numbered = [] if shown is None else calls_of(shown.spans)
    if shown is not None and name.isdecimal() and 1 <= int(name) <= len(numbered):
        return shown, numbered[int(name) - 1].call_id
    calls = {call.call_id: each for each in trace.attempts for call in calls_of(each.spans)}
    names = {other: call_id for each in trace.attempts for other, call_id in names_of(each.spans).items()}
    if name in names:
        return calls[names[name]], names[name]
    is_number = name.isdecimal() and len(name) < _PART_OF_AN_ID
    near = [
        call_id for call_id in calls if name and not is_number and (call_id.startswith(name) or call_id.endswith(name))
    ]
    if len(near) == 1:
        return calls[near[0]], near[0]
    rollout_id = trace.rollout.rollout_id
    if near:
        more = " and more" if len(near) > 5 else ""
        raise NoSuchCall(
            f"{name!r} names several calls of rollout {rollout_id}, {', '.join(near[:5])}{more}: give more of its id"
        )
    if not numbered:
        raise NoSuchCall(f"rollout {rollout_id} has no call {name!r}: it made none")
    alike = difflib.get_close_matches(name, calls, n=3, cutoff=0.5)
    hint = f"near are {', '.join(alike)}" if alike and not is_number else f"its calls are 1 to {len(numbered)}"
    raise NoSuchCall(f"rollout {rollout_id} has no call {name!r}; {hint}")


def detail(
    trace: RolloutTrace,
    attempt: AttemptTrace,
    call_id: str,
    run: TrainedBy = UNKNOWN,
    *,
    decode: Decode | None = None,
) -> CallDetail:
    """A call of one of the trace's attempts laid open, with its tokens' texts where `decode` gives them.

    Raises:
        ForestError: the calls of the attempt do not fit together; it names the call.
    """
    if attempt.attempt.attempt_id != trace.rollout.counting_attempt_id:
        run = run._replace(record=None, not_recorded=None)
    record = run.record
    tree = forest.build(calls_of(attempt.spans))
    numbers = numbers_of(tree)
    call = tree.nodes[call_id].call
    attributes = next(span.attributes for span in attempt.spans if span.span_id == call_id)
    excluded = why_excluded(trace.rollout, attempt.attempt)
    cut = rows_of(tree, run, training=trace.rollout.mode == "train")
    views = [view for view in row_views(tree, cut) if any(part.number == numbers[call_id] for part in view.calls)]
    owner = next((view.number for view in views if call_id in cut[view.number - 1].call_ids), None)
    row_excluded = None if owner is None else cut[owner - 1].excluded
    in_row = excluded is None and owner is not None and row_excluded is None
    return CallDetail(
        rollout_id=trace.rollout.rollout_id,
        attempt_id=attempt.attempt.attempt_id,
        attempt=attempt.attempt.sequence,
        excluded=excluded,
        number=numbers[call_id],
        call_id=call_id,
        continues=None if call.parent_id is None else numbers[call.parent_id],
        agent=call.agent,
        model=call.model,
        dialect=attributes.get(semconv.DIALECT),
        finish_reason=call.finish_reason,
        temperature=call.temperature,
        sampling_requested=attributes.get(semconv.SAMPLING_REQUESTED) or {},
        sampling_effective=attributes.get(semconv.SAMPLING_EFFECTIVE) or {},
        ignored_fields=list(attributes.get(semconv.IGNORED_FIELDS) or ()),
        logprob_kind=call.logprob_kind,
        policy_versions=call.versions,
        marks=marks_of(call),
        prompt_tokens=len(call.prompt_ids),
        sampled_tokens=len(call.response_ids),
        overshoot=call.overshoot,
        messages=list(attributes.get(semconv.INPUT_MESSAGES) or ()),
        answer=list(attributes.get(semconv.OUTPUT_MESSAGES) or ()),
        rewards=attempt.attempt.rewards,
        call_rewards=_own_rewards(attempt, call_id),
        training=record and trained.call_training(record, call_id),
        rollout_training=None if record is None else trained.rollout_training(record),
        not_recorded=run.not_recorded,
        sampler_is_old=run.sampler_is_old,
        rows=[view.number for view in views],
        trained_in=owner if in_row else None,
        row_excluded=row_excluded,
        tokens=_tokens(call, record, in_row, decode),
        media=call.media,
    )


def path_of(attempt: AttemptTrace, call_id: str) -> list[Call]:
    """The call and those that it continues, the first one first."""
    return [node.call for node in forest.build(calls_of(attempt.spans)).nodes[call_id].path()]


def of_token(view: CallDetail, place: int) -> CallDetail:
    """The same with this token alone. Raises NoSuchCall where the call has none there."""
    if not 0 <= place < len(view.tokens):
        has = f"its tokens are 0 to {len(view.tokens) - 1}" if view.tokens else "its tokens are not known"
        raise NoSuchCall(f"call {view.number} ({view.call_id}) has no token {place}: {has}")
    return msgspec.structs.replace(view, tokens=[view.tokens[place]])


def with_now(view: CallDetail, logprobs: Sequence[float], checkpoint: str) -> CallDetail:
    """The same with the logprobs that a checkpoint gives the tokens."""
    tokens = [msgspec.structs.replace(token, now_logprob=now) for token, now in zip(view.tokens, logprobs, strict=True)]
    return msgspec.structs.replace(view, tokens=tokens, checkpoint=checkpoint)


def _own_rewards(attempt: AttemptTrace, call_id: str) -> dict[str, float]:
    """The rewards of one call, given under any of its names."""
    return added_up(rewards_by_call(attempt.rewards, names_of(attempt.spans)).get(call_id, ()))


def _tokens(call: Call, record: TrainingRecord | None, in_row: bool, decode: Decode | None) -> list[TokenView]:
    sampled = len(call.response_ids)
    call_record = record[1].calls.get(call.call_id) if record else None
    places = trained.places(call_record, sampled) if call_record else range(sampled) if in_row else ()
    trainers = trainer_logprobs(call_record, sampled)
    mask = set(places)
    return [
        TokenView(
            place=place,
            token_id=token_id,
            text=None if decode is None else decode([token_id]),
            trained=place in mask,
            policy_version=version,
            logprob=None if call.logprobs is None else call.logprobs[place],
            trainer_logprob=trainers.get(place),
            difference=trainers[place] - call.logprobs[place] if call.logprobs and place in trainers else None,
        )
        for place, (token_id, version) in enumerate(zip(call.response_ids, call.policy_versions(), strict=True))
    ]


def trainer_logprobs(record: CallRecord | None, sampled: int) -> Mapping[int, float]:
    """What the trainer gave a call's trained tokens before the update, by place; {} where no record says."""
    if record is None or not record.old_log_probs:
        return {}
    return dict(zip(trained.places(record, sampled), unpack_logprobs(record.old_log_probs), strict=True))
