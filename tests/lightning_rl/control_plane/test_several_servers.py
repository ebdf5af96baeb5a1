"""A run at two servers with a store each, real processes: who has which group, and what becomes of it when one is
gone, is there again, or was started anew."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane.attach import attached
from lightning_rl.control_plane.launch import Serving, launch
from lightning_rl.control_plane.several_servers import SeveralServers, together
from lightning_rl.inspect import recorded
from lightning_rl.inspect.rollout_source import PagedStore, RolloutServer, RolloutServers, Which
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Claim, Finish, Reward, RolloutRequest
from lightning_rl.store.errors import NotFound, StoreUnwritable, Unreachable
from lightning_rl.store.run_store import RunStore
from lightning_rl.viewer.source import ServerSource, ServerSources
from tests.lightning_rl.control_plane.test_process import TOKENIZER
from tests.lightning_rl.control_plane.test_several_gateways import engine
from tests.proxy.engines.sglang_stand_in import StandIn
from tests.proxy.engines.vllm_stand_in import serving

LEASE = 1.0
MODEL = "policy-x"
MAIN_LLM = {"main_llm": {"type": "proxy_llm", "model": MODEL}}
RUNS = itertools.count()


class Server:
    """A server in a folder, which is killed and started again at the same port."""

    def __init__(self, folder: Path, parts: ExitStack) -> None:
        folder.mkdir()
        self._folder, self._parts, self._port = folder, parts, 0
        self.start()

    def start(self) -> None:
        policy = Endpoint(model="policy", tokenizer=str(TOKENIZER), renderer="qwen3", engines=[])
        serving = launch(self._folder, policy, admin_key="admin", runner_key="runner", port=self._port)
        self.serving: Serving = self._parts.enter_context(serving)
        self._port = int(self.serving.url.rpartition(":")[2])
        self.store = PagedStore(self.serving.url, "admin")
        self.is_dead = False

    def send(self, number: signal.Signals) -> None:
        os.kill(self.serving.pid, number)
        self.is_dead = number == signal.SIGKILL


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as parts, ThreadPoolExecutor(2) as threads:
        yield list(threads.map(lambda name: Server(folder / name, parts), ("one", "two")))


@pytest.fixture
def servers(both: list[Server]) -> list[Server]:
    """Two servers that run, with what earlier tests left there; nothing of it is handed out."""
    for server in both:
        if server.is_dead:
            server.start()
        for rollout in server.store.rollouts(status="queued"):
            server.store.cancel(rollout.rollout_id)
    return both


@pytest.fixture(scope="module")
def policy() -> Iterator[Endpoint]:
    with engine() as sampler:
        engines: list[Any] = [sampler | {"model": MODEL}]
        yield Endpoint(model="policy", tokenizer=str(TOKENIZER), renderer="qwen3", engines=engines, served_as=MODEL)


@dataclass
class Run:
    """A run with an id of its own, since the servers keep what earlier tests left there."""

    run_id: str
    policy: Endpoint

    @contextmanager
    def at(self, servers: list[Server], lease_seconds: float = LEASE) -> Iterator[SeveralServers]:
        stores = [HttpStore(server.serving.url, "admin") for server in servers]
        several = SeveralServers(stores, lease_seconds=lease_seconds)
        with several.attached(self.run_id, self.policy):
            several.publish(MAIN_LLM, self.run_id)
            yield several

    def ids(self, *names: str) -> list[str]:
        return [f"{name}.{self.run_id}" for name in names]

    def groups(self, names: str, n: int = 2) -> list[RolloutRequest]:
        """A group of `n` rollouts for each letter: `a` has `a0` and `a1`."""
        return [
            RolloutRequest(task=1, rollout_id=f"{name}{i}.{self.run_id}", group_id=name, resources_id=self.run_id)
            for name in names
            for i in range(n)
        ]


@pytest.fixture
def run(policy: Endpoint) -> Run:
    return Run(f"x{next(RUNS)}", policy)


def play(server: Server, limit: int = 9) -> list[Claim]:
    """Run what is queued at a server: a call each."""
    claims = server.store.claim("w", limit=limit)
    for claim in claims:
        llm = claim.resources["main_llm"]
        with openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=0) as sdk:
            sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
        server.store.finish(*place(claim), Finish(status="succeeded", reward=1.0))
    return claims


def place(claim: Claim) -> tuple[str, str]:
    return claim.rollout.rollout_id, claim.attempt.attempt_id


def names(claims: list[Claim]) -> set[str]:
    return {claim.rollout.rollout_id for claim in claims}


def wait_for(store: RunStore, rollout_ids: list[str]) -> None:
    waiting, end = set(rollout_ids), time.monotonic() + 60
    while waiting:
        assert time.monotonic() < end, waiting
        waiting -= {rollout.rollout_id for rollout in store.wait(sorted(waiting), 1.0)}


def until(store: RunStore, holds: Callable[[], bool]) -> None:
    """Wait as an algorithm does, until something holds."""
    end = time.monotonic() + 90  # a request that hung is tried again after a minute
    while not holds():
        assert time.monotonic() < end
        store.wait([], 0.2)


def test_groups_are_spread_whole_and_read_from_where_they_are(servers: list[Server], run: Run) -> None:
    asked = run.groups("abcde")
    every = [str(request.rollout_id) for request in asked]
    with run.at(servers) as store:
        made = store.enqueue(asked)
        assert [rollout.rollout_id for rollout in made] == every
        assert store.enqueue(asked) == made, "the same again are the same"
        groups = [[rollout.group_id for rollout in server.store.find(every)] for server in servers]
        assert groups == [["a", "a", "c", "c", "e", "e"], ["b", "b", "d", "d"]]
        claims = [claim for server in servers for claim in play(server)]
        wait_for(store, every)
        assert [rollout.rollout_id for rollout in store.wait(every[:3], 0)] == every[:3]
        late = {place(claim): [Reward(value=float(number))] for number, claim in enumerate(claims)}
        store.add_late_rewards(late)
        traces = store.traces(every)
        assert list(traces) == every
        given = {rollout_id: rewards[0].value for (rollout_id, _), rewards in late.items()}
        assert {name: trace.rollout.reward for name, trace in traces.items()} == given
        counted = store.tokens_of(every).values()
        assert {each.rollout_id for each in counted} == set(every)
        assert sum(each.received[MODEL] for each in counted) > 0
        assert store.state()["models"][MODEL]["tokens_received"] == sum(
            server.store.state()["models"][MODEL]["tokens_received"] for server in servers
        )
        assert store.rollout(every[-1]).status == "succeeded"
        with pytest.raises(NotFound, match=r"none of http.*, http.* has a rollout f0"):
            store.rollout("f0")
        [queued] = store.enqueue(run.groups("g", 1))
        assert store.cancel(queued.rollout_id).status == "cancelled"
        store.pause(MODEL, mode="keep")
        assert [server.store.state()["models"][MODEL]["paused"] for server in servers] == [True, True]
        store.resume(MODEL, 3)
        states = [server.store.state()["models"][MODEL] for server in servers]
        assert [(state["paused"], state["policy_version"]) for state in states] == [(False, 3)] * 2
        assert store.state()["models"][MODEL]["policy_version"] == 3
    assert [server.store.engines() for server in servers] == [[], []], "the run and its engines have left"


def test_what_is_asked_for_while_a_request_waits_is_heard_of(servers: list[Server], run: Run) -> None:
    one, two = servers
    with run.at(servers) as store:
        store.enqueue(run.groups("ab", 1))
        play(two)
        ended = store.wait(run.ids("a0", "b0"), 60)
        assert [rollout.rollout_id for rollout in ended] == run.ids("b0"), "the request for a0 waits on"
        store.enqueue(run.groups("cd", 1))
        one.store.cancel(*run.ids("d0"))
        assert [rollout.rollout_id for rollout in store.wait(run.ids("d0"), 5)] == run.ids("d0")


def test_what_a_gone_server_had_runs_elsewhere_and_it_is_told_what_it_missed(
    servers: list[Server], run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = servers
    with run.at(servers) as store:
        store.enqueue(run.groups("abcd"))
        play(one)
        play(two, limit=3)
        read, *unread = run.ids("b0", "b1", "d0", "d1")
        wait_for(store, [read, *unread[:2], *run.ids("a0", "a1", "c0", "c1")])
        store.traces([read])
        two.send(signal.SIGKILL)
        until(store, lambda: len(one.store.find(unread)) == 3)
        assert one.store.find([read]) == [], "it was read"
        assert "does not answer for" in caplog.text
        store.publish(MAIN_LLM | {"hint": {"type": "prompt"}}, f"second-{run.run_id}")
        store.resume(MODEL, 4)
        store.pause(MODEL, mode="keep", lease_seconds=60)
        two.start()
        until(store, lambda: "is there again" in caplog.text)
        state = two.store.state()["models"][MODEL]
        assert (state["paused"], state["policy_version"]) == (True, 4)
        assert two.store.resources(f"second-{run.run_id}").resources["hint"] == {"type": "prompt"}
        assert [rollout.status for rollout in two.store.find(unread)] == ["succeeded", "succeeded", "queued"]
        store.resume(MODEL)
        assert play(two) == []
        assert names(play(one)) == set(unread)
        wait_for(store, unread)
        traces = store.traces(unread)
        assert [trace.rollout.status for trace in traces.values()] == ["succeeded"] * 3
        attempts = {trace.counting.attempt.attempt_id for trace in traces.values() if trace.counting is not None}
        assert set(store.tokens_of(unread)) == attempts, "what the gone server received is nobody's"
        store.enqueue(run.groups("ef"))
        assert [len(server.store.claim("w", limit=9)) for server in servers] == [2, 2], "both have rollouts again"


@pytest.mark.long
def test_a_server_that_was_started_anew_in_time_goes_on_with_its_own(servers: list[Server], run: Run) -> None:
    one, two = servers
    with run.at(servers, lease_seconds=60) as store:
        store.enqueue(run.groups("ab"))
        [claim] = two.store.claim("w", limit=1)
        two.send(signal.SIGKILL)
        two.start()
        assert store.pause(MODEL, mode="keep")["models"][MODEL]["paused"], "one that does not know the run learns of it"
        assert two.store.state()["models"][MODEL]["paused"]
        store.resume()
        two.send(signal.SIGKILL)
        two.start()
        until(store, lambda: MODEL in two.store.state()["models"])
        assert not two.store.state()["models"][MODEL]["paused"], "the pause of one model ended with those of all"
        assert [attempt.status for attempt in store.rollout(claim.rollout.rollout_id).attempts] == ["lost"]
        assert names(play(two)) == set(run.ids("b0", "b1"))
        assert names(play(one)) == set(run.ids("a0", "a1"))
        wait_for(store, run.ids("a0", "a1", "b0", "b1"))


@pytest.mark.long
def test_a_server_that_is_joined_again_is_told_of_an_engine_that_is_away_when_it_is_back(
    servers: list[Server], run: Run
) -> None:
    one, _ = servers
    with ExitStack() as well, ExitStack() as first, ExitStack() as again:
        apps = [StandIn(), StandIn(), StandIn()]
        urls = [well.enter_context(serving(apps[0].app)), first.enter_context(serving(apps[1].app))]
        engines: list[Any] = [{"model": MODEL, "kind": "sglang", "url": url, "policy_version": 0} for url in urls]
        run.policy = msgspec.structs.replace(run.policy, engines=engines)
        away = urls[1:]
        with run.at([one], lease_seconds=60) as store:
            apps[0].weight_version = "1"
            store.resume(MODEL, 1, outdated=lambda: away)

            def known() -> list[tuple[str, int, bool]]:
                infos = [info for info in one.store.engines() if info["model"] == MODEL]
                return [(info["url"], info["policy_version"], info["away"] is None) for info in infos]

            one.store.end_run(run.run_id)  # as when it was started anew
            until(store, lambda: known() == [(urls[0], 1, True)])  # the other one answers, without the weights
            first.close()
            one.store.end_run(run.run_id)
            away = []
            until(store, lambda: known() == [(urls[0], 1, True)])  # the other one was not missed yet
            again.enter_context(serving(apps[2].app, int(urls[1].rpartition(":")[2])))
            apps[2].weight_version = "1"  # it was given them
            until(store, lambda: known() == [(url, 1, True) for url in urls])


@pytest.mark.long
def test_one_server_alone_may_be_started_anew_and_ends_the_run_when_it_is_gone(servers: list[Server], run: Run) -> None:
    one, _ = servers
    with run.at([one], lease_seconds=60) as store:
        store.enqueue(run.groups("a"))
        assert len(one.store.claim("w", limit=1)) == 1
        one.send(signal.SIGKILL)
        one.start()
        store.enqueue(run.groups("b", 1))
        assert names(play(one)) == set(run.ids("a0", "a1", "b0"))
        wait_for(store, run.ids("a0", "a1", "b0"))
    with run.at([one]) as store:
        store.enqueue(run.groups("c", 1))
        one.send(signal.SIGKILL)
        with pytest.raises(Unreachable, match=r"none of the run's servers answers \(http.*\): start them again"):
            wait_for(store, run.ids("c0"))


@pytest.mark.long
def test_what_ended_and_was_not_read_is_waited_for_where_it_runs_again(servers: list[Server], run: Run) -> None:
    one, two = servers
    with run.at(servers) as store:
        store.enqueue(run.groups("ab"))
        every, played = run.ids("a0", "a1", "b0", "b1"), list[Claim]()
        play(one)
        play(two)
        wait_for(store, every)
        two.send(signal.SIGKILL)
        store.while_waiting = lambda: played.extend(play(one))
        traces = store.traces(every)
        assert names(played) == set(every[2:])
        assert [trace.rollout.status for trace in traces.values()] == ["succeeded"] * 4
        one.send(signal.SIGKILL)
        late = {place(played[0]): [Reward(value=1.0)]}
        with pytest.raises(Unreachable, match=r"none of the run's servers answers \(http.*\): start them again"):
            store.add_late_rewards(late)


@pytest.mark.long
def test_a_server_that_is_gone_with_what_was_read_is_given_its_rewards_when_it_is_there_again(
    servers: list[Server], run: Run
) -> None:
    _, two = servers
    with run.at(servers) as store:
        store.enqueue(run.groups("ab"))
        [claim, _] = play(two)
        every = run.ids("b0", "b1")
        wait_for(store, every)
        read = store.traces(every)
        two.send(signal.SIGKILL)
        store.add_late_rewards({place(claim): [Reward(value=0.25, reward_id="graded-reward")]})
        assert read[claim.rollout.rollout_id].rollout.reward == 1.0
        two.start()
        until(store, lambda: two.store.rollout(claim.rollout.rollout_id).reward == 0.25)


def test_a_resumed_run_and_who_looks_at_it_find_rollouts_where_they_count(servers: list[Server], run: Run) -> None:
    one, two = servers
    every = run.ids("a0", "a1", "b0", "b1")
    with run.at(servers) as store:
        store.enqueue(run.groups("ab"))
        play(two)
        one.store.enqueue(run.groups("b", 1))  # as if two had been gone for a while
        one.store.cancel(every[1])
    with run.at(servers) as store:
        made = store.enqueue(run.groups("ab"))
        assert [rollout.status for rollout in made] == ["queued", "cancelled", "succeeded", "succeeded"]
        assert names(play(one)) == {every[0]}, "the second record of b0 is not asked for"
        wait_for(store, every)
    two.store.enqueue(run.groups("a", 1))  # as if one had been gone, and back with the end of a0
    one.store.enqueue(run.groups("b")[1:])  # as if two had been gone with the end of b1, which has come to another
    [again] = one.store.claim("w")
    one.store.finish(again.rollout.rollout_id, again.attempt.attempt_id, Finish(status="succeeded", reward=2.0))
    stores = [server.store for server in servers]
    place = RolloutServers([RolloutServer(each, run.run_id) for each in stores])
    source = ServerSources([ServerSource(each, run.run_id) for each in stores])
    placed = {rollout.rollout_id: position for part in source.arrived() for position, rollout in part}
    assert sorted(placed.values()) == [1, 2, 3, 4]
    assert set(placed) == {rollout.rollout_id for rollout in place.arrived()} == set(every)
    known = place.newest(Which(), 9)
    assert {rollout.rollout_id: rollout.status for rollout in known} == dict(
        zip(every, ["succeeded", "cancelled", "succeeded", "succeeded"], strict=True)
    )
    assert [rollout.rollout_id for rollout in place.newest(Which(status="cancelled"), 9)] == [every[1]]
    assert sorted(rollout.rollout_id for rollout in place.ended(every)) == every
    changed = [rollout for part in source.changed(placed) for _, rollout in part]
    assert sorted(rollout.rollout_id for rollout in changed) == every
    assert {call.rollout_id for call in source.calls(1000)[0]} == {every[0], every[2]}, (
        "b1 counts at one, without calls"
    )
    assert next(rollout.reward for rollout in known if rollout.rollout_id == every[3]) == 2.0
    with recorded.copied(stores, run.run_id) as connection:
        for rollout in known:
            for trace in (
                place.trace(rollout.rollout_id),
                source.trace(rollout.rollout_id),
                recorded.trace(connection, rollout.rollout_id),
            ):
                assert (trace.rollout.status, len(trace.attempts)) == (rollout.status, rollout.attempt_count)


@pytest.mark.long
def test_what_moved_moves_back_when_the_other_server_is_gone(
    servers: list[Server], run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = servers
    every = run.ids("a0", "a1", "b0", "b1")
    with run.at(servers) as store:
        store.enqueue(run.groups("ab"))
        two.send(signal.SIGKILL)
        until(store, lambda: len(one.store.find(every)) == 4)
        two.start()
        until(store, lambda: "is there again" in caplog.text)
        one.send(signal.SIGKILL)
        until(store, lambda: len(two.store.find(every)) == 4)
        assert names(play(two)) == set(every)
        wait_for(store, every)
        assert [trace.rollout.status for trace in store.traces(every).values()] == ["succeeded"] * 4


@pytest.mark.long
def test_a_server_that_hangs_is_left_out_and_taken_back(
    servers: list[Server], run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = servers
    every = run.ids("a0", "a1", "b0", "b1")
    with run.at(servers) as store:
        store.enqueue(run.groups("ab"))
        two.send(signal.SIGSTOP)
        try:
            store.enqueue(run.groups("cd"))  # half of it at the one that hangs
            every += run.ids("c0", "c1", "d0", "d1")
            assert len(one.store.find(every)) == 8
        finally:
            two.send(signal.SIGCONT)
        until(store, lambda: "is there again" in caplog.text)
        assert play(two) == [], "what was asked for elsewhere is not handed out"
        assert names(play(one)) == set(every)
        wait_for(store, every)


@pytest.mark.parametrize(("error", "tries"), [(Unreachable("500"), 3), (StoreUnwritable("507"), 1)])
def test_what_a_server_cannot_do_although_it_is_there_is_raised(
    servers: list[Server], run: Run, error: Exception, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def find(self: HttpStore, rollout_ids: Any) -> Any:
        asked.append(rollout_ids)
        raise error

    with run.at(servers[:1]) as store:
        monkeypatch.setattr(HttpStore, "find", find)
        with pytest.raises(type(error)):
            store.rollout("a0")
    assert len(asked) == tries


def test_states_are_added_up() -> None:
    same = {"policy_version": 3, "engines": 2, "waiting": 5}  # of the engines, which all servers call
    one = {"models": {"m": {"in_flight": 1, "paused": False, "capacity": None} | same}, "open": 2}
    two = {"models": {"m": {"in_flight": 2, "paused": True, "capacity": 8} | same, "n": {}}, "more": "x"}
    assert together([one]) == one
    assert together([one, two]) == {
        "models": {"m": {"in_flight": 3, "paused": True, "capacity": 8} | same, "n": {}},
        "open": 2,
        "more": "x",
    }


@pytest.mark.long
def test_a_run_says_once_that_its_server_does_not_answer(
    servers: list[Server], run: Run, caplog: pytest.LogCaptureFixture, eventually: Callable[..., None]
) -> None:
    one = servers[0]
    with attached(one.store, run.run_id, run.policy):
        one.send(signal.SIGKILL)
        eventually(lambda: "does not answer" in caplog.text)
        one.start()
    assert "Retrying" not in caplog.text
