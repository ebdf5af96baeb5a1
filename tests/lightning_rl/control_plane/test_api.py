"""The control plane's contract: who may ask what, what is answered, and that long polls wake."""

import re
import socket
import threading
from urllib.parse import urlsplit

import jsonschema_rs
import msgspec
import pytest
from schemathesis.specs.openapi.definitions import OPENAPI_31

from lightning_rl.control_plane.api import ROUTES
from lightning_rl.control_plane.routes import traces
from lightning_rl.control_plane.routes.traces import TripletsAnswer
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Attempt, Claim, Ending, ErrorInfo, Finish, Reward, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import Conflict, Invalid, NotAllowed, NotFound, Unreachable
from lightning_rl_adapters.triplet import Triplet
from lightning_rl_proxy.address import Address
from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable
from lightning_rl_proxy.http import openapi
from lightning_rl_proxy.http.keys import verify_attempt_key

POLICY = {
    "main_llm": {
        "type": "proxy_llm",
        "model": "m",
        "sampling_parameters": {"temperature": 0.7},
        "val_sampling_parameters": {"temperature": 0},
    }
}
A = "/api/v1/rollouts/r1/attempts/a1"
RUNNERS = [
    ("POST", "/api/v1/rollouts/claim"),
    ("POST", f"{A}/heartbeat"),
    ("POST", f"{A}/rewards"),
    ("POST", f"{A}/finish"),
    ("POST", f"{A}/log"),
    ("POST", "/api/v1/attempts/heartbeat"),
    ("POST", "/api/v1/attempts/finish"),
    ("POST", "/api/v1/attempts/logs"),
    ("POST", "/api/v1/workers/died"),
]
ADMINS = [
    ("POST", "/api/v1/rollouts"),
    ("GET", "/api/v1/rollouts"),
    ("GET", "/api/v1/rollouts/rewarded"),
    ("POST", "/api/v1/rollouts/start"),
    ("POST", "/api/v1/rollouts/wait"),
    ("POST", "/api/v1/rollouts/find"),
    ("POST", "/api/v1/rollouts/spans"),
    ("GET", "/api/v1/rollouts/r1"),
    ("POST", "/api/v1/rollouts/r1/cancel"),
    ("GET", "/api/v1/workers"),
    ("GET", f"{A}/log"),
    ("GET", f"{A}/spans"),
    ("GET", f"{A}/triplets"),
    ("GET", f"{A}/rows"),
    ("POST", "/api/v1/resources"),
    ("GET", "/api/v1/resources/latest"),
    ("POST", "/api/v1/engines"),
    ("GET", "/api/v1/engines"),
    ("DELETE", "/api/v1/engines/e1"),
    ("POST", "/api/v1/pause"),
    ("POST", "/api/v1/resume"),
    ("GET", "/api/v1/server"),
    ("POST", "/api/v1/runs/x/begin"),
    ("POST", "/api/v1/runs/x/heartbeat"),
    ("POST", "/api/v1/runs/x/end"),
    ("GET", "/api/v1/gateways"),
    ("POST", "/api/v1/peers/seal"),
    ("POST", "/api/v1/peers/pause"),
    ("POST", "/api/v1/peers/resume"),
    ("POST", "/api/v1/peers/pauses"),
    ("POST", "/api/v1/peers/engines"),
    ("POST", "/api/v1/peers/engine"),
    ("POST", "/api/v1/peers/remove_engine"),
    ("POST", "/api/v1/peers/tokens"),
    ("GET", "/api/v1/state"),
    ("POST", "/api/v1/state/tokens"),
]


def enqueue(served, *ids, **fields) -> None:
    served.client().enqueue([RolloutRequest(task=i, rollout_id=i, **fields) for i in ids])


# Keys


def test_every_route_needs_a_key_and_the_admins_need_the_admin_key(served) -> None:
    for method, path in RUNNERS + ADMINS:
        for key in (None, "", "wrong"):
            status, body = served.call(method, path, {}, key=key)
            assert (status, body["error"]["type"]) == (401, "unauthorized"), path
        status, body = served.call(method, path, None if method == "GET" else {}, key="runner")
        assert (status == 403) == ((method, path) in ADMINS), (path, body)


def test_a_client_that_leaves_within_its_body_is_no_error_of_the_servers(served, caplog) -> None:
    address = urlsplit(served.url)
    head = "POST /api/v1/rollouts HTTP/1.1\r\nhost: x\r\nauthorization: Bearer admin\r\ncontent-length: 99\r\n\r\n"
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head.encode() + b'{"rollouts"')
        assert served.call("GET", "/readyz")[0] == 200  # by then it has taken up the request
    for _ in range(3):
        assert served.call("GET", "/readyz")[0] == 200
    assert "Exception in ASGI application" not in caplog.text


def test_the_keys_table_names_every_route_there_is(served) -> None:
    assert len(ROUTES) == len(RUNNERS + ADMINS)


def test_health_needs_no_key_and_other_paths_are_the_gateways(served) -> None:
    assert served.call("GET", "/healthz", key=None) == (200, {"status": "ok"})
    assert served.call("GET", "/readyz", key=None)[0] == 200
    answer = served.pool.request("POST", f"{served.url}/rollout/r/attempt/a/v1/chat/completions")
    assert (answer.status, answer.data) == (299, b"gateway")


def test_the_document_describes_every_route_and_every_door(served) -> None:
    _, told = served.call("GET", "/openapi.json", key=None)
    jsonschema_rs.validator_for(OPENAPI_31).validate(told)
    there = {(method.upper(), path) for path, operations in told["paths"].items() for method in operations}
    routes = {(method, route.path) for route in ROUTES for method in route.methods - {"HEAD"}}
    assert routes | {("GET", "/healthz"), ("POST", "/v1/traces"), ("POST", "/v1/chat/completions")} <= there
    for method, path in routes:
        operation = told["paths"][path][method.lower()]
        assert operation["security"]
        assert operation["responses"].keys() - {"default"} in ({"200"}, {"201"})
    ids = [operation["operationId"] for operations in told["paths"].values() for operation in operations.values()]
    assert len(ids) == len(set(ids))
    references = re.findall(r'"#/components/schemas/([^"]*)"', msgspec.json.encode(told).decode())
    assert set(references) <= told["components"]["schemas"].keys()
    doors = openapi.document()
    assert doors["components"]["schemas"].items() <= told["components"]["schemas"].items()
    assert doors["paths"].keys() <= told["paths"].keys()


def test_the_document_says_what_goes_in_and_out(served) -> None:
    _, told = served.call("GET", "/openapi.json", key=None)
    schemas = {"components": told["components"]}

    def fits(schema, value) -> bool:
        return jsonschema_rs.validator_for(schema | schemas).is_valid(value)

    claim = told["paths"]["/api/v1/rollouts/claim"]["post"]
    body = claim["requestBody"]["content"]["application/json"]["schema"]
    assert fits(body, {"worker_id": "w", "limit": 1})
    assert not fits(body, {"worker_id": "w", "limit": 0})
    enqueue(served, "r1")
    _, answer = served.call("POST", "/api/v1/rollouts/claim", {"worker_id": "w"})
    assert fits(claim["responses"]["200"]["content"]["application/json"]["schema"], answer)
    assert not fits(claim["responses"]["200"]["content"]["application/json"]["schema"], {"claims": [{}]})
    page = served.pool.request("GET", served.url + "/docs").data.decode()
    assert "/api/v1/rollouts/claim" in page
    assert not re.findall(r"<(?:script|link|img)|https?://", page)


def test_a_get_answers_head_and_other_methods_are_told(served) -> None:
    for path in ("/healthz", "/api/v1/rollouts", "/docs"):
        answer = served.pool.request("HEAD", served.url + path, headers={"authorization": "Bearer admin"})
        assert (answer.status, answer.data) == (200, b"")
    answer = served.pool.request("DELETE", f"{served.url}/api/v1/rollouts", headers={"authorization": "Bearer admin"})
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"] == {
        "type": "method_not_allowed", "message": "DELETE /api/v1/rollouts: Method Not Allowed",
    }  # fmt: skip


# Errors


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/rollouts", {"rollouts": [{"task": 1, "mode": "tain"}]}, "$.rollouts[0].mode"),
        ("/rollouts", {"rollouts": [{"task": 1, "colour": 1}]}, "colour"),
        ("/rollouts", {"rollouts": [{"mode": "val"}]}, "task"),
        ("/rollouts", {"rollouts": [{"task": 1, "rollout_id": "a/b"}]}, "rollout_id"),
        ("/rollouts", {"rollouts": [{"task": 1, "rollout_id": ".."}]}, "rollout_id"),
        ("/rollouts", b"{", "JSON"),
        ("/rollouts/claim", {"worker_id": "w", "limit": 0}, "limit"),
        ("/resources", {"resources": {"llm": {"type": "proxy_llm"}}}, "llm"),
        ("/engines", {"model": "m", "kind": "none", "url": "http://x"}, "kind"),
        ("/rollouts/r9/attempts/a/finish", {"status": "done"}, "rollout r9"),
    ],
)
def test_a_wrong_body_is_400_and_names_what_is_wrong(served, path, body, named) -> None:
    status, answer = served.call("POST", f"/api/v1{path}", body)
    assert status == 400
    assert named in answer["error"]["message"]


def test_unknown_things_are_404_and_named(served) -> None:
    for path in ("/api/v1/rollouts/r9", "/api/v1/rollouts/r9/attempts/a9/spans", "/api/v1/resources/s9"):
        status, body = served.call("GET", path)
        assert status == 404
        assert "9" in body["error"]["message"]
    assert served.call("GET", "/api/v1/nothing")[0] == 404
    assert served.call("DELETE", "/api/v1/rollouts")[0] == 405


def test_the_clients_errors_are_the_stores(served) -> None:
    enqueue(served, "r1")
    with pytest.raises(Conflict, match="r1"):
        enqueue(served, "r1", mode="val")
    with pytest.raises(NotFound, match="r9"):
        served.client().rollout("r9")
    with pytest.raises(NotAllowed):
        served.client("runner").rollout("r1")
    with pytest.raises(Unreachable):
        HttpStore("http://127.0.0.1:9", "admin").state()


# Shapes


def test_the_way_of_a_rollout(served, call_span) -> None:
    client = served.client()
    client.publish(POLICY)
    status, body = served.call(
        "POST", "/api/v1/rollouts", {"rollouts": [{"task": {"q": 1}, "rollout_id": "r1", "group_id": "g"}]}
    )
    assert status == 201
    assert body["rollouts"][0]["status"] == "queued"

    status, body = served.call("POST", "/api/v1/rollouts/claim", {"worker_id": "w"}, key="runner")
    assert status == 200
    (claim,) = body["claims"]
    attempt = claim["attempt"]["attempt_id"]
    assert claim["rollout"]["task"] == {"q": 1}
    assert claim["attempt"]["sequence"] == 1
    llm = claim["resources"]["main_llm"]
    assert (llm["type"], llm["model"]) == ("llm", "m")
    assert llm["base_url"] == f"{served.url}/rollout/r1/attempt/{attempt}/v1"
    assert llm["anthropic_base_url"] == llm["base_url"].removesuffix("/v1")
    assert llm["sampling_parameters"] == {"temperature": 0.7}
    assert verify_attempt_key(served.store.secret, llm["api_key"]) == Address("r1", attempt)

    place = f"/api/v1/rollouts/r1/attempts/{attempt}"
    status, body = served.call("POST", f"{place}/heartbeat", {}, key="runner")
    assert (status, body["lease_expires_at"] >= claim["attempt"]["lease_expires_at"]) == (200, True)
    status, body = served.call("POST", f"{place}/rewards", {"rewards": [{"value": 1, "name": "x"}]}, key="runner")
    assert (status, body["rewards"][0]["value"]) == (200, 1.0)
    by_call = {"value": 0.25, "name": "step", "call_id": f"chatcmpl-{attempt}-c0", "reward_id": "w1"}
    assert served.call("POST", f"{place}/rewards", {"rewards": [by_call]}, key="runner")[0] == 200

    served.gateway.on_their_way = [call_span("r1", attempt)]
    status, body = served.call("POST", f"{place}/finish", {"status": "succeeded", "reward": 0.5}, key="runner")
    assert (status, body["status"], body["reward"]) == (200, "succeeded", 0.5)
    assert ("seal", "r1", attempt) in served.gateway.asked

    _, body = served.call("GET", "/api/v1/rollouts/r1")
    assert body["counting_attempt_id"] == attempt
    assert body["rewards"] == {"x": 1.0, "reward": 0.5}
    assert [(a["status"], a["call_rewards"]) for a in body["attempts"]] == [("succeeded", [by_call])]

    _, body = served.call("GET", f"{place}/spans")
    assert body["spans"][0]["span_id"] == f"{attempt}-c0"
    assert [(reward["name"], reward["call_id"]) for reward in body["rewards"]] == [
        ("x", None),
        ("step", f"chatcmpl-{attempt}-c0"),
    ]
    assert [3, 4] in body["spans"][0]["attributes"].values()
    asked = {"authorization": "Bearer admin", "accept": "application/msgpack"}
    packed = served.pool.request("GET", f"{served.url}{place}/triplets", headers=asked)
    _, body = served.call("GET", f"{place}/triplets")
    assert body == msgspec.msgpack.decode(packed.data)
    assert body["triplets"] == [
        {
            "call_id": f"{attempt}-c0",
            "agent": None,
            "model": "m",
            "prompt_token_ids": [1, 2],
            "response_token_ids": [3, 4],
            "response_logprobs": [-0.5, -0.25],
            "reward": 0.5,
            "rewards": {"step": 0.25},
            "exact": True,
            "media": [],
        }
    ]
    _, body = served.call("GET", f"{place}/rows")
    (row,) = body["rows"]
    assert row["token_ids"] == [1, 2, 3, 4]
    assert row["loss_mask"] == [0, 0, 1, 1]
    assert row["logprobs"] == [None, None, -0.5, -0.25]
    assert row["rewards"] == [0, 0, 0, 0.5]
    assert row["policy_versions"] == [None, None, 7, 7]
    assert (row["model"], row["excluded"]) == ("m", None)


def test_rows_that_are_not_trained_say_why(served, call_span) -> None:
    client = served.client()
    enqueue(served, "lost", "val", "open")
    served.store.enqueue([RolloutRequest(task=1, rollout_id="v", mode="val")])
    attempts = {c.rollout.rollout_id: c.attempt.attempt_id for c in client.claim("w", limit=4)}
    served.store.add_spans([call_span(r, a) for r, a in attempts.items()])
    gone = ErrorInfo(type="E", message="", infrastructure=True)
    client.finish("lost", attempts["lost"], Finish(status="failed", error=gone))
    client.finish("v", attempts["v"], Finish(status="succeeded", reward=1.0))

    def why(rollout_id):
        _, body = served.call("GET", f"/api/v1/rollouts/{rollout_id}/attempts/{attempts[rollout_id]}/rows")
        return body["rows"][0]["excluded"]

    assert (why("v"), why("open")) == ("validation", "open")
    (retry,) = client.claim("w", wait_seconds=30)
    client.finish("lost", retry.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    assert why("lost") == "superseded"


def test_validation_rollouts_get_the_validation_sampling(served) -> None:
    served.client().publish(POLICY)
    enqueue(served, "r1", mode="val")
    (claim,) = served.client("runner").claim("w")
    assert claim.resources["main_llm"]["sampling_parameters"] == {"temperature": 0}


def test_start_creates_and_claims_in_one_and_again_the_same(served) -> None:
    body = {"task": 1, "rollout_id": "r1"}
    status, claim = served.call("POST", "/api/v1/rollouts/start", body)
    assert (status, claim["rollout"]["status"]) == (201, "running")
    assert served.call("POST", "/api/v1/rollouts/start", body)[1] == claim


def test_traces_are_the_same_in_messagepack_and_json(served, call_span) -> None:
    client = served.client()
    enqueue(served, "r1")
    (claim,) = client.claim("w")
    served.store.add_spans([call_span("r1", claim.attempt.attempt_id)])
    client.add_rewards("r1", claim.attempt.attempt_id, [Reward(value=1.0)])
    trace = client.traces(["r1", "unknown"])
    assert list(trace) == ["r1"]
    assert trace["r1"].attempts[0].spans == [call_span("r1", claim.attempt.attempt_id)]
    _, body = served.call("POST", "/api/v1/rollouts/spans", {"rollout_ids": ["r1"]})
    (attempt,) = body["rollouts"]["r1"]["attempts"]
    assert [3, 4] in attempt["spans"][0]["attributes"].values()
    assert attempt["rewards"][0]["value"] == 1.0


def test_lists_go_on_at_the_cursor(served) -> None:
    enqueue(served, *(f"r{n}" for n in range(5)))
    assert [r.rollout_id for r in served.client().rollouts(status="queued", page=2)] == [f"r{n}" for n in range(5)]


def test_a_refused_finish_leaves_the_attempt_open(served) -> None:
    enqueue(served, "r1")
    (claim,) = served.client().claim("w")
    place = ("r1", claim.attempt.attempt_id)
    with pytest.raises(Invalid, match="r1"):
        served.client().finish(*place, Finish(status="succeeded", reward={"x": 1.0}))
    path = f"/api/v1/rollouts/r1/attempts/{place[1]}/finish"
    for wrong in (b'{"status": "succeeded", "reward": NaN}', b'{"status": "succeeded", "reward": 1e999}'):
        status, body = served.call("POST", path, wrong)
        assert status == 400
        assert "rollout r1" in body["error"]["message"]
    assert ("seal", *place) not in served.gateway.asked
    many = [Ending(rollout_id=place[0], attempt_id=place[1], finish=Finish(status="succeeded", reward={"x": 1.0}))]
    with pytest.raises(Invalid, match="r1"):
        served.client().finish_many(many)
    assert ("seal", *place) not in served.gateway.asked
    served.client().heartbeat(*place)


# Long polls


def in_thread(work):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    return thread, answers


def test_a_claim_wakes_when_a_rollout_is_queued_or_retried(served) -> None:
    thread, answers = in_thread(lambda: served.client("runner").claim("w", wait_seconds=60))
    enqueue(served, "r1")
    thread.join(20)
    (claim,) = answers[0]
    thread, answers = in_thread(lambda: served.client("runner").claim("w", wait_seconds=60))
    gone = ErrorInfo(type="E", message="", infrastructure=True)
    served.client().finish("r1", claim.attempt.attempt_id, Finish(status="failed", error=gone))
    thread.join(20)
    assert answers[0][0].attempt.sequence == 2


def test_one_rollout_goes_to_one_of_many_that_wait(served) -> None:
    waiting = [in_thread(lambda: served.client("runner").claim("w", wait_seconds=60)) for _ in range(4)]
    enqueue(served, *(f"r{n}" for n in range(4)))
    for thread, _ in waiting:
        thread.join(20)
    claimed = [answers[0][0].rollout.rollout_id for _, answers in waiting]
    assert sorted(claimed) == [f"r{n}" for n in range(4)]


@pytest.mark.parametrize("how", ["finish", "finish_many", "cancel", "deadline"])
def test_a_wait_wakes_when_a_rollout_ends(served, how) -> None:
    config = RolloutConfig(timeout_seconds=0.05 if how == "deadline" else 60)
    enqueue(served, "r1", "r2", config=config)
    (claim,) = served.client().claim("w")
    thread, answers = in_thread(lambda: served.client().wait(["r2", "r1"], 60))
    if how == "finish":
        served.client().finish("r1", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    elif how == "finish_many":
        done = Finish(status="succeeded", reward=1.0)
        served.client().finish_many([Ending(rollout_id="r1", attempt_id=claim.attempt.attempt_id, finish=done)])
    elif how == "cancel":
        served.client().cancel("r1")
    thread.join(20)
    assert [r.rollout_id for r in answers[0]] == ["r1"]
    assert ("seal", "r1", claim.attempt.attempt_id) in served.gateway.asked


def test_a_wait_tells_of_all_that_ended_together(served) -> None:
    enqueue(served, "r1", "r2", "r3")
    claims = served.client().claim("w", limit=2)
    thread, answers = in_thread(lambda: served.client().wait(["r3", "r2", "r1"], 60))
    done = Finish(status="succeeded", reward=1.0)
    served.client().finish_many(
        [Ending(rollout_id=c.rollout.rollout_id, attempt_id=c.attempt.attempt_id, finish=done) for c in claims]
    )
    thread.join(20)
    assert sorted(rollout.rollout_id for rollout in answers[0]) == ["r1", "r2"]


@pytest.mark.parametrize("before", [0, 1])
def test_a_wait_gathers_those_that_end_a_little_later_and_answers_when_all_have(served, before) -> None:
    enqueue(served, "r1", "r2", "r3")
    claims = served.client().claim("w", limit=3)
    done = Finish(status="succeeded", reward=1.0)
    for number, claim in enumerate(claims):
        if number == before:
            thread, answers = in_thread(lambda: served.client().wait(["r1", "r2", "r3"], 30, gather_seconds=500))
        served.client().finish(claim.rollout.rollout_id, claim.attempt.attempt_id, done)
    thread.join(60)
    assert sorted(rollout.rollout_id for rollout in answers[0]) == ["r1", "r2", "r3"]


def test_a_wait_that_gathers_answers_when_the_server_stops(served) -> None:
    enqueue(served, "r1", "r2")
    (claim,) = served.client().claim("w")
    served.client().finish("r1", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    thread, answers = in_thread(lambda: served.client().wait(["r1", "r2", "r1"], 30, gather_seconds=500))
    served.release()
    thread.join(60)
    assert [rollout.rollout_id for rollout in answers[0]] == ["r1"]


def test_a_wait_answers_nothing_when_the_time_is_up(served) -> None:
    enqueue(served, "r1")
    assert served.client().wait(["r1"], 0.01) == []
    assert served.client().claim("w", agents=["nobody's"], wait_seconds=0.01) != []
    assert served.client().claim("w", wait_seconds=0.01) == []


def test_a_lost_lease_is_swept_and_queued_again(served) -> None:
    enqueue(served, "r1", config=RolloutConfig(unresponsive_seconds=0.05))
    (first,) = served.client().claim("w")
    (second,) = served.client().claim("w", wait_seconds=60)
    assert second.attempt.sequence == 2
    ended = (
        r"no longer yours: it ended as lost at 2\d{3}-\d\d-\d\dT.*Z \(LeaseExpired: neither a heartbeat of worker w nor"
    )
    with pytest.raises(Conflict, match=ended):
        served.client().heartbeat("r1", first.attempt.attempt_id)


def test_a_call_renews_the_lease_as_a_heartbeat_does(served, eventually) -> None:
    claim = served.client().start(RolloutRequest(task=1, config=RolloutConfig(unresponsive_seconds=0.05)))
    attempt_id = claim.attempt.attempt_id
    served.gateway.idle[attempt_id] = 0.0  # a call is in flight

    def now() -> Attempt:
        return served.client().rollout(claim.rollout.rollout_id).attempts[0]

    eventually(lambda: now().lease_expires_at > claim.attempt.lease_expires_at + 0.2)
    assert now().status == "running"
    served.gateway.idle[attempt_id] = 60.0  # it ended a minute ago
    eventually(lambda: now().status == "lost")


def test_the_list_of_workers_says_what_each_runs(served) -> None:
    assert served.client().workers() == []
    enqueue(served, "r1", "r2", "r3")
    worker = served.client("runner")
    claims = [*worker.claim("b", limit=2), *worker.claim("a")]
    lease = worker.heartbeat("r2", claims[1].attempt.attempt_id)
    _, body = served.call("GET", "/api/v1/workers")
    running = [
        {
            "rollout_id": claim.rollout.rollout_id,
            "attempt_id": claim.attempt.attempt_id,
            "started_at": claim.attempt.started_at,
            "lease_expires_at": lease if claim is claims[1] else claim.attempt.lease_expires_at,
        }
        for claim in claims
    ]
    assert body == {
        "workers": [{"worker_id": "a", "attempts": running[2:]}, {"worker_id": "b", "attempts": running[:2]}]
    }
    for claim in claims[:2]:
        worker.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    assert [each.worker_id for each in served.client().workers()] == ["a"]


def test_an_attempts_own_key_may_heartbeat(served) -> None:
    served.client().publish(POLICY)
    mine, other = (served.client().start(RolloutRequest(task=1)) for _ in range(2))
    key = mine.resources["main_llm"]["api_key"]
    status, body = served.call("POST", _heartbeat(mine), {}, key=key)
    assert (status, body["attempt_id"]) == (200, mine.attempt.attempt_id)
    assert served.call("POST", _heartbeat(other), {}, key=key)[0] == 401
    assert served.call("POST", _heartbeat(mine).replace("heartbeat", "finish"), {"status": "failed"}, key=key)[0] == 401
    served.client().cancel(mine.rollout.rollout_id)
    assert served.call("POST", _heartbeat(mine), {}, key=key)[0] == 409


def _heartbeat(claim: Claim) -> str:
    return f"/api/v1/rollouts/{claim.rollout.rollout_id}/attempts/{claim.attempt.attempt_id}/heartbeat"


# Engines and pauses


def test_engines_are_registered_once(served) -> None:
    client = served.client()
    one = client.register_engine("m", "embedded", "http://127.0.0.1:1", 3)
    assert client.register_engine("m", "embedded", "http://127.0.0.1:1", 3) == one
    assert client.engines() == [one]
    assert len(served.attached) == 1
    with pytest.raises(Conflict, match="policy version"):
        client.register_engine("m", "embedded", "http://127.0.0.1:1", 4)


def test_an_engine_may_sample_a_model_as_an_adapter(served) -> None:
    client = served.client()
    assert client.register_engine("m", "vllm", "http://127.0.0.1:1", adapter=True)["adapter"]
    assert served.attached[-1].adapter
    with pytest.raises(Invalid, match="adapter is for engines of kind 'vllm', not 'sglang'"):
        client.register_engine("m", "sglang", "http://127.0.0.1:1", adapter=True)


def test_an_engine_registered_again_with_the_present_version_has_those_weights(served) -> None:
    client = served.client()
    client.register_engine("m", "vllm", "http://127.0.0.1:1")
    client.register_engine("m", "vllm", "http://127.0.0.1:2")
    client.register_engine("m", "vllm", "http://127.0.0.1:2", 3)
    assert served.gateway.asked[-1] == ("vouch", "m 1", 3)
    assert len(served.attached) == 2
    served.gateway.refuses = EngineUnavailable("it does not answer")
    with pytest.raises(Conflict, match="it does not answer"):
        client.register_engine("m", "vllm", "http://127.0.0.1:2", 3)


def test_the_first_registration_come_twice_speaks_for_no_later_weights(served) -> None:
    client = served.client()
    one = client.register_engine("m", "vllm", "http://127.0.0.1:1")
    assert client.register_engine("m", "vllm", "http://127.0.0.1:1") == one


def test_the_list_of_engines_says_how_each_is(served) -> None:
    client = served.client()
    for port in (1, 2):
        client.register_engine("m", "vllm", f"http://127.0.0.1:{port}")
    served.gateway.told = {
        "m 0": {"away": None, "in_flight": 4, "policy_version": 3},
        "m 1": {"away": "it is gone", "in_flight": 0, "policy_version": 2},
    }
    told = [(one["away"], one["in_flight"], one["policy_version"]) for one in client.engines()]
    assert told == [(None, 4, 3), ("it is gone", 0, 2)]


def test_an_engine_is_taken_out_and_may_come_back(served) -> None:
    client = served.client()
    [kept, out] = [client.register_engine("m", "vllm", f"http://127.0.0.1:{port}") for port in (1, 2)]
    status, answer = served.call("DELETE", f"/api/v1/engines/{out['engine_id']}")
    assert (status, answer["url"]) == (200, "http://127.0.0.1:2")
    assert served.gateway.asked[-1] == ("detach", "m 1")
    assert client.engines() == [kept]
    status, answer = served.call("DELETE", f"/api/v1/engines/{out['engine_id']}")
    assert status == 404
    assert kept["engine_id"] in answer["error"]["message"]
    assert client.register_engine("m", "vllm", "http://127.0.0.1:2", 3)["engine_id"] == out["engine_id"]
    assert len(served.attached) == 3
    served.call("DELETE", f"/api/v1/engines/{out['engine_id']}")
    assert served.gateway.asked[-1] == ("detach", "m 2")


def test_generations_in_flight_have_until_the_deadline_or_no_time_at_all(served) -> None:
    served.client().pause("m", deadline_seconds=60)
    served.client().pause("m", mode="keep", deadline_seconds=60)
    assert served.gateway.asked[-2:] == [("pause", "m", 60), ("pause", "m", 0)]
    assert served.client().state()["models"]["m"]["paused"]
    served.client().resume("m", 4)
    assert served.gateway.asked[-1] == ("resume", "m", 4)
    with pytest.raises(NotFound, match="'n'"):
        served.client().pause("n")


def test_the_gateway_is_told_which_engines_lack_the_weights_by_its_own_names(served) -> None:
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    for url in urls:
        served.call("POST", "/api/v1/engines", {"model": "m", "kind": "vllm", "url": url})
    served.client().resume("m", 4, outdated=lambda: [urls[1], "http://127.0.0.1:3"])
    assert served.gateway.asked[-1] == ("resume", "m", 4, "m 1")


def test_an_engine_that_cannot_freeze_is_an_error_and_pauses_nothing(served) -> None:
    served.gateway.refuses = EngineRefused("engine e has no /pause; start it with VLLM_SERVER_DEV_MODE=1")
    with pytest.raises(Conflict, match="VLLM_SERVER_DEV_MODE=1"):
        served.client().pause("m", mode="keep", lease_seconds=60)
    assert not served.gateway.paused


def test_a_pause_is_over_when_its_lease_is(served, eventually) -> None:
    served.client().pause("m", lease_seconds=0.05)
    eventually(lambda: served.gateway.asked[-1] == ("resume", "m", None))


def test_paused_time_counts_against_no_deadline(served) -> None:
    served.client().pause("m")
    enqueue(served, "r1", config=RolloutConfig(timeout_seconds=0.1))
    served.client().claim("w")
    assert served.client().wait(["r1"], 0.5) == []
    served.client().resume("m")
    assert served.client().wait(["r1"], 20)[0].error.type == "DeadlineExceeded"


def test_triplets_that_are_sent_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_PIECE", 300)
    made = [
        Triplet(
            call_id=str(n), agent=None, model="m", prompt_token_ids=list(range(9 * n)), response_token_ids=[],
            response_logprobs=None, reward=None,
        )
        for n in range(9)
    ]  # fmt: skip
    pieces = list(traces._as_json(iter(made)))
    assert len(pieces) > 3
    assert msgspec.json.decode(b"".join(pieces), type=TripletsAnswer).triplets == made
    assert b"".join(traces._as_json(())) == b'{"triplets":[]}'
