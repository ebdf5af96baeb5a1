"""Clients of an LLM: each for its endpoint, all over the same connections, which closing one leaves open."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from lightning_rl.agents import clients
from lightning_rl.agents.resources import LLM

FIRST = LLM("m", "http://127.0.0.1:1/rollout/a/attempt/b/v1", "key-1", "http://127.0.0.1:1/rollout/a/attempt/b")
SECOND = LLM("m", "http://127.0.0.1:1/rollout/c/attempt/d/v1", "key-2", "http://127.0.0.1:1/rollout/c/attempt/d")


def endpoint(client: Any) -> tuple[str, str]:
    return str(client.base_url).rstrip("/"), client.api_key


def test_each_has_its_endpoint_and_shares_connections() -> None:
    first, second = FIRST.openai(), SECOND.openai(max_retries=0, timeout=3.0)
    assert isinstance(first, openai.OpenAI)
    assert (endpoint(first), endpoint(second)) == ((FIRST.base_url, "key-1"), (SECOND.base_url, "key-2"))
    assert (second.max_retries, second.timeout) == (0, 3.0)
    assert first.max_retries == openai.DEFAULT_MAX_RETRIES
    assert first._client is second._client is FIRST.http_client
    claude = FIRST.anthropic()
    assert isinstance(claude, anthropic.Anthropic)
    assert endpoint(claude) == (FIRST.anthropic_base_url, "key-1")
    assert claude._client is SECOND.anthropic()._client


def test_closing_one_leaves_the_others_open() -> None:
    for make in (FIRST.openai, FIRST.anthropic):
        with make() as client:
            pass
        assert not client._client.is_closed
    FIRST.http_client.close()
    assert not FIRST.http_client.is_closed


def test_event_loops_have_clients_of_their_own() -> None:
    async def of_this_loop() -> list[Any]:
        async with FIRST.async_openai() as client, FIRST.async_anthropic() as claude:
            assert isinstance(client, openai.AsyncOpenAI)
            assert isinstance(claude, anthropic.AsyncAnthropic)
            assert endpoint(client) == (FIRST.base_url, "key-1")
            assert client._client is SECOND.async_openai()._client is FIRST.async_http_client
        assert not client._client.is_closed
        return [client._client, claude._client]

    one, other = asyncio.run(of_this_loop()), asyncio.run(of_this_loop())
    assert all(a is not b for a, b in zip(one, other, strict=True))


def test_outside_of_an_event_loop_each_caller_has_a_client_of_its_own() -> None:
    """As of a sync agent whose framework runs a loop for each call (`run_sync`)."""
    one, other = FIRST.async_openai(), FIRST.async_openai()
    assert one._client is not other._client
    assert endpoint(one) == (FIRST.base_url, "key-1")


def test_rollouts_that_begin_together_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_of_process", {})
    together = threading.Barrier(16)

    def begin(_: int) -> int:
        together.wait(10)
        return id(FIRST.openai()._client)

    with ThreadPoolExecutor(16) as threads:
        assert len(set(threads.map(begin, range(16)))) == 1


def test_a_process_forked_while_one_is_made_makes_its_own() -> None:
    made, forked = threading.Event(), threading.Event()

    def make() -> None:
        made.set()
        assert forked.wait(10)

    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(clients._in_process, "slow", make)
        made.wait(10)
        if (child := os.fork()) == 0:
            signal.alarm(10)  # ends this process where it waits for the thread that it does not have
            FIRST.openai()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        forked.set()
        making.result(10)
    assert status == 0


def test_clients_are_made_for_forked_processes_and_shared_by_no_two() -> None:
    def connections() -> set[Any]:
        async def awaited() -> set[Any]:
            return {FIRST.async_openai()._client, FIRST.async_anthropic()._client}

        return {FIRST.openai()._client, FIRST.anthropic()._client, *asyncio.run(awaited())}

    clients.make_for_forked()
    prepared = [clients._of_forked, clients._of_loop_of_forked]
    made = {of[name]._client for of in prepared for name in ("openai", "anthropic")}
    assert not made & connections()
    if (child := os.fork()) == 0:
        ours = connections()
        if (grandchild := os.fork()) == 0:
            os._exit(0 if not ours & connections() else 1)
        os._exit(0 if ours == made and os.waitpid(grandchild, 0)[1] == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_process_opens_connections_of_its_own() -> None:
    ours = FIRST.http_client
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, b"own" if FIRST.http_client is not ours and FIRST.openai()._client is not ours else b"same")
        os._exit(0)
    assert os.read(reading, 10) == b"own"
    os.waitpid(child, 0)
