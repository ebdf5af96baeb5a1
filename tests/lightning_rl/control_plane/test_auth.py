"""The table of keys, cell by cell, at a real server: what each key opens, and that none is to be found anywhere."""

import asyncio
import json
import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import msgspec
import pytest
import urllib3

from lightning_rl.agents.agent import as_agent
from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane.api import ROUTES
from lightning_rl.control_plane.gateways.cluster_rpc import ASKED
from lightning_rl.control_plane.gateways.engines import EngineRequest
from lightning_rl.control_plane.launch import launch
from lightning_rl.control_plane.process import ServerSettings
from lightning_rl.control_plane.routes.auth import Keys, RefusedKeys
from lightning_rl.control_plane.routes.required_key import OwnKey, PeerKey, RoleKey
from lightning_rl.control_plane.routes.route import Refused
from lightning_rl.runner import launch as runners
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import RolloutRequest
from lightning_rl_proxy.http.keys import sign_attempt_key
from tests.proxy.engines.service import running

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # children cannot import a test

ADMIN, RUNNER = "the-admin-key-of-the-tests", "the-runner-key-of-the-tests"
NOTHING = b'{"nonsense": 1}'  # a body that no route takes, so that none does anything
ATTEMPT = "/rollouts/r/attempts/a"
# Every route of the control plane: whose it is, and what its owner is answered.
CONTROL = {
    ("POST", "/rollouts/claim"): ("runner", 400),
    ("POST", f"{ATTEMPT}/heartbeat"): ("runner", 404),
    ("POST", f"{ATTEMPT}/rewards"): ("runner", 400),
    ("POST", f"{ATTEMPT}/finish"): ("runner", 400),
    ("POST", f"{ATTEMPT}/log"): ("runner", 400),
    ("POST", "/attempts/heartbeat"): ("runner", 400),
    ("POST", "/attempts/finish"): ("runner", 400),
    ("POST", "/attempts/logs"): ("runner", 400),
    ("POST", "/workers/died"): ("runner", 400),
    ("GET", "/workers"): ("admin", 200),
    ("POST", "/rollouts"): ("admin", 400),
    ("GET", "/rollouts"): ("admin", 200),
    ("POST", "/rollouts/start"): ("admin", 400),
    ("POST", "/rollouts/wait"): ("admin", 400),
    ("POST", "/rollouts/find"): ("admin", 400),
    ("POST", "/rollouts/spans"): ("admin", 400),
    ("GET", "/rollouts/rewarded"): ("admin", 200),
    ("GET", "/rollouts/r"): ("admin", 404),
    ("POST", "/rollouts/r/cancel"): ("admin", 404),
    ("GET", f"{ATTEMPT}/log"): ("admin", 404),
    ("GET", f"{ATTEMPT}/spans"): ("admin", 404),
    ("GET", f"{ATTEMPT}/triplets"): ("admin", 404),
    ("GET", f"{ATTEMPT}/rows"): ("admin", 404),
    ("POST", "/resources"): ("admin", 400),
    ("GET", "/resources/none"): ("admin", 404),
    ("POST", "/engines"): ("admin", 400),
    ("GET", "/engines"): ("admin", 200),
    ("DELETE", "/engines/e"): ("admin", 404),
    ("POST", "/pause"): ("admin", 400),
    ("POST", "/resume"): ("admin", 400),
    ("GET", "/server"): ("admin", 200),
    ("POST", "/runs/x/begin"): ("admin", 400),
    ("POST", "/runs/x/heartbeat"): ("admin", 400),
    ("POST", "/runs/x/end"): ("admin", 400),
    ("GET", "/gateways"): ("admin", 200),
    ("POST", "/peers/seal"): ("peer", 409),  # which gateway is meant was not said
    ("POST", "/peers/pause"): ("peer", 409),
    ("POST", "/peers/resume"): ("peer", 409),
    ("POST", "/peers/pauses"): ("peer", 409),
    ("POST", "/peers/engines"): ("peer", 409),
    ("POST", "/peers/engine"): ("peer", 409),
    ("POST", "/peers/remove_engine"): ("peer", 409),
    ("POST", "/peers/tokens"): ("peer", 409),
    ("GET", "/state"): ("admin", 200),
    ("POST", "/state/tokens"): ("admin", 400),
}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
# What is behind each door of the gateway, a request for it, and what the attempt's key is answered.
DOORS: dict[tuple[str, str], tuple[Any, int]] = {
    ("POST", "chat/completions"): (CHAT, 200),
    ("POST", "completions"): ({"model": "policy", "prompt": "hi"}, 400),  # a chat service completes no prompts
    ("POST", "responses"): ({"model": "policy", "input": "hi"}, 200),
    ("POST", "messages"): (CHAT | {"max_tokens": 8}, 200),
    ("POST", "messages/count_tokens"): (CHAT, 400),  # nor does it count tokens
    ("POST", "embeddings"): ({"model": "policy", "input": "hi"}, 200),
    ("GET", "models"): (None, 200),
    ("GET", "models/policy"): (None, 200),
}
KEYS = ["none", "admin", "damaged admin", "runner", "damaged runner", "attempt"]
KEYS += ["damaged attempt", "forged attempt", "expired attempt", "other attempt", "closed attempt"]


policy_of = partial(Endpoint, model="policy", tokenizer=None, renderer="auto")


@dataclass
class Server:
    url: str
    run_dir: Path
    pid: int
    keys: dict[str, str | None] = field(default_factory=dict)
    base_url: str = ""  # of the open attempt
    closed_url: str = ""
    pool: urllib3.PoolManager = field(default_factory=lambda: urllib3.PoolManager(retries=False))

    def ask(self, method: str, url: str, key: str | None, body: bytes | None = None) -> urllib3.BaseHTTPResponse:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self.pool.request(method, url, body=body, headers=headers)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server over a chat service, with an open attempt, another one, and one that has ended."""
    run_dir = tmp_path_factory.mktemp("run")
    with running() as service:
        engine = {"model": "policy", "kind": "openai", "url": service.url, "api_key": "sk-of-the-service"}
        with launch(run_dir, policy_of(engines=[engine]), admin_key=ADMIN, runner_key=RUNNER) as serving:
            server = Server(serving.url, run_dir, serving.pid)
            store = HttpStore(serving.url, ADMIN)
            llm, other, closed = (store.start(RolloutRequest(task=1)).resources["main_llm"] for _ in range(3))
            store.cancel(closed["base_url"].split("/")[4])
            server.base_url, server.closed_url = llm["base_url"], closed["base_url"]
            _, rollout_id, _, attempt_id, _ = llm["base_url"].split("/")[3:]
            with closing(sqlite3.connect(run_dir / "store.db")) as database:
                [[secret]] = database.execute("SELECT value FROM meta WHERE key = 'secret'").fetchall()
            secrets = bytes.fromhex(secret), b"another"
            soon = int(time.time()) + 60
            server.keys = {
                "none": None,
                "admin": ADMIN,
                "damaged admin": ADMIN[:-1],
                "runner": RUNNER,
                "damaged runner": RUNNER + "x",
                "attempt": llm["api_key"],
                "damaged attempt": llm["api_key"][:-1],
                "forged attempt": sign_attempt_key(secrets[1], rollout_id, attempt_id, soon),
                "expired attempt": sign_attempt_key(secrets[0], rollout_id, attempt_id, soon - 120),
                "other attempt": other["api_key"],
                "closed attempt": closed["api_key"],
            }
            yield server


def test_the_table_has_every_route_of_the_control_plane() -> None:
    there = {(method, route.path) for route in ROUTES for method in (route.methods or set()) - {"HEAD"}}
    named = {"r": "{rollout_id}", "a": "{attempt_id}", "none": "{resources_id}", "e": "{engine_id}"}
    named |= {"x": "{run_id}"}
    table = {(method, "/".join(named.get(part, part) for part in path.split("/"))) for method, path in CONTROL}
    assert {(method, "/api/v1" + path) for method, path in table} == there


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize(("method", "path"), CONTROL)
def test_a_route_of_the_control_plane_opens_to_its_own_keys_alone(
    server: Server, method: str, path: str, kind: str
) -> None:
    owner, answered = CONTROL[method, path]
    expected = {"admin": answered, "runner": answered if owner == "runner" else 403}.get(kind, 401)
    body = NOTHING if method == "POST" else None
    answer = server.ask(method, f"{server.url}/api/v1{path}", server.keys[kind], body)
    assert answer.status == expected, answer.data
    assert expected < 400 or answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("door", ["of the attempt", "of an agent", "by key alone"])
@pytest.mark.parametrize(("method", "path"), DOORS)
def test_a_model_door_opens_to_the_key_of_its_open_attempt_alone(
    server: Server, method: str, path: str, door: str, kind: str
) -> None:
    fields, answered = DOORS[method, path]
    root = {
        "of the attempt": server.base_url,
        "of an agent": server.base_url.removesuffix("/v1") + "/agent/judge/v1",
        "by key alone": server.url + "/v1",
    }[door]
    # By key alone a key cannot be at a wrong door: it goes to its own attempt.
    elsewhere = {"other attempt": answered, "closed attempt": 409} if door == "by key alone" else {}
    expected = ({"attempt": answered, "other attempt": 403, "closed attempt": 403} | elsewhere).get(kind, 401)
    answer = server.ask(method, f"{root}/{path}", server.keys[kind], fields and msgspec.json.encode(fields))
    assert answer.status == expected, answer.data
    if expected >= 400:
        assert answer.headers["x-should-retry"] == "false"


def test_a_key_of_an_attempt_that_has_ended_opens_nothing(server: Server) -> None:
    answer = server.ask("GET", f"{server.closed_url}/models", server.keys["closed attempt"])
    assert (answer.status, answer.headers["x-should-retry"]) == (409, "false")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/healthz", 200), ("/readyz", 200), ("/openapi.json", 200), ("/docs", 200), ("/metrics", 401), ("/no", 404),
        ("/v1/traces", 401),
    ],
)  # fmt: skip
def test_without_a_key_only_health_readiness_and_the_api_are_told(server: Server, path: str, status: int) -> None:
    assert server.ask("GET", server.url + path, None).status == status


@pytest.mark.parametrize("kind", KEYS)
def test_the_metrics_are_the_admins(server: Server, kind: str) -> None:
    assert server.ask("GET", f"{server.url}/metrics", server.keys[kind]).status == (200 if kind == "admin" else 401)


@pytest.mark.parametrize("header", ["Basic {}", "{}", "Bearer", "Bearer  ", "", "Bearer \xff\xfe", "Token {}"])
def test_a_header_that_is_no_bearer_of_a_key_opens_nothing(header: str) -> None:
    assert Keys(admin="admin", runner="").role(header.format("admin")) is None


def asked_with(key: str, **headers: str) -> Any:
    """A request about the attempt `a` of the rollout `r` at gateway g, with this key."""
    together = SimpleNamespace(is_meant="g".__eq__)
    services = SimpleNamespace(
        keys=Keys(admin="admin", runner="runner", peer="peer"),
        store=SimpleNamespace(secret=b"secret"),
        refused_keys=RefusedKeys(),
        together=together,
    )
    return SimpleNamespace(
        app=SimpleNamespace(state=SimpleNamespace(services=services)),
        headers={"authorization": f"Bearer {key}"} | headers,
        path_params={"rollout_id": "r", "attempt_id": "a"},
        method="POST",
        url=SimpleNamespace(path="/x"),
        client=None,
    )


def status_of(needed: Any, request: Any) -> int:
    try:
        asyncio.run(needed(request))
    except Refused as refused:
        return refused.status
    return 200


@pytest.mark.parametrize("given", ["admin", "runner", "peer"])
@pytest.mark.parametrize("needed", ["admin", "runner", "peer"])
def test_the_key_of_a_role_opens_what_is_its_own_and_the_admins_all(needed: Any, given: str) -> None:
    assert status_of(RoleKey(needed), asked_with(given)) == (200 if given in ("admin", needed) else 403)


@pytest.mark.parametrize(("meant", "status"), [({}, 409), ({ASKED: "another"}, 409), ({ASKED: "g"}, 200)])
def test_a_peer_is_answered_by_the_gateway_that_it_means_alone(meant: dict[str, str], status: int) -> None:
    assert status_of(PeerKey(), asked_with("peer", **meant)) == status


@pytest.mark.parametrize(
    ("rollout", "attempt", "status"), [("r", "a", 200), ("r", "an earlier one", 401), ("another", "a", 401)]
)
def test_the_key_of_an_attempt_renews_its_own_lease_alone(rollout: str, attempt: str, status: int) -> None:
    key = sign_attempt_key(b"secret", rollout, attempt, int(time.time()) + 60)
    assert status_of(OwnKey(), asked_with(key)) == status


def test_there_is_no_runner_key_where_none_is_set() -> None:
    keys = Keys(admin="admin", runner="")
    assert [keys.role(f"Bearer {key}") for key in ("", " ", "admin")] == [None, None, "admin"]


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No comparison ends early: each check asks `hmac.compare_digest`, the control plane's of all keys every time."""
    import hmac

    compared: list[tuple[Any, Any]] = []
    whole = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or whole(a, b))
    for given in ("admin", "runner", "peer", "neither", ""):
        compared.clear()
        Keys(admin="admin", runner="runner", peer="peer").role(f"Bearer {given}")
        assert compared == [(given.encode(), key) for key in (b"admin", b"runner", b"peer")]


def test_what_holds_a_key_does_not_show_it() -> None:
    engine = EngineRequest(model="m", kind="openai", url="http://x", api_key="sk-secret")
    settings = ServerSettings(
        store="sqlite:///x", run_dir="x", admin_key="sk-secret", runner_key="sk-secret", model="m", engines=(engine,)
    )
    shown = [settings, engine, Keys(admin="sk-secret", runner="sk-secret")]
    assert "sk-secret" not in "".join(f"{each!r} {each} {[each]}" for each in shown)


def secrets_in(text: bytes, secrets: list[str]) -> list[str]:
    return [secret for secret in secrets if secret.encode() in text]


def test_no_key_is_in_a_log_an_answer_or_the_environment_of_a_process(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real run of an agent that starts a program, in a trainer whose own environment holds the keys."""
    monkeypatch.setenv("LIGHTNING_RL_ADMIN_KEY", ADMIN)
    monkeypatch.setenv("LIGHTNING_RL_RUNNER_KEY", RUNNER)
    found = tmp_path / "found"

    def agent(task, llm):
        import subprocess

        import openai

        client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
        client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}])
        with open(task, "wb") as file:
            file.write(subprocess.run(["env"], capture_output=True, check=True).stdout)
        raise RuntimeError(f"an agent that fails with {llm}")

    store = HttpStore(server.url, ADMIN)
    [rollout] = store.enqueue([RolloutRequest(task=str(found))])
    with runners.launch(1, as_agent(agent), server.url, RUNNER, log_dir=tmp_path) as working:
        [ended] = store.wait([rollout.rollout_id], 60)
        pids = [server.pid, *working.pids]
        processes = [Path(f"/proc/{pid}/{what}").read_bytes() for pid in pids for what in ("environ", "cmdline")]
    assert ended.error.type == "RuntimeError"
    server.ask("POST", f"{server.url}/api/v1/engines", ADMIN, NOTHING)
    answers = [
        server.ask("GET", server.url + path, ADMIN).data
        for path in ("/api/v1/state", "/api/v1/engines", "/metrics", "/readyz", "/api/v1/resources/latest")
    ] + [server.ask("POST", server.base_url + "/chat/completions", kind, b"{}").data for kind in (ADMIN, RUNNER)]
    logs = [path.read_bytes() for path in [*server.run_dir.glob("*.log"), *tmp_path.glob("*.log")]]
    assert len(logs) == 2
    assert b"an agent that fails" in b"".join(logs)
    ours = [ADMIN, RUNNER, "sk-of-the-service"]
    signatures = [key.rpartition(":")[2] for kind, key in server.keys.items() if key and kind.endswith("attempt")]
    assert secrets_in(b"".join(processes), ours + signatures) == []
    assert secrets_in(found.read_bytes(), ours) == []
    assert secrets_in(b"".join(answers), ours + signatures) == []
    assert secrets_in(b"".join(logs), ours + signatures) == []
    assert "lrl-attempt" not in json.dumps(msgspec.to_builtins(ended))


def test_the_files_of_a_server_are_its_owners_alone(server: Server) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in server.run_dir.iterdir()}
    del modes["server.log"]  # the parent opens it, and no key or prompt is in it
    assert modes.keys() >= {"store.db", "gateway.journal"}
    assert set(modes.values()) == {0o600}


def test_the_trainers_admin_key_is_its_owners_alone(tmp_path: Path) -> None:
    from lightning_rl.trainer import _write_private

    os.umask(os.umask(0))
    _write_private(tmp_path / "admin.key", "secret")
    assert (tmp_path / "admin.key").stat().st_mode & 0o777 == 0o600


# What keys do not keep apart: `docs/security.md` says so


def test_runners_of_one_server_share_a_key_and_can_end_each_others_attempts_by_id(server: Server) -> None:
    admin, runner = HttpStore(server.url, ADMIN), HttpStore(server.url, RUNNER)
    admin.enqueue([RolloutRequest(task=1, rollout_id="shared")])
    claim = next(one for one in runner.claim("one runner", limit=100) if one.rollout.rollout_id == "shared")
    body = b'{"status": "succeeded", "reward": 1}'
    place = f"{server.url}/api/v1/rollouts/shared/attempts/"
    assert server.ask("POST", f"{place}unknown/finish", RUNNER, body).status == 404
    assert server.ask("POST", f"{place}{claim.attempt.attempt_id}/finish", RUNNER, body).status == 200


def test_an_agent_in_a_runner_could_find_the_runners_key(server: Server, tmp_path: Path) -> None:
    def agent(task, llm):
        import gc

        from lightning_rl.store.client import HttpStore

        stores = [each for each in gc.get_objects() if isinstance(each, HttpStore)]
        return float(any(task[::-1] in header for each in stores for header in each._headers.values()))

    store = HttpStore(server.url, ADMIN)
    store.enqueue([RolloutRequest(task=RUNNER[::-1], rollout_id="looks")])
    with runners.launch(1, as_agent(agent), server.url, RUNNER, log_dir=tmp_path):
        [ended] = store.wait(["looks"], 60)
    assert ended.reward == 1.0


def test_a_leaked_attempt_key_ends_with_its_attempt_and_after_a_week_at_the_latest(server: Server) -> None:
    store = HttpStore(server.url, ADMIN)
    claim = store.start(RolloutRequest(task=1, rollout_id="leak"))
    llm = claim.resources["main_llm"]
    last = int(llm["api_key"].split(":")[3])
    assert last - int(claim.attempt.started_at) == 7 * 24 * 3600
    assert server.ask("GET", f"{server.url}/v1/models", llm["api_key"]).status == 200
    store.cancel("leak")
    assert server.ask("GET", f"{server.url}/v1/models", llm["api_key"]).status == 409


def test_it_speaks_no_tls(server: Server) -> None:
    with pytest.raises(urllib3.exceptions.SSLError):
        server.ask("GET", server.url.replace("http:", "https:") + "/healthz", None)


def test_prompts_are_kept_in_clear_and_the_keys_of_services_are_not_kept(server: Server) -> None:
    store = HttpStore(server.url, ADMIN)
    llm = store.start(RolloutRequest(task="task in clear", rollout_id="clear")).resources["main_llm"]
    chat = {"model": "policy", "messages": [{"role": "user", "content": "prompt in clear"}]}
    answer = server.ask("POST", f"{llm['base_url']}/chat/completions", llm["api_key"], msgspec.json.encode(chat))
    assert answer.status == 200
    store.cancel("clear")  # all of it is in the store now
    kept = b"".join(path.read_bytes() for path in server.run_dir.iterdir())
    assert secrets_in(kept, ["prompt in clear", "task in clear"]) == ["prompt in clear", "task in clear"]
    assert secrets_in(kept, [ADMIN, RUNNER, "sk-of-the-service", llm["api_key"]]) == []
    with closing(sqlite3.connect(server.run_dir / "store.db")) as database:
        assert database.execute("SELECT length(value) FROM meta WHERE key = 'secret'").fetchall() == [(64,)]
