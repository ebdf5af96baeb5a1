"""Run folders for the viewer's tests: a few steps of groups, a validation, and rollouts that say whatever is asked."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_rl.store.contract import ErrorInfo, Finish, Log, RolloutRequest
from lightning_rl.store.sql import SqlStore
from lightning_rl.trajectories.step_record import CallRecord, RolloutRecord, StepRecord
from lightning_rl.trajectories.trace_views import log_span
from lightning_rl.viewer.run import ViewedRun
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, VersionRange, to_span
from lightning_rl_adapters.media import media_span, url_of
from lightning_rl_adapters.span import pack_logprobs
from tests.lightning_rl.inspect.runs import metrics_of, open_store, write_run

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
PIXEL = hashlib.sha256(PNG).hexdigest()
SVG = b"<svg xmlns='http://www.w3.org/2000/svg' onload='globalThis.broken = 1'/>"


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def add_rollout(
    store: SqlStore,
    rollout_id: str,
    talk: Sequence[Mapping[str, Any]],
    *,
    task: Any = "a task",
    mode: Any = "train",
    step: int = 1,
    group: str | None = None,
    reward: float | None = 1.0,
    error: ErrorInfo | None = None,
    agent: str | None = None,
    log: Log | None = None,
    images: Sequence[bytes] = (),
    ends: bool = True,
) -> None:
    """A rollout whose calls said so: of each `asked` and `answered` (messages), and further fields of a call."""
    asked = RolloutRequest(
        task=task, rollout_id=rollout_id, mode=mode, group_id=group, agent=agent, metadata={"step": step}
    )
    store.enqueue([asked])
    [claim] = store.claim("worker", limit=1)
    attempt_id, base = claim.attempt.attempt_id, int(claim.attempt.started_at * 1e9)
    tokens = {"response_ids": [4, 5], "logprobs": [-0.5, -1.5], "versions": [VersionRange(step - 1, 0, 2)]}
    sampled: dict[str, Any] = {"model": "policy", **tokens}
    for number, turn in enumerate(talk):
        more = {name: value for name, value in turn.items() if name not in ("asked", "answered", "attributes")}
        after = more.pop("after", number)  # from 1; 0: it begins a tree
        call = Call(
            call_id=f"{rollout_id}-c{number + 1}", rollout_id=rollout_id, attempt_id=attempt_id, number=number,
            prompt_ids=[1, 2, 3], temperature=1.0, finish_reason="stop",
            parent_id=f"{rollout_id}-c{after}" if after else None, start_ns=base + number * 10**9,
            end_ns=base + number * 10**9 + 5 * 10**8, **(sampled | more),
        )  # fmt: skip
        told = {semconv.INPUT_MESSAGES: list(turn["asked"]), semconv.OUTPUT_MESSAGES: [turn["answered"]]}
        store.add_spans([to_span(call, **told, **turn.get("attributes", {}))])
    for data in images:
        digest = hashlib.sha256(data).hexdigest()
        store.add_spans([media_span(rollout_id, attempt_id, digest, data=data, media_type="image/png", at_ns=base)])
    if log is not None:
        store.add_spans([log_span(rollout_id, attempt_id, log)])
    if ends:
        how: Any = "succeeded" if error is None else "failed"
        store.finish(rollout_id, attempt_id, Finish(status=how, reward=None if error else reward, error=error))


def turn(asked: str, answered: str, **more: Any) -> dict[str, Any]:
    return {"asked": [message("user", asked)], "answered": message("assistant", answered), **more}


def record_of(step: int, rollouts: Mapping[str, tuple[float, float, int]], *, group: str = "g") -> StepRecord:
    """A step's record of rollouts with (reward, advantage, calls); the first token of each call is trained."""
    made = [
        RolloutRecord(
            rollout_id=name, group_id=group, reward=reward,
            calls={
                f"{name}-c{number}": CallRecord(
                    credit=reward, compared_with="group", baseline=0.5, scale=0.5, advantage=advantage, weight=0.1,
                    mini_batch=0, trained_tokens=1, kept=[0], old_log_probs=pack_logprobs([-0.75]),
                )
                for number in range(1, calls + 1)
            },
        )
        for name, (reward, advantage, calls) in rollouts.items()
    ]  # fmt: skip
    return StepRecord(step=step, policy_version=step - 1, rule="final", loss_agg_mode="token-mean", rollouts=made)


def small_run(run_dir: Path, **config: Any) -> Path:
    """Two steps of a group of two, one held-out task before and after, a failure, and one that has not ended."""
    with open_store(run_dir) as store:
        add_rollout(
            store, "val-0", [turn("how many cars", "SELECT id FROM cars")], mode="val", step=0, reward=0.0, task="t"
        )
        for step in (1, 2):
            for k, reward in enumerate((0.0, 1.0)):
                talk = [turn("count the lakes", f"SELECT {k} FROM lakes"), turn("empty", "done", after=1)]
                add_rollout(
                    store, f"train-{step}-{k}", talk, step=step, group=f"g{step}", reward=reward, task=f"lakes {step}"
                )
        failed = ErrorInfo(type="ValueError", message="no such table", traceback="Traceback: line 7")
        add_rollout(
            store, "train-2-failed", [turn("birds", "?")], step=2, error=failed, log=Log(stdout="printed by it")
        )
        add_rollout(
            store,
            "val-2",
            [turn("how many cars", "SELECT count(*) FROM cars")],
            mode="val",
            step=2,
            reward=1.0,
            task="t",
        )
        add_rollout(store, "train-3-open", [turn("still", "working")], step=3, ends=False)
    steps = [
        record_of(step, {f"train-{step}-0": (0.0, -1.0, 2), f"train-{step}-1": (1.0, 1.0, 2)}, group=f"g{step}")
        for step in (1, 2)
    ]
    rows = [{"step": 0.0, "val/reward": 0.0}, metrics_of(1), metrics_of(2, val__reward=1.0, tokens__pending=0.0)]
    return write_run(run_dir, steps=steps, metrics=rows, config=config or {"trainer": {"logger": ["jsonl"]}})


def read(run_dir: Path) -> ViewedRun:
    """The run, read once; whoever asks for it closes it."""
    run = ViewedRun(run_dir)
    run.start(behind=False)
    return run


def with_image(digest: str = PIXEL) -> dict[str, Any]:
    """A turn that shows an image."""
    content = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url_of(digest)}}]
    return {"asked": [message("user", content)], "answered": message("assistant", "a pixel")}
