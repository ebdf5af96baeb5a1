"""Recorded calls as traces: one rollout's conversation with its reward, from a run's folder or a file.

All are read as the records of `lightning-rl export --what calls`, so a file and the run that it came from are the
same traces. A file may have chats of the user's own, too (`chats.py`).
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import SftSection
from lightning_rl.inspect import export, recorded
from lightning_rl.inspect.rollout_source import Which
from lightning_rl.sft import chats

_JSON = tuple(name for name, kind in export.COLUMNS["calls"].items() if kind == "json")


class TracedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A record of `export --what calls`, as far as it is learned from (docs/tools.md)."""

    rollout_id: str
    call_id: str
    number: int
    mode: str
    counts: bool
    model: str
    prompt_token_ids: list[int]
    response_token_ids: list[int]
    messages: list[dict[str, Any]]
    answer: list[dict[str, Any]]
    finish_reason: str | None = None
    parent_call_id: str | None = None
    agent: str | None = None
    dialect: str | None = None
    reward: float | None = None
    call_rewards: dict[str, float] | None = None
    delivered: bool = True
    exact: bool = True
    media: list[Any] | None = None
    group_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    vocabulary: str | None = None
    failed: bool = False


class CallTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of a rollout's counting attempt, in order of arrival; `reward` is None where it was given none, or
    `failed`, whatever it was given before.

    Runs number their groups alike, so `group_id` begins with the number of the source.
    """

    rollout_id: str
    group_id: str
    mode: str
    reward: float | None
    calls: list[TracedCall]
    failed: bool = False


def read(sources: Sequence[str | Path]) -> tuple[list[CallTrace], Counter[str]]:
    """The traces of all sources, and how many tokens of attempts that do not count stand beside them, by reason.

    Raises ConfigError naming a source that holds no calls, or whose rollouts are in another one too.
    """
    traces: list[CallTrace] = []
    excluded: Counter[str] = Counter()
    source_numbers: dict[str, int] = {}
    for number, source in enumerate(sources):
        of_source = list(_by_rollout(_calls(Path(source).expanduser(), number)))
        if not of_source:
            raise ConfigError(f"sft.traces: {source} holds no calls; name a run whose agent asked a model")
        for calls in of_source:
            first = calls[0]
            if (other := source_numbers.setdefault(first.rollout_id, number)) != number:
                raise ConfigError(
                    f"sft.traces: rollout {first.rollout_id} is in {sources[other]} and in {source}: name one, once"
                )
        call_traces, superseded = of_calls(itertools.chain.from_iterable(of_source))
        traces += [msgspec.structs.replace(trace, group_id=f"{number}/{trace.group_id}") for trace in call_traces]
        excluded += superseded
    return traces, excluded


def of_calls(calls: Iterable[TracedCall]) -> tuple[list[CallTrace], Counter[str]]:
    """See `read`: of calls that are there already."""
    traces: list[CallTrace] = []
    superseded = 0
    for of_rollout in _by_rollout(calls):
        counting = [call for call in of_rollout if call.counts]
        superseded += sum(len(call.response_token_ids) for call in of_rollout if not call.counts)
        if counting:
            traces.append(_trace(counting))
    return traces, +Counter(superseded=superseded)


def chosen(
    traces: Iterable[CallTrace], config: SftSection, agent_failure: float | None
) -> tuple[list[CallTrace], list[tuple[CallTrace, str]]]:
    """The traces to learn from, and the others, each with the reason. Those that failed count with `agent_failure`, or
    not at all, as in PPO."""
    kept: list[CallTrace] = []
    left_out: list[tuple[CallTrace, str]] = []
    for trace in traces:
        if trace.failed:
            trace = msgspec.structs.replace(trace, reward=agent_failure)
        reason = _why_not(trace, config)
        if reason is None:
            kept.append(trace)
        else:
            left_out.append((trace, reason))
    if config.best_of_group is not None:
        best = _best(kept, config.best_of_group)
        left_out += [(trace, "not_best") for trace in kept if trace.rollout_id not in best]
        kept = [trace for trace in kept if trace.rollout_id in best]
    return kept, left_out


def _why_not(trace: CallTrace, config: SftSection) -> str | None:
    asks = config.min_reward is not None or config.best_of_group is not None or config.weights == "reward"
    if config.mode is not None and trace.mode != config.mode:
        return f"mode_{trace.mode}"
    if trace.reward is None:
        return "no_reward" if asks or trace.failed else None
    if config.min_reward is not None and trace.reward < config.min_reward:
        return "low_reward"
    return "no_weight" if config.weights == "reward" and trace.reward <= 0 else None


def _best(traces: Sequence[CallTrace], n: int) -> set[str]:
    """The rollouts with the highest rewards of each group; of equals those that come first."""
    groups: dict[str, list[CallTrace]] = {}
    for trace in traces:
        groups.setdefault(trace.group_id, []).append(trace)
    ranked = (sorted(group, key=lambda trace: -(trace.reward or 0.0)) for group in groups.values())
    return {trace.rollout_id for group in ranked for trace in group[:n]}


def names(regex: str | None, key: str) -> re.Pattern[str] | None:
    """The regular expression of a key. Raises ConfigError where it is none."""
    try:
        return None if regex is None else re.compile(regex)
    except re.error as error:
        raise ConfigError(f"{key} {regex!r} is no regular expression: {error}") from error


def _trace(calls: list[TracedCall]) -> CallTrace:
    calls = sorted(calls, key=lambda call: call.number)
    final = next((call.reward for call in calls if call.reward is not None), None)
    single = [value for call in calls for value in (call.call_rewards or {}).values()]
    failed = any(call.failed for call in calls)
    return CallTrace(
        rollout_id=calls[0].rollout_id,
        group_id=calls[0].group_id or calls[0].rollout_id,
        mode=calls[0].mode,
        reward=None if failed else sum(single) if final is None and single else final,
        calls=calls,
        failed=failed,
    )


def _by_rollout(calls: Iterable[TracedCall]) -> Iterator[list[TracedCall]]:
    by_rollout: dict[str, list[TracedCall]] = {}
    for call in calls:
        by_rollout.setdefault(call.rollout_id, []).append(call)
    yield from by_rollout.values()


def _calls(source: Path, number_of_source: int) -> Iterator[TracedCall]:
    """Its calls. Chats are known by the numbers of source and record: a resumed run may find the file elsewhere."""
    run_dir = source.parent if source.name == recorded.STORE else source
    if run_dir.is_dir():
        with recorded.opened(run_dir) as connection:
            for one in export.records(connection, run_dir, "calls", Which()):
                yield msgspec.convert(one, TracedCall, from_attributes=True)
        return
    if not source.is_file():
        raise ConfigError(f"sft.traces: there is no run folder and no file {source.resolve()}")
    at_end: Any = object()
    records = _records(source)
    for number in itertools.count(1):
        place = f"sft.traces: {source}, record {number}"
        try:
            if (record := next(records, at_end)) is at_end:
                return
            of_chat = chats.is_chat(record)
            rollout_id = f"chat-{number_of_source}-{number}"
            calls = chats.calls_of(record, rollout_id, place) if of_chat else (record,)
            read = [msgspec.convert(call, TracedCall) for call in calls]
        except (msgspec.MsgspecError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"{place} is none of `lightning-rl export --what calls`, nor a chat ({error}); export the run again, "
                "or name its folder; a chat is a record with `messages`"
            ) from error
        yield from read


def _records(file: Path) -> Iterator[Any]:
    if file.suffix != ".parquet":
        with file.open("rb") as lines:
            yield from (msgspec.json.decode(line) for line in lines if not line.isspace())
        return
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ConfigError(f"sft.traces: {file} needs pyarrow: pip install 'lightning-rl[data]'") from error
    for group in pq.ParquetFile(file).iter_batches():
        for record in group.to_pylist():
            texts = {name: json.loads(record[name]) for name in _JSON if isinstance(record.get(name), str)}
            yield _as_written(record) | texts


def _as_written(value: Any) -> Any:
    """What was in a column before its structs were given the fields of each other, which are null."""
    if isinstance(value, dict):
        return {name: _as_written(each) for name, each in value.items() if each is not None}
    return [_as_written(each) for each in value] if isinstance(value, list) else value
