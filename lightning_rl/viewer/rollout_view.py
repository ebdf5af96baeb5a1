"""One rollout as the page draws it: its forest, its conversation, its timeline, and one call down to its tokens.

What training made of it comes from `inspect` and is not computed anew here. Long texts are cut with a note of how much
is missing; the call itself has them whole.
"""

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from lightning_rl.config.schema import TrainConfig
from lightning_rl.inspect import call as calls
from lightning_rl.inspect import folder
from lightning_rl.inspect.explain import AttemptView, explain
from lightning_rl.inspect.recorded import NotRecorded
from lightning_rl.inspect.trained import TrainingRecord
from lightning_rl.store.contract import AttemptTrace, RolloutTrace
from lightning_rl.viewer import tokens
from lightning_rl.viewer.tokens import Decode
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import calls_of
from lightning_rl_adapters.forest import ForestError
from lightning_rl_adapters.span import Span
from lightning_rl_adapters.tool_schemas import tools_of

LONGEST_TEXT = 16_000  # characters of one message
_RASTER = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
_HIDDEN = frozenset({semconv.CALL_SPAN, semconv.MEDIA_SPAN, semconv.TOOLS_SPAN, semconv.LOG_SPAN})
_OTHERS = 500  # spans of an agent's own that a timeline shows


def rollout(trace: RolloutTrace, config: TrainConfig | None, record: TrainingRecord | None) -> dict[str, Any]:
    """The rollout laid open. Raises NotRecorded for one whose calls do not fit together."""
    trace = folder.with_trained_calls(config, trace)
    try:
        view = explain(trace, folder.trained_by(config, record))
    except ForestError as error:
        raise NotRecorded(f"rollout {trace.rollout.rollout_id} is damaged: {error}") from error
    answer: dict[str, Any] = msgspec.to_builtins(view)
    of_rollout = trace.rollout
    answer |= {name: getattr(of_rollout, name) for name in ("group_id", "agent", "created_at", "ended_at", "metadata")}
    answer["rewards"] = of_rollout.rewards
    for attempt, of_view, each in zip(answer["attempts"], view.attempts, trace.attempts, strict=True):
        attempt |= _attempt(each, of_view)
    return answer


def _attempt(trace: AttemptTrace, view: AttemptView) -> dict[str, Any]:
    spans = {span.span_id: span for span in trace.spans}
    messages = {call.call_id: _messages(spans[call.call_id]) for call in view.calls}
    made = [
        {**msgspec.to_builtins(call), **messages[call.call_id], **_times(span := spans[call.call_id]), **_engine(span)}
        for call in view.calls
    ]
    others = [span for span in trace.spans if span.name not in _HIDDEN]
    return {
        "calls": made,
        "tools": tools_of(trace.spans),
        "worker": trace.attempt.worker_id,
        "started_at": trace.attempt.started_at,
        "ended_at": trace.attempt.ended_at,
        "reward": trace.attempt.reward,
        "rewards": [msgspec.to_builtins(reward) for reward in trace.rewards],
        "returned": trace.attempt.rewards,
        "spans": [_other(span) for span in others[:_OTHERS]],
        "spans_left_out": max(len(others) - _OTHERS, 0),
        "versions": sorted({version for call in view.calls for version in call.policy_versions}),
    }


def _times(span: Span) -> dict[str, float]:
    return {"start": span.start_ns / 1e9, "end": span.end_ns / 1e9}


def _engine(span: Span) -> dict[str, list[float]]:
    """Of a call that an engine sampled: when it was asked, and when it had ended."""
    offsets = span.attributes.get(semconv.ENGINE_US)
    return {} if offsets is None else {"engine": [span.start_ns / 1e9 + at / 1e6 for at in offsets]}


def _messages(span: Span) -> dict[str, Any]:
    """What a call added to its conversation, and what it answered."""
    attributes = span.attributes
    return {
        "messages": shortened(list(attributes.get(semconv.INPUT_MESSAGES) or ())),
        "answer": shortened(list(attributes.get(semconv.OUTPUT_MESSAGES) or ())),
        "tools": attributes.get(semconv.TOOLS),
    }


def _other(span: Span) -> dict[str, Any]:
    """A span of the agent's own: what it emitted, its tools, what its instrumentation told."""
    attributes = {name: value for name, value in span.attributes.items() if isinstance(value, str | int | float | bool)}
    return {"name": span.name, **_times(span), "attributes": shortened(attributes)}


def shortened(value: Any, longest: int = LONGEST_TEXT) -> Any:
    """The same with texts of at most so many characters; bytes become a note of their length."""
    if isinstance(value, str):
        cut = len(value) - longest
        return value if cut <= 0 else f"{value[:longest]}\n… {cut:,} more characters"
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    if isinstance(value, list | tuple):
        return [shortened(each, longest) for each in value]
    return {name: shortened(each, longest) for name, each in value.items()} if isinstance(value, Mapping) else value


def call(
    trace: RolloutTrace,
    name: tuple[int, int],
    config: TrainConfig | None,
    record: TrainingRecord | None,
    decode: Decode | None,
    start: int = 0,
) -> dict[str, Any]:
    """A call in full; `name` is the number of its attempt and its own there, from 1. Raises NotRecorded."""
    trace = folder.with_trained_calls(config, trace)
    sequence, number = name
    attempt = next((each for each in trace.attempts if each.attempt.sequence == sequence), None)
    made = [] if attempt is None else calls_of(attempt.spans)
    if attempt is None or not 1 <= number <= len(made):
        raise NotRecorded(f"rollout {trace.rollout.rollout_id} has no call {number} in an attempt {sequence}")
    one = made[number - 1]
    try:
        view = calls.detail(trace, attempt, one.call_id, folder.trained_by(config, record))
        path = calls.path_of(attempt, one.call_id)
    except ForestError as error:
        raise NotRecorded(f"rollout {trace.rollout.rollout_id} is damaged: {error}") from error
    counts = attempt.attempt.attempt_id == trace.rollout.counting_attempt_id
    call_record = record[1].calls.get(one.call_id) if record is not None and counts else None
    answer: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(view, tokens=[]))
    answer["tokens"] = tokens.columns(one, view, call_record, decode, start)
    answer["request"] = _request(attempt, [each.call_id for each in path])
    return answer


def _request(attempt: AttemptTrace, path: list[str]) -> dict[str, Any]:
    """The call as a request of Chat Completions: the whole conversation before its answer."""
    spans = {span.span_id: span for span in attempt.spans}
    messages: list[dict[str, Any]] = []
    for call_id in path:
        attributes = spans[call_id].attributes
        messages += attributes.get(semconv.INPUT_MESSAGES) or ()
        if call_id != path[-1]:
            messages += (attributes.get(semconv.OUTPUT_MESSAGES) or ())[:1]
    last = spans[path[-1]].attributes
    tools = tools_of(attempt.spans).get(spans[path[0]].attributes.get(semconv.TOOLS) or "")
    request: dict[str, Any] = {"model": last.get(semconv.REQUEST_MODEL) or last[semconv.RESPONSE_MODEL]}
    request |= {"messages": messages} | ({"tools": tools} if tools else {})
    return request | (last.get(semconv.SAMPLING_REQUESTED) or {})


def image(trace: RolloutTrace, sha256: str) -> tuple[bytes, str]:
    """An image of the rollout, and its media type by its first bytes. Raises NotRecorded for one that is no raster
    image: others may hold scripts."""
    for attempt in trace.attempts:
        for span in attempt.spans:
            if span.name == semconv.MEDIA_SPAN and span.attributes[semconv.MEDIA_SHA256] == sha256:
                data = span.attributes[semconv.MEDIA_DATA]
                kind = next((kind for head, kind in _RASTER.items() if data.startswith(head)), None)
                if kind is not None:
                    return data, kind
                raise NotRecorded(f"image {sha256} is no PNG, JPEG, GIF or WebP: it is not shown")
    raise NotRecorded(f"rollout {trace.rollout.rollout_id} has no image {sha256}")


def data_url(trace: RolloutTrace, sha256: str) -> str:
    """The image as a `data:` URL."""
    data, kind = image(trace, sha256)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
