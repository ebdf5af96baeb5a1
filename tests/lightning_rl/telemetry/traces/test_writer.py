"""Traces are written behind the training: nothing waits, and what has no trace is counted and told of."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_rl.config import ConfigError, compose
from lightning_rl.config.otlp_endpoint import EndpointRefused
from lightning_rl.telemetry.traces import check
from lightning_rl.telemetry.traces.trace_builder import Story
from lightning_rl.telemetry.traces.trace_sampling import TraceSampling
from lightning_rl.telemetry.traces.writer import NotTaken, Writer
from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import Span
from tests.lightning_rl.telemetry.traces.recorded import COUNTED, FAILED, looked_up, rollout

CHECKPOINT = Path(__file__).parents[4] / "examples" / "sql_agent" / "checkpoint"


class Kept:
    """A backend that keeps what it is given once it `goes_on`; `refuse` is what it does not take."""

    name = "a backend"

    def __init__(self) -> None:
        self.taken: list[list[Span]] = []
        self.closed = False
        self.refuse: set[str] = set()
        self.came, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def take(self, spans: Sequence[Span]) -> None:
        self.came.set()
        self.goes_on.wait(60)
        if spans[0].rollout_id in self.refuse:
            raise NotTaken("not today")
        self.taken.append(list(spans))

    def close(self) -> None:
        self.closed = True


def writer(backend: Kept, *, tokenizer: Path | None = None, most_waiting: int = 8) -> Writer:
    return Writer(backend, Story(tokenizer), TraceSampling(None, 0), most_waiting=most_waiting)


def test_an_attempt_is_a_trace_with_its_root_first() -> None:
    backend = Kept()
    out = writer(backend)
    out.put(looked_up())
    out.close(60)
    assert out.metrics() == {"trace/written": 1.0, "trace/left_out": 0.0}
    assert backend.closed
    [[failed], [root, *told]] = backend.taken
    assert (failed.attempt_id, failed.attributes[semconv.COUNTS]) == (FAILED, False)
    [exception] = failed.attributes[semconv.EVENTS]
    assert exception["attributes"]["exception.message"] == "no engine"
    assert root.attempt_id == COUNTED
    said = root.attributes
    assert (said[semconv.TASK], said[semconv.STEP], said[semconv.REWARD_VALUE]) == ('"how many?"', 3, 1.0)
    assert [span.name for span in told] == ["lightning_rl.call", "lightning_rl.call", "search", "fetch"]
    of_call = told[1].attributes
    assert (of_call[semconv.INPUT_TOKENS], of_call[semconv.OUTPUT_TOKENS]) == (8, 2)
    assert (of_call[semconv.LOGPROB_MEAN], of_call[semconv.LOGPROB_MIN]) == (-0.375, -0.5)
    assert of_call[semconv.POLICY_VERSIONS] == [7]
    assert semconv.PROMPT_TEXT not in of_call


def test_tokens_are_text_where_that_is_asked_for() -> None:
    backend = Kept()
    out = writer(backend, tokenizer=CHECKPOINT)
    out.put(looked_up())
    out.close(60)
    _, _, first, second, *_ = (span for spans in backend.taken for span in spans)
    prompt, response = (first.attributes[name] for name in (semconv.PROMPT_TEXT, semconv.RESPONSE_TEXT))
    assert prompt
    assert response
    assert second.attributes[semconv.PROMPT_TEXT] == prompt + response + prompt  # the whole context


def test_a_backend_that_hangs_holds_up_nothing_and_what_does_not_fit_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = Kept()
    backend.goes_on.clear()
    out = writer(backend, most_waiting=3)
    out.put(looked_up())
    assert backend.came.wait(60)
    for _ in range(5):
        out.put(looked_up())
    assert out.metrics() == {"trace/written": 0.0, "trace/left_out": 2.0}
    out.close(0.1)
    assert not backend.goes_on.is_set()
    assert out.metrics()["trace/left_out"] == 6.0
    backend.goes_on.set()
    told = [record.message for record in caplog.records]
    assert len([line for line in told if "trouble with the rollout traces to a backend" in line]) == 1
    assert "6 rollouts are not among the traces of a backend" in told


def test_what_is_not_taken_is_counted_and_the_next_ones_are_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    backend = Kept()
    backend.refuse = {"r"}
    out = writer(backend)
    for name in ("r", "s", "t"):
        out.put(rollout([], rollout_id=name))
    out.close(60)
    assert out.metrics() == {"trace/written": 2.0, "trace/left_out": 1.0}
    told = [record.message for record in caplog.records]
    assert "rollout r has no trace" in told
    assert "trouble with the rollout traces to a backend is over" in told


def test_so_many_tasks_of_a_step_are_chosen_the_same_ones_again() -> None:
    groups = [f"train-0-1-{number}" for number in range(8)]
    one, other = TraceSampling(3, 0), TraceSampling(3, 0)
    chosen = one.of("train 1", groups)
    assert len(chosen) == 3
    assert chosen == other.of("train 1", groups)
    assert one.of("train 1", ["a further part"]) == set()  # of the same step
    assert len(one.of("val 1", groups)) == 3
    assert len({frozenset(one.of(f"train {step}", groups)) for step in range(2, 12)}) > 1
    assert TraceSampling(None, 0).of("train 1", groups) == set(groups)


def test_a_backend_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trace\.backend is 'weave'.*there are mlflow, otlp"):
        compose({"actor_rollout_ref": {"rollout": {"trace": {"backend": "weave"}}}})


def test_an_endpoint_is_needed_and_holds_no_key() -> None:
    with pytest.raises(ConfigError, match=r"set actor_rollout_ref\.rollout\.trace\.otlp_endpoint=http://"):
        check(
            compose({"actor_rollout_ref": {"rollout": {"trace": {"backend": "otlp"}}}}).actor_rollout_ref.rollout.trace
        )
    with pytest.raises(EndpointRefused, match=r"rollout\.trace\.otlp_endpoint is no http") as refused:
        compose({"actor_rollout_ref": {"rollout": {"trace": {"otlp_endpoint": "http://me:secret@h"}}}})
    assert "secret" not in str(refused.value)


def test_a_missing_library_is_told_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-rl\[tracking\]'"):
        check(
            compose(
                {"actor_rollout_ref": {"rollout": {"trace": {"backend": "mlflow"}}}}
            ).actor_rollout_ref.rollout.trace
        )
