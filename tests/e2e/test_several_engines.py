"""Two real engines behind one server: one goes away while agents work, and comes back, once with old weights."""

import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import urllib3

from lightning_rl import tutorial
from lightning_rl.control_plane.launch import launch
from lightning_rl.inference.embedded import EmbeddedPolicy
from lightning_rl.inference.engine import EmbeddedEngine
from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.server import EngineServer
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, RolloutRequest
from lightning_rl_adapters.call import calls_of
from tests.lightning_rl.control_plane.test_process import policy_of

pytestmark = pytest.mark.e2e

AGENTS, TURNS = 6, 6


class Site:
    """Two engines of one model; the servers of both may be stopped, and started again on their ports."""

    def __init__(self) -> None:
        self.policy = EmbeddedPolicy(ModelSource(device="cpu"), threads=1)
        self.engines: list[EmbeddedEngine] = []
        self.servers: list[EngineServer] = []

    def add(self) -> dict[str, Any]:
        engine = EmbeddedEngine(copy.deepcopy(self.policy.model), name="policy", threads=1)
        engine.start()
        self.engines.append(engine)
        self.servers.append(EngineServer(engine))
        self.servers[-1].start()
        return {"model": "policy", "kind": "embedded", "url": self.servers[-1].url}

    def stop(self, index: int) -> None:
        self.servers[index].stop()

    def start(self, index: int) -> None:
        self.servers[index] = EngineServer(self.engines[index], port=self.servers[index].port)
        self.servers[index].start()

    def close(self) -> None:
        for server in self.servers:
            server.stop()
        for engine in self.engines:
            engine.stop()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.02)


def talk(store: HttpStore, index: int, turn_over: Callable[[], None]) -> str:
    """One agent: a conversation of some turns; its rollout's id."""
    claim = store.start(RolloutRequest(task=index, rollout_id=f"r{index}"))
    llm = claim.resources["main_llm"]
    messages: list[Any] = [{"role": "user", "content": f"table {index}: size id\nHow many are there?"}]
    with openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=3) as client:
        for _ in range(TURNS):
            answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=24)
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content or ""},
                {"role": "user", "content": "And now?"},
            ]
            turn_over()
    store.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, Finish(status="succeeded", reward=1.0))
    return claim.rollout.rollout_id


def away(store: HttpStore) -> list[str | None]:
    return [engine["away"] for engine in store.engines()]


def test_agents_do_not_notice_that_an_engine_went_and_came_back(tmp_path: Path, site: Site) -> None:
    settings = policy_of(tokenizer=str(tutorial.checkpoint()), engines=[site.add(), site.add()])
    turns = threading.Semaphore(0)
    with launch(tmp_path, settings, admin_key="a", runner_key="r") as running, ThreadPoolExecutor(AGENTS) as pool:
        store = HttpStore(running.url, "a")
        agents = [pool.submit(talk, store, index, turns.release) for index in range(AGENTS)]
        for _ in range(AGENTS):
            assert turns.acquire(timeout=120)
        site.stop(1)
        eventually(lambda: away(store)[1] is not None)
        for _ in range(AGENTS):
            assert turns.acquire(timeout=120)
        site.start(1)
        rollouts = [agent.result(120) for agent in agents]
        eventually(lambda: away(store) == [None, None])
        traces = store.traces(rollouts)
        recorded = [calls_of(trace.spans) for found in traces.values() for trace in found.attempts]
        delivered = [[call for call in calls if call.delivered] for calls in recorded]
        assert [len(calls) for calls in delivered] == [TURNS] * AGENTS
        state = store.state()
        sampled = sum(call.sampled_tokens for calls in recorded for call in calls)
        assert state["models"]["policy"]["tokens_received"] == sampled
        assert state["models"]["policy"]["in_flight"] == 0


def test_an_engine_that_missed_an_update_comes_back_when_it_has_it(tmp_path: Path, site: Site) -> None:
    settings = policy_of(tokenizer=str(tutorial.checkpoint()), engines=[site.add(), site.add()])
    with launch(tmp_path, settings, admin_key="a", runner_key="r") as running:
        store = HttpStore(running.url, "a")
        site.stop(1)
        eventually(lambda: away(store)[1] is not None)
        store.pause("policy")
        site.engines[0].update_weights(site.policy.model, 1)
        store.resume("policy", 1)
        site.start(1)
        eventually(lambda: "policy version 0, not 1" in str(away(store)[1]))
        assert away(store)[0] is None
        talk(store, 1, lambda: None)
        [trace] = store.traces(["r1"])["r1"].attempts
        assert {version for call in calls_of(trace.spans) for version in call.policy_versions()} == {1}
        site.engines[1].update_weights(site.policy.model, 1)
        eventually(lambda: away(store) == [None, None])
        out = store.engines()[0]["engine_id"]
        urllib3.request("DELETE", f"{running.url}/api/v1/engines/{out}", headers={"authorization": "Bearer a"})
        site.stop(0)
        talk(store, 2, lambda: None)
        [left] = store.engines()
        assert left["url"] == site.servers[1].url
