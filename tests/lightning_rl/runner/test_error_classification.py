"""Only a failure of the rollout's own server is infrastructure; everything else is the agent's."""

import asyncio
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from lightning_rl.runner.error_classification import error_info, is_infrastructure
from lightning_rl.sandboxes import SandboxError
from lightning_rl.store.contract import body_of
from lightning_rl.store.errors import Unreachable
from tests.lightning_rl.runner.conftest import OURS


def request_to(url: str) -> httpx.Request:
    return httpx.Request("POST", url + "/v1/chat/completions")


def status(code: int, url: str) -> openai.APIStatusError:
    return openai.APIStatusError("", response=httpx.Response(code, request=request_to(url)), body=None)


@pytest.mark.parametrize(
    ("error", "infrastructure"),
    [
        (openai.APIConnectionError(request=request_to(OURS)), True),
        (openai.APIConnectionError(request=request_to("http://example.com")), False),
        (openai.APITimeoutError(request=request_to(OURS)), False),
        (httpx.ConnectError("refused", request=request_to(OURS)), True),
        (httpx.ConnectError("refused"), False),
        (status(503, OURS), True),
        (status(503, "http://example.com"), False),
        (status(400, OURS), False),
        (Unreachable("no answer"), True),
        (SandboxError("the container is gone"), True),
        (ConnectionError("the agent's own socket"), False),
        (ValueError("x"), False),
        (ExceptionGroup("of a task group", [ValueError("x"), ExceptionGroup("", [status(503, OURS)])]), True),
        (ExceptionGroup("of a task group", [ValueError("x"), status(400, OURS)]), False),
    ],
)
def test_whose_fault_it_is(claim, error, infrastructure) -> None:
    assert is_infrastructure(error, claim) == infrastructure


@pytest.mark.parametrize(
    ("answer", "infrastructure"),
    [
        (b"", True),  # hung up on
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", True),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", True),
        (b"HTTP/1.1 400 Bad\r\ncontent-length: 0\r\n\r\n", False),
        (None, True),  # nobody listens
    ],
)
def test_aiohttps_errors_which_carry_no_request_are_the_servers_too(claim, answer, infrastructure) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def ask(path: str) -> BaseException:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        ours = "http://{}:{}".format(*server.sockets[0].getsockname())
        claim.resources["main_llm"] = {"base_url": f"{ours}/ours/v1", "anthropic_base_url": f"{ours}/ours"}
        if answer is None:
            server.close()
            await server.wait_closed()
        async with server, aiohttp.ClientSession(ours, raise_for_status=True) as session:
            with pytest.raises(aiohttp.ClientError) as raised:
                async with session.post(path, json={}) as response:
                    await response.read()
        return raised.value

    assert is_infrastructure(asyncio.run(ask("/ours/v1/chat/completions")), claim) == infrastructure
    assert not is_infrastructure(asyncio.run(ask("/a/tool/of/the/agent")), claim)


def test_what_an_agent_does_wrong_with_aiohttp_and_its_time_outs_are_its_own(claim) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def ask(**request: Any) -> BaseException:
        async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
            ours = "http://{}:{}".format(*server.sockets[0].getsockname())
            claim.resources["main_llm"] = {"base_url": f"{ours}/v1", "anthropic_base_url": ours}
            async with aiohttp.ClientSession(ours) as session:
                with pytest.raises((asyncio.TimeoutError, TypeError)) as raised:
                    await session.post("/v1/chat/completions", **request)
        return raised.value

    for request in ({"timeout": aiohttp.ClientTimeout(total=0.05)}, {"headers": {"a": 3}}, {"data": object()}):
        assert not is_infrastructure(asyncio.run(ask(**request)), claim)


def answered(code: int) -> httpx.HTTPStatusError:
    request = request_to(OURS)
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(code, request=request))


@pytest.mark.parametrize(("code", "infrastructure"), [(401, False), (400, False), (500, True)])
def test_the_status_is_found_as_the_sdk_raises_it(claim, code, infrastructure) -> None:
    """The SDK raises its own error while it handles httpx's, which carries the request too."""

    def ask() -> None:
        try:
            raise answered(code)
        except httpx.HTTPStatusError as error:
            raise status(error.response.status_code, OURS) from None

    with pytest.raises(openai.APIStatusError) as raised:
        ask()
    assert is_infrastructure(raised.value, claim) == infrastructure


def test_a_wrapped_failure_is_still_the_servers(claim) -> None:
    try:
        try:
            raise status(502, OURS)
        except openai.APIStatusError as error:
            raise RuntimeError("the agent gave up") from error
    except RuntimeError as error:
        info = error_info(error, claim)
    assert (info.type, info.infrastructure) == ("RuntimeError", True)
    assert "the agent gave up" in info.traceback


class Unshowable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (ValueError("half an emoji: \ud83d"), "half an emoji: \\ud83d"),
        (Unshowable(), "<exception str() failed>"),
        (ValueError("x" * 3_000_000), "xxx"),
    ],
)
def test_whatever_an_agent_raises_can_be_sent(claim, error, begins) -> None:
    info = error_info(error, claim)
    assert info.message.startswith(begins)
    assert len(body_of(info)) < 150_000
    if len(info.message) > 1000:
        assert "characters left out" in info.message
        assert info.traceback.startswith("ValueError: xxx")
