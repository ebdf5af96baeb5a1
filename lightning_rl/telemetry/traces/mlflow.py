"""Traces to MLflow: where `MLFLOW_TRACKING_URI` says, else into `mlflow.db` of the run's folder.

Invariant: an attempt has the same trace id whenever it is written, so a run that goes on writes no trace twice. The
tracer of MLflow itself, which is one for the process and may be in use by others in it, is left alone.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from mlflow.entities import Span as MlflowSpan
from mlflow.entities import SpanType, TraceInfo, TraceLocation, TraceState
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey
from mlflow.tracking import MlflowClient
from opentelemetry.sdk.trace import ReadableSpan

from lightning_rl.telemetry.metrics.mlflow import experiment_of, run_id_of, tracking_uri
from lightning_rl_adapters import semconv
from lightning_rl_adapters.otel_out import readable, trace_id_of
from lightning_rl_adapters.span import Span

_PREVIEW = 1000  # characters of a task, and of an answer, in lists of traces
_TAGS = (semconv.STEP, semconv.MODE, semconv.GROUP_ID, semconv.STATUS, semconv.REWARD_VALUE, semconv.COUNTS)


class MlflowTraces:
    """One trace an attempt, in the experiment that the run's metrics go to, too (`trainer.logger: mlflow`)."""

    def __init__(self, run_dir: Path, project: str) -> None:
        # MLflow asks litellm, where it is installed, what a call costs, whose import asks GitHub for a price list.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        uri = tracking_uri(run_dir)
        self.name = f"MLflow at {uri}"
        self._run_dir = run_dir
        self._experiment = experiment_of(MlflowClient(uri), project)
        self._client = TracingClient(uri)

    def take(self, spans: Sequence[Span]) -> None:
        """See `Backend`. Raises what MLflow raises."""
        trace_id = f"tr-{trace_id_of(spans[0].attempt_id):032x}"
        self._client.start_trace(self._info(trace_id, spans))
        self._client.log_spans(self._experiment, [_mlflow_span(trace_id, span) for span in spans])

    def close(self) -> None:
        """Nothing is open."""

    def _info(self, trace_id: str, spans: Sequence[Span]) -> TraceInfo:
        root, calls = spans[0], [span for span in spans if span.name == semconv.CALL_SPAN]
        attributes = root.attributes
        failed = attributes.get(semconv.STATUS_CODE) == "ERROR"
        tags = {name: str(attributes[name]) for name in _TAGS if attributes.get(name) is not None}
        run_id = run_id_of(self._run_dir)
        return TraceInfo(
            trace_id=trace_id,
            trace_location=TraceLocation.from_experiment_id(self._experiment),
            request_time=root.start_ns // 1_000_000,
            execution_duration=(root.end_ns - root.start_ns) // 1_000_000,
            state=TraceState.ERROR if failed else TraceState.OK,
            request_preview=attributes[semconv.TASK][:_PREVIEW],
            response_preview=_answer(calls[-1])[:_PREVIEW] if calls else None,
            client_request_id=root.attempt_id,
            trace_metadata={} if run_id is None else {TraceMetadataKey.SOURCE_RUN: run_id},
            tags={TraceTagKey.TRACE_NAME: root.rollout_id, semconv.ROLLOUT_ID: root.rollout_id} | tags,
        )


def _mlflow_span(trace_id: str, span: Span) -> MlflowSpan:
    """MLflow keeps attributes as JSON, and has names of its own for what its pages show."""
    otel = readable(span)
    attributes = dict(otel.attributes or {}) | _shown(span) | {SpanAttributeKey.REQUEST_ID: trace_id}
    return MlflowSpan(
        ReadableSpan(
            name=otel.name,
            context=otel.context,
            parent=otel.parent,
            resource=otel.resource,
            attributes={name: msgspec.json.encode(value).decode() for name, value in attributes.items()},
            events=otel.events,
            status=otel.status,
            start_time=otel.start_time,
            end_time=otel.end_time,
        )
    )


def _shown(span: Span) -> dict[str, Any]:
    """What MLflow shows of a span: its type, what went in, what came out."""
    attributes = span.attributes
    if span.name == semconv.ROLLOUT_SPAN:
        rewards = {
            name.removeprefix(f"{semconv.REWARDS}."): value
            for name, value in attributes.items()
            if name.startswith(f"{semconv.REWARDS}.")
        }
        return _typed(
            SpanType.AGENT,
            json.loads(attributes[semconv.TASK]),
            rewards or {"reward": attributes.get(semconv.REWARD_VALUE)},
        )
    if span.name == semconv.CALL_SPAN:
        tokens = {
            "input_tokens": attributes.get(semconv.INPUT_TOKENS) or 0,
            "output_tokens": attributes.get(semconv.OUTPUT_TOKENS) or 0,
        }
        return _typed(SpanType.CHAT_MODEL, _messages(attributes, semconv.INPUT_MESSAGES, semconv.PROMPT_TEXT),
            _messages(attributes, semconv.OUTPUT_MESSAGES, semconv.RESPONSE_TEXT),
        ) | {
            SpanAttributeKey.CHAT_USAGE: tokens | {"total_tokens": sum(tokens.values())},
            SpanAttributeKey.MODEL: attributes.get(semconv.RESPONSE_MODEL),
        }  # fmt: skip
    if semconv.OPERATION_NAME in attributes:
        inputs, output = (attributes.get(name) for name in (semconv.OPERATION_INPUTS, semconv.OPERATION_OUTPUT))
        return _typed(SpanType.TOOL, *(None if text is None else json.loads(text) for text in (inputs, output)))
    return {SpanAttributeKey.SPAN_TYPE: SpanType.UNKNOWN}


def _typed(kind: str, inputs: Any, outputs: Any) -> dict[str, Any]:
    values = {SpanAttributeKey.INPUTS: inputs, SpanAttributeKey.OUTPUTS: outputs}
    return {SpanAttributeKey.SPAN_TYPE: kind} | {name: value for name, value in values.items() if value is not None}


def _messages(attributes: Mapping[str, Any], messages: str, text: str) -> dict[str, Any]:
    return {"messages": attributes.get(messages) or []} | ({"text": attributes[text]} if text in attributes else {})


def _answer(call: Span) -> str:
    """The text of the answer; an answer without text as it is."""
    for message in call.attributes.get(semconv.OUTPUT_MESSAGES) or ():
        content = message.get("content")
        return content if isinstance(content, str) and content else msgspec.json.encode(message).decode()
    return ""
