"""A rollout as the store hands it over: two calls, between them a tool of which a part fails, and a failed attempt."""

from typing import Any

from lightning_rl.store.contract import Attempt, AttemptTrace, ErrorInfo, Rollout, RolloutConfig, RolloutTrace
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, VersionRange, to_span
from lightning_rl_adapters.span import Span

SECOND = 1_000_000_000
NOW = 1_700_000_000 * SECOND
FAILED, COUNTED = "a1", "a2"


def call(number: int, start: float, end: float, *, attempt: str = COUNTED, **said: Any) -> Span:
    """The call `c<number>` of the model `policy`, in seconds since NOW."""
    parent = said.pop("parent_id", None)
    return to_span(
        Call(
            call_id=f"{attempt}-c{number}", rollout_id="r", attempt_id=attempt, number=number, parent_id=parent,
            model="policy", prompt_ids=[1, 2, 3], response_ids=[4, 5], logprobs=[-0.5, -0.25],
            versions=[VersionRange(7, 0, 2)], temperature=1.0, finish_reason="stop",
            start_ns=NOW + int(start * SECOND), end_ns=NOW + int(end * SECOND),
        ),
        **said,
    )  # fmt: skip


def emitted(name: str, start: float, end: float, span_id: int, *, parent: str | None = None, **said: Any) -> Span:
    """A span that came by OTLP."""
    if parent is not None:
        said[semconv.PARENT_SPAN] = parent
    return Span(
        span_id=f"{COUNTED}:{'ab' * 16}:{span_id:016x}", rollout_id="r", attempt_id=COUNTED, name=name,
        number=NOW, start_ns=NOW + int(start * SECOND), end_ns=NOW + int(end * SECOND), attributes=said,
    )  # fmt: skip


def operation(name: str, start: float, end: float, span_id: int, **more: Any) -> Span:
    return emitted(semconv.OPERATION_SPAN, start, end, span_id, **{semconv.OPERATION_NAME: name} | more)


def rollout(spans: list[Span], task: Any = "how many?", rollout_id: str = "r") -> RolloutTrace:
    """A failed attempt without spans, and one with these that succeeded."""
    error = ErrorInfo(type="EngineAway", message="no engine", traceback="Traceback: here", infrastructure=True)
    failed, counted = (
        Attempt(
            attempt_id=attempt_id, rollout_id=rollout_id, sequence=sequence, status=status, worker_id="w",
            lease_expires_at=0.0, started_at=NOW / SECOND, ended_at=NOW / SECOND + 10, **more,
        )
        for sequence, attempt_id, status, more in (
            (1, FAILED, "failed", {"error": error}),
            (2, COUNTED, "succeeded", {"reward": 1.0, "rewards": {"reward": 1.0, "style": 0.5}}),
        )
    )  # fmt: skip
    told = Rollout(
        rollout_id=rollout_id, task=task, mode="train", status="succeeded", group_id="g", agent="solver",
        resources_id=None, config=RolloutConfig(), metadata={"step": 3}, attempt_count=2, created_at=0.0,
        counting_attempt_id=COUNTED, reward=1.0, rewards={"reward": 1.0, "style": 0.5},
    )  # fmt: skip
    return RolloutTrace(
        rollout=told,
        attempts=[
            AttemptTrace(attempt=failed, spans=[], rewards=[]),
            AttemptTrace(attempt=counted, spans=spans, rewards=[]),
        ],
    )


def looked_up() -> RolloutTrace:
    """An answer, a tool that it asked for, which another step inside fails, and a second answer."""
    asked = {"role": "user", "content": "how many?"}
    tool = {"id": "t1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    exception = {"exception.type": "KeyError", "exception.message": "gone", "exception.stacktrace": "here"}
    search = operation(
        "search", 2, 4, 1, **{semconv.OPERATION_INPUTS: '{"query": "x"}', semconv.OPERATION_OUTPUT: '"three"'}
    )
    fetch = operation(
        "fetch", 2.5, 3, 2, parent=search.span_id,
        **{
            semconv.STATUS_CODE: "ERROR", semconv.STATUS_DESCRIPTION: "gone",
            semconv.EVENTS: [{"name": "exception", "time_ns": NOW + 3 * SECOND, "attributes": exception}],
        },
    )  # fmt: skip
    first = call(0, 0, 1, **{
        semconv.INPUT_MESSAGES: [asked],
        semconv.OUTPUT_MESSAGES: [{"role": "assistant", "content": "", "tool_calls": [tool]}],
    })  # fmt: skip
    second = call(1, 5, 6, parent_id=first.span_id, **{
        semconv.INPUT_MESSAGES: [{"role": "tool", "content": "three"}],
        semconv.OUTPUT_MESSAGES: [{"role": "assistant", "content": "three"}],
    })  # fmt: skip
    return rollout([first, second, search, fetch])
