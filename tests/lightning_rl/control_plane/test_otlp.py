"""`POST /v1/traces`: the standard exporter's spans become spans of attempts, as the sender's key allows."""

import gzip
import json
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind

from lightning_rl.agents.emit import emit_message, emit_reward, operation
from lightning_rl.agents.emitted import Emitted
from lightning_rl.inspect.explain import explain
from lightning_rl.runner.delivery import SpanDelivery
from lightning_rl.runner.outcome import SpanBatch, batches
from lightning_rl.store.contract import Claim, Finish, Reward, RolloutRequest
from lightning_rl.store.errors import StoreUnwritable
from lightning_rl.trajectories.trajectory import trajectory_of
from lightning_rl_adapters import otel
from lightning_rl_proxy.http.keys import sign_attempt_key

CONVENTIONS = Path(__file__).parents[2] / "adapters" / "otel"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def claim(served) -> Claim:
    return served.client().start(RolloutRequest(task=1))


def place(claim: Claim) -> tuple[str, str]:
    return claim.rollout.rollout_id, claim.attempt.attempt_id


def attempt_key(served, claim: Claim, seconds: float = 60) -> str:
    return sign_attempt_key(served.store.secret, *place(claim), int(time.time() + seconds))


def request(claim: Claim | None, **span: Any) -> bytes:
    """A JSON request of one span, of this attempt where there is one."""
    whose = {} if claim is None else dict(zip(("rollout_id", "attempt_id"), place(claim), strict=True))
    attributes = [{"key": f"lightning_rl.{name}", "value": {"stringValue": value}} for name, value in whose.items()]
    whole = {"traceId": TRACE, "spanId": SPAN, "name": "chat", "startTimeUnixNano": "1"} | span
    resource = {"attributes": attributes}
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [whole]}]}]}).encode()


def post(served, body: bytes, key: str | None = "admin", **headers: str):
    sent = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    sent |= {} if key is None else {"authorization": f"Bearer {key}"}
    return served.pool.request("POST", f"{served.url}/v1/traces", body=body, headers=sent, retries=False)


def names(served, claim: Claim) -> list[str]:
    status, answer = served.call("GET", "/api/v1/rollouts/{}/attempts/{}/spans".format(*place(claim)))
    assert status == 200
    return [span["name"] for span in answer["spans"]]


@pytest.fixture(params=[Compression.Gzip, Compression.NoCompression, Compression.Deflate])
def compression(request: pytest.FixtureRequest) -> Compression:
    return request.param


def test_the_standard_exporters_spans_are_kept_and_served(served, claim, compression) -> None:
    exporter = OTLPSpanExporter(
        endpoint=f"{served.url}/v1/traces",
        headers={"authorization": f"Bearer {attempt_key(served, claim)}"},
        compression=compression,
        timeout=5,
    )
    provider = TracerProvider(resource=Resource({"service.name": "their agent"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("their tool").start_as_current_span("turn") as span:
        span.set_attribute("gen_ai.usage.input_tokens", 7)
        with provider.get_tracer("their tool").start_as_current_span("search"):
            pass
    if compression is Compression.Deflate:  # which OTLP does not have: refused, and nothing breaks
        assert names(served, claim) == []
        return
    assert names(served, claim) == ["turn", "search"]
    turn, search = served.store.spans(*place(claim))
    assert turn.attributes["gen_ai.usage.input_tokens"] == 7
    assert turn.attributes["lightning_rl.resource"] == {"service.name": "their agent"}
    assert search.attributes["lightning_rl.parent_span"] == turn.span_id
    assert turn.start_ns <= search.start_ns <= search.end_ns <= turn.end_ns


@pytest.mark.parametrize("prefix", ["lightning_rl", "agentlightning"])
def test_the_standard_exporters_spans_are_joined_by_their_resource(served, claim, prefix) -> None:
    """With a runner's key, which opens every attempt: the resource alone says whose the spans are."""
    whose = dict(zip((f"{prefix}.rollout_id", f"{prefix}.attempt_id"), place(claim), strict=True))
    exporter = OTLPSpanExporter(
        endpoint=f"{served.url}/v1/traces",
        headers={"authorization": "Bearer runner"},
        compression=Compression.Gzip,
        timeout=5,
    )
    provider = TracerProvider(resource=Resource({"service.name": "their agent"} | whose))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("their tool").start_as_current_span("turn", kind=SpanKind.CLIENT):
        pass
    [turn] = served.store.spans(*place(claim))
    assert turn.attributes["lightning_rl.resource"] == {"service.name": "their agent"}
    assert turn.attributes["lightning_rl.kind"] == "CLIENT"


@pytest.mark.parametrize("content_type", ["application/json", "application/x-protobuf"])
def test_what_real_instrumentations_exported_are_triplets_where_they_have_token_ids(
    served, claim, content_type
) -> None:
    body = json.dumps(json.loads((CONVENTIONS / "openinference.json").read_text())["request"]).encode()
    if content_type != "application/json":
        body = otel.from_json(body).SerializeToString()
    form = {"content_type": content_type, "content_encoding": "gzip"}
    assert post(served, gzip.compress(body), attempt_key(served, claim), **form).status == 200
    path = "/api/v1/rollouts/{}/attempts/{}/triplets".format(*place(claim))
    assert served.call("GET", path) == (200, {"triplets": []})  # the gateway saw none of it
    served.client().finish(*place(claim), Finish(status="succeeded", reward=0.5))
    status, told = served.call("GET", f"{path}?source=otel")
    assert status == 200
    assert [each["response_token_ids"] for each in told["triplets"]] == [[21, 22, 23], [], [21, 22, 23]]
    assert [each["exact"] for each in told["triplets"]] == [True, False, True]
    assert [each["content"] for each in told["triplets"][1]["response_messages"]] == ["I add."]
    assert {(each["verified"], each["convention"]) for each in told["triplets"]} == {(False, "openinference")}
    assert {each["reward"] for each in told["triplets"]} == {0.5}
    [diagnosis] = told["diagnoses"]
    assert diagnosis["missing"] == ["prompt token ids", "response token ids", "logprobs"]
    assert "llm.base_url" in diagnosis["advice"]
    trace = served.store.traces([claim.rollout.rollout_id])[claim.rollout.rollout_id]
    assert trajectory_of(trace, agent_failure=0.0).sampled_tokens == 0
    assert trajectory_of(trace, agent_failure=0.0, spans=True).sampled_tokens == 6
    status, wrong = served.call("GET", f"{path}?source=other")
    assert (status, "Invalid enum value 'other'" in wrong["error"]["message"]) == (400, True)


def test_what_an_agent_emitted_is_kept_once_however_often_it_is_sent(served, claim) -> None:
    emitted = Emitted(*place(claim))
    with emitted.collecting(), operation("step", inputs={"a": 1}):
        emit_message("hello")
        emit_reward(0.5, "style")
    deliver = SpanDelivery(served.url, "runner")
    for _ in range(2):
        deliver([(place(claim)[0], batch) for batch in batches(emitted.spans)])
    assert sorted(names(served, claim)) == ["lightning_rl.message", "lightning_rl.operation", "lightning_rl.reward"]
    served.client().finish(*place(claim), Finish(status="succeeded"))
    rollout = served.client().rollout(claim.rollout.rollout_id)
    assert (rollout.reward, rollout.rewards) == (None, {})  # rewards are told by the control plane alone


def test_spans_of_several_attempts_go_together_and_what_is_wrong_with_one_is_no_others_loss(served, caplog) -> None:
    claims = [served.client().start(RolloutRequest(task=number)) for number in range(3)]
    emitted: list[tuple[str, SpanBatch]] = []
    for claim in claims:
        of_claim = Emitted(*place(claim))
        with of_claim.collecting():
            emit_message("hello")
        emitted += [(place(claim)[0], batch) for batch in batches(of_claim.spans)]
    deliver, sent = SpanDelivery(served.url, "runner"), []
    deliver._pool.request, ask = (
        lambda *args, **kwargs: sent.append(ask(*args, **kwargs)) or sent[-1],
        deliver._pool.request,
    )
    deliver(emitted[:2])
    assert [answer.status for answer in sent] == [200]
    deliver([("broken", SpanBatch(7, b"no protobuf")), emitted[2]])
    assert [answer.status for answer in sent] == [200, 400, 400, 200]
    assert [names(served, claim) for claim in claims] == [["lightning_rl.message"]] * 3
    assert caplog.messages == ["7 of the 7 spans that rollout broken emitted did not reach the server"]


def test_many_spans_are_sent_in_several_requests(served, claim) -> None:
    emitted = Emitted(*place(claim))
    with emitted.collecting():
        for number in range(1100):
            emit_message(str(number))
    SpanDelivery(served.url, "runner")([(place(claim)[0], batch) for batch in batches(emitted.spans)])
    assert len(names(served, claim)) == 1100


def test_json_by_hand_is_taken_and_its_answer_is_json(served, claim) -> None:
    answer = post(served, request(claim), content_type="application/json; charset=utf-8")
    assert (answer.status, answer.headers["content-type"], answer.data) == (200, "application/json", b"{}")
    packed = post(served, gzip.compress(request(claim, spanId="00" * 7 + "01", name="packed")), content_encoding="gzip")
    assert packed.status == 200
    assert names(served, claim) == ["chat", "packed"]
    assert served.store.spans(*place(claim))[0].span_id == f"{place(claim)[1]}:{TRACE}:{SPAN}"


def test_an_empty_request_is_taken(served, claim) -> None:
    assert post(served, b"{}").status == 200
    answer = post(served, b"", content_type="application/x-protobuf")
    assert (answer.status, answer.headers["content-type"], answer.data) == (200, "application/x-protobuf", b"")


def test_each_key_opens_what_it_may(served, claim) -> None:
    other = served.client().start(RolloutRequest(task=2))
    own = attempt_key(served, claim)
    for number, key in enumerate(("admin", "runner", own)):
        assert post(served, request(claim, spanId=f"{number + 1:016x}"), key).data == b"{}"
    assert len(names(served, claim)) == 3
    refused = json.loads(post(served, request(other), own).data)["partialSuccess"]
    assert refused["rejectedSpans"] == "1"
    assert "'chat' is of another attempt than the one that the key opens" in refused["errorMessage"]
    assert names(served, other) == []
    forged = sign_attempt_key(b"another", *place(claim), int(time.time()) + 60)
    for nobody in (None, "", "wrong", own[:-1], forged, attempt_key(served, claim, -60)):
        answer = post(served, request(claim), nobody)
        assert answer.status == 401
        assert json.loads(answer.data)["code"] == 16
    basic = served.pool.request("POST", f"{served.url}/v1/traces", headers={"authorization": f"Basic {own}"})
    assert basic.status == 401
    assert len(names(served, claim)) == 3


def test_the_holder_of_an_attempts_key_gives_neither_rewards_nor_calls(served, claim, call_span) -> None:
    recorded = call_span(*place(claim))
    served.store.add_spans([recorded])
    own, before = attempt_key(served, claim), served.store.recorded_calls().tokens
    attributes = [
        {"key": "lightning_rl.reward.value", "value": {"doubleValue": 1.0}},
        {"key": "lightning_rl.response_ids", "value": {"bytesValue": "AAAAAA=="}},
        {"key": "gen_ai.response.model", "value": {"intValue": "5"}},
        {"key": "lightning_rl.fork_cause", "value": {"intValue": "5"}},
    ]
    for number, name in enumerate(("lightning_rl.reward", "lightning_rl.call", recorded.span_id)):
        sent = request(None, name=name, spanId=f"{number + 1:016x}", attributes=attributes)
        assert post(served, sent, own).data == b"{}"
    served.store.add_rewards(*place(claim), [Reward(value=0.5)])
    served.client().finish(*place(claim), Finish(status="succeeded"))
    trace = served.store.traces([claim.rollout.rollout_id])[claim.rollout.rollout_id]
    assert len(trace.attempts[0].spans) == 4
    assert trace.rollout.rewards == {"reward": 0.5}
    # Nothing that reads spans minds those that are no calls.
    assert served.store.recorded_calls().tokens == before == {"m": 2}
    assert len(explain(trace).attempts[0].calls) == 1
    assert trajectory_of(trace, agent_failure=0.0).sampled_tokens == 2
    for what in ("triplets", "rows"):
        status, answer = served.call("GET", "/api/v1/rollouts/{}/attempts/{}/".format(*place(claim)) + what)
        assert (status, len(answer[what])) == (200, 1)
    assert served.call("POST", "/api/v1/rollouts/spans", {"rollout_ids": [claim.rollout.rollout_id]})[0] == 200
    assert served.client().traces([claim.rollout.rollout_id])


def test_an_ended_attempt_takes_no_more(served, claim) -> None:
    own = attempt_key(served, claim)
    served.client().cancel(claim.rollout.rollout_id)
    answer = post(served, request(None), own)
    assert answer.status == 409
    assert "is closed: its rollout has ended or was retried" in json.loads(answer.data)["message"]
    for key in ("runner", "admin"):
        told = json.loads(post(served, request(claim), key).data)["partialSuccess"]
        assert "'chat' is of no open attempt" in told["errorMessage"]
    assert names(served, claim) == []


def test_spans_of_no_attempt_are_rejected_by_name_and_the_others_taken(served, claim) -> None:
    mixed = json.loads(request(claim))
    mixed["resourceSpans"] += json.loads(request(None, name="stray"))["resourceSpans"]
    unknown = msgspec.structs.replace(claim.attempt, attempt_id="a-unknown")
    lost = msgspec.structs.replace(claim, attempt=unknown)
    mixed["resourceSpans"] += json.loads(request(lost, name="lost"))["resourceSpans"]
    told = json.loads(post(served, json.dumps(mixed).encode(), "runner").data)["partialSuccess"]
    assert told["rejectedSpans"] == "2"
    assert "'stray' has no attempt: set lightning_rl.rollout_id" in told["errorMessage"]
    assert "'lost' is of no open attempt: there is no attempt a-unknown" in told["errorMessage"]
    assert names(served, claim) == ["chat"]


def test_a_key_of_an_attempt_that_is_not_there_is_told_so(served) -> None:
    stranger = sign_attempt_key(served.store.secret, "r-none", "a-none", int(time.time()) + 60)
    assert post(served, request(None), stranger).status == 404


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        (b"{", {}, 400, "the body is no JSON"),
        (b"\xff", {"content_type": "application/x-protobuf"}, 400, "the body is no protobuf"),
        (b"{}", {"content_type": "text/plain"}, 415, "send application/x-protobuf or application/json"),
        (b"{}", {"content_encoding": "br"}, 415, "the content encoding is 'br'; send gzip"),
        (b"{}", {"content_encoding": "gzip"}, 400, "the body is no gzip"),
        (gzip.compress(b"{}", mtime=0)[:-4], {"content_encoding": "gzip"}, 400, "cut short"),
        (gzip.compress(b"{}", mtime=0) * 2, {"content_encoding": "gzip"}, 400, "comes after it"),
    ],
)
def test_what_is_no_otlp_is_refused_in_otlps_own_words(served, body, headers, status, said) -> None:
    answer = post(served, body, **headers)
    assert answer.status == status
    if headers.get("content_type") == "application/x-protobuf":
        assert said in Status.FromString(answer.data).message
    else:
        assert said in json.loads(answer.data)["message"]


def test_a_body_over_the_limit_is_refused_packed_or_not(served, claim) -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join([packer.compress(bytes(2**20)) for _ in range(65)] + [packer.flush()])
    assert len(bomb) < 2**20
    own = attempt_key(served, claim)
    packed = post(served, bomb, own, content_encoding="gzip")
    assert (packed.status, "over 67108864 bytes when it is unpacked" in packed.data.decode()) == (413, True)
    assert post(served, bytes(64 * 2**20 + 1), own).status == 413
    told = post(served, b"", content_length=str(2**40))
    assert (told.status, "over 268435456 bytes" in told.data.decode()) == (413, True)


def test_only_what_may_be_sent_again_has_a_status_that_exporters_send_again(served, claim, monkeypatch) -> None:
    def full(spans: Any) -> Iterator[None]:
        raise StoreUnwritable("the disk is full")

    monkeypatch.setattr(served.store, "add_spans", full)
    answer = post(served, request(claim))
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert "the disk is full" in json.loads(answer.data)["message"]


def test_other_methods_and_paths_are_none(served) -> None:
    assert served.call("GET", "/v1/traces")[0] == 405
    assert served.call("GET", "/v1/traces", key=None)[0] == 401
    assert served.call("POST", "/v1/traces/more")[0] == 404


def test_an_answer_in_protobuf_says_what_was_rejected(served) -> None:
    exported = requests.post(
        f"{served.url}/v1/traces",
        data=b"\x0a\x0c\x12\x0a\x12\x08\x2a\x06\x73\x74\x72\x61\x79\x73",  # one span named "strays"
        headers={"authorization": "Bearer runner", "content-type": "application/x-protobuf"},
        timeout=10,
    )
    told = ExportTraceServiceResponse.FromString(exported.content).partial_success
    assert (exported.status_code, told.rejected_spans) == (200, 1)
    assert "'strays' has no attempt" in told.error_message
