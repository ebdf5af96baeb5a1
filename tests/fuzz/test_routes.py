"""Any bytes at any route of a real server: no answer of 5xx, and the server is well afterwards.

Fields have the names that routes know, so that values come as deep as they can.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import urllib3
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_rl.control_plane.api import ROUTES
from lightning_rl.control_plane.launch import launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import RolloutRequest
from tests.fuzz.laws import share
from tests.lightning_rl.control_plane.test_killed import engine
from tests.lightning_rl.control_plane.test_process import policy_of

CONTROL = [(method, route.path) for route in ROUTES for method in sorted((route.methods or set()) - {"HEAD"})]
ADMIN = [*CONTROL, ("POST", "/v1/traces"), ("GET", "/metrics"), ("GET", "/healthz")]
DOORS = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens", "embeddings")
OWN = [("POST", "/v1/traces"), *(("POST", f"/v1/{door}") for door in DOORS), ("GET", "/v1/models"), ("PUT", "/v1/x")]
NAMES = [
    "rollouts", "rollout_id", "rollout_ids", "task", "mode", "group_id", "agent", "agents", "resources_id",
    "config", "metadata", "max_attempts", "timeout_seconds", "unresponsive_seconds", "worker_id", "worker_ids",
    "claim_id", "limit", "rewards", "value", "name", "call_id", "reward_id", "status", "reward", "error",
    "type", "message", "traceback", "infrastructure", "attempts", "attempt_id", "finish", "stdout", "stderr",
    "resources", "model", "policy_version", "lease_seconds", "resourceSpans", "scopeSpans", "spans",
    "attributes", "key", "stringValue", "traceId", "spanId", "messages", "role", "content", "prompt", "input",
    "tools", "function", "parameters", "arguments", "stop", "max_tokens", "n", "temperature", "stream", "x",
]  # fmt: skip
TEXTS = [
    "",
    "r1",
    "train",
    "queued",
    "succeeded",
    "policy",
    "user",
    "latest",
    "a:b",
    "\x00",
    "é",
    "\U0001f600" * 3,
    "a" * 200,
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(TEXTS)
    | st.sampled_from([0, 1, -1, 0.5, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 1e308, -0.0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=8,
)
# What is put into the text of a body: half surrogates, bytes that are no UTF-8, depth, numbers beyond all bounds.
ODD = [b'"\\ud800"', b'"\xff"', b"[" * 1000 + b"]" * 1000, b"{" * 500, b"1e999", b"9" * 5000, b"NaN", b'"\\u0000"', b""]
QUERIES = [
    "",
    "?cursor=" + "9" * 30,
    "?cursor=%ff",
    "?limit=0",
    "?limit=1e3",
    "?status=%ed%a0%80",
    "?source=otel",
    "?x=%00",
]
IDS = ["r1", "latest", "%ff", "%00", "%ed%a0%80", "..", "é", "a" * 300]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """Its URL, its admin key, the key of an open attempt."""
    folder = tmp_path_factory.mktemp("run")
    with (
        engine() as sampler,
        launch(folder, policy_of(engines=[sampler]), admin_key="admin", runner_key="r") as serving,
    ):
        claim = HttpStore(serving.url, "admin").start(RolloutRequest(task=1, rollout_id="r1"))
        yield serving.url, "admin", claim.resources["main_llm"]["api_key"]


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=40) | st.sampled_from(ODD))
    fields: Any = draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
    body = json.dumps(fields).encode()
    if draw(st.booleans()):  # one value of one field is odd, and the rest is well-formed
        name = draw(st.sampled_from(NAMES)).encode()
        body = body.rstrip(b"}") + (b"," if fields else b"{") + b'"' + name + b'":' + draw(st.sampled_from(ODD)) + b"}"
    return body


POOL = urllib3.PoolManager(retries=False, timeout=20)


@share(0.15)
@given(
    route=st.sampled_from(ADMIN),
    body=bodies(),
    query=st.sampled_from(QUERIES),
    name=st.sampled_from(IDS),
    own=st.booleans(),
    protobuf=st.booleans(),
)
@example(("POST", "/api/v1/rollouts"), b'{"rollouts": [{"task": "\xff"}]}', "", "r1", False, False)
@example(
    ("POST", "/api/v1/rollouts"), b'{"rollouts": [{"task": ' + b"[" * 1000 + b"]" * 1000 + b"}]}", "", "", False, False
)
@example(("GET", "/api/v1/rollouts"), b"", "?cursor=" + "9" * 30, "r1", False, False)
@example(("POST", "/v1/traces"), b'{"\\ud800": 1}', "", "r1", True, False)
def test_no_bytes_at_any_route_are_a_failure_of_the_server(
    server: tuple[str, str, str],
    route: tuple[str, str],
    body: bytes,
    query: str,
    name: str,
    own: bool,
    protobuf: bool,
) -> None:
    url, admin, attempt = server
    method, path = route
    for place in ("{rollout_id}", "{attempt_id}", "{resources_id}", "{engine_id}"):
        path = path.replace(place, name)
    key = attempt if own else admin
    kind = "application/x-protobuf" if protobuf else "application/json"
    if path in ("/api/v1/pause", "/api/v1/engines"):
        body += b"]"  # no model is to be paused for those that come after, and no engine to be asked
    check(url, method, path + query, body, key, kind)


@share(0.1)
@given(route=st.sampled_from(OWN), body=bodies())
def test_no_bytes_at_any_door_are_a_failure_of_the_server(
    server: tuple[str, str, str], route: tuple[str, str], body: bytes
) -> None:
    url, _, attempt = server
    check(url, *route, body, attempt, "application/json")


def check(url: str, method: str, path: str, body: bytes, key: str, kind: str) -> None:
    headers = {"authorization": f"Bearer {key}", "content-type": kind}
    answer = POOL.request(method, url + path, body=body, headers=headers)
    assert answer.status < 500, (method, path, body[:300], answer.status, answer.data[:300])


def test_the_server_is_well_afterwards(server: tuple[str, str, str]) -> None:
    checks = POOL.request("GET", server[0] + "/readyz").json()["checks"]
    assert (checks["server"], checks["store"], checks["journal"]) == ("ok", "ok", "ok")
