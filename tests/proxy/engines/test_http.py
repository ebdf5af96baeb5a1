"""What is the same for every engine server: events are whole however their bytes come, refusals say what is wrong."""

import asyncio
import itertools
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rl_proxy.engines.base import EngineRefused, EngineUnavailable
from lightning_rl_proxy.engines.client import HttpResponse
from lightning_rl_proxy.engines.http import EngineConnection, events, refusal
from lightning_rl_proxy.errors import PromptTooLong


@given(
    data=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x85\u2028\u2029"), min_size=1)),
    cuts=st.lists(st.integers(0, 400)),
    blank=st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n: ping\n\n"]),
)
def test_events_are_whole_wherever_their_bytes_are_cut(data: list[str], cuts: list[int], blank: bytes) -> None:
    sent = [f"<{text}>".encode() for text in data]
    stream = b"".join(b"data: " + event + blank for event in sent) + b"data: [DONE]\n\n"
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})

    async def read() -> list[bytes]:
        response = HttpResponse("http://h:1/x", Mock())

        async def feed() -> None:
            for start, end in itertools.pairwise(places):
                response.add(stream[start:end])
                await asyncio.sleep(0)
            response.end()

        feeding = asyncio.create_task(feed())
        found = [event async for event in events(response)]
        await feeding
        return found

    assert asyncio.run(read()) == sent


@pytest.mark.parametrize(
    ("said", "lengths"),
    [
        ("a prompt of 600 tokens does not fit: max_model_len is 512", (600, 512)),
        ("The decoder prompt (length 600) is longer than the maximum model length of 512.", (600, 512)),
        ("The input (600 tokens) is longer than the model's context length (512 tokens).", (600, 512)),
        ("Input length (600 tokens) exceeds the maximum allowed length (512 tokens). Use a shorter", (600, 512)),
    ],
)
def test_a_prompt_that_does_not_fit_is_understood_in_every_engines_words(said: str, lengths: tuple[int, int]) -> None:
    error = refusal("http://h:1/x", 400, said.encode())
    assert isinstance(error, PromptTooLong)
    assert (error.prompt_tokens, error.limit) == lengths


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "bad"}}', "bad"),
        (b'{"error": "bad"}', "bad"),
        (b'{"object": "error", "message": "bad", "type": "400", "code": 400}', "bad"),
        (b'{"detail": []}', '{"detail": []}'),
        (b"<html>", "<html>"),
        (b"", ""),
    ],
)
def test_a_refusal_says_what_the_server_said(body: bytes, said: str) -> None:
    error = refusal("http://h:1/x", 422, body)
    assert isinstance(error, EngineRefused)
    assert (str(error), error.status) == (f"the engine answered 422: {said}", 400)
    assert isinstance(refusal("http://h:1/x", 502, body), EngineUnavailable)


@pytest.mark.parametrize(("cut", "held"), [(1, True), (2, False)])
def test_an_order_is_given_again_where_its_connection_was_cut_once(cut: int, held: bool) -> None:
    """A server that hangs up on what comes first, as one does whose patience with an idle connection ends just then."""
    orders: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        orders.append(await reader.readuntil(b"\r\n\r\n"))
        if len(orders) > cut:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            await writer.drain()
        writer.close()

    async def order() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            server = EngineConnection(f"http://127.0.0.1:{port}")
            try:
                await server.order("/resume", needs="nothing")
            finally:
                await server.close()

    if held:
        asyncio.run(order())
    else:
        with pytest.raises(EngineUnavailable, match="/resume"):
            asyncio.run(order())
    assert len(orders) == 2
    assert all(order.startswith(b"POST /resume ") for order in orders)


def test_orders_and_checks_do_not_wait_in_line_behind_generations() -> None:
    """A weight update pauses an engine whose connections are all taken by answers that last."""
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/generate" in await reader.readuntil(b"\r\n\r\n"):
            await over.wait()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            await writer.drain()
        writer.close()

    async def work() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            server = EngineConnection(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
            server._client._connections = 2
            generations = [asyncio.create_task(server.post("/generate", {}).__aenter__()) for _ in range(3)]
            while len(server._client._waiting) < 1:
                await asyncio.sleep(0.01)
            await server.order("/pause", needs="nothing", seconds=10)
            assert await server.get("/health") == (200, b"{}")
            over.set()
            await asyncio.gather(*generations, return_exceptions=True)
            await server.close()

    asyncio.run(work())
