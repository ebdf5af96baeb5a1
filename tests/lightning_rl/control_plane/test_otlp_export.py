"""Every span that the store takes goes to an OTLP endpoint, too, and nothing ever waits for it."""

import gzip
import json
import logging
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import CollectorRegistry

from lightning_rl.agents.emit import emit_message, emit_reward, operation
from lightning_rl.agents.emitted import Emitted
from lightning_rl.algorithms.base import Algorithm, Endpoint
from lightning_rl.config import compose
from lightning_rl.config.otlp_endpoint import EndpointRefused, traces_url
from lightning_rl.store.contract import Claim, Ending, ErrorInfo, Finish, RolloutRequest
from lightning_rl.telemetry.traces.otlp_export import MirroredStore, SpansOut
from lightning_rl.trainer import Trainer
from lightning_rl_adapters import otel, semconv
from lightning_rl_adapters.otel import SpanPlace
from lightning_rl_adapters.otel_out import trace_id_of
from lightning_rl_adapters.span import Span
from tests.lightning_rl.cli.test_serve import serving
from tests.proxy.engines.service import running

CONVENTIONS = Path(__file__).parents[2] / "adapters" / "otel"


class Receiver:
    """An OTLP endpoint. `status` is what it answers; while `held` is set it takes requests and does not answer."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.status = 200
        self.came = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.came.set()
                receiver.goes_on.wait(60)
                if receiver.status == 200:
                    receiver.requests.append(ExportTraceServiceRequest.FromString(gzip.decompress(body)))
                    receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
                    receiver.paths.append(self.path)
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def spans(self) -> dict[str, Any]:
        """What came, by name."""
        return {span.name: span for _, _, span in self.all()}

    def all(self) -> Iterator[tuple[Any, Any, Any]]:
        for request in self.requests:
            for of_resource in request.resource_spans:
                for of_scope in of_resource.scope_spans:
                    for span in of_scope.spans:
                        yield of_resource.resource, of_scope.scope, span


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, args=(0.01,))
    thread.start()
    yield receiver
    receiver.goes_on.set()
    receiver.server.shutdown()
    thread.join()
    receiver.server.server_close()


def said(attributes: Any) -> dict[str, Any]:
    return otel._values(attributes)


def count(out: SpansOut, name: str, **labels: str) -> float:
    registry = CollectorRegistry()
    for collector in out.collectors:
        registry.register(collector)
    return registry.get_sample_value(f"lightning_rl_otlp_{name}", labels) or 0.0


@contextmanager
def mirrored(tmp_path: Path, url: str, **how: Any) -> Iterator[tuple[MirroredStore, SpansOut]]:
    """A store whose spans go to an endpoint; on return all that was in time is there."""
    out = SpansOut(traces_url(url, "it"), **how)
    with closing(MirroredStore(f"sqlite:///{tmp_path / 'mirrored.db'}", out)) as store:
        yield store, out


def started(store: MirroredStore) -> tuple[Claim, str, str]:
    claim = store.start(RolloutRequest(task=1, agent="solver", mode="train", group_id="g"), "w")
    return claim, claim.rollout.rollout_id, claim.attempt.attempt_id


def agents_own(rollout_id: str, attempt_id: str, name: str = "openinference") -> list[Span]:
    """What a real instrumentation exported."""
    told = json.loads((CONVENTIONS / f"{name}.json").read_text())["request"]
    decoded = otel.from_json(json.dumps(told).encode())
    return otel.spans_of(decoded, emitted=False, own=SpanPlace(rollout_id, attempt_id))[0]


def test_calls_rewards_and_the_agents_spans_are_one_trace_below_the_rollout(
    receiver: Receiver, tmp_path: Path, call_span: Callable[..., Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=red,authorization=Bearer%20secret")
    with mirrored(tmp_path, receiver.url) as (store, out):
        _, rollout_id, attempt_id = started(store)
        call = call_span(rollout_id, attempt_id)
        call.attributes[semconv.INPUT_MESSAGES] = [{"role": "user", "content": "hé"}]
        emitted = Emitted(rollout_id, attempt_id)
        with emitted.collecting(), operation("search", inputs={"a": 1}):
            emit_message("on my way")
            emit_reward(0.5, "style")
        own = agents_own(rollout_id, attempt_id)
        store.add_spans([call])
        store.add_spans(_by_otlp(emitted) + own)
        store.finish(rollout_id, attempt_id, Finish(status="succeeded", reward={"reward": 1.0, "style": 0.5}))
    assert count(out, "sent_total") == len(own) + 5
    assert set(receiver.paths) == {"/v1/traces"}
    assert {(each["x-team"], each["authorization"]) for each in receiver.headers} == {("red", "Bearer secret")}
    came = receiver.spans()
    assert {span.trace_id.hex() for _, _, span in receiver.all()} == {f"{trace_id_of(attempt_id):032x}"}
    root, ours = came["lightning_rl.rollout"], came["lightning_rl.call"]
    assert root.parent_span_id == b""
    assert {
        came[name].parent_span_id for name in ("lightning_rl.call", "ChatCompletion", "lightning_rl.operation")
    } == {root.span_id}
    assert came["lightning_rl.message"].parent_span_id == came["lightning_rl.operation"].span_id
    of_root = said(root.attributes)
    assert (of_root["lightning_rl.status"], of_root["lightning_rl.reward.value"]) == ("succeeded", 1.0)
    assert (of_root["gen_ai.agent.name"], of_root["lightning_rl.rewards.style"]) == ("solver", 0.5)
    of_call = said(ours.attributes)
    assert of_call["lightning_rl.call_id"] == call.span_id
    assert (of_call["lightning_rl.rollout_id"], of_call["lightning_rl.attempt_id"]) == (rollout_id, attempt_id)
    assert json.loads(of_call["gen_ai.input.messages"]) == [{"role": "user", "content": "hé"}]
    assert of_call["gen_ai.response.finish_reasons"] == ["stop"]
    assert not {semconv.PROMPT_IDS, semconv.RESPONSE_IDS, semconv.LOGPROBS} & of_call.keys()
    assert said(came["lightning_rl.reward"].attributes)["lightning_rl.reward.value"] == 0.5
    assert {(said(r.attributes)["service.name"], scope.name) for r, scope, _ in receiver.all()} == {
        ("agent", "openinference.instrumentation.openai"), ("lightning_rl", "lightning_rl"),
    }  # fmt: skip
    [link] = came["ChatCompletion"].links
    assert f"{attempt_id}:{link.trace_id.hex()}:{link.span_id.hex()}" in {span.span_id for span in own}


def _by_otlp(emitted: Emitted) -> list[Span]:
    """What an agent emitted, as its runner sends it."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    return otel.spans_of(encode_spans(emitted.spans), emitted=True)[0]


@pytest.mark.parametrize("name", ["openinference", "gen_ai", "litellm", "openllmetry_before_1_0"])
def test_a_second_server_takes_them_and_has_what_the_first_one_has(
    served: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20admin")
    claim = served.client().start(RolloutRequest(task=1))
    place = claim.rollout.rollout_id, claim.attempt.attempt_id
    with (
        closing(sqlite3.connect(tmp_path / "run.db")) as one,
        closing(sqlite3.connect(tmp_path / "mirrored.db")) as two,
    ):
        one.backup(two)
    with mirrored(tmp_path, served.url) as (store, out):
        store.add_spans(agents_own(*place, name))
        first = store.spans(*place)
    second = served.store.spans(*place)
    assert len(second) == len(first) >= 3
    assert count(out, "sent_total") == len(first)
    for mine, theirs in zip(by_span_id(first), by_span_id(second), strict=True):
        assert (mine.name, mine.start_ns, mine.end_ns) == (theirs.name, theirs.start_ns, theirs.end_ns)
        assert without_parent(mine) == without_parent(theirs)
        assert theirs.attributes[semconv.PARENT_SPAN].startswith(f"{place[1]}:{trace_id_of(place[1]):032x}:")


def by_span_id(spans: list[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: span.span_id.rpartition(":")[2])


def without_parent(span: Span) -> dict[str, Any]:
    return {name: value for name, value in span.attributes.items() if name != semconv.PARENT_SPAN}


def test_every_end_of_an_attempt_has_its_root(receiver: Receiver, tmp_path: Path) -> None:
    with mirrored(tmp_path, receiver.url) as (store, _):
        failed, cancelled, lost, one_of_many = (started(store) for _ in range(4))
        store.finish(failed[1], failed[2], Finish(status="failed", error=ErrorInfo(type="E", message="no")))
        done = Finish(status="succeeded", reward=1.0)
        store.finish_many([Ending(rollout_id=one_of_many[1], attempt_id=one_of_many[2], finish=done)])
        store.cancel(cancelled[1])
        store.expire(store.running(why="session"))
        queued = store.enqueue([RolloutRequest(task=2)])[0]
        store.cancel(queued.rollout_id)  # no attempt, no trace
    ends = {said(span.attributes)["lightning_rl.attempt_id"]: span for _, _, span in receiver.all()}
    assert {attempt_id: said(span.attributes)["lightning_rl.status"] for attempt_id, span in ends.items()} == {
        failed[2]: "failed", cancelled[2]: "cancelled", lost[2]: "lost", one_of_many[2]: "succeeded",
    }  # fmt: skip
    assert (ends[failed[2]].status.code, ends[failed[2]].status.message) == (2, "E: no")


def test_an_endpoint_that_hangs_holds_up_nothing_and_what_does_not_fit_is_dropped_and_told_once(
    receiver: Receiver, tmp_path: Path, call_span: Callable[..., Span], caplog: pytest.LogCaptureFixture
) -> None:
    receiver.goes_on.clear()
    with mirrored(tmp_path, receiver.url, waiting_bytes=20_000) as (store, out):
        _, rollout_id, attempt_id = started(store)
        store.add_spans([call_span(rollout_id, attempt_id, 0)])
        assert receiver.came.wait(60)  # it holds the first request for as long as this block runs
        calls = [call_span(rollout_id, attempt_id, number) for number in range(1, 300)]
        for call in calls:
            store.add_spans([call])
        store.finish(rollout_id, attempt_id, Finish(status="succeeded", reward=1.0))
        assert len(store.spans(rollout_id, attempt_id)) == 300
        dropped, waiting = count(out, "dropped_total", why="full"), count(out, "waiting")
        assert dropped + waiting == 300  # all but the first, and the root
        assert 0 < waiting < 300
        store._out.close(0.2)
        assert not receiver.goes_on.is_set()
        assert receiver.requests == []
        assert count(out, "dropped_total", why="stopped") == waiting + 1
        receiver.goes_on.set()
    told = [record.message for record in caplog.records if "trouble with the OTLP endpoint" in record.message]
    assert len(told) == 1
    assert "nothing that is recorded is lost" in told[0]


@pytest.mark.parametrize("status", [400, 503, None])
def test_what_an_endpoint_does_not_take_is_dropped_and_it_is_told_when_it_takes_again(
    receiver: Receiver,
    tmp_path: Path,
    call_span: Callable[..., Span],
    status: int | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[[Callable[[], bool]], None],
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    caplog.set_level(logging.WARNING)
    url, receiver.status = ("http://127.0.0.1:9", 200) if status is None else (receiver.url, status)
    with mirrored(tmp_path, url) as (store, out):
        _, rollout_id, attempt_id = started(store)
        store.add_spans([call_span(rollout_id, attempt_id, 0)])
        eventually(lambda: count(out, "dropped_total", why="failed") == 1)
        receiver.status = 200
        if status is not None:
            store.add_spans([call_span(rollout_id, attempt_id, 1)])
            eventually(lambda: count(out, "sent_total") == 1)
    told = [record.message for record in caplog.records if "the OTLP endpoint" in record.message]
    assert "it does not take spans (server.log says why)" in told[0]
    assert told[1:] == ([] if status is None else [f"trouble with the OTLP endpoint {receiver.url}/v1/traces is over"])


def test_many_spans_go_out_in_several_requests(
    receiver: Receiver, tmp_path: Path, call_span: Callable[..., Span]
) -> None:
    with mirrored(tmp_path, receiver.url) as (store, _):
        _, rollout_id, attempt_id = started(store)
        store.add_spans([call_span(rollout_id, attempt_id, number) for number in range(1100)])
    assert [sum(1 for _ in receiver.all()), len(receiver.requests)] == [1100, 3]


@pytest.mark.long
def test_serve_answers_finishes_and_stops_while_its_endpoint_hangs(receiver: Receiver, tmp_path: Path) -> None:
    """As a person runs it: an agent is answered, its rollout ends, and SIGTERM stops it cleanly."""
    receiver.goes_on.clear()
    with running() as service:
        words = ("--engine", f"openai:policy={service.url}", "--otlp-endpoint", receiver.url)
        with serving(tmp_path, *words, OPENAI_API_KEY="k") as server:
            claim = json.loads(server.post("/api/v1/rollouts/start", {"task": 1}, server.key).data)
            llm, place = claim["resources"]["main_llm"], claim["attempt"]
            client = openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"])
            ask = client.chat.completions.create
            assert ask(model="policy", messages=[{"role": "user", "content": "hi"}]).choices[0].message.content == "ok"
            assert receiver.came.wait(60)
            assert ask(model="policy", messages=[{"role": "user", "content": "you"}]).choices[0].message.content == "ok"
            path = f"/api/v1/rollouts/{place['rollout_id']}/attempts/{place['attempt_id']}/finish"
            assert server.post(path, {"status": "succeeded", "reward": 1.0}, server.key).status == 200
            headers = {"authorization": f"Bearer {server.key}"}
            page = server.pool.request("GET", f"{server.url}/metrics", headers=headers).data.decode()
            assert "lightning_rl_otlp_waiting 2.0" in page
            assert "lightning_rl_otlp_sent_total 0.0" in page
            status, _ = server.stop(signal.SIGTERM)
            assert status == 0
    assert receiver.requests == []
    assert (tmp_path / "run.db").exists()


def test_serve_sends_what_it_recorded(receiver: Receiver, tmp_path: Path) -> None:
    with running() as service:
        words = ("--engine", f"openai:policy={service.url}", "--otlp-endpoint", f"{receiver.url}/v1/traces")
        with serving(tmp_path, *words, OPENAI_API_KEY="k") as server:
            claim = json.loads(server.post("/api/v1/rollouts/start", {"task": 1}, server.key).data)
            llm, place = claim["resources"]["main_llm"], claim["attempt"]
            client = openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"])
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
            path = f"/api/v1/rollouts/{place['rollout_id']}/attempts/{place['attempt_id']}/finish"
            server.post(path, {"status": "succeeded", "reward": 1.0}, server.key)
            server.stop(signal.SIGTERM)
    assert receiver.spans().keys() == {"lightning_rl.call", "lightning_rl.rollout"}
    call = said(receiver.spans()["lightning_rl.call"].attributes)
    assert (call["gen_ai.operation.name"], json.loads(call["gen_ai.input.messages"])[0]["content"]) == ("chat", "hi")


@pytest.mark.long
def test_without_an_endpoint_of_ours_nothing_is_sent_whatever_the_environment_says(
    receiver: Receiver, tmp_path: Path
) -> None:
    with running() as service:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OPENAI_API_KEY": "k"}
        with serving(tmp_path, "--engine", f"openai:policy={service.url}", **environment) as server:
            claim = json.loads(server.post("/api/v1/rollouts/start", {"task": 1}, server.key).data)
            llm = claim["resources"]["main_llm"]
            client = openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"])
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
            server.stop(signal.SIGTERM)
    assert not receiver.came.is_set()


class Once(Algorithm):
    """One rollout, with a service as the model."""

    def __init__(self, service: str, otlp_endpoint: str) -> None:
        engine = {"model": "policy", "kind": "openai", "url": service, "api_key": "k"}
        self._endpoint = Endpoint(
            model="policy", tokenizer=None, renderer="auto", engines=[engine], otlp_endpoint=otlp_endpoint
        )

    def open(self, run_dir: Path) -> Endpoint:
        return self._endpoint

    def run(self, train_dataset: Any, val_dataset: Any) -> None:
        asked = self.store.enqueue([RolloutRequest(task=1)])
        self.store.wait([asked[0].rollout_id], 60)


def calling(task: Any, llm: Any) -> float:
    import openai

    import lightning_rl

    lightning_rl.emit_message("on my way")
    client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
    client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}])
    return 1.0


def test_a_run_sends_its_spans(receiver: Receiver, tmp_path: Path) -> None:
    with running() as service:
        Trainer(calling, n_runners=1, run_dir=tmp_path / "run").fit(Once(service.url, receiver.url), [1])
    came = receiver.spans()
    assert came.keys() == {"lightning_rl.call", "lightning_rl.message", "lightning_rl.rollout"}
    assert len({span.trace_id for span in came.values()}) == 1
    assert said(came["lightning_rl.rollout"].attributes)["lightning_rl.reward.value"] == 1.0


def test_a_config_with_a_key_in_its_endpoint_is_refused() -> None:
    with pytest.raises(
        EndpointRefused, match=r"config key gateway.otlp_endpoint is no .*OTEL_EXPORTER_OTLP_HEADERS"
    ) as e:
        compose({"gateway": {"otlp_endpoint": "https://user:secret@h"}})
    assert "secret" not in str(e.value)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("http://h:4318/", "http://h:4318/v1/traces"),
        ("https://h/api/otel", "https://h/api/otel/v1/traces"),
        ("https://h/v1/traces", "https://h/v1/traces"),
    ],
)
def test_an_endpoint_is_named_with_otlps_path_or_without(endpoint: str, url: str) -> None:
    assert traces_url(endpoint, "it") == url


@pytest.mark.parametrize(
    "endpoint", ["h:4318", "ftp://h", "http://user:secret@h", "http://h?key=secret", "", "http://"]
)
def test_what_is_no_endpoint_is_refused_without_repeating_it(endpoint: str) -> None:
    with pytest.raises(EndpointRefused) as refused:
        traces_url(endpoint, "--otlp-endpoint")
    assert "--otlp-endpoint is no http://... or https://... of an OTLP endpoint" in str(refused.value)
    assert "secret" not in str(refused.value)
