"""A rollout in MLflow, read back by MLflow's own client, and at an OTLP endpoint: the same tree in both."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_rl.telemetry.traces.otlp import OtlpTraces
from lightning_rl.telemetry.traces.trace_builder import Story
from lightning_rl.telemetry.traces.writer import NotTaken
from lightning_rl_adapters import otel, semconv
from tests.lightning_rl.control_plane.test_otlp_export import Receiver, receiver  # noqa: F401 - a fixture
from tests.lightning_rl.telemetry.traces.recorded import COUNTED, FAILED, looked_up

CHECKPOINT = Path(__file__).parents[4] / "examples" / "sql_agent" / "checkpoint"
TREE = {
    "lightning_rl.rollout": None,
    "lightning_rl.call": "lightning_rl.rollout",
    "search": "lightning_rl.call",
    "fetch": "search",
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What MLflow holds of a rollout that was written twice, by attempt."""
    from mlflow.tracking import MlflowClient  # takes seconds to load, of every process that collects tests

    from lightning_rl.telemetry.traces.mlflow import MlflowTraces

    run_dir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("MLFLOW_TRACKING_URI", raising=False)
        patched.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "")
        patched.delenv("LITELLM_LOCAL_MODEL_COST_MAP")
        backend = MlflowTraces(run_dir, "p")
        assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"  # no price list is fetched
        for _ in range(2):  # as by a run that goes on
            for spans in Story(CHECKPOINT).of(looked_up()):
                backend.take(spans)
        client: Any = MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
        found = client.search_traces(locations=[client.get_experiment_by_name("p").experiment_id])
        assert len(found) == 2
        by_step = client.search_traces(
            locations=[client.get_experiment_by_name("p").experiment_id], filter_string="tags.`lightning_rl.step` = '3'"
        )
        assert len(by_step) == 2
        yield {trace.info.client_request_id: trace for trace in found} | {"database": run_dir / "mlflow.db"}


def test_spans_nest_from_the_attempt_over_its_calls_to_their_tools(traces: dict[str, Any]) -> None:
    spans = traces[COUNTED].data.spans
    names = {span.span_id: span.name for span in spans}
    assert {span.name: names.get(span.parent_id) for span in spans} == TREE
    assert {span.name: span.span_type for span in spans} == {
        "lightning_rl.rollout": "AGENT", "lightning_rl.call": "CHAT_MODEL", "search": "TOOL", "fetch": "TOOL",
    }  # fmt: skip
    assert len(spans) == 5


def test_a_trace_says_how_it_went(traces: dict[str, Any]) -> None:
    info = traces[COUNTED].info
    assert (info.state, info.execution_duration) == ("OK", 10_000)
    assert (info.request_preview, info.response_preview) == ('"how many?"', "three")
    assert (info.tags["lightning_rl.step"], info.tags["lightning_rl.reward.value"]) == ("3", "1.0")
    assert info.tags["lightning_rl.group_id"] == "g"
    assert info.token_usage["output_tokens"] == 4


def test_a_call_has_its_messages_its_numbers_and_its_text(traces: dict[str, Any]) -> None:
    call = traces[COUNTED].search_spans(name="lightning_rl.call")[1]
    assert call.inputs["messages"] == [{"role": "tool", "content": "three"}]
    assert call.outputs["messages"] == [{"role": "assistant", "content": "three"}]
    assert call.inputs["text"]
    assert call.outputs["text"]
    assert call.get_attribute("lightning_rl.logprob.mean") == -0.375
    assert call.get_attribute("gen_ai.usage.input_tokens") == 8
    assert call.get_attribute("lightning_rl.call_id") == "a2-c1"
    assert not {semconv.PROMPT_IDS, semconv.RESPONSE_IDS, semconv.LOGPROBS} & call.attributes.keys()
    [tool] = traces[COUNTED].search_spans(name="search")
    assert (tool.inputs, tool.outputs) == ({"query": "x"}, "three")
    assert (tool.end_time_ns - tool.start_time_ns) == 2_000_000_000


def test_exceptions_are_recorded_of_a_tool_and_of_an_attempt(traces: dict[str, Any]) -> None:
    [tool] = traces[COUNTED].search_spans(name="fetch")
    assert (tool.status.status_code.value, tool.status.description) == ("ERROR", "gone")
    assert tool.events[0].attributes["exception.type"] == "KeyError"
    assert traces[FAILED].info.state == "ERROR"
    [root] = traces[FAILED].data.spans
    assert root.status.description == "EngineAway: no engine"
    assert root.events[0].attributes["exception.stacktrace"] == "Traceback: here"


def test_only_its_owner_can_read_a_database_in_the_run_folder(traces: dict[str, Any]) -> None:
    assert traces["database"].stat().st_mode & 0o777 == 0o600


def test_any_otlp_endpoint_gets_the_same(receiver: Receiver) -> None:  # noqa: F811
    backend = OtlpTraces(f"{receiver.url}/v1/traces")
    for spans in Story(CHECKPOINT).of(looked_up()):
        backend.take(spans)
    backend.close()
    came = [span for _, _, span in receiver.all()]
    names = {span.span_id: span.name for span in came}
    assert {span.name: names.get(span.parent_span_id) for span in came} == TREE
    assert len({span.trace_id for span in came}) == len(receiver.requests) == 2
    said = otel._values(next(span for span in came if span.name == "lightning_rl.call").attributes)
    assert said["lightning_rl.logprob.sum"] == -0.75
    assert said["lightning_rl.prompt.text"]
    assert json.loads(said["gen_ai.input.messages"]) == [{"role": "user", "content": "how many?"}]
    [fetch] = [span for span in came if span.name == "fetch"]
    assert (fetch.status.code, fetch.events[0].name) == (2, "exception")


def test_an_endpoint_that_does_not_take_them_is_told(receiver: Receiver) -> None:  # noqa: F811
    receiver.status = 400
    backend = OtlpTraces(f"{receiver.url}/v1/traces")
    with pytest.raises(NotTaken, match="does not take spans"):
        backend.take(next(iter(Story(None).of(looked_up()))))
    backend.close()
