"""A real SIGKILL of the server at each named step: no call of a finished attempt is lost, and nothing is there twice.

The server is the real one, started by a few lines that put the kill behind (or before) one of its functions.
"""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import msgspec
import openai
import pytest
import urllib3

from lightning_rl.control_plane.launch import launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, RolloutRequest
from lightning_rl.store.errors import Conflict, Unreachable
from lightning_rl_adapters.call import calls_of
from lightning_rl_proxy.recording.recorder import replay
from tests.lightning_rl.control_plane.test_process import TOKENIZER, policy_of

PROGRAM = """
import functools, os, signal, sys

import sqlalchemy

from lightning_rl.control_plane import process
from lightning_rl.control_plane.gateways.store_ledger import StoreLedger
from lightning_rl.store.sql import SqlStore
from lightning_rl_proxy.http.delivery import _Reply
from lightning_rl_proxy.recording.recorder import Recorder

step, left = sys.argv[1], int(sys.argv[2])

def die_at_last():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

def kill(owner, name, *, after):
    whole = getattr(owner, name)
    if name in ("end", "add_spans") and owner is not SqlStore:
        async def killed(*args, **kwargs):
            if not after:
                die_at_last()
            result = await whole(*args, **kwargs)
            if after:
                die_at_last()
            return result
    else:
        def killed(*args, **kwargs):
            if not after:
                die_at_last()
            result = whole(*args, **kwargs)
            if after:
                die_at_last()
            return result
    setattr(owner, name, functools.wraps(whole)(killed))

def kill_within_write():
    whole = os.write
    def killed(file, data):
        if left == 1:
            whole(file, bytes(data)[: len(data) // 2])
        die_at_last()
        return whole(file, data)
    def write(self, record, real=Recorder._write):
        os.write = killed
        try:
            real(self, record)
        finally:
            os.write = whole
    Recorder._write = write

def kill_within_commit():
    whole = SqlStore.add_packed
    def add_packed(self, spans):
        @sqlalchemy.event.listens_for(sqlalchemy.Engine, "commit", once=True)
        def committing(connection):
            die_at_last()
        whole(self, spans)
    SqlStore.add_packed = add_packed

{
    "before the record": lambda: kill(Recorder, "record", after=False),
    "within the append": kill_within_write,
    "after the append": lambda: kill(Recorder, "record", after=True),
    "after the answer": lambda: kill(_Reply, "end", after=True),
    "before the move": lambda: kill(StoreLedger, "add_spans", after=False),
    "within the commit": kill_within_commit,
    "after the commit": lambda: kill(StoreLedger, "add_spans", after=True),
    "before the end": lambda: kill(SqlStore, "finish", after=False),
    "after the end": lambda: kill(SqlStore, "finish", after=True),
}[step]()
process.main()
"""
STEPS = (
    "before the record", "within the append", "after the append", "after the answer", "before the move",
    "within the commit", "after the commit", "before the end", "after the end",
)  # fmt: skip
CALLS = 3  # in each attempt


@dataclass
class Seen:
    """What a runner knows: the attempts by rollout, the calls whose answers came, the finishes that were answered."""

    attempts: dict[str, str] = field(default_factory=dict)
    answered: dict[str, list[str]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)


class Streams(BaseHTTPRequestHandler):
    """Samples the same three tokens for everybody, in two events where a stream is wanted."""

    def do_POST(self) -> None:
        wanted = msgspec.json.decode(self.rfile.read(int(self.headers["content-length"])))
        if wanted.get("stream"):
            events = b"".join(b"data: " + sampled(ids) + b"\n\n" for ids in ([1, 2], [151645]))
            self.answer(events + b"data: [DONE]\n\n", "text/event-stream")
        else:
            self.answer(sampled([1, 2, 151645]), "application/json")

    def answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


def sampled(ids: list[int]) -> bytes:
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": [{"logprob": -0.5}] * len(ids)}}
    return msgspec.json.encode(
        {"request_id": "x", "choices": [choice | {"finish_reason": "stop" if 151645 in ids else None}]}
    )


@contextlib.contextmanager
def engine() -> Iterator[dict[str, str]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Streams) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield {"model": "policy", "kind": "embedded", "url": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()


@contextlib.contextmanager
def mortal(folder: Path, engine: dict[str, str], step: str, number: int) -> Iterator[str]:
    """The URL of a server that is killed when it comes to `step` for the `number`-th time."""
    settings = {"store": f"sqlite:///{folder / 'store.db'}", "run_dir": str(folder), "admin_key": "a"}
    settings |= {"runner_key": "r", "model": "policy", "tokenizer": str(TOKENIZER), "renderer": "qwen3"}
    settings |= {"engines": [engine]}
    command = [sys.executable, "-c", PROGRAM, step, str(number)]
    with (folder / "killed.log").open("wb") as log:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    try:
        child.stdin.write(msgspec.json.encode(settings) + b"\n")
        child.stdin.flush()
        yield msgspec.json.decode(child.stdout.readline())["url"]
        assert child.wait(20) == -9, (folder / "killed.log").read_text()
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def run_until_it_dies(url: str, rollouts: int, *, stream: bool) -> Seen:
    """Be a runner whose agent calls a few times in each rollout."""
    seen, store = Seen(), HttpStore(url, "a", patience_seconds=0)
    store._pool = urllib3.PoolManager(retries=False)  # who is dead stays dead
    with contextlib.suppress(Unreachable, openai.APIError, httpx.TransportError):
        store.enqueue([RolloutRequest(task=i, rollout_id=f"r{i}") for i in range(rollouts)])
        for _ in range(rollouts):
            (claim,) = store.claim("w")
            rollout_id = claim.rollout.rollout_id
            seen.attempts[rollout_id] = claim.attempt.attempt_id
            seen.answered[rollout_id] = []
            llm = claim.resources["main_llm"]
            with openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=0) as sdk:
                for _ in range(CALLS):
                    seen.answered[rollout_id].append(ask(sdk, stream=stream))
            store.finish(rollout_id, claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
            seen.finished.add(rollout_id)
    return seen


def ask(sdk: openai.OpenAI, *, stream: bool) -> str:
    asked = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    if stream:
        *_, last = sdk.chat.completions.create(**asked, stream=True)
        return last.id.removeprefix("chatcmpl-")
    return sdk.chat.completions.create(**asked).id.removeprefix("chatcmpl-")


def check_survives(folder: Path, step: str, number: int, *, stream: bool = False) -> None:
    """Kill a server at a step, start it again on its folder, and look at what is there."""
    with engine() as sampler:
        with mortal(folder, sampler, step, number) as url:
            seen = run_until_it_dies(url, rollouts=8, stream=stream)
        assert len(seen.finished) < 8
        told = sum(len(calls) for calls in seen.answered.values())
        left = [span.span_id for span in replay(folder / "gateway.journal").records]
        assert len(left) == len(set(left)) >= told, "every answer was in the journal before its last byte left"
        with launch(folder, policy_of(engines=[sampler]), admin_key="a", runner_key="r") as serving:
            store = HttpStore(serving.url, "a")
            check_stored(store, seen, exactly=seen.finished)
            for rollout_id, attempt_id in seen.attempts.items():  # the runner tries again what was not answered
                store.finish(rollout_id, attempt_id, Finish(status="succeeded", reward=1.0))
            check_stored(store, seen, exactly=seen.finished)
            ended = [store.rollout(rollout_id) for rollout_id in seen.attempts]
            assert {(one.status, one.reward, len(one.attempts)) for one in ended} <= {("succeeded", 1.0, 1)}


def check_stored(store: HttpStore, seen: Seen, *, exactly: set[str]) -> None:
    """Whose answer came is stored once, in an attempt whose finish was answered nothing besides."""
    traces = store.traces(list(seen.attempts))
    for rollout_id, answered in seen.answered.items():
        (attempt,) = traces[rollout_id].attempts
        stored = [call.call_id for call in calls_of(attempt.spans) if call.delivered]
        assert len(stored) == len(set(stored))
        assert set(answered) <= set(stored)
        if rollout_id in exactly:
            assert sorted(stored) == sorted(answered)
            assert len(stored) == CALLS
        assert len(stored) - len(answered) <= 1  # the one whose answer the kill cut off
    received = store.state()["models"]["policy"]["tokens_received"]
    assert received == sum(
        call.sampled_tokens for t in traces.values() for a in t.attempts for call in calls_of(a.spans)
    )


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("within the append", marks=pytest.mark.long),
        "after the commit",
        pytest.param("after the end", marks=pytest.mark.long),
    ],
)
def test_no_call_of_a_finished_attempt_is_lost_by_a_kill(tmp_path, step) -> None:
    check_survives(tmp_path, step, 2 if "end" in step or "commit" in step else 2 * CALLS - 1)


def test_a_damaged_journal_costs_open_attempts_and_nothing_else(tmp_path) -> None:
    asked = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    with engine() as sampler:
        with mortal(tmp_path, sampler, "after the append", 3) as url:
            claim = HttpStore(url, "a").start(RolloutRequest(task=1, rollout_id="r1"))
            llm = claim.resources["main_llm"]
            door, headers = llm["base_url"] + "/chat/completions", {"authorization": f"Bearer {llm['api_key']}"}
            for _ in range(2):
                httpx.post(door, json=asked, headers=headers).raise_for_status()
            with pytest.raises(httpx.TransportError):
                httpx.post(door, json=asked, headers=headers)
        journal = tmp_path / "gateway.journal"
        first, _, last = (span.span_id for span in replay(journal).records)
        data = bytearray(journal.read_bytes())
        data[len(data) // 2] ^= 1
        journal.write_bytes(data)
        with launch(tmp_path, policy_of(engines=[sampler]), admin_key="a", runner_key="r") as serving:
            store = HttpStore(serving.url, "a")
            with pytest.raises(Conflict):
                store.finish("r1", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
            trace = store.traces(["r1"])["r1"]
            assert trace.rollout.status == "queued"
            [attempt] = trace.attempts
            assert (attempt.attempt.status, attempt.attempt.error.type) == ("lost", "RecordingLost")
            stored = [call.call_id for call in calls_of(attempt.spans)]
            assert {first, last} <= set(stored), "what was recorded before and behind the damage"
    assert (tmp_path / "gateway.journal.damaged").read_bytes() == data


@pytest.mark.long
@pytest.mark.parametrize(("step", "recorded"), [("within the append", 0), ("after the append", 1)])
def test_a_retry_of_what_a_kill_cut_off_hears_the_answer_that_is_recorded(tmp_path, step, recorded) -> None:
    """Sampled anew, the call that nobody heard would be trained beside the one that was heard."""
    asked = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    with engine() as sampler:
        with mortal(tmp_path, sampler, step, 1) as url:
            claim = HttpStore(url, "a").start(RolloutRequest(task=1, rollout_id="r1"))
            llm = claim.resources["main_llm"]
            door = llm["base_url"].removeprefix(url) + "/chat/completions"
            headers = {"authorization": f"Bearer {llm['api_key']}"}
            with pytest.raises(httpx.TransportError):
                httpx.post(url + door, json=asked, headers=headers)
        left = [span.span_id for span in replay(tmp_path / "gateway.journal").records]
        with launch(tmp_path, policy_of(engines=[sampler]), admin_key="a", runner_key="r") as serving:
            headers |= {"x-stainless-retry-count": "1"}
            again = httpx.post(serving.url + door, json=asked, headers=headers).raise_for_status().json()
            heard = again["id"].removeprefix("chatcmpl-")
            store = HttpStore(serving.url, "a")
            store.finish("r1", claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
            [attempt] = store.traces(["r1"])["r1"].attempts
            assert [(call.call_id, call.delivered) for call in calls_of(attempt.spans)] == [(heard, True)]
            assert left == [heard] * recorded
