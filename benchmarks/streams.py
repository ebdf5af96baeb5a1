"""What a streamed answer costs the gateway: CPU per token, beside a bare relay in the same run.

    python benchmarks/streams.py [--clients 16 --between 20 --answer 128]

The engine gives a token to every client each `--between` milliseconds, an event each, as vLLM does; with 0 it has all
tokens at once and writes its events one after another. The relay hands each event on as the smallest chunk that there
is: it decodes the event, tokens to text, writes a Chat Completions chunk, and records nothing. Its event loop, its
client for the engine and its garbage collection are the gateway's. The processor time is the serving process's, per
token; "whole" are the same answers unstreamed.
"""

import argparse
import asyncio
import gc
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
from gateway import (
    ANSWER,
    GENERATE,
    MODEL,
    TOKENIZER,
    Asgi,
    answer,
    body_of,
    cpu_seconds,
    end_attempts,
    open_attempts,
    question,
    role,
    serve,
)

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane import launch as server
from lightning_rl.store.client import HttpStore
from lightning_rl_proxy.engines.client import Client
from lightning_rl_proxy.engines.http import events
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer

_START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def streaming_engine(tokens: int, between: float) -> Asgi:
    """The token wire with a fixed answer, streamed or whole; a token each `between` seconds."""
    ids = [ANSWER[n % len(ANSWER)] for n in range(tokens)]
    told = [{"token_id": t, "logprob": -0.5, "rank": 1, "top_logprobs": []} for t in ids]
    version = {"version": "0"}

    def choice(first: int, end: int) -> bytes:
        of = {"index": 0, "token_ids": ids[first:end], "finish_reason": "stop" if end == tokens else None}
        of |= {"stop_reason": None, "logprobs": {"content": told[first:end]}}
        of |= {"weight_versions": [version | {"start": 0, "end": end}]}
        return msgspec.json.encode({"choices": [of]})

    parts = [b"data: " + choice(n, n + 1) + b"\n\n" for n in range(tokens)]
    whole, well = choice(0, tokens), msgspec.json.encode({"data": [{"policy_version": 0}]})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = await body_of(receive)
        if scope["path"] != GENERATE or not msgspec.json.decode(body).get("stream"):
            return await answer(send, whole if scope["path"] == GENERATE else well)
        await send(_START)
        loop = asyncio.get_running_loop()
        for part in parts:
            if between:  # of all streams at the same time, as a batch's tokens are
                await asyncio.sleep(between - loop.time() % between)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        return await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return app


def relay(engine_url: str) -> Asgi:
    """The least that hands on a stream."""
    renderer = load_renderer(TOKENIZER, "qwen3", MODEL)
    decode = FastTokenizer(TOKENIZER).decode
    state: dict[str, Client] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if not state:
            state["client"] = Client(engine_url, connections=1024)
            gc.freeze()
            gc.set_threshold(250_000, 20, 50)  # as `control_plane/process.py` has it
        request = msgspec.json.decode(await body_of(receive))
        ids = renderer.render(request["messages"], None)
        asked = {"token_ids": ids, "sampling_params": {"max_tokens": 16, "logprobs": 0}, "stream": True}
        await send(_START)
        about = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
        async with state["client"].post(GENERATE, msgspec.json.encode(asked)) as response:
            async for data in events(response):
                text = decode(msgspec.json.decode(data)["choices"][0]["token_ids"])
                choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
                chunk = b"data: " + msgspec.json.encode(about | {"choices": choices}) + b"\n\n"
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return app


async def load(
    requests: list[tuple[str, str]], clients: int, number: Iterator[int], prompt: int, stream: bool
) -> float:
    """One call to each (URL, key) from `clients` clients; seconds."""
    waiting = iter(requests)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:

        async def client() -> None:
            for url, key in waiting:
                messages = [{"role": "user", "content": question(next(number), prompt)}]
                body = msgspec.json.encode({"model": MODEL, "messages": messages, "stream": stream})
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    async for _ in response.content.iter_any():
                        pass

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return time.perf_counter() - started


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--between", type=float, default=20, help="milliseconds between two tokens of an answer")
    parser.add_argument("--prompt", type=int, default=300, help="tokens of a prompt, about")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--role", choices=["engine", "relay"])
    parser.add_argument("--engine-url")
    arguments = parser.parse_args()
    if arguments.role == "engine":
        return serve(streaming_engine(arguments.answer, arguments.between / 1e3))
    if arguments.role == "relay":
        return serve(relay(arguments.engine_url))

    number = itertools.count()
    with ExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        given = ("--answer", str(arguments.answer), "--between", str(arguments.between))
        engine_url, _ = parts.enter_context(role("--role", "engine", *given, script=__file__))
        relay_url, relay_pid = parts.enter_context(role("--role", "relay", "--engine-url", engine_url, script=__file__))
        engine = {"model": MODEL, "kind": "embedded", "url": engine_url, "policy_version": 0}
        endpoint = Endpoint(model=MODEL, tokenizer=str(TOKENIZER), renderer="qwen3", engines=[engine])
        serving = parts.enter_context(server.launch(folder, endpoint, admin_key="admin", runner_key="runner"))
        store = HttpStore(serving.url, "admin")
        calls = 3 * arguments.clients
        found: dict[str, list[float]] = {"gateway": [], "gateway, whole": [], "bare relay": []}
        for warm_up in (True, *[False] * arguments.rounds):
            for name, each in found.items():
                attempts = open_attempts(store, calls) if name != "bare relay" else []
                requests, pid = (
                    attempts or [(f"{relay_url}/v1", "none")] * calls,
                    serving.pid if attempts else relay_pid,
                )
                before = cpu_seconds(pid)
                asyncio.run(load(requests, arguments.clients, number, arguments.prompt, name != "gateway, whole"))
                spent = 1e6 * (cpu_seconds(pid) - before) / (calls * arguments.answer)
                end_attempts(store, attempts)
                if not warm_up:
                    each.append(spent)
        print(f"{arguments.clients} clients, {arguments.between:g} ms between the tokens of an answer\n")
        print("| | CPU, µs per token | lowest to highest |\n|---|---|---|")
        for name, each in found.items():
            print(f"| {name} | {median(each):.1f} | {min(each):.1f} to {max(each):.1f} |")
    return None


if __name__ == "__main__":
    main()
