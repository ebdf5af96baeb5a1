"""The HTTP client of engines: bodies are whole however their bytes come, connections are kept, bounded and hung up."""

import asyncio
import itertools
import socket
import ssl
import struct
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl_proxy.engines import client
from lightning_rl_proxy.engines.base import EngineUnavailable
from lightning_rl_proxy.engines.client import Client, NoAnswer
from tests.random_examples import examples

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"


async def asked(reader: asyncio.StreamReader) -> bytes:
    """One request, head and body; b"" where the client hung up."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
    return head + await reader.readexactly(int(length.removeprefix(b"content-length: ")))


class Server:
    """Answers each request with `answer`; `requests` and `connections` are what came, `gone` those that are closed."""

    def __init__(self, answer: bytes | Answer) -> None:
        self._answer = answer
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.most_open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            while request := await asked(reader):
                self.requests.append(request)
                if isinstance(self._answer, bytes):
                    writer.write(self._answer)
                    await writer.drain()
                else:
                    await self._answer(reader, writer)
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            writer.close()


def with_client(
    server: Server, use: Callable[[Client], Awaitable[None]], *, tls: ssl.SSLContext | None = None, **options: float
) -> None:
    async def work() -> None:
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls) as listening:
            port = listening.sockets[0].getsockname()[1]
            scheme = "http" if tls is None else "https"
            one = Client(f"{scheme}://{'' if tls is None else 'me:p%40ss@'}127.0.0.1:{port}/base", **options)  # type: ignore[arg-type]
            try:
                await use(one)
            finally:
                await one.close()

    asyncio.run(asyncio.wait_for(work(), 30))


async def body_of(one: Client, path: str = "/x", body: bytes = b"{}") -> tuple[int, bytes]:
    async with one.post(path, body) as response:
        return response.status, await response.read()


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


def framed(body: list[bytes], how: str) -> bytes:
    """An answer whose body comes in these pieces."""
    whole = b"".join(body)
    if how == "length":
        return OK + b"Content-Length: %d\r\n\r\n%b" % (len(whole), whole)
    if how == "chunks":
        pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in body if piece)
        return OK + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
    return OK + b"connection: close\r\n\r\n" + whole


@given(
    body=st.lists(st.binary(max_size=40) | st.text("x\n", max_size=40).map(str.encode), max_size=6),
    hows=st.tuples(*[st.sampled_from(["length", "chunks", "end"])] * 3),
    cuts=st.lists(st.integers(1, 300), max_size=4),
    interim=st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_bodies_are_whole_wherever_their_bytes_are_cut(
    body: list[bytes], hows: tuple[str, ...], cuts: list[int], interim: bool
) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        how = hows[len(server.requests) - 1]
        sent = (b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" if interim else b"") + framed(body, how)
        places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
        for start, end in itertools.pairwise(places):
            writer.write(sent[start:end])
            await writer.drain()
            await asyncio.sleep(0)
        if how == "end":
            writer.close()

    server = Server(answer)

    async def use(one: Client) -> None:
        for _ in range(2):
            assert await body_of(one) == (200, b"".join(body))
        async with one.get("/lines") as response:
            lines = [line async for line in response.lines()]
        expected = b"".join(body).split(b"\n")
        assert lines == (expected if expected[-1] else expected[:-1])

    with_client(server, use)
    assert [request.split(b" HTTP")[0] for request in server.requests] == [
        b"POST /base/x", b"POST /base/x", b"GET /base/lines",
    ]  # fmt: skip
    assert server.connections == 1 + hows[:2].count("end")


def test_requests_at_once_have_a_connection_each_up_to_the_limit_and_the_rest_wait_their_turn() -> None:
    answering = asyncio.Event()

    async def when_told(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answering.wait()
        writer.write(framed([b"ok"], "length"))

    server = Server(when_told)

    async def use(one: Client) -> None:
        answers = [asyncio.create_task(body_of(one, body=b"%d" % n)) for n in range(20)]
        await until(lambda: len(server.requests) == 4)
        answers.pop(3).cancel()  # under way
        answers.pop(10).cancel()  # waits for its turn
        answering.set()
        assert await asyncio.gather(*answers) == [(200, b"ok")] * 18

    with_client(server, use, connections=4, idle_seconds=60)
    assert server.connections == 5
    assert server.most_open <= 5  # the server sees the cancelled one's connection close a moment after the next opens
    assert len({request.partition(b"\r\n\r\n")[2] for request in server.requests}) == 19


def test_who_gives_up_when_its_turn_has_come_leaves_it_to_the_next() -> None:
    others_wait = asyncio.Event()

    async def in_two_parts(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: 2\r\n\r\n")
        await others_wait.wait()
        writer.write(b"ok")

    server = Server(in_two_parts)

    async def use(one: Client) -> None:
        async with one.post("/x", b"") as first:
            second, third = asyncio.create_task(body_of(one)), asyncio.create_task(body_of(one))
            await asyncio.sleep(0)
            others_wait.set()
            await first.read()
            second.cancel()  # the connection is free, and it has not taken it yet
            assert await third == (200, b"ok")

    with_client(server, use, connections=1, idle_seconds=60)
    assert len(server.requests) == 2


def test_a_connection_that_was_idle_too_long_is_closed_and_not_asked_again() -> None:
    server = Server(framed([b"ok"], "length"))

    async def use(one: Client) -> None:
        assert await body_of(one) == (200, b"ok")
        await asyncio.sleep(0.02)  # it is looked for every 0.05 s
        assert await body_of(one) == (200, b"ok")
        await until(lambda: server.open == 0)
        assert await body_of(one) == (200, b"ok")

    with_client(server, use, idle_seconds=0.05)
    assert server.connections == 2


def test_a_connection_that_the_server_closed_is_not_asked_again() -> None:
    async def once(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framed([b"ok"], "length"))
        writer.close()

    server = Server(once)

    async def use(one: Client) -> None:
        for _ in range(3):
            assert await body_of(one) == (200, b"ok")
            await asyncio.sleep(0.05)

    with_client(server, use, idle_seconds=60)
    assert server.connections == 3


@pytest.mark.parametrize("end", ["says that it closes", "speaks unasked"])
def test_a_connection_that_the_server_has_ended_is_not_asked_again_though_it_is_open(end: str) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closes = b"connection: close\r\n" if end == "says that it closes" else b""
        writer.write(OK + closes + b"content-length: 2\r\n\r\nok")
        if not closes:
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")

    server = Server(answer)

    async def use(one: Client) -> None:
        for _ in range(2):
            assert await body_of(one) == (200, b"ok")
            await until(lambda: server.open == 0)

    with_client(server, use, idle_seconds=60)
    assert server.connections == 2


@pytest.mark.parametrize("leave", ["early", "cancelled", "before it begins"])
def test_who_leaves_an_answer_before_its_end_hangs_up(leave: str) -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if leave == "before it begins":
            await reader.read()
        writer.write(OK + b"transfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"2\r\nx\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.001)

    server = Server(endless)

    async def use(one: Client) -> None:
        if leave == "early":
            async with one.post("/x", b"") as response:
                assert await anext(response.lines()) == b"x"
        else:
            reading = asyncio.create_task(body_of(one))
            await until(lambda: len(server.requests) == 1)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: server.open == 0)

    with_client(server, use)


def test_a_stream_that_nobody_reads_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_AHEAD", 10_000)
    written = 0

    async def much(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.transport.set_write_buffer_limits(1000)
        writer.write(OK + b"content-length: 40000000\r\n\r\n")
        for _ in range(400):
            written += 100_000
            writer.write(b"x" * 99_999 + b"\n")
            await writer.drain()

    async def use(one: Client) -> None:
        async with one.post("/x", b"") as response:
            lines = response.lines()
            await anext(lines)
            before = -1
            while before != written:
                before = written
                await asyncio.sleep(0.1)
            assert written < 20_000_000
            assert sum([len(line) async for line in lines]) == 399 * 99_999
            assert written == 40_000_000

    with_client(Server(much), use)


def test_who_leaves_the_rest_of_an_answer_that_has_come_leaves_a_connection_that_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_AHEAD", 10)
    rest = asyncio.Event()

    async def in_two_parts(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: 102\r\n\r\nx\n")
        await rest.wait()
        writer.write(b"y" * 100)

    server = Server(in_two_parts)

    async def use(one: Client) -> None:
        async with one.post("/x", b"") as response:
            await anext(response.lines())
            rest.set()
            await until(lambda: response.complete)
        assert await body_of(one) == (200, b"x\n" + b"y" * 100)

    with_client(server, use, idle_seconds=60)
    assert server.connections == 1


def test_a_body_whose_connection_is_reset_is_not_whole() -> None:
    begun = asyncio.Event()

    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"\r\nhalf")
        await begun.wait()
        at_once = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        writer.transport.abort()

    async def use(one: Client) -> None:
        async with one.post("/x", b"") as response:
            begun.set()
            with pytest.raises(NoAnswer, match="hung up before its answer was whole: ConnectionResetError"):
                await response.read()

    with_client(Server(reset), use)


@pytest.mark.parametrize("before", [b"", b"short\n"])
def test_a_line_without_end_is_an_error(before: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MAX_LINE", 100)

    async def use(one: Client) -> None:
        async with one.post("/x", b"") as response:
            with pytest.raises(NoAnswer, match="a line of over 100 bytes"):
                [line async for line in response.lines()]

    with_client(Server(framed([before + b"x" * 101], "length")), use)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"", "hung up before its answer was whole"),
        (OK + b"content-length: 10\r\n\r\nshort", "hung up before its answer was whole"),
        (OK + b"transfer-encoding: chunked\r\n\r\n5\r\nshort\r\n", "hung up before its answer was whole"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak HTTP"),
        (OK + b"content-length: x\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", "does not speak HTTP"),
    ],
)
def test_an_answer_that_is_cut_or_none_is_an_error_that_names_the_server(sent: bytes, said: str) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        writer.close()

    async def use(one: Client) -> None:
        with pytest.raises(NoAnswer, match=f"{one.url}/x {said}") as error:
            await body_of(one)
        assert isinstance(error.value, EngineUnavailable)

    with_client(Server(answer), use)


def test_a_server_that_is_not_there_is_an_error_and_takes_no_place_from_others() -> None:
    async def work() -> None:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as closed:
            port = closed.sockets[0].getsockname()[1]
        one = Client(f"http://127.0.0.1:{port}", connections=1)
        for _ in range(3):
            with pytest.raises(NoAnswer, match=f"127.0.0.1:{port}/x is not reached"):
                await body_of(one)
        await one.close()

    asyncio.run(asyncio.wait_for(work(), 20))


def test_who_gives_up_while_it_connects_leaves_its_place_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(framed([b"ok"], "length"))

    async def use(one: Client) -> None:
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        connect = loop.create_connection

        async def never(*_: object, **__: object) -> None:
            asked.set()
            await asyncio.sleep(60)

        monkeypatch.setattr(loop, "create_connection", never)
        first = asyncio.create_task(body_of(one))
        await asked.wait()
        monkeypatch.setattr(loop, "create_connection", connect)
        second = asyncio.create_task(body_of(one))
        await asyncio.sleep(0.01)
        assert not second.done()
        first.cancel()
        assert await second == (200, b"ok")

    with_client(server, use, connections=1)


def test_a_connection_takes_one_place_also_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = asyncio.Barrier(4)

    async def together(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await everyone.wait()
        writer.write(framed([b"ok"], "length"))

    server = Server(together)

    async def use(one: Client) -> None:
        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def told_late(*args: Any, **kwargs: Any) -> Any:
            made = await connect(*args, **kwargs)
            await asyncio.sleep(0.05)
            return made

        monkeypatch.setattr(loop, "create_connection", told_late)
        first = [asyncio.create_task(body_of(one)) for _ in range(2)]
        await until(lambda: server.connections == 2)
        rest = [asyncio.create_task(body_of(one)) for _ in range(2)]
        assert await asyncio.gather(*first, *rest) == [(200, b"ok")] * 4

    with_client(server, use, connections=4)


def test_what_was_being_connected_when_the_client_was_closed_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(framed([b"ok"], "length"))

    async def use(one: Client) -> None:
        loop, go_on = asyncio.get_running_loop(), asyncio.Event()
        connect = loop.create_connection

        async def held(*args: Any, **kwargs: Any) -> Any:
            await go_on.wait()
            return await connect(*args, **kwargs)

        monkeypatch.setattr(loop, "create_connection", held)
        late = asyncio.create_task(body_of(one))
        await asyncio.sleep(0.01)
        await one.close()
        go_on.set()
        with pytest.raises(NoAnswer, match="hung up"):
            await late
        await until(lambda: server.open == 0)

    with_client(server, use)
    assert server.requests == []


def test_a_connection_that_is_lost_at_once_takes_no_place() -> None:
    async def work() -> None:
        async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as listening:
            one = Client(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", connections=1)
            for _ in range(5):
                with pytest.raises(NoAnswer):
                    await asyncio.wait_for(body_of(one), 5)
            await one.close()

    asyncio.run(work())


def test_a_long_body_arrives_whole() -> None:
    body = bytes(range(256)) * 20_000
    server = Server(framed([b"ok"], "length"))

    async def use(one: Client) -> None:
        assert await body_of(one, body=body) == (200, b"ok")

    with_client(server, use)
    assert server.requests[0].partition(b"\r\n\r\n")[2] == body


@pytest.mark.parametrize(
    ("url", "place", "lines"),
    [
        ("http://host", ("host", 80), [b"POST /x HTTP/1.1", b"host: host"]),
        ("https://host/v1/", ("host", 443), [b"POST /v1/x HTTP/1.1", b"host: host"]),
        ("http://m%40e@host:8000", ("host", 8000), [b"host: host:8000", b"authorization: Basic bUBlOg=="]),
    ],
)
def test_what_a_url_leaves_out(
    url: str, place: tuple[str, int], lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        places = []

        async def refuse(_: object, host: str, port: int, **__: object) -> None:
            places.append((host, port))
            raise OSError

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
        one = Client(url)
        with pytest.raises(NoAnswer):
            await body_of(one)
        assert places == [place]
        assert set(lines) <= set(one.head("POST", "/x", 0).split(b"\r\n"))

    asyncio.run(work())


def test_https_and_a_password_in_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Server(framed([b"ok"], "length"))

    async def use(one: Client) -> None:
        with pytest.raises(NoAnswer, match="CERTIFICATE_VERIFY_FAILED") as error:
            await body_of(one)
        assert "ss@" not in str(error.value)
        assert "p%40ss" not in str(error.value)

    async def trusting(one: Client) -> None:
        assert await body_of(one) == (200, b"ok")

    with_client(server, use, tls=context)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with_client(server, trusting, tls=context)
    head = server.requests[0].partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert b"authorization: Basic bWU6cEBzcw==" in head
    assert next(line for line in head if line.startswith(b"host: ")).startswith(b"host: 127.0.0.1:")
