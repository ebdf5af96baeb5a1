"""What is asked of a vLLM server when it is registered, and how one that lacks something is refused."""

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable
from lightning_rl_proxy.engines.probe import probe
from tests.proxy.engines.vllm_stand_in import StandIn, serving


def refusal(expected: type[Exception], **flags: Any) -> str:
    with serving(StandIn(**flags).app) as url, pytest.raises(expected) as refused:
        asyncio.run(probe(url))
    assert url in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_the_kind_of_the_logprobs_is_found_by_two_temperatures(mode: str) -> None:
    with serving(StandIn(mode=f"{mode}_logprobs").app) as url:
        assert asyncio.run(probe(url + "/")) == mode


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_refused_as_logprobs(mode: str) -> None:
    assert "--logprobs-mode" in refusal(EngineRefused, mode=mode)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_a_server_that_refuses_to_tell_other_tokens_is_taken_as_raw(mode: str) -> None:
    server = StandIn(mode=f"{mode}_logprobs", most=0)
    with serving(server.app) as url:
        assert asyncio.run(probe(url)) == "raw"
    assert server.sampled == 0


def test_what_is_missing_is_named_by_its_flag() -> None:
    message = refusal(EngineRefused, scale_out=False)
    assert "the token endpoint (--enable-scale-out); start it" in message
    message = refusal(EngineRefused, dev_mode=False)
    assert "weight updates (VLLM_SERVER_DEV_MODE=1 in its environment); start it" in message
    assert " and the token endpoint (" in refusal(EngineRefused, scale_out=False, dev_mode=False)


def test_something_else_than_vllm_is_refused() -> None:
    with serving(web.Application()) as url, pytest.raises(EngineRefused, match=r"no vLLM server, or one older"):
        asyncio.run(probe(url))


def test_an_answer_that_is_none_of_vllms_is_refused() -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    app = web.Application()
    app.router.add_get("/is_paused", page)
    with serving(app) as url, pytest.raises(EngineRefused, match="does not answer as vLLM"):
        asyncio.run(probe(url))


def test_a_paused_server_is_asked_for_nothing_that_it_would_not_answer() -> None:
    server = StandIn()
    server.paused = True
    with serving(server.app) as url, pytest.raises(EngineUnavailable, match="is paused"):
        asyncio.run(probe(url))
    assert server.sampled == 0


@pytest.mark.parametrize(
    ("status", "expected", "words"), [(500, EngineUnavailable, "500"), (401, EngineRefused, "API key")]
)
def test_a_server_that_fails_or_wants_a_key_is_told_so(status: int, expected: type[Exception], words: str) -> None:
    server = StandIn()
    server.status = status
    with serving(server.app) as url, pytest.raises(expected, match=words):
        asyncio.run(probe(url))


def test_a_server_that_is_not_there_is_told_with_its_address() -> None:
    with pytest.raises(EngineUnavailable, match=r"http://127\.0\.0\.1:1 cannot be reached: .*; start it first"):
        asyncio.run(probe("http://127.0.0.1:1"))


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rl_proxy.engines.probe._SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineUnavailable, match=r"did not answer within 0\.1 s"):
            asyncio.run(probe(url))
