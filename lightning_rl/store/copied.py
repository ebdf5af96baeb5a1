"""The rollouts of one run at its servers, copied into a SQLite file with the tables of a store, to be read at leisure.

Invariant: nothing is changed at a server. The copy holds what the stores there hold of these rollouts: their rows,
attempts, spans, rewards and resources; not how they were claimed. A few rollouts at a time are in memory.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from lightning_rl.store import contents, schema
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Attempt, AttemptTrace, Resources, Rollout, RolloutTrace, body_of
from lightning_rl.store.databases import Database
from lightning_rl.store.run_store import rank_of
from lightning_rl.store.upgrades import open_database
from lightning_rl_adapters.span import pack

_PAGE = 500  # rollouts of one listing
_TRACES = 16  # rollouts whose spans are in memory at once


def copy_run(stores: Sequence[HttpStore], run_id: str | None, file: Path) -> None:
    """Copy the rollouts of a run (None: of all) into `file`, which is not there yet: of one server in the order they
    were asked for, of several those of each together.

    Raises what the stores' calls raise.
    """
    copied_ids: set[str] = set()
    with closing(open_database(f"sqlite:///{file}")) as database:
        for store, of_run in zip(stores, _of_run(stores, run_id), strict=True):
            while ids := list(itertools.islice(of_run, _TRACES)):
                by_id = store.traces(ids)
                traces = [by_id[rollout_id] for rollout_id in ids if rollout_id in by_id]
                ids_of_resources = {trace.rollout.resources_id for trace in traces}
                named = sorted({each for each in ids_of_resources if each is not None} - copied_ids)
                resources = [store.resources(resources_id) for resources_id in named]
                # Each server counts its own versions.
                numbered = [
                    (each.version if len(stores) == 1 else len(copied_ids) + 1 + i, each)
                    for i, each in enumerate(resources)
                ]
                copied_ids.update(named)
                database.write(partial(_write, database, traces, numbered))


def _of_run(stores: Sequence[HttpStore], run_id: str | None) -> Iterable[Iterator[str]]:
    """The ids of the run's rollouts, store by store: of several each once, where its record counts."""
    ending = "" if run_id is None else f".{run_id}"
    listed = [(each for each in store.rollouts(page=_PAGE) if each.rollout_id.endswith(ending)) for store in stores]
    if len(stores) == 1:
        return [(rollout.rollout_id for rollout in listed[0])]
    best: dict[str, tuple[tuple[bool, float], int]] = {}
    for number, rollouts in enumerate(listed):
        for rollout in rollouts:
            one = (rank_of(rollout), number)
            best[rollout.rollout_id] = max(one, best.get(rollout.rollout_id, one))
    by_store: list[list[str]] = [[] for _ in stores]
    for rollout_id, (_, number) in best.items():
        by_store[number].append(rollout_id)
    return map(iter, by_store)


def _write(
    database: Database,
    traces: Iterable[RolloutTrace],
    resources: Iterable[tuple[int, Resources]],
    connection: sa.Connection,
) -> None:
    for version, each in resources:
        connection.execute(sa.insert(schema.resources), _resources_row(each) | {"version": version})
    for trace in traces:
        connection.execute(sa.insert(schema.rollouts), _rollout_row(trace.rollout))
        for attempt in trace.attempts:
            connection.execute(sa.insert(schema.attempts), _attempt_row(attempt.attempt))
            if rewards := _reward_rows(attempt):
                connection.execute(sa.insert(schema.rewards), rewards)
            spans = [msgspec.structs.asdict(pack(span)) for span in attempt.spans]
            contents.insert_spans(database, connection, spans)


def _resources_row(resources: Resources) -> dict[str, Any]:
    return msgspec.structs.asdict(resources) | {"resources": body_of(resources.resources)}


def _rollout_row(rollout: Rollout) -> dict[str, Any]:
    return _columns(schema.rollouts, rollout) | {"request": body_of(rollout.as_request())}


def _attempt_row(attempt: Attempt) -> dict[str, Any]:
    return _columns(schema.attempts, attempt) | {
        "unresponsive_seconds": 0.0,  # a server does not tell it, and only who ends attempts asks
        "rewards": body_of(attempt.rewards),
        "error": None if attempt.error is None else body_of(attempt.error),
    }


def _reward_rows(trace: AttemptTrace) -> list[dict[str, Any]]:
    place = {"rollout_id": trace.attempt.rollout_id, "attempt_id": trace.attempt.attempt_id}
    return [place | msgspec.structs.asdict(reward) for reward in trace.rewards]


def _columns(table: sa.Table, record: msgspec.Struct) -> dict[str, Any]:
    """What a record and a table have in common."""
    return {name: getattr(record, name) for name in record.__struct_fields__ if name in table.c}
