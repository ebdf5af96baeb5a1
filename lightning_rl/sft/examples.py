"""Traces as training sequences, split into those that are trained and those that are held out.

Invariant: every answer token that was read is trained, held out or excluded by a name; each is trained in one row.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import Config
from lightning_rl.sft import traces
from lightning_rl.sft.student_ids import StudentFormat, Written
from lightning_rl.sft.traces import CallTrace, TracedCall
from lightning_rl.training.batch import TrainingSequence, sequence_of
from lightning_rl.trajectories.call_filter import context_of, selection
from lightning_rl.trajectories.reader import agent_failure
from lightning_rl.trajectories.token_account import ConservationError
from lightning_rl_adapters import forest, rows
from lightning_rl_adapters.call import Call
from lightning_rl_proxy.rendering.base import Renderer


@dataclass
class Example:
    """One rollout that is learned from: its rows, and the weight of its tokens in the loss."""

    rollout_id: str
    group_id: str
    weight: float
    sequences: list[TrainingSequence]

    @property
    def tokens(self) -> int:
        """Answer tokens."""
        return sum(len(sequence.trained) for sequence in self.sequences)


@dataclass
class Examples:
    """What a run learns from, what it holds out, and what became of every token that it read.

    `excluded` counts tokens by reason: the student's, where a call could be written in its ids, else the recorded ones.
    `calls` counts calls: `as_sampled`, `rendered`, or the reason why one could not be written.
    """

    trained: list[Example] = field(default_factory=list)
    held_out: list[Example] = field(default_factory=list)
    read: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def metrics(self, trained_tokens: int) -> dict[str, float]:
        """The account of tokens; `trained_tokens` is how many were trained so far. Raises ConservationError where it
        does not balance."""
        trained, held_out = (sum(one.tokens for one in part) for part in (self.trained, self.held_out))
        if self.read != trained + held_out + self.excluded.total():
            raise ConservationError(
                f"of {self.read} tokens of the traces {trained} are trained, {held_out} held out and "
                f"{self.excluded.total()} excluded ({dict(self.excluded)})"
            )
        excluded = self.excluded + Counter({"held_out": held_out})
        return {
            "tokens/received": float(self.read),
            "tokens/trained": float(trained_tokens),
            "tokens/pending": float(trained - trained_tokens),
            **{f"tokens/excluded/{reason}": float(n) for reason, n in sorted(excluded.items())},
            **{f"sft/calls/{outcome}": float(n) for outcome, n in sorted(self.calls.items())},
        }


def load(
    config: Config,
    sources: Sequence[str | Path],
    renderer: Renderer,
    *,
    taught: Iterable[TracedCall] = (),
    teacher: str | None = None,
) -> Examples:
    """Read and choose traces, and write them in the ids of the student. Raises ConfigError where none is left.

    Args:
        sources: folders of runs, and exported files.
        taught: the calls of the run's own rollouts, whatever their mode. Those that `teacher` answered are learned
            from, unless `sft.models` says otherwise.
    """
    of_sources, other_attempts = traces.read(sources)
    of_run, others_of_run = traces.of_calls(taught)
    failure = agent_failure(config)
    kept, left_out = traces.chosen(of_sources, config.sft, failure)
    kept_of_run, left_out_of_run = traces.chosen(of_run, replace(config.sft, mode=None), failure)
    other_attempts += others_of_run
    examples = Examples(read=other_attempts.total(), excluded=other_attempts)
    for trace, reason in (left_out := left_out + left_out_of_run):
        tokens = sum(len(call.response_token_ids) for call in trace.calls)
        examples.read += tokens
        examples.excluded[reason] += tokens
    student, made = StudentFormat(renderer), list[Example]()
    of_teacher = None if teacher is None else re.escape(teacher)
    for chosen, models in ((kept, config.sft.models), (kept_of_run, config.sft.models or of_teacher)):
        select = _selection(config, models)
        made += [_example(trace, student.write(trace), config, select, examples) for trace in chosen]
    usable = [one for one in made if one.sequences]
    if not usable:
        reasons = Counter(reason for _, reason in left_out) + Counter(dict(examples.calls))
        counts = ", ".join(f"{n} {reason}" for reason, n in reasons.items())
        raise ConfigError(
            f"of {len(of_sources) + len(of_run)} rollouts none is left to learn from ({counts}): "
            "sft.mode, sft.min_reward, sft.models and algorithm.train_agents choose among them"
        )
    _split(usable, config, examples)
    examples.excluded, examples.calls = +examples.excluded, +examples.calls
    examples.metrics(0)
    return examples


def _selection(config: Config, models: str | None) -> Callable[[Call], bool] | None:
    """Which calls are learned from, of models whose names match; the others are context."""
    named = traces.names(models, "sft.models")
    return selection(
        config.algorithm.train_agents, None if named is None else lambda call: bool(named.fullmatch(call.model))
    )


def _example(
    trace: CallTrace,
    written: Written,
    config: Config,
    select: Callable[[Call], bool] | None,
    examples: Examples,
) -> Example:
    """The rollout's rows; its tokens and calls are entered in `examples`."""
    excluded, overlong = examples.excluded, config.data.overlong
    recorded = {call.call_id: len(call.response_token_ids) for call in trace.calls}
    examples.calls["as_sampled"] += written.as_sampled
    examples.calls["rendered"] += len(written.calls) - written.as_sampled
    for call_id, why in written.why_not.items():
        examples.calls[why] += 1
        examples.read += recorded[call_id]
        excluded[why] += recorded[call_id]
    examples.read += sum(len(call.response_ids) for call in written.calls)
    context = context_of(written.calls, select)
    max_tokens = None if overlong.startswith("truncate") else config.data.max_tokens
    cut = rows.cut(forest.build(written.calls), {}, max_tokens=max_tokens, left_out=context)
    if overlong == "drop_rollout" and any(row.excluded == "overlong" for row in cut):
        for row in cut:
            row.excluded = row.excluded or "overlong"
    for call in written.calls:
        if reason := rows.why_left_out(call, context):
            excluded[reason] += len(call.response_ids)
    sequences = []
    for row in cut:
        if row.excluded is not None:
            excluded[row.excluded] += sum(row.loss_mask)
            continue
        sequence = sequence_of(row, 0)
        if len(sequence) > config.data.max_tokens:
            shorten = sequence.truncate_left if overlong == "truncate_left" else sequence.truncate_response
            excluded["truncated"] += shorten(config.data.max_tokens)
        sequence.old_log_probs = np.zeros(len(sequence.trained), np.float32)
        if len(sequence.trained):
            sequences.append(sequence)
    weight = trace.reward if config.sft.weights == "reward" and trace.reward is not None else 1.0
    return Example(trace.rollout_id, trace.group_id, weight, sequences)


def _split(usable: list[Example], config: Config, examples: Examples) -> None:
    """Hold out whole groups, by seed; at least one is trained."""
    groups = list(dict.fromkeys(one.group_id for one in usable))
    count = min(round(config.sft.held_out * len(groups)), len(groups) - 1)
    chosen = np.random.default_rng(config.data.seed).permutation(len(groups))[:count]
    held_out = {groups[index] for index in chosen}
    examples.held_out = [one for one in usable if one.group_id in held_out]
    examples.trained = [one for one in usable if one.group_id not in held_out]
