"""Attempts that go on after their end: whatever they still say is refused in every dialect, and trains nothing."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer

import msgspec
import openai
import pytest
import urllib3

from lightning_rl.control_plane.launch import launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import Conflict
from lightning_rl.trajectories.trajectory import trajectory_of
from lightning_rl_adapters.call import calls_of
from tests.lightning_rl.control_plane.test_full_disk import Engine
from tests.lightning_rl.control_plane.test_process import policy_of

MESSAGES = [{"role": "user", "content": "hello"}]
DIALECTS = {
    "/chat/completions": {"messages": MESSAGES},
    "/completions": {"prompt": "hello"},
    "/responses": {"input": "hello"},
    "/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/messages/count_tokens": {"messages": MESSAGES},
}


class SlowEngine(Engine):
    """Samples only while it may."""

    may = threading.Event()
    asked = threading.Event()

    def do_POST(self) -> None:
        self.asked.set()
        self.may.wait(20)
        super().do_POST()


@pytest.fixture
def store(tmp_path):
    SlowEngine.may.set()
    SlowEngine.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowEngine) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        engine = {"model": "policy", "kind": "embedded", "url": f"http://127.0.0.1:{server.server_port}"}
        with launch(tmp_path, policy_of(engines=[engine]), admin_key="a", runner_key="r") as serving:
            yield HttpStore(serving.url, "a", patience_seconds=0)
            SlowEngine.may.set()
        server.shutdown()


def claim(store):
    (claimed,) = store.claim("w", wait_seconds=20)
    return claimed, ("r1", claimed.attempt.attempt_id)


def say(claimed, text: str) -> None:
    llm = claimed.resources["main_llm"]
    with openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=0) as sdk:
        sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])


def check_refused_everywhere(claimed) -> None:
    llm = claimed.resources["main_llm"]
    for path, body in DIALECTS.items():
        for stream in (False, True) if path != "/messages/count_tokens" else (False,):
            answer = urllib3.request(
                "POST",
                llm["base_url"] + path,
                body=msgspec.json.encode({"model": "policy", **body} | ({"stream": True} if stream else {})),
                headers={"authorization": f"Bearer {llm['api_key']}"},
                retries=False,
            )
            assert (path, answer.status, answer.headers["x-should-retry"]) == (path, 409, "false")
            assert "is closed" in answer.json()["error"]["message"]


def check_nothing_is_its(store, place) -> None:
    """Neither its lease nor its end is the zombie's any more."""
    with pytest.raises(Conflict):
        store.heartbeat(*place)
    with pytest.raises(Conflict):
        store.finish(*place, Finish(status="succeeded", reward=9.0))


@pytest.mark.long
def test_an_attempt_started_by_hand_lives_by_its_calls_and_is_told_what_ended_it(store) -> None:
    claimed = store.start(RolloutRequest(task=1, rollout_id="r1", config=RolloutConfig(unresponsive_seconds=2)))
    llm = claimed.resources["main_llm"]
    with openai.OpenAI(base_url=llm["base_url"], api_key=llm["api_key"], max_retries=0) as sdk:
        for _ in range(12):
            sdk.chat.completions.create(model="policy", messages=MESSAGES)
            time.sleep(0.3)
    claim(store)  # it stops to call, and its rollout is another's
    with pytest.raises(
        openai.ConflictError, match=r"is closed: it ended as lost at .*Z \(LeaseExpired: .* a call came"
    ):
        say(claimed, "hello")


def test_a_zombie_trains_nothing_before_and_after_its_retry_has_ended(store, eventually) -> None:
    store.enqueue(
        [RolloutRequest(task=1, rollout_id="r1", config=RolloutConfig(max_attempts=3, unresponsive_seconds=2))]
    )
    zombie, lost = claim(store)
    say(zombie, "one")
    eventually(lambda: store.rollout("r1").status == "queued")  # its lease has run out

    check_refused_everywhere(zombie)
    check_nothing_is_its(store, lost)
    second, place = claim(store)
    assert place != lost
    say(second, "one")
    check_refused_everywhere(zombie)
    check_nothing_is_its(store, lost)
    store.finish(*place, Finish(status="succeeded", reward=1.0))
    check_refused_everywhere(zombie)
    check_refused_everywhere(second)
    check_nothing_is_its(store, lost)

    trace = store.traces(["r1"])["r1"]
    assert (trace.rollout.status, trace.rollout.reward) == ("succeeded", 1.0)
    assert trace.rollout.counting_attempt_id == place[1]
    calls = {one.attempt.attempt_id: calls_of(one.spans) for one in trace.attempts}
    assert {attempt: len(made) for attempt, made in calls.items()} == {lost[1]: 1, place[1]: 1}
    trajectory = trajectory_of(trace, agent_failure=0.0)
    assert {call_id for row in trajectory.rows for call_id in row.call_ids if call_id} == {calls[place[1]][0].call_id}
    assert trajectory.excluded == {"superseded": calls[lost[1]][0].sampled_tokens}
    assert store.state()["models"]["policy"]["tokens_received"] == sum(
        call.sampled_tokens for made in calls.values() for call in made
    )


def test_a_call_in_flight_when_the_worker_is_lost_ends_with_its_attempt(store) -> None:
    SlowEngine.may.clear()
    store.enqueue([RolloutRequest(task=1, rollout_id="r1")])
    zombie, lost = claim(store)
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(say, zombie, "one")
        assert SlowEngine.asked.wait(20)
        store.workers_died(["w"])
        with pytest.raises(openai.ConflictError) as refused:
            asking.result(20)
    assert refused.value.response.headers["x-should-retry"] == "false"
    SlowEngine.may.set()
    second, place = claim(store)
    say(second, "one")
    store.finish(*place, Finish(status="succeeded", reward=1.0))
    trace = store.traces(["r1"])["r1"]
    assert {one.attempt.attempt_id: len(one.spans) for one in trace.attempts} == {lost[1]: 0, place[1]: 1}
