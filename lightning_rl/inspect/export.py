"""A run's records as files for other programs: rollouts, calls, training rows, spans or preference pairs.

Invariants: what is exported is one moment of the run, read a page at a time, so that memory does not grow with it. A
file is there as a whole or not at all. Token ids and logprobs are the numbers that were recorded.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, get_args

import msgspec
import sqlalchemy as sa

from lightning_rl.control_plane.gateways.resolve import PROXY_LLM
from lightning_rl.errors import Explained
from lightning_rl.files import is_a_runs_own, whole_file
from lightning_rl.inspect import folder, pairs, recorded, trained
from lightning_rl.inspect.rollout_source import Which, pages, resources_of
from lightning_rl.store import queries
from lightning_rl.store.contract import Rollout, RolloutTrace
from lightning_rl.store.rewards import added_up, rewards_by_call
from lightning_rl.trajectories import step_record
from lightning_rl.trajectories.call_filter import selection
from lightning_rl.trajectories.reader import reader
from lightning_rl.trajectories.step_record import RolloutRecord, StepRecord
from lightning_rl.trajectories.trace_views import why_excluded
from lightning_rl.trajectories.trajectory import Trajectory, trajectory_of
from lightning_rl_adapters import credit, forest, otlp_json, rows, semconv, triplet
from lightning_rl_adapters.call import Call, calls_of
from lightning_rl_adapters.call_names import names_of
from lightning_rl_adapters.forest import ForestError
from lightning_rl_adapters.rows import Row
from lightning_rl_adapters.span import Span, to_json
from lightning_rl_adapters.tool_schemas import tools_of
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer

if TYPE_CHECKING:
    import pyarrow as pa

What = Literal["rollouts", "calls", "rows", "spans", "pairs"]
Format = Literal["parquet", "jsonl", "otlp"]
Record = dict[str, Any]

_POLICY = "main_llm"
_TRACES = 16  # rollouts whose spans are in memory at a time
_GROUP_RECORDS, _GROUP_SIZE = 1024, 4_000_000  # of a row group: records, and characters and list entries in them

# The columns of each file. `json` is a value of any shape: itself in JSONL, its JSON text in Parquet.
COLUMNS: dict[What, dict[str, str]] = {
    "rollouts": {
        "rollout_id": "text", "group_id": "text", "mode": "text", "status": "text", "task": "json", "agent": "text",
        "resources_id": "text", "attempts": "int32", "counting_attempt_id": "text", "reward": "float64",
        "rewards": "json", "error_type": "text", "error_message": "text", "traceback": "text",
        "infrastructure": "bool", "created_at": "float64", "ended_at": "float64", "metadata": "json", "config": "json",
    },
    "calls": {
        "rollout_id": "text", "attempt_id": "text", "call_id": "text", "number": "int32", "mode": "text",
        "counts": "bool", "parent_call_id": "text", "agent": "text", "model": "text", "dialect": "text",
        "finish_reason": "text", "prompt_token_ids": "int32s", "new_prompt_tokens": "int32",
        "response_token_ids": "int32s", "response_logprobs": "float32s", "logprob_kind": "text",
        "policy_versions": "int32s", "temperature": "float64", "sampling": "json", "messages": "json",
        "answer": "json", "reward": "float64", "call_rewards": "json", "fork_cause": "text", "delivered": "bool",
        "exact": "bool", "trainable": "bool", "overshoot": "int32", "start_ns": "int64", "end_ns": "int64",
        "media": "json", "group_id": "text", "tools": "json", "vocabulary": "text", "failed": "bool",
    },
    "rows": {
        "rollout_id": "text", "attempt_id": "text", "group_id": "text", "mode": "text", "row": "int32",
        "model": "text", "reward": "float64", "token_ids": "int32s", "loss_mask": "int8s", "logprobs": "float32s",
        "rewards": "float64s", "policy_versions": "int32s", "call_ids": "texts", "temperature": "float64s",
        "exact": "bool", "excluded": "text", "excluded_calls": "json", "step": "int32", "media": "json",
    },
    "spans": {
        "rollout_id": "text", "attempt_id": "text", "span_id": "text", "name": "text", "number": "int64",
        "start_ns": "int64", "end_ns": "int64", "attributes": "json",
    },
    "pairs": {
        "group_id": "text", "task": "json", "prompt": "json", "chosen": "json", "rejected": "json", "tools": "json",
        "chosen_reward": "float64", "rejected_reward": "float64", "chosen_call_id": "text",
        "rejected_call_id": "text", "prompt_ids": "int32s", "chosen_ids": "int32s", "rejected_ids": "int32s",
        "vocabulary": "text",
    },
}  # fmt: skip


class NotExported(Explained, ValueError):
    """What was asked for cannot be written so."""


def export(
    run_dir: Path, what: What, form: Format, to: Path, *, mode: str | None = None, limit: int | None = None
) -> tuple[Path, int]:
    """Write a run's records to the file `to`, or into it where it is a folder; the file, and how many records it has.

    Args:
        what: OTLP has `spans`, and `calls` for the calls' spans alone.
        mode: rollouts of this mode alone.
        limit: of at most so many rollouts, the oldest ones; of pairs at most so many.

    Raises NotExported for what the format has no place for, or needs a package that is not there; NotRecorded for a
    run that cannot be read.
    """
    if form == "otlp" and what not in ("spans", "calls"):
        raise NotExported(f"OTLP has spans, and no place for {what}: choose --what spans or calls, or another format")
    file = to / f"{what}.{'parquet' if form == 'parquet' else 'jsonl'}" if to.is_dir() else to
    if file.resolve() == run_dir.resolve() or is_a_runs_own(
        file, run_dir, *(f"{name}.{ending}" for name in WHATS for ending in ("parquet", "jsonl"))
    ):
        raise NotExported(f"{file} is a file of the run: name another for what is exported")
    if not file.parent.is_dir():
        raise NotExported(f"there is no folder {file.parent.resolve()} for {file.name}: make it, or name another")
    writer = _parquet_writer(what) if form == "parquet" else _write_lines
    with recorded.opened(run_dir) as connection:
        which = Which(mode=mode)
        if form == "otlp":
            lines = _otlp_lines(_traces(connection, which, limit), calls_alone=what == "calls")
            return file, _written(file, lambda out: _write_raw(out, lines))
        entries = records(connection, run_dir, what, which, limit)
        return file, _written(file, lambda out: writer(out, entries))


def records(
    connection: sa.Connection, run_dir: Path, what: What, which: Which, limit: int | None = None
) -> Iterator[Record]:
    """The records of a run, rollout by rollout, in the order they were asked for."""
    if what == "rollouts":
        yield from map(_rollout, itertools.islice(itertools.chain.from_iterable(pages(connection, which)), limit))
        return
    if what == "pairs":
        try:
            yield from pairs.pairs(connection, which, limit, _vocabulary(run_dir))
        except ForestError as error:
            raise recorded.NotRecorded(f"a rollout is damaged: {error}") from error
        return
    of_trace: Callable[[RolloutTrace], Iterator[Record]] = _spans
    if what == "rows":
        of_trace = RowReader(connection, run_dir).records
    elif what == "calls":
        of_trace = partial(call_records, vocabulary=_vocabulary(run_dir))
    for trace in _traces(connection, which, limit):
        try:
            yield from of_trace(trace)
        except ForestError as error:
            raise recorded.NotRecorded(f"rollout {trace.rollout.rollout_id} is damaged: {error}") from error


def _traces(connection: sa.Connection, which: Which, limit: int | None) -> Iterator[RolloutTrace]:
    remaining = limit
    for page in pages(connection, which, page=_TRACES):
        ids = [rollout.rollout_id for rollout in page][:remaining]
        packed = msgspec.msgpack.encode(queries.traces(connection, ids))
        yield from msgspec.msgpack.decode(packed, type=dict[str, RolloutTrace]).values()
        if remaining is not None:
            remaining -= len(ids)
            if remaining <= 0:
                return


def _rollout(rollout: Rollout) -> Record:
    error = rollout.error
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "mode": rollout.mode,
        "status": rollout.status,
        "task": rollout.task,
        "agent": rollout.agent,
        "resources_id": rollout.resources_id,
        "attempts": rollout.attempt_count,
        "counting_attempt_id": rollout.counting_attempt_id,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "error_type": error and error.type,
        "error_message": error and error.message,
        "traceback": error and error.traceback,
        "infrastructure": error and error.infrastructure,
        "created_at": rollout.created_at,
        "ended_at": rollout.ended_at,
        "metadata": rollout.metadata,
        "config": msgspec.to_builtins(rollout.config),
    }


def _vocabulary(run_dir: Path) -> str | None:
    """The digest of the vocabulary of the run's policy, by which its ids are known again; None where it is not here."""
    tokenizer = folder.tokenizer_folder(run_dir, folder.config_of(run_dir))
    return None if tokenizer is None else FastTokenizer(tokenizer).vocabulary_digest()


def call_records(trace: RolloutTrace, vocabulary: str | None) -> Iterator[Record]:
    """The calls of a rollout's attempts. `vocabulary` is the digest of that of their ids, where it is known."""
    for attempt in trace.attempts:
        tools = tools_of(attempt.spans)
        grown = forest.build(calls_of(attempt.spans))
        by_call = rewards_by_call(attempt.rewards, names_of(attempt.spans))
        attributes = {span.span_id: span.attributes for span in attempt.spans}
        values = credit.final_values(grown, attempt.attempt.reward)
        for one in triplet.iter_triplets(grown, values):
            call = grown.nodes[one.call_id].call
            yield _call(trace.rollout, call, one, attributes[call.call_id]) | {
                "call_rewards": added_up(by_call.get(call.call_id, ())),
                "tools": tools.get(attributes[call.call_id].get(semconv.TOOLS) or ""),
                "vocabulary": vocabulary if call.trainable else None,
                "failed": attempt.attempt.status == "failed",
            }


def _call(rollout: Rollout, call: Call, one: triplet.Triplet, attributes: Mapping[str, Any]) -> Record:
    return {
        "rollout_id": call.rollout_id,
        "attempt_id": call.attempt_id,
        "call_id": call.call_id,
        "number": call.number,
        "mode": rollout.mode,
        "counts": call.attempt_id == rollout.counting_attempt_id,
        "parent_call_id": call.parent_id,
        "agent": call.agent,
        "model": call.model,
        "dialect": attributes.get(semconv.DIALECT),
        "finish_reason": call.finish_reason,
        "prompt_token_ids": one.prompt_token_ids,
        "new_prompt_tokens": len(call.prompt_ids),
        "response_token_ids": call.response_ids,
        "response_logprobs": call.logprobs,
        "logprob_kind": call.logprob_kind,
        "policy_versions": call.policy_versions(),
        "temperature": call.temperature,
        "sampling": attributes.get(semconv.SAMPLING_EFFECTIVE) or {},
        "messages": attributes.get(semconv.INPUT_MESSAGES) or [],
        "answer": attributes.get(semconv.OUTPUT_MESSAGES) or [],
        "reward": one.reward,
        "fork_cause": attributes.get(semconv.FORK_CAUSE),
        "delivered": call.delivered,
        "exact": one.exact,
        "trainable": call.trainable,
        "overshoot": call.overshoot,
        "start_ns": call.start_ns,
        "end_ns": call.end_ns,
        "media": one.media,
        "group_id": rollout.group_id,
    }


def _spans(trace: RolloutTrace) -> Iterator[Record]:
    return (to_json(span) for attempt in trace.attempts for span in attempt.spans)


class RowReader:
    """The rows that training makes of a rollout's counting attempt, by the run's own keys and step records.

    Where the run is no training, they are cut as an evaluation cuts them.
    """

    def __init__(self, connection: sa.Connection, run_dir: Path) -> None:
        self._connection = connection
        self._run_dir = run_dir
        self._config = folder.config_of(run_dir)
        self._models: dict[str | None, list[str]] = {}
        self._step: tuple[StepRecord, dict[str, RolloutRecord]] | None = None

    def records(self, trace: RolloutTrace) -> Iterator[Record]:
        """Its rows, numbered from 1 as `explain` numbers them."""
        rollout = trace.rollout
        counting = trace.counting
        if counting is None:
            return
        record = self._record_of(rollout)
        trajectory = self._trajectory(trace)
        reason = why_excluded(rollout, counting.attempt) or (None if record is None else record[1].left_out)
        for number, row in enumerate(self._rows(trajectory, record), start=1):
            yield {
                "rollout_id": rollout.rollout_id,
                "attempt_id": counting.attempt.attempt_id,
                "group_id": rollout.group_id,
                "mode": rollout.mode,
                "row": number,
                "reward": trajectory.reward,
                **{name: getattr(row, name) for name in Row.__struct_fields__},
                "excluded": row.excluded or reason,
                "step": None if record is None else record[0].step,
            }

    def _trajectory(self, trace: RolloutTrace) -> Trajectory:
        config, models = self._config, self._trained(trace.rollout.resources_id)
        if config is None or not models:
            return trajectory_of(trace, agent_failure=0.0)
        return reader(config, models, selection(config.algorithm.train_agents, None))(trace)

    def _rows(self, trajectory: Trajectory, record: trained.TrainingRecord | None) -> list[Row]:
        """The rows, without those calls and tokens that the step left out, which its record alone knows."""
        more = {
            call_id: reason
            for call_id, reason in trained.left_out_calls(record).items()
            if record is not None and record[1].left_out is None and call_id not in trajectory.why_left_out
        }
        cut = trajectory.rows
        if more and not all(row.excluded for row in cut):
            cut = rows.cut(
                trajectory.forest,
                credit.final_values(trajectory.forest, trajectory.reward),
                max_tokens=folder.trained_by(self._config).max_tokens,
                left_out=trajectory.why_left_out | more,
            )
        trained.leave_out_tokens(cut, record)
        return cut

    def _record_of(self, rollout: Rollout) -> trained.TrainingRecord | None:
        """The record of the step that trained it; steps come one after the other, so that the last is kept."""
        step = rollout.metadata.get("step")
        if not isinstance(step, int):
            return None
        ahead = bool(rollout.metadata.get("ahead"))
        is_loaded = self._step is not None and (
            rollout.rollout_id in self._step[1] if ahead else self._step[0].step == step
        )
        if not is_loaded or self._step is None:
            record = step_record.find(self._run_dir, rollout.rollout_id, step, ahead=ahead)
            if record is None:
                return None
            self._step = record[0], {rollout_record.rollout_id: rollout_record for rollout_record in record[0].rollouts}
        rollout_record = self._step[1].get(rollout.rollout_id)
        return None if rollout_record is None else (self._step[0], rollout_record)

    def _trained(self, resources_id: str | None) -> list[str]:
        """The models of the policy in these resources, or of its policies."""
        if resources_id not in self._models:
            resources = resources_of(self._connection, resources_id)
            self._models[resources_id] = sorted(
                {
                    one["model"]
                    for name, one in resources.items()
                    if one.get("type") == PROXY_LLM and (name == _POLICY or one.get("agents") is not None)
                }
            )
        return self._models[resources_id]


# Files


def _otlp_lines(traces: Iterable[RolloutTrace], *, calls_alone: bool) -> Iterator[tuple[bytes, int]]:
    """The lines; the first of each attempt with the number of all its spans, the others with 0."""
    for trace in traces:
        for attempt in trace.attempts:
            spans: list[Span] = [s for s in attempt.spans if not calls_alone or s.name == semconv.CALL_SPAN]
            for number, line in enumerate(otlp_json.requests(spans)):
                yield line, 0 if number else len(spans)


def _write_raw(out: BinaryIO, lines: Iterable[tuple[bytes, int]]) -> int:
    count = 0
    for line, spans in lines:
        out.write(line + b"\n")
        count += spans
    return count


def _write_lines(out: BinaryIO, entries: Iterable[Record]) -> int:
    count = 0
    for record in entries:
        out.write(msgspec.json.encode(record) + b"\n")
        count += 1
    return count


def _parquet_writer(what: What) -> Callable[[BinaryIO, Iterable[Record]], int]:
    """What writes such records as Parquet. Raises NotExported where pyarrow is missing."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise NotExported(
            "Parquet needs pyarrow: pip install 'lightning-rl[data]', or choose --format jsonl"
        ) from error

    def write(out: BinaryIO, entries: Iterable[Record]) -> int:
        count = 0
        columns, table = COLUMNS[what], arrow_schema(what)
        with pq.ParquetWriter(out, table, compression="zstd") as file:
            for group in _groups(entries):
                flat = [{name: _flat(kind, record[name]) for name, kind in columns.items()} for record in group]
                file.write_table(pa.Table.from_pylist(flat, schema=table))
                count += len(group)
        return count

    return write


def arrow_schema(what: What) -> "pa.Schema":
    """The columns of a Parquet file. Needs pyarrow."""
    import pyarrow as pa

    kinds = {
        "text": pa.string(), "json": pa.string(), "bool": pa.bool_(), "int32": pa.int32(), "int64": pa.int64(),
        "float64": pa.float64(), "int32s": pa.list_(pa.int32()), "int8s": pa.list_(pa.int8()),
        "float32s": pa.list_(pa.float32()), "float64s": pa.list_(pa.float64()), "texts": pa.list_(pa.string()),
    }  # fmt: skip
    return pa.schema([(name, kinds[kind]) for name, kind in COLUMNS[what].items()])


def _flat(kind: str, value: Any) -> Any:
    return msgspec.json.encode(value).decode() if kind == "json" and value is not None else value


def _groups(entries: Iterable[Record]) -> Iterator[list[Record]]:
    """Records for one row group each, as far as memory goes."""
    group: list[Record] = []
    size = 0
    for record in entries:
        group.append(record)
        size += sum(len(value) for value in record.values() if isinstance(value, (str, list)))
        if len(group) >= _GROUP_RECORDS or size >= _GROUP_SIZE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _written(file: Path, write: Callable[[BinaryIO], int]) -> int:
    with whole_file(file) as out:
        return write(out)


WHATS: tuple[What, ...] = get_args(What)
FORMATS: tuple[Format, ...] = get_args(Format)
