"""Hundreds of rollouts run at once in a few processes: the engine answers nobody before all of them have asked it."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from aiohttp import web

from lightning_rl.agents.resources import LLM
from lightning_rl.control_plane.launch import launch
from lightning_rl.store.client import HttpStore
from lightning_rl_adapters.call import calls_of
from tests.lightning_rl.runner.conftest import Server, policy_of
from tests.lightning_rl.runner.runs import asked
from tests.proxy.engines.vllm_stand_in import serving

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # children cannot import a test
AT_ONCE = 300
TOKENS = [5, 6, 7]


class Engine:
    """The token wire; the first generations wait until there are `AT_ONCE` of them."""

    def __init__(self) -> None:
        self.present = self.most = 0
        self.all_there = asyncio.Event()
        self.app = web.Application(client_max_size=2**20)
        self.app.router.add_post("/inference/v1/generate", self.generate)
        self.app.router.add_get("/{other:.*}", self.well)

    async def well(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"policy_version": 0}]})

    async def generate(self, request: web.Request) -> web.Response:
        await request.read()
        self.present += 1
        self.most = max(self.most, self.present)
        if self.present == AT_ONCE:
            self.all_there.set()
        await self.all_there.wait()
        self.present -= 1
        content = [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []} for token in TOKENS]
        versions = [{"version": "0", "start": 0, "end": len(TOKENS)}]
        choice = {"index": 0, "token_ids": TOKENS, "finish_reason": "length", "stop_reason": None}
        return web.json_response(
            {"choices": [choice | {"weight_versions": versions, "logprobs": {"content": content}}]}
        )


async def agent(task: int, llm: LLM) -> float:
    import aiohttp

    headers = {"authorization": f"Bearer {llm.api_key}"}
    body: dict[str, Any] = {"model": llm.model, "messages": [{"role": "user", "content": f"number {task}"}]}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{llm.base_url}/chat/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
    return float(task)


@pytest.mark.e2e
@pytest.mark.long
def test_three_hundred_rollouts_run_at_once_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    engine = Engine()
    with serving(engine.app) as url:
        policy = policy_of(engines=[{"model": "policy", "kind": "embedded", "url": url, "policy_version": 0}])
        with launch(tmp_path, policy, admin_key="admin", runner_key="runner") as started:
            store = HttpStore(started.url, "admin")
            server = Server(started.url, store, "runner")
            with asked(server, tmp_path, agent, list(range(AT_ONCE)), n=AT_ONCE) as rollouts:
                ended = rollouts.ended()
                assert len(rollouts.working.pids) == 2
            traces = store.traces(rollouts.ids)
    assert engine.most == AT_ONCE
    assert [(each.status, each.reward, each.attempt_count) for each in ended] == [
        ("succeeded", float(number), 1) for number in range(AT_ONCE)
    ]
    for trace in traces.values():
        [call] = calls_of(trace.attempts[0].spans)
        assert call.response_ids[: len(TOKENS)] == TOKENS
