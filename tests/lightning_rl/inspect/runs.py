"""Folders of runs as training leaves them, made by hand: a store, step records, metrics, a config."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from lightning_rl.config import compose, to_yaml
from lightning_rl.store.contract import ErrorInfo, Finish, Reward, RolloutConfig, RolloutRequest
from lightning_rl.store.sql import SqlStore
from lightning_rl.trajectories import step_record, termination
from lightning_rl.trajectories.step_record import CallRecord, RolloutRecord, StepRecord
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call
from lightning_rl_adapters.otel import SpanPlace
from lightning_rl_adapters.span import Span, pack_logprobs
from tests.adapters.test_conventions import recorded
from tests.adapters.words import attempt_of, say

TALK = [say(1, "a", "b c"), say(2, "d", "e", after=1)]


def record(
    store: SqlStore,
    rollout_id: str,
    calls: Sequence[Call],
    forks: Mapping[int, Mapping[str, Any]] | None = None,
    *,
    mode: Any = "train",
    reward: float | dict[str, float] | None = 1.0,
    call_rewards: Iterable[Reward] = (),
    error: ErrorInfo | None = None,
    attempts: int = 1,
    step: int = 7,
    seen: str | None = None,
    ended_by: str | None = None,
    group_id: str | None = None,
) -> None:
    """A rollout of `attempts` attempts that ended so, each with these calls; their ids get the rollout's before. `step`
    asked for it. `seen` names the recording (tests/adapters/otel) of what the agent's own spans say,
    `ended_by` what ended the conversation of its loop."""
    config, metadata = RolloutConfig(max_attempts=attempts), {"step": step}
    asked = RolloutRequest(
        task={"q": rollout_id}, rollout_id=rollout_id, group_id=group_id, mode=mode, config=config, metadata=metadata
    )
    store.enqueue([asked])
    for sequence in range(1, attempts + 1):
        [claim] = store.claim("worker", limit=1)
        attempt_id = claim.attempt.attempt_id
        before = rollout_id if sequence == 1 else f"{rollout_id}.{sequence}"
        spans = attempt_of(calls, forks=forks).spans
        for span in spans:
            span.rollout_id, span.attempt_id = rollout_id, attempt_id
            span.span_id = f"{before}-{span.span_id}"
            if span.attributes[semconv.PARENT] is not None:
                span.attributes[semconv.PARENT] = f"{before}-{span.attributes[semconv.PARENT]}"
        store.add_spans(spans)
        if seen is not None:
            store.add_spans(recorded(seen, SpanPlace(rollout_id, attempt_id)))
        if ended_by is not None:
            told = {semconv.OBJECT: json.dumps(termination.ending("tool_agent", ended_by))}
            place: Any = {"rollout_id": rollout_id, "attempt_id": attempt_id, "span_id": f"{before}-ended"}
            store.add_spans([Span(name=semconv.OBJECT_SPAN, number=1, start_ns=1, end_ns=1, attributes=told, **place)])
        store.add_rewards(rollout_id, attempt_id, list(call_rewards))
        status: Any = "succeeded" if error is None else "failed"
        store.finish(rollout_id, attempt_id, Finish(status=status, reward=None if error else reward, error=error))


def rollout_record(
    rollout_id: str, group_id: str, reward: float | None, advantage: float = 0.0, *, calls: int = 2, **more: Any
) -> RolloutRecord:
    """What a step made of a rollout whose calls all had its reward as credit."""
    made = CallRecord(
        credit=reward, compared_with="group", baseline=0.5, scale=0.5, advantage=advantage, weight=0.25, mini_batch=0,
        trained_tokens=1,
    )  # fmt: skip
    told = {f"{rollout_id}-c{number}": made for number in range(1, calls + 1)}
    return RolloutRecord(rollout_id=rollout_id, group_id=group_id, reward=reward, **{"calls": told, **more})


def step_of(step: int, *rollouts: RolloutRecord) -> StepRecord:
    """A step's record."""
    return StepRecord(
        step=step, policy_version=step - 1, rule="final", loss_agg_mode="token-mean", rollouts=list(rollouts)
    )


def call_record(places: list[int] | None, logprobs: list[float], **more: Any) -> CallRecord:
    """What a step made of a call that it trained at these places."""
    given: dict[str, Any] = {
        "credit": 1.0, "compared_with": "group", "baseline": 0.5, "scale": 0.53, "advantage": 0.943, "weight": 0.125,
        "mini_batch": 0, "trained_tokens": len(logprobs), "kept": places, "old_log_probs": pack_logprobs(logprobs),
    }  # fmt: skip
    return CallRecord(**{**given, **more})


def metrics_of(step: int, **values: float) -> dict[str, float]:
    """The line of a step in which all went well; names are given with __ for /."""
    healthy = {
        "critic/score/mean": 0.5, "critic/score/max": 1.0, "critic/score/min": 0.0, "actor/entropy": 1.0,
        "response_length/mean": 8.0, "training/rollout_probs_diff_mean": 1e-5, "tokens/received": 100.0 * step,
        "tokens/trained": 100.0 * step,
    }  # fmt: skip
    return {"step": float(step), **healthy, **{name.replace("__", "/"): value for name, value in values.items()}}


def write_run(
    run_dir: Path,
    *,
    steps: Iterable[StepRecord] = (),
    metrics: Iterable[Mapping[str, float]] = (),
    config: Mapping[str, Any] | None = None,
) -> Path:
    """What lies beside the store."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for step in steps:
        step_record.write(run_dir, step)
    (run_dir / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in metrics))
    if config is not None:
        (run_dir / "config.yaml").write_text(to_yaml(compose(config)))
    return run_dir


def open_store(run_dir: Path) -> "closing[SqlStore]":
    """The run's store, to be filled; its clock goes on when it is read, so that no attempt waits for the next."""
    run_dir.mkdir(parents=True, exist_ok=True)
    seconds = itertools.count(1_700_000_000.0, 60.0)
    return closing(SqlStore(f"sqlite:///{run_dir / 'store.db'}", clock=lambda: next(seconds)))
