"""An agent that fails behind a failure of the gateway is not blamed, whatever client it has and whatever it raises."""

import asyncio
import http.client
import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest
import requests

from lightning_rl.control_plane.launch import launch
from lightning_rl.runner.error_classification import error_info
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Attempt, Claim, ErrorInfo, Finish, RolloutConfig, RolloutRequest
from lightning_rl.store.errors import Conflict
from tests.lightning_rl.control_plane.test_killed import Streams, engine
from tests.lightning_rl.control_plane.test_process import policy_of

ASKED = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


def by_urllib(url: str, key: str) -> None:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(ASKED).encode(), headers)).read()


def by_requests(url: str, key: str) -> None:
    requests.post(url, json=ASKED, headers={"authorization": f"Bearer {key}"}).raise_for_status()


def by_aiohttp(url: str, key: str) -> None:
    async def ask() -> None:
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.post(url, json=ASKED, headers={"authorization": f"Bearer {key}"}) as answer,
        ):
            await answer.read()

    asyncio.run(ask())


def by_its_own_client(url: str, key: str) -> None:
    where = urlsplit(url)
    line = http.client.HTTPConnection(where.hostname or "", where.port)
    line.request("POST", where.path, json.dumps(ASKED), {"authorization": f"Bearer {key}"})
    assert line.getresponse().status == 200, "no answer"


CLIENTS = [by_urllib, by_requests, by_aiohttp, by_its_own_client]


@dataclass
class Server:
    url: str
    store: HttpStore

    def claim(self, **config: Any) -> Claim:
        return self.store.start(RolloutRequest(task=1, config=RolloutConfig(**config)))

    def failed(self, claim: Claim, error: BaseException) -> Attempt:
        """What is stored of an attempt whose agent raised."""
        finish = Finish(status="failed", error=error_info(error, claim))
        return self.store.finish(claim.rollout.rollout_id, claim.attempt.attempt_id, finish)

    def status(self, claim: Claim) -> str:
        return self.store.rollout(claim.rollout.rollout_id).status


def door(claim: Claim) -> tuple[str, str]:
    llm = claim.resources["main_llm"]
    return f"{llm['base_url']}/chat/completions", llm["api_key"]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("run")
    with engine() as sampler, launch(folder, policy_of(engines=[sampler]), admin_key="a", runner_key="r") as serving:
        yield Server(serving.url, HttpStore(serving.url, "a"))


@pytest.fixture
def broken(monkeypatch) -> Callable[[bool], None]:
    """Let the engine fail, or be well again."""
    whole = Streams.do_POST

    def fails(self: Streams) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_error(500)

    def switch(now: bool) -> None:
        monkeypatch.setattr(Streams, "do_POST", fails if now else whole)

    return switch


@pytest.mark.parametrize("ask", CLIENTS)
def test_a_failure_of_the_engine_is_no_agents_whatever_its_client(server, broken, ask) -> None:
    claim = server.claim()
    broken(True)
    with pytest.raises(Exception) as raised:  # noqa: PT011 - each client has its own
        ask(*door(claim))
    stored = server.failed(claim, raised.value)
    assert (stored.status, stored.error.infrastructure) == ("failed", True)
    assert stored.error.type == type(raised.value).__name__
    if ask not in (by_requests, by_aiohttp):  # whose exceptions say by themselves whom they asked
        assert "the gateway had failed with a call of this attempt: " in stored.error.message
    assert server.status(claim) == "queued", "it is tried again"
    assert server.failed(claim, raised.value) == stored, "said again"
    server.store.cancel(claim.rollout.rollout_id)


def test_an_agent_whose_call_was_answered_in_the_end_fails_by_itself(server, broken) -> None:
    claim = server.claim()
    broken(True)
    with pytest.raises(requests.HTTPError):
        by_requests(*door(claim))
    broken(False)
    by_requests(*door(claim))
    stored = server.failed(claim, ValueError("a bug of the agent"))
    assert (stored.error.infrastructure, server.status(claim)) == (False, "failed")


@pytest.mark.parametrize("fails", [True, False])
def test_a_program_that_ended_with_an_error_is_judged_unless_the_gateway_had_failed(server, broken, fails) -> None:
    claim = server.claim()
    place = claim.rollout.rollout_id, claim.attempt.attempt_id
    broken(fails)
    try:
        by_requests(*door(claim))
    except requests.HTTPError:
        assert fails
    ended = ErrorInfo(type="ProgramFailed", message="the program 'claude' ended with status 1")
    finish = Finish(status="succeeded", reward=0.0, error=ended)
    if not fails:
        stored = server.store.finish(*place, finish)
        assert (stored.status, stored.error, stored.reward, server.status(claim)) == (
            "succeeded",
            None,
            0.0,
            "succeeded",
        )
        return
    with pytest.raises(Conflict, match=r"'claude' ended with status 1 .*the gateway had failed with a call"):
        server.store.finish(*place, finish)
    assert server.status(claim) == "queued", "it is tried again"
    server.store.cancel(claim.rollout.rollout_id)


@pytest.mark.parametrize("wrong", [{"messages": 3}, {"max_context_tokens": 1}], ids=["as it is read", "in its work"])
def test_a_refused_request_is_the_agents(server, wrong) -> None:
    claim = server.claim()
    url, key = door(claim)
    answer = httpx.post(url, json=ASKED | wrong, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 400, answer.text
    stored = server.failed(claim, KeyError("choices"))
    assert (stored.error.infrastructure, server.status(claim)) == (False, "failed")


def test_a_deadline_behind_a_failure_of_ours_is_no_agents(server, broken, eventually) -> None:
    claim = server.claim(timeout_seconds=1.0, max_attempts=1)
    broken(True)
    with pytest.raises(requests.HTTPError):
        by_requests(*door(claim))
    eventually(lambda: server.status(claim) == "failed")
    [attempt] = server.store.rollout(claim.rollout.rollout_id).attempts
    assert (attempt.status, attempt.error.type, attempt.error.infrastructure) == ("lost", "DeadlineExceeded", True)


@pytest.mark.long
def test_an_agent_that_fails_after_its_server_was_started_anew_is_tried_again(tmp_path) -> None:
    """What raised may be a refused connection in any client's words; who asked meanwhile is not known."""
    with engine() as sampler:
        policy = policy_of(engines=[sampler])
        with launch(tmp_path, policy, admin_key="a", runner_key="r") as serving:
            claim = HttpStore(serving.url, "a").start(RolloutRequest(task=1))
        with launch(tmp_path, policy, admin_key="a", runner_key="r") as serving:
            server = Server(serving.url, HttpStore(serving.url, "a"))
            stored = server.failed(claim, OSError("connection refused"))
            assert (stored.error.infrastructure, server.status(claim)) == (True, "queued")
            assert isinstance(stored.error, ErrorInfo)
            assert "the server was started anew meanwhile" in stored.error.message
