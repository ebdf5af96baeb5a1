"""Several servers, each a process of its own, over one PostgreSQL: one is killed, and its agents go on at another.

The engine samples tokens that a tokenizer would write otherwise, so tokens that were made anew are seen.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import urllib3

from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Claim, Finish, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import Conflict
from lightning_rl.store.gateways import APART_SECONDS
from lightning_rl_adapters.call import calls_of
from tests.lightning_rl.control_plane.test_killed import PROGRAM, Streams
from tests.lightning_rl.control_plane.test_process import TOKENIZER

LEASE = 3.0
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
PATIENT = RolloutConfig(unresponsive_seconds=600)


class Sampler(Streams):
    """`Streams` as an embedded engine: well, and told to pause and to go on."""

    def do_GET(self) -> None:
        self.answer(msgspec.json.encode({"data": []}), "application/json")

    def do_POST(self) -> None:
        if self.path.startswith(("/pause", "/resume")):
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.answer(b"{}", "application/json")
        else:
            super().do_POST()

    def answer(self, body: bytes, kind: str) -> None:
        if self.path == "/v1/models":  # which weights it has it does not say
            self.send_error(404)
        else:
            super().answer(body, kind)


@contextlib.contextmanager
def engine() -> Iterator[dict[str, str]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Sampler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield {"model": "policy", "kind": "embedded", "url": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()


@dataclass
class Server:
    """A server process; `url` is where it listens."""

    url: str
    child: "subprocess.Popen[bytes]"
    folder: Path

    @property
    def store(self) -> HttpStore:
        return HttpStore(self.url, "a")

    def kill(self) -> None:
        os.kill(self.child.pid, signal.SIGKILL)
        self.child.wait(20)


class Fleet:
    """Starts servers over one store and one engine."""

    def __init__(self, folder: Path, store: str, sampler: dict[str, str], opened: ExitStack) -> None:
        self.folder, self.store_url, self.sampler, self.opened = folder, store, sampler, opened

    def start(self, name: str, *, program: list[str] | None = None, **more: Any) -> Server:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        settings = {"store": self.store_url, "run_dir": str(folder), "admin_key": "a", "runner_key": f"r-{name}"}
        settings |= {"model": "policy", "tokenizer": str(TOKENIZER), "renderer": "qwen3", "lease_seconds": LEASE}
        settings |= {"engines": [self.sampler]} | more
        command = [sys.executable, *(program or ["-m", "lightning_rl.control_plane.process"])]
        with (folder / "log").open("ab") as log:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        self.opened.callback(end, child)
        child.stdin.write(msgspec.json.encode(settings) + b"\n")
        child.stdin.flush()
        told: dict[str, str] = {}
        while "url" not in told:  # an alarm may come before it
            line = child.stdout.readline()
            assert line, (folder / "log").read_text()
            told = msgspec.json.decode(line)
        [port] = [int(word) for word in (folder / "port").read_text().split()] if "url" in more else [0]
        url = f"http://127.0.0.1:{port}" if port else told["url"]
        return Server(url, child, folder)


def end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait(20)
    child.stdin.close()
    child.stdout.close()


@pytest.fixture
def fleet(postgres_url: str, tmp_path: Path) -> Iterator[Fleet]:
    with engine() as sampler, ExitStack() as opened:
        yield Fleet(tmp_path, postgres_url, sampler, opened)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    def wait(holds: Callable[[], bool]) -> None:
        given_up = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < given_up, "it did not come to hold"
            time.sleep(0.05)

    return wait


def together(*servers: Server) -> None:
    """Wait until all of the servers are named."""
    given_up = time.monotonic() + 60
    while True:
        told = servers[0].store._call("GET", "/gateways", None, dict[str, Any])["gateways"]
        if len(told) == len(servers):
            return
        assert time.monotonic() < given_up, told
        time.sleep(0.05)


def placed_at(server: Server, others: HttpStore | None = None) -> Claim:
    """A new attempt at this server's gateway; others that came up on the way stay open."""
    while True:
        claim = (others or server.store).start(RolloutRequest(task=1, config=PATIENT))
        if claim.resources["main_llm"]["base_url"].startswith(server.url):
            return claim


def ask(
    claim: Claim, messages: list[Any], *, at: str | None = None, retry: int = 0, tries: int = 0, model: str = "policy"
) -> Any:
    """A chat completion; `at` is another gateway than the URL names."""
    llm = claim.resources["main_llm"]
    base_url = llm["base_url"]
    if at is not None:
        base_url = at + "/rollout/" + base_url.partition("/rollout/")[2]
    with openai.OpenAI(base_url=base_url, api_key=llm["api_key"], max_retries=tries) as sdk:
        headers = {"x-stainless-retry-count": str(retry)} if retry else {}
        return sdk.chat.completions.create(model=model, messages=messages, extra_headers=headers)


def went_on(messages: list[Any], answer: Any) -> list[Any]:
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    return [*messages, said, {"role": "user", "content": "and?"}]


def place(claim: Claim) -> tuple[str, str]:
    return claim.rollout.rollout_id, claim.attempt.attempt_id


def calls(server: Server, claim: Claim) -> list[Any]:
    [trace] = [
        each
        for each in server.store.traces([claim.rollout.rollout_id])[claim.rollout.rollout_id].attempts
        if each.attempt.attempt_id == claim.attempt.attempt_id
    ]
    return calls_of(trace.spans)


@pytest.mark.long
def test_claims_at_any_server_are_spread_and_their_keys_open_their_gateways(fleet: Fleet) -> None:
    one, two = fleet.start("one"), fleet.start("two")
    together(one, two)
    one.store.enqueue([RolloutRequest(task=i, config=PATIENT) for i in range(40)])
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: (one, two)[i % 2].store.claim(f"w{i}"), range(40)))
    claims = [claim for each in found for claim in each]
    at = Counter(claim.resources["main_llm"]["base_url"].partition("/rollout")[0] for claim in claims)
    assert at == {one.url: 20, two.url: 20}
    for claim in claims[:6]:  # claimed at one, served at either
        assert ask(claim, MESSAGES).choices[0].message.content


def test_after_a_stop_an_attempt_goes_on_elsewhere_token_by_token(fleet: Fleet) -> None:
    one, two = fleet.start("one"), fleet.start("two")
    together(one, two)
    claim, control = placed_at(one), placed_at(two)
    first = ask(claim, MESSAGES)
    second_asked = went_on(MESSAGES, first)
    second = ask(claim, second_asked)
    with pytest.raises(openai.InternalServerError, match=f"is at the gateway {one.url}"):
        ask(claim, second_asked, at=two.url)  # it lives
    one.child.send_signal(signal.SIGTERM)
    assert one.child.wait(60) == 0
    third = ask(claim, went_on(second_asked, second), at=two.url, tries=30)
    again = ask(claim, second_asked, at=two.url, retry=1)
    assert (again.id, again.choices) == (second.id, second.choices)  # a retry hears the recorded answer
    ask(control, MESSAGES)
    ask(control, second_asked)
    ask(control, went_on(second_asked, second))
    for each in (claim, control):
        two.store.finish(*place(each), Finish(status="succeeded", reward=1.0))
    told = calls(two, claim)
    assert [call.number for call in told] == [0, 1, 2]
    assert [call.parent_id for call in told] == [None, told[0].call_id, told[1].call_id]
    assert f"chatcmpl-{told[2].call_id}" == third.id
    rows = [two.store._call("GET", f"/rollouts/{r}/attempts/{a}/rows", None, dict[str, Any])["rows"]
            for r, a in (place(claim), place(control))]  # fmt: skip
    [row], [straight] = rows
    assert row["token_ids"] == straight["token_ids"]
    assert row["loss_mask"] == straight["loss_mask"]
    assert sum(row["loss_mask"]) == 9


@pytest.mark.long
def test_what_a_killed_gateway_had_is_retried_and_trained_once_also_what_the_dead_journal_alone_has(
    fleet: Fleet, eventually: Any
) -> None:
    two = fleet.start("two")
    one = fleet.start("one", program=["-c", PROGRAM, "after the answer", "1"])
    together(two, one)
    claim = placed_at(one, two.store)
    with contextlib.suppress(openai.APIConnectionError):
        ask(claim, MESSAGES)  # answered, recorded in the journal, and the process is dead
    assert one.child.wait(60) == -9
    with pytest.raises(openai.InternalServerError):
        ask(claim, MESSAGES, at=two.url)  # it may be back in time
    eventually(lambda: two.store.rollout(claim.rollout.rollout_id).status == "queued")
    [lost] = two.store.rollout(claim.rollout.rollout_id).attempts
    assert (lost.status, lost.error.type, lost.error.infrastructure) == ("lost", "ServerGone", True)
    with pytest.raises(openai.ConflictError):
        ask(claim, MESSAGES, at=two.url)
    fleet.start("one")  # with the journal: what was in it is kept, and superseded
    eventually(lambda: len(calls(two, claim)) == 1)
    [second] = two.store.claim("w", wait_seconds=60)
    assert second.attempt.sequence == 2
    ask(second, MESSAGES)
    two.store.finish(*place(second), Finish(status="succeeded", reward=1.0))
    path = "/rollouts/{}/attempts/{}/rows"
    excluded = [
        [row["excluded"] for row in two.store._call("GET", path.format(*place(each)), None, dict[str, Any])["rows"]]
        for each in (claim, second)
    ]
    assert excluded == [["superseded"], [None]]


@pytest.mark.long
def test_a_gateway_that_is_back_in_time_goes_on_with_what_its_journal_holds(fleet: Fleet) -> None:
    two = fleet.start("two", lease_seconds=60)
    one = fleet.start("one", program=["-c", PROGRAM, "after the answer", "1"], lease_seconds=60)
    together(two, one)
    claim = placed_at(one, two.store)
    with contextlib.suppress(openai.APIConnectionError):
        ask(claim, MESSAGES)
    assert one.child.wait(60) == -9
    back = fleet.start("one", port=int(one.url.rpartition(":")[2]))
    [said] = calls(two, claim)
    assert said.delivered
    ask(claim, MESSAGES)
    two.store.finish(*place(claim), Finish(status="succeeded", reward=1.0))  # handed over to the one that has it
    assert [call.number for call in calls(two, claim)] == [0, 1]
    assert back.store.rollout(claim.rollout.rollout_id).status == "succeeded"


@pytest.mark.long
def test_a_gateway_that_is_started_anew_hands_out_nothing_of_its_run_until_that_attaches_again(
    fleet: Fleet, eventually: Any
) -> None:
    def takes(server: Server) -> bool:
        with contextlib.suppress(Conflict):
            server.store.enqueue(asked)
            return True
        return False

    def claimed(server: Server) -> list[str]:
        return [claim.rollout.rollout_id for claim in server.store.claim("w", limit=9)]

    asked = [RolloutRequest(task=1, rollout_id=name) for name in ("r1.run", "r1.more")]
    one, two = fleet.start("one"), fleet.start("two")
    one.store.begin_run("run", "policy-run", 60)
    two.store.begin_run("more", "policy-more", 60)
    one.store.enqueue(asked)
    one.kill()
    one = fleet.start("one")
    assert claimed(one) == ["r1.more"]
    with pytest.raises(Conflict, match="run run is not attached here"):  # nor at the other, if that was as slow as dead
        one.store.renew_run("run")
    two.store.begin_run("run", "policy-run", 60)
    two.store.enqueue(asked)
    eventually(lambda: takes(one))
    one.kill()
    one = fleet.start("one")
    assert claimed(one) == ["r1.run"], "it is the other one's now"


@pytest.mark.long
def test_a_gateway_that_joins_leaves_out_an_engine_that_an_update_left_out(fleet: Fleet) -> None:
    one = fleet.start("one")
    one.store.resume("policy", 1, outdated=lambda: [fleet.sampler["url"]])
    two = fleet.start("two")
    together(one, two)
    for server in (one, two):
        [engine] = server.store.engines()
        assert "weights of policy version 0, not 1" in engine["away"]


@pytest.mark.long
def test_a_trainer_that_dies_with_its_gateway_loses_what_ran_when_its_lease_is_over_and_no_sooner(
    fleet: Fleet, eventually: Any
) -> None:
    def begin(server: Server, engine_url: str) -> None:
        server.store.begin_run("run", "policy-run", 2 * LEASE)
        server.store.register_engine("policy-run", "embedded", engine_url)
        server.store.publish({"main_llm": {"type": "proxy_llm", "model": "policy-run"}}, "of-the-run")
        server.store.enqueue(requests)

    def statuses(claim: Claim) -> list[str]:
        return [attempt.status for attempt in two.store.rollout(claim.rollout.rollout_id).attempts]

    names = ["a.run", "b.run", "c.run"]
    requests = [RolloutRequest(task=1, rollout_id=n, resources_id="of-the-run", config=PATIENT) for n in names]
    one, two = fleet.start("one"), fleet.start("two")
    together(one, two)
    with ThreadPoolExecutor(1) as threads:
        with engine() as trainers:
            begin(one, trainers["url"])
            claims = two.store.claim("w", limit=2)  # one is placed at each gateway
            [here] = [each for each in claims if each.resources["main_llm"]["base_url"].startswith(two.url)]
            ask(here, MESSAGES, model="policy-run")
        one.kill()
        asked = threads.submit(ask, here, MESSAGES, tries=2, model="policy-run")
        eventually(lambda: two.store.state()["models"]["policy-run"]["paused"])
        assert statuses(here) == ["running"]
        eventually(lambda: statuses(here) == ["lost"])
        assert two.store.claim("w", limit=9) == []
        with pytest.raises(openai.APIStatusError, match="attempt"):
            asked.result(30)
    with engine() as trainers:
        begin(two, trainers["url"])  # the run is resumed
        claims = two.store.claim("w", limit=9)
        assert sorted(claim.rollout.rollout_id for claim in claims) == names
        for claim in claims:
            ask(claim, MESSAGES, model="policy-run")
            two.store.finish(*place(claim), Finish(status="succeeded", reward=1.0))


def test_a_database_that_is_away_for_long_costs_no_gateway_its_attempts(fleet: Fleet, cluster: Any) -> None:
    one, two = fleet.start("one"), fleet.start("two")
    together(one, two)
    claims = [placed_at(server) for server in (one, two)]
    first = [ask(claim, MESSAGES) for claim in claims]
    cluster.stop()
    try:
        time.sleep(LEASE + APART_SECONDS + 2)
        asked = [went_on(MESSAGES, answer) for answer in first]
        second = [ask(claim, messages) for claim, messages in zip(claims, asked, strict=True)]  # meanwhile, too
    finally:
        cluster.start()
    for claim, messages, answer in zip(claims, asked, second, strict=True):
        ask(claim, went_on(messages, answer), tries=30)
        two.store.finish(*place(claim), Finish(status="succeeded", reward=1.0))  # one of them is at the other
        assert [call.number for call in calls(one, claim)] == [0, 1, 2]
        assert [each.status for each in one.store.rollout(claim.rollout.rollout_id).attempts] == ["succeeded"]


@pytest.mark.long
def test_a_finish_at_another_server_is_answered_when_the_gateway_has_stored_all(fleet: Fleet) -> None:
    one, two = fleet.start("one"), fleet.start("two")
    together(one, two)
    for _ in range(3):
        claim = placed_at(one)
        ask(claim, MESSAGES)
        two.store.finish(*place(claim), Finish(status="succeeded", reward=1.0))
        assert len(calls(two, claim)) == 1
        for at in (one.url, two.url):
            with pytest.raises(openai.ConflictError):
                ask(claim, MESSAGES, at=at)


@pytest.mark.long
def test_a_pause_anywhere_holds_everywhere_and_so_does_the_version(fleet: Fleet, eventually: Any) -> None:
    one, two = fleet.start("one"), fleet.start("two")
    together(one, two)
    claims = [placed_at(one), placed_at(two)]
    two.store.pause("policy", mode="keep", lease_seconds=120)

    def policy(server: Server) -> tuple[bool, int]:
        told = server.store.state()["models"]["policy"]
        return told["paused"], told["policy_version"]

    assert [policy(each) for each in (one, two)] == [(True, 0), (True, 0)]
    three = fleet.start("three")
    assert policy(three) == (True, 0)  # who joins waits with the others
    with ThreadPoolExecutor(2) as pool:
        parked = [pool.submit(ask, claim, MESSAGES) for claim in claims]
        eventually(lambda: all(each.store.state()["open_attempts"] >= 1 for each in (one, two)))
        assert not any(each.done() for each in parked)
        one.store.resume("policy", policy_version=1)
        assert [policy(each) for each in (one, two, three)] == [(False, 1)] * 3
        for each in parked:
            assert each.result(60).choices
    for claim in claims:
        two.store.finish(*place(claim), Finish(status="succeeded", reward=1.0))
        [call] = calls(two, claim)
        assert {version.version for version in call.versions} == {1}
    assert policy(fleet.start("four")) == (False, 1)  # whatever it was told at its start


@pytest.mark.long
def test_a_killed_gateway_is_no_longer_named_and_one_that_stops_leaves_its_attempts(
    fleet: Fleet, eventually: Any
) -> None:
    one, two, three = (fleet.start(name) for name in ("one", "two", "three"))
    together(one, two, three)
    claim = placed_at(three)
    first = ask(claim, MESSAGES)
    three.child.send_signal(signal.SIGTERM)
    assert three.child.wait(60) == 0
    ask(claim, went_on(MESSAGES, first), at=one.url)  # at once
    assert [call.number for call in calls(one, claim)] in ([0], [0, 1])
    two.kill()
    path = "/gateways"
    eventually(
        lambda: [each["url"] for each in one.store._call("GET", path, None, dict[str, Any])["gateways"]] == [one.url]
    )
    claims = [one.store.start(RolloutRequest(task=1, config=PATIENT)) for _ in range(4)]
    assert {each.resources["main_llm"]["base_url"].partition("/rollout")[0] for each in claims} == {one.url}


class Front:
    """A TCP relay that goes to the first of some ports that takes the connection, as a balancer with backups does."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                inward, _ = self._listening.accept()
            except OSError:
                return
            for port in self.ports:
                with contextlib.suppress(OSError):
                    outward = socket.create_connection(("127.0.0.1", port))
                    for one, other in ((inward, outward), (outward, inward)):
                        threading.Thread(target=self._copy, args=(one, other), daemon=True).start()
                    break

    @staticmethod
    def _copy(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.mark.long
def test_behind_a_front_with_backups_agent_and_runner_notice_nothing_of_a_gateway_that_stops(fleet: Fleet) -> None:
    front, port = Front(), free_port()
    fleet.opened.callback(front.close)
    (fleet.folder / "one").mkdir()
    (fleet.folder / "one" / "port").write_text(str(port))
    two = fleet.start("two")
    front.ports = [port, int(two.url.rpartition(":")[2])]
    one = fleet.start("one", url=front.url, port=port)
    together(two, one)
    runner = HttpStore(front.url, "a")
    while True:
        claim = runner.start(RolloutRequest(task=1, config=PATIENT))
        if claim.resources["main_llm"]["base_url"].startswith(front.url):
            break
    first = ask(claim, MESSAGES)
    one.child.send_signal(signal.SIGTERM)
    assert one.child.wait(60) == 0
    ask(claim, went_on(MESSAGES, first), tries=30)
    with contextlib.suppress(urllib3.exceptions.HTTPError):
        runner.heartbeat(*place(claim))
    runner.finish(*place(claim), Finish(status="succeeded", reward=1.0))
    told = calls(two, claim)
    assert [call.parent_id for call in told] == [None, told[0].call_id]


@pytest.mark.long
def test_an_engine_is_every_gateways_and_what_each_counted_is_added_up(fleet: Fleet) -> None:
    one = fleet.start("one", engines=[])
    two = fleet.start("two", engines=[])
    info = one.store.register_engine("policy", "embedded", fleet.sampler["url"], 4)
    assert [each["engine_id"] for each in two.store.engines()] == [info["engine_id"]]
    late = fleet.start("late", engines=[])
    assert [each["policy_version"] for each in late.store.engines()] == [4], "who joins learns of it"
    assert late.store.state()["models"]["policy"]["policy_version"] == 4

    requests = [RolloutRequest(task=n, rollout_id=f"r{n}.counted", config=PATIENT) for n in range(6)]
    one.store.enqueue(requests)
    claims = two.store.claim("w", limit=6)
    at = Counter(claim.resources["main_llm"]["base_url"].split("/rollout/")[0] for claim in claims)
    assert sorted(at.values()) == [2, 2, 2]
    for claim in claims:
        llm = claim.resources["main_llm"]
        with openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"]) as sdk:
            sdk.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=8)
    counted = [server.store.tokens_of([each.rollout_id for each in requests]) for server in (one, two, late)]
    assert counted[0] == counted[1] == counted[2]
    assert {attempt_id: sum(each.received.values()) > 0 for attempt_id, each in counted[0].items()} == {
        claim.attempt.attempt_id: True for claim in claims
    }

    two.store.remove_engine(info["engine_id"])
    assert [server.store.engines() for server in (one, two, late)] == [[], [], []]
