"""A server whose disk is full, or whose store was taken away: it says so, loses nothing, and goes on when it can again.

The disk is "full" by a limit on the size of the server's files, set and lifted from outside.
"""

import asyncio
import json
import logging
import os
import resource
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest
import urllib3

from lightning_rl.control_plane.launch import launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import StoreUnwritable
from lightning_rl.store.sql import SqlStore
from lightning_rl_proxy.recording.recorder import replay
from tests.lightning_rl.control_plane.test_process import journal, policy_of, refusal, span
from tests.lightning_rl.store.test_sql import damaged


@contextmanager
def full_disk(pid: int):
    """No file of the process can be written beyond its first byte."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


class Engine(BaseHTTPRequestHandler):
    """Samples the same three tokens for everybody."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        tokens = {"content": [{"logprob": -0.5}] * 3}
        choice = {"index": 0, "token_ids": [1, 2, 151645], "logprobs": tokens, "finish_reason": "stop"}
        body = json.dumps({"request_id": "x", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def engine():
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield {"model": "policy", "kind": "embedded", "url": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()


def alarms(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "lightning_rl.processes.child"]


def eventually(what) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def test_a_run_outlives_a_full_disk(tmp_path, engine, caplog) -> None:
    config = RolloutConfig(unresponsive_seconds=1, timeout_seconds=2)
    with launch(tmp_path, policy_of(engines=[engine]), admin_key="a", runner_key="r") as serving:
        store = HttpStore(serving.url, "a")
        store.enqueue([RolloutRequest(task=1, rollout_id="r1", config=config)])
        (claim,) = store.claim("w")
        llm = claim.resources["main_llm"]
        client = openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=0)
        place = ("r1", claim.attempt.attempt_id)
        with full_disk(serving.pid):
            # An answer goes out, though neither journal nor store can be written.
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
            assert store.state()["counters"]["journal_errors"] == 1
            impatient = HttpStore(serving.url, "a", patience_seconds=0)
            with pytest.raises(StoreUnwritable, match=rf"{tmp_path}/store\.db cannot be written(.|\n)*free space"):
                impatient.finish(*place, Finish(status="succeeded", reward=1.0))
            with pytest.raises(StoreUnwritable):
                impatient.enqueue([RolloutRequest(task=2)])
            # Longer than the lease and the deadline: the time counts against neither.
            time.sleep(2.5)
            finishing = threading.Thread(target=lambda: store.finish(*place, Finish(status="succeeded", reward=1.0)))
            finishing.start()
        finishing.join(20)
        assert not finishing.is_alive()
        trace = store.traces(["r1"])["r1"]
        assert (trace.rollout.status, trace.rollout.attempt_count) == ("succeeded", 1)
        assert len(trace.attempts[0].spans) == 1
        eventually(lambda: "the server: trouble with the store is over" in alarms(caplog))
    told = alarms(caplog)
    assert any(f"trouble with the journal {tmp_path}/gateway.journal: " in line for line in told)
    assert any(f"trouble with the store: the store {tmp_path}/store.db cannot be written" in line for line in told)
    assert all(r.levelno == logging.WARNING for r in caplog.records if r.name == "lightning_rl.processes.child")


@pytest.mark.long
def test_a_server_on_a_full_disk_does_not_start_and_keeps_its_journal(tmp_path) -> None:
    SqlStore(f"sqlite:///{tmp_path / 'store.db'}").close()
    record = span("a", 0, 5)
    asyncio.run(journal(tmp_path / "gateway.journal", record))
    with full_disk(os.getpid()):  # of which the server is a child
        assert refusal(tmp_path).startswith(f"the store {tmp_path}/store.db cannot be written")
    assert [left.span_id for left in replay(tmp_path / "gateway.journal").records] == [record.span_id]


@pytest.mark.long
def test_a_server_on_a_damaged_store_says_so_in_one_line(tmp_path) -> None:
    damaged(tmp_path / "store.db")
    assert refusal(tmp_path).startswith(f"the store {tmp_path}/store.db is damaged (")


@pytest.mark.parametrize("how", ["deleted", "its log deleted", "exchanged"])
def test_a_store_that_was_taken_away_is_told_and_nothing_is_answered_as_durable(tmp_path, engine, caplog, how) -> None:
    away = tmp_path / "away"
    away.mkdir()
    names = ["store.db-wal"] if how == "its log deleted" else ["store.db", "store.db-wal", "store.db-shm"]
    with launch(tmp_path, policy_of(engines=[engine]), admin_key="a", runner_key="r") as serving:
        store = HttpStore(serving.url, "a", patience_seconds=0)
        claim = store.start(RolloutRequest(task=1, rollout_id="r1"))
        place = ("r1", claim.attempt.attempt_id)
        for name in names:
            os.rename(tmp_path / name, away / name)
        if how == "exchanged":
            SqlStore(f"sqlite:///{tmp_path / 'store.db'}").close()
        what = "exchanged for another file" if how == "exchanged" else f"{names[0]} was deleted"
        with pytest.raises(StoreUnwritable, match=what):
            store.finish(*place, Finish(status="succeeded", reward=1.0))
        ready = urllib3.request("GET", serving.url + "/readyz", retries=False)
        assert (ready.status, ready.json()["checks"]["store"]) == (503, "cannot be written, or does not answer")
        eventually(lambda: any("trouble with the store: " in line for line in alarms(caplog)))
        for name in names:
            os.rename(away / name, tmp_path / name)
        eventually(lambda: "the server: trouble with the store is over" in alarms(caplog))
        assert store.finish(*place, Finish(status="succeeded", reward=1.0)).status == "succeeded"


def test_a_pause_that_nobody_ends_is_told_of_in_the_trainers_process(tmp_path, engine, caplog) -> None:
    with launch(tmp_path, policy_of(engines=[engine]), admin_key="a", runner_key="r") as serving:
        HttpStore(serving.url, "a").pause(mode="keep", lease_seconds=0.05)
        eventually(lambda: any("was not ended within its lease" in line for line in alarms(caplog)))
