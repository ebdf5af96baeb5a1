"""A recorded rollout as data that a person can read: its attempts, their calls, forks and rows.

Pure: a `RolloutTrace` in, records out; `draw` makes text of them. Invariant: nothing is told here that the adapters
do not say; calls are numbered from 1 in order of arrival, and rows from 1.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from lightning_rl.inspect import trained
from lightning_rl.inspect.trained import UNKNOWN, CallTraining, RolloutTraining, TrainedBy
from lightning_rl.store.contract import AttemptTrace, Log, Rollout, RolloutTrace
from lightning_rl.trajectories.call_filter import context_of
from lightning_rl.trajectories.trace_views import log_of, why_excluded
from lightning_rl_adapters import forest, rows, semconv
from lightning_rl_adapters.call import Call, calls_of
from lightning_rl_adapters.forest import Forest, Node
from lightning_rl_adapters.rows import Row


class CallView(msgspec.Struct, frozen=True, kw_only=True):
    """One call at its place.

    `continues` is the number of the call before it. `prompt_tokens` are those that it adds, `images` the images among
    them. `marks` are `undelivered`, `inexact` and `frozen`. `asked` and `answered` are its last new message and its
    answer. `trained` says whether some row trains what it sampled. `training` is what a step made of it, None where no
    record says.
    """

    number: int
    call_id: str
    continues: int | None
    agent: str | None
    model: str
    prompt_tokens: int
    sampled_tokens: int
    finish_reason: str
    policy_versions: list[int]
    marks: list[str]
    asked: str
    answered: str
    trained: bool
    training: CallTraining | None = None
    images: int = 0


class ExplainedFork(msgspec.Struct, frozen=True, kw_only=True):
    """A place where an attempt's calls are not one line.

    With a `cause` (`semconv.ForkCause`), the one call of `calls` could not continue an earlier one; `at` says where it
    parted from the nearest: `message`, its `role`, and `token`, from 0, as far as known.
    Without, `calls` all continue call `after`; `same_prompt`: with equal tokens, so they are samples of one prompt.
    """

    calls: list[int]
    cause: str | None = None
    at: dict[str, Any] | None = None
    after: int | None = None
    same_prompt: bool = False


class RowCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call's part in a row: `trained`, `context` (mask 0 here), or the reason why it is left out."""

    number: int
    part: str


class RowView(msgspec.Struct, frozen=True, kw_only=True):
    """One row: the calls that it holds, how many tokens it has and how many of them would be trained."""

    number: int
    calls: list[RowCall]
    tokens: int
    trained: int
    exact: bool
    excluded: str | None


class AttemptView(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt; `excluded` is why nothing of it is trained, None for the one that counts in training. `log` is what
    it printed, and its traceback."""

    attempt_id: str
    sequence: int
    status: str
    excluded: str | None
    error: str | None
    calls: list[CallView]
    forks: list[ExplainedFork]
    rows: list[RowView]
    log: Log = Log()


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout with all its attempts, oldest first. `training` is what a step made of it; where the run trains and no
    record says so, `not_recorded` is why. `run_dir` is the run's folder, None where it was read elsewhere."""

    rollout_id: str
    status: str
    mode: str
    task: Any
    reward: float | None
    error: str | None
    counting_attempt_id: str | None
    attempts: list[AttemptView]
    training: RolloutTraining | None = None
    not_recorded: str | None = None
    run_dir: str | None = None


def explain(
    trace: RolloutTrace,
    run: TrainedBy = UNKNOWN,
) -> RolloutView:
    """A rollout laid open, with the rows that training by `run` cuts, and what the record of its step says; calls that
    were left out there are left out of the rows.

    Raises:
        ForestError: the calls of an attempt do not fit together; it names the call.
    """
    rollout = trace.rollout
    return RolloutView(
        rollout_id=rollout.rollout_id,
        status=rollout.status,
        mode=rollout.mode,
        task=rollout.task,
        reward=rollout.reward,
        error=None if rollout.error is None else f"{rollout.error.type}: {rollout.error.message}",
        counting_attempt_id=rollout.counting_attempt_id,
        attempts=[_attempt(rollout, attempt, run) for attempt in trace.attempts],
        training=None if run.record is None else trained.rollout_training(run.record),
        not_recorded=run.not_recorded,
    )


def rows_of(tree: Forest, run: TrainedBy, *, training: bool) -> list[Row]:
    """The rows that training by `run` cuts from an attempt of a rollout for `training`."""
    calls = [node.call for node in tree.nodes.values()]
    left_out = context_of(calls, run.select, training=training) | trained.left_out_calls(run.record)
    cut = rows.cut(tree, {}, max_tokens=run.max_tokens, left_out=left_out)
    trained.leave_out_tokens(cut, run.record)
    return cut


def numbers_of(tree: Forest) -> dict[str, int]:
    """The number of each call as a person reads it: from 1, in order of arrival."""
    return {call_id: number for number, call_id in enumerate(tree.nodes, start=1)}


def row_views(tree: Forest, cut: Sequence[Row]) -> list[RowView]:
    """The rows of a forest, `cut` from it, each with the calls on its path."""
    numbers = numbers_of(tree)
    return [
        RowView(
            number=number,
            calls=_parts(leaf, row, numbers),
            tokens=len(row.token_ids),
            trained=0 if row.excluded else sum(row.loss_mask),
            exact=row.exact,
            excluded=row.excluded,
        )
        for number, (row, leaf) in enumerate(zip(cut, tree.leaves(), strict=True), start=1)
    ]


def words_of(message: dict[str, Any]) -> str:
    """What a message says: its text, and the tools that it calls."""
    content = message.get("content") or ""
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    called = [f"{call.get('name')}({call.get('arguments')})" for call in calls]
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return " ".join([text, *called]).strip()


def _attempt(
    rollout: Rollout,
    trace: AttemptTrace,
    run: TrainedBy,
) -> AttemptView:
    attempt, reason = trace.attempt, why_excluded(rollout, trace.attempt)
    if attempt.attempt_id != rollout.counting_attempt_id:
        run = run._replace(record=None)  # a step sees only the attempt that counts
    tree = forest.build(calls_of(trace.spans))
    cut = rows_of(tree, run, training=rollout.mode == "train")
    for row in cut:
        row.excluded = row.excluded or reason
    attributes = {span.span_id: span.attributes for span in trace.spans}
    views = row_views(tree, cut)
    in_rows = {part.number for row in views for part in row.calls if part.part == "trained"}
    numbers = numbers_of(tree)
    return AttemptView(
        attempt_id=attempt.attempt_id,
        sequence=attempt.sequence,
        status=attempt.status,
        excluded=reason,
        error=None if attempt.error is None else f"{attempt.error.type}: {attempt.error.message}",
        calls=[
            _call(
                node, numbers, attributes[call_id], in_rows, run.record and trained.call_training(run.record, call_id)
            )
            for call_id, node in tree.nodes.items()
        ],
        forks=_forks(tree, numbers, attributes),
        rows=views,
        log=log_of(trace),
    )


def _call(
    node: Node, numbers: dict[str, int], attributes: dict[str, Any], in_rows: set[int], training: CallTraining | None
) -> CallView:
    call = node.call
    number = numbers[call.call_id]
    messages, answers = (attributes.get(name) or [{}] for name in (semconv.INPUT_MESSAGES, semconv.OUTPUT_MESSAGES))
    return CallView(
        number=number,
        call_id=call.call_id,
        continues=None if call.parent_id is None else numbers[call.parent_id],
        agent=call.agent,
        model=call.model,
        prompt_tokens=len(call.prompt_ids),
        sampled_tokens=len(call.response_ids),
        finish_reason=call.finish_reason,
        policy_versions=sorted({version.version for version in call.versions}),
        marks=marks_of(call),
        asked=words_of(messages[-1]),
        answered=words_of(answers[0]),
        trained=number in in_rows,
        training=training,
        images=len(call.media),
    )


def marks_of(call: Call) -> list[str]:
    """What is out of the ordinary about a call (`CallView.marks`)."""
    marks = {"undelivered": not call.delivered, "inexact": not call.exact, "frozen": not call.trainable}
    return [mark for mark, holds in marks.items() if holds]


def _forks(tree: Forest, numbers: dict[str, int], attributes: dict[str, dict[str, Any]]) -> list[ExplainedFork]:
    """The forks in order of the first call that made them one."""
    numbered: list[tuple[int, ExplainedFork]] = []
    for call_id, node in tree.nodes.items():
        number = numbers[call_id]
        if cause := attributes[call_id].get(semconv.FORK_CAUSE):
            fork = ExplainedFork(calls=[number], cause=cause, at=attributes[call_id].get(semconv.FORK_AT))
            numbered.append((number, fork))
        if len(node.children) > 1:
            calls = [numbers[child.call.call_id] for child in node.children]
            prompts = {(tuple(child.call.prompt_ids), tuple(child.call.media)) for child in node.children}
            same = len(prompts) == 1 and all(child.call.exact for child in node.children)
            numbered.append((calls[1], ExplainedFork(calls=calls, after=number, same_prompt=same)))
    return [fork for _, fork in sorted(numbered, key=lambda item: item[0])]


def _parts(leaf: Node, row: Row, numbers: dict[str, int]) -> list[RowCall]:
    trained = set(row.call_ids)
    parts = []
    for node in leaf.path():
        call_id = node.call.call_id
        part = (row.excluded or "trained") if call_id in trained else row.excluded_calls.get(call_id, "context")
        parts.append(RowCall(number=numbers[call_id], part=part))
    return parts
