"""What the gateway costs: calls per second and added latency, recording durably, beside a bare relay in the same run.

    python benchmarks/gateway.py [--prompt 300 --answer 128 --group 8] [--turns 10] [--tools 20] [--peer PYTHON]
        [--agl PROGRAM] [--rllm PROGRAM]
    python benchmarks/gateway.py --instructions [--prompt 300 --answer 128 --group 8] [--turns 10] [--tools 20]

Both sit between the same clients and the same instant token engine (its answer at once, no model). The gateway is the
real server: keys, forest, journal, SQLite store. The relay is the least that any proxy must do: parse the request,
tokenise it with the same chat format, ask the engine over HTTP, decode the answer, write it to SQLite in batches; its
event loop, its client for the engine, its garbage collection and its tokenizer are the gateway's. Every call goes to an
attempt of its own, with a text of its own or, of a group, the same as the calls before and behind it. With `--turns` it
is the last of a conversation of so many calls, whose client sends all that was said: `--prompt` tokens in the end.
Gateway and relay take turns; medians are printed, and the processor time of the serving process per call, which does
not depend on what else the machine does. With `--instructions` both run under Valgrind, and how many instructions a
call takes is printed instead.

`--peer` names the Python of an environment with agentlightning 0.3 and its LLMProxy (`llm_proxy.py`), which is then a
third beside them. It speaks Chat Completions to an engine that answers with the same tokens at once, and looks at no
keys. `--agl` names the program `agl-server` of Agent Lightning 1.0 (from its repository), which keeps events in memory.
`--rllm` names the program `rllm-model-gateway` (rllm-model-gateway 0.1.0 from PyPI), another one: started as its
README says, over SQLite, each call in a session of its own. It looks at no keys either, reads a call's token ids and
log probabilities from the engine's answer, and leaves rendering and tokenising to the engine, which costs nothing here.
"""

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import msgspec
import urllib3
import uvicorn
from valgrind import Instructions, counted

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane import launch as server
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Finish, RolloutConfig, RolloutRequest
from lightning_rl_adapters import semconv
from lightning_rl_adapters.span import unpack
from lightning_rl_proxy.engines.client import Client
from lightning_rl_proxy.rendering.load import load_renderer
from lightning_rl_proxy.rendering.tokenizer import FastTokenizer

TOKENIZER = Path(__file__).parents[1] / "examples" / "sql_agent" / "checkpoint"
MODEL = "policy"
GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
PEER, RLLM = "Agent Lightning 0.3, LLMProxy", "rllm-model-gateway 0.1.0"
AGL, AGL_KEY = "Agent Lightning 1.0, agl-server", "benchmark"
ANSWER = [300, 301, 302, 303, 304, 305, 306, 307]
TOKENS_A_WORD = 1.58  # of the tutorial's tokenizer
WORDS = [
    "shops",
    "books",
    "id",
    "size",
    "city",
    "price",
    "how",
    "many",
    "have",
    "over",
    "under",
    "each",
    "region",
    "sold",
    "open",
    "first",
    "last",
    "name",
    "year",
    "the",
    "of",
]
Asgi = Callable[[Any, Any, Any], Awaitable[None]]


class Measured(NamedTuple):
    """One round: calls per second, latencies (ms) at the median and the 99th percentile, CPU ms per call."""

    rate: float
    p50: float
    p99: float
    cpu: float


async def body_of(receive: Any) -> bytes:
    """The whole body of a request."""
    chunks = []
    while True:
        message = await receive()
        chunks.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(chunks)


async def answer(send: Any, body: bytes) -> None:
    """A JSON answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def instant_engine(tokens: int = len(ANSWER), prompt: int = 40) -> Asgi:
    """The token wire with a fixed answer of so many tokens; and Chat Completions, to prompts of about `prompt`."""
    ids = [ANSWER[n % len(ANSWER)] for n in range(tokens)]
    content = [{"token_id": t, "logprob": -0.5, "rank": 1, "top_logprobs": []} for t in ids]
    versions = [{"version": "0", "start": 0, "end": len(ids)}]
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "stop_reason": None}
    fixed = msgspec.json.encode({"choices": [choice | {"weight_versions": versions, "logprobs": {"content": content}}]})
    return fixed_answer(fixed, chat_answer(ids, prompt), chat_answer(ids, prompt, logprobs=True))


def chat_answer(ids: list[int], prompt: int, *, logprobs: bool = False) -> bytes:
    """The same answer as vLLM's Chat Completions give it, with token ids."""
    text = "how many shops have size over 3? " * (len(ids) // len(ANSWER))
    message = {"role": "assistant", "content": text.rstrip()}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": ids}
    if logprobs:
        choice["logprobs"] = {
            "content": [{"token": " shops", "logprob": -0.5, "bytes": list(b" shops"), "top_logprobs": []} for _ in ids]
        }
    usage = {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)}
    about = {"id": "x", "object": "chat.completion", "created": 0, "model": MODEL}
    return msgspec.json.encode(about | {"choices": [choice], "usage": usage, "prompt_token_ids": list(range(prompt))})


def fixed_answer(fixed: bytes, chat: bytes = b"", with_logprobs: bytes = b"") -> Asgi:
    """An engine that gives the same answer to every prompt, and another to every conversation; one more to those who
    ask for log probabilities there."""
    well = msgspec.json.encode({"data": [{"policy_version": 0}]})  # of its health and of its queue

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked = await body_of(receive)
        told = with_logprobs if with_logprobs and b'"logprobs"' in asked else chat
        await answer(send, {GENERATE: fixed, CHAT: told}.get(scope["path"], well))

    return app


def bare_relay(engine_url: str, database: Path) -> Asgi:
    """The least that a recording proxy must do."""
    renderer = load_renderer(TOKENIZER, "qwen3", MODEL)
    decode = FastTokenizer(TOKENIZER).decode
    connection = sqlite3.connect(database, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("CREATE TABLE calls (id INTEGER PRIMARY KEY, prompt BLOB, answer BLOB)")
    pending: list[tuple[bytes, bytes]] = []
    state: dict[str, Any] = {}

    def write(batch: list[tuple[bytes, bytes]]) -> None:
        with connection:
            connection.executemany("INSERT INTO calls (prompt, answer) VALUES (?, ?)", batch)

    async def writer() -> None:
        while True:
            await asyncio.sleep(0.02)
            if pending:
                batch = pending[:]
                pending.clear()
                await asyncio.to_thread(write, batch)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if not state:
            state["writer"] = asyncio.create_task(writer())
            state["client"] = Client(engine_url, connections=1024)
            gc.freeze()
            gc.set_threshold(250_000, 20, 50)  # as `control_plane/process.py` has it
        request = msgspec.json.decode(await body_of(receive))
        ids = renderer.render(request["messages"], request.get("tools"))
        body = msgspec.json.encode({"token_ids": ids, "sampling_params": {"max_tokens": 16, "logprobs": 0}})
        async with state["client"].post(GENERATE, body) as response:
            choice = msgspec.json.decode(await response.read())["choices"][0]
        message = {"role": "assistant", "content": decode(choice["token_ids"])}
        pending.append((body, msgspec.json.encode(choice)))
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        await answer(send, msgspec.json.encode({"id": "x", "object": "chat.completion", "choices": choices}))

    return app


def serve(app: Asgi) -> None:
    """Serve on a free port of the loopback, and print the port."""
    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, lifespan="off", loop="uvloop")

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            print(self.servers[0].sockets[0].getsockname()[1], flush=True)

    Server(config).run()


@contextmanager
def role(*arguments: str, script: str = __file__) -> Iterator[tuple[str, int]]:
    """A benchmark's file in a process of its own; its URL and process id."""
    child = subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(child.stdout.readline())}", child.pid
    finally:
        child.terminate()
        child.wait(20)


@contextmanager
def llm_proxy(python: str, engine_url: str, calls: int, log: Path) -> Iterator[tuple[list[str], int]]:
    """Agent Lightning's LLMProxy; the base URLs of so many attempts, and its process id."""
    script = Path(__file__).with_name("llm_proxy.py")
    without_keys = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    environment = os.environ | without_keys | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    with log.open("wb") as lines:
        child = subprocess.Popen(
            [python, str(script), engine_url, MODEL, str(calls)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=lines, text=True, env=environment,
        )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith("["):
                yield json.loads(line), child.pid
                break
        else:
            raise RuntimeError(f"LLMProxy did not start: {log.read_text()[-2000:]}")
        child.stdin.close()
        print(f"{PEER} at its end: {child.stdout.read().strip()}", file=sys.stderr)
    finally:
        child.terminate()
        child.wait(20)


@contextmanager
def peer_program(
    command: list[str], port_as: str, health: str, folder: Path, **environment: str
) -> Iterator[tuple[str, int]]:
    """A server that is started by a command, which is told its port as `port_as` says; its URL, and its process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (folder / "peer-program.log").open("wb") as lines:
        told = port_as.format(port).split()
        child = subprocess.Popen(
            [*command, *told], stdout=lines, stderr=lines, cwd=folder, env=os.environ | environment
        )
    url = f"http://127.0.0.1:{port}"
    try:
        urllib3.request("GET", f"{url}{health}", retries=urllib3.Retry(total=12, backoff_factor=0.2))
        yield url, child.pid
    finally:
        child.terminate()
        child.wait(20)


@contextmanager
def agl_server(program: str, engine_url: str, folder: Path) -> Iterator[tuple[Callable[[int], list[str]], int]]:
    """Agent Lightning's server; what makes the base URLs of so many attempts, and its process id."""
    command = [program, "host=127.0.0.1", f"key={AGL_KEY}", f"default_proxy.model_name={MODEL}"]
    with peer_program(command, "port={}", "/healthz", folder) as (url, pid):
        headers = {"authorization": f"Bearer {AGL_KEY}"}
        model = [{"model": MODEL, "endpoint": f"{engine_url}/v1"}]
        assert urllib3.request("POST", f"{url}/api/models", json=model, headers=headers).status == 201

        def attempts(calls: int) -> list[str]:
            made = urllib3.request("POST", f"{url}/api/rollouts", json=[{"input": None}] * calls, headers=headers)
            assert made.status == 201, made.data
            return [f"{url}/proxy/rollout/{one['rollout_id']}/attempt/1/mode/train/openai/v1" for one in made.json()]

        yield attempts, pid


@contextmanager
def rllm_gateway(program: str, engine_url: str, folder: Path) -> Iterator[tuple[str, int]]:
    """rLLM's gateway; its URL, and its process id."""
    command = [program, "--host", "127.0.0.1", "--worker", f"{engine_url}/v1"]
    command += ["--db-path", str(folder / "rllm.db"), "--log-level", "WARNING"]
    with peer_program(command, "--port {}", "/health", folder) as found:
        yield found
    with closing(sqlite3.connect(f"file:{folder / 'rllm.db'}?mode=ro", uri=True)) as store:
        (traces,) = store.execute("SELECT count(*) FROM traces").fetchone()
    print(f"{RLLM} at its end: {traces} traces", file=sys.stderr)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process's threads so far (Linux)."""
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def question(n: int, tokens: int) -> str:
    """The `n`-th text, of about so many tokens with the format around it; all are different."""
    text = f"shops id size city\nbooks id shops_id price\nhow many shops have size over {n}? ({n * 7919})"
    rng = random.Random(n)
    return " ".join([text, *rng.choices(WORDS, k=max(0, round((tokens - 40) / TOKENS_A_WORD)))])


class Size(NamedTuple):
    """What each call asks: about so many tokens in all, after so many turns; so many calls in a row the same; with so
    many tools beside, of about 600 tokens each."""

    tokens: int = 40
    group: int = 1
    turns: int = 1
    tools: int = 0


ONE_CALL = Size()


def tools_of(number: int) -> dict[str, Any]:
    """A request's tools, as large as those of coding agents."""
    rng = random.Random(0)

    def described(words: int) -> dict[str, Any]:
        return {"description": " ".join(rng.choices(WORDS, k=words))}

    tools = []
    for n in range(number):
        properties = {f"{word}_of": {"type": "string", **described(20)} for word in WORDS[:8]}
        parameters = {"type": "object", "properties": properties}
        tools.append({"type": "function", "function": {"name": f"tool_{n}", **described(80), "parameters": parameters}})
    return {"tools": tools} if tools else {}


async def load(
    requests: list[tuple[str, str]],
    clients: int,
    number: Iterator[int],
    size: Size = ONE_CALL,
    begin: Callable[[], None] = lambda: None,
) -> tuple[float, list[float]]:
    """Send one call to each (URL, key) from `clients` clients; seconds, and the latency of each call. Of several turns
    the last alone counts, before which `begin` is called."""
    tools = tools_of(size.tools)
    said: dict[int, list[dict[str, str]]] = {place: [] for place in range(len(requests))}
    latencies: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:

        async def client(waiting: Iterator[tuple[int, tuple[str, str]]]) -> None:
            for place, (url, key) in waiting:
                text = question(next(number) // size.group, size.tokens // size.turns)
                said[place].append({"role": "user", "content": text})
                body = msgspec.json.encode({"model": MODEL, "messages": said[place], **tools})
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                started = time.perf_counter()
                async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                    answered = await response.read()
                    assert response.status == 200, await response.text()
                latencies.append(time.perf_counter() - started)
                if size.turns > 1:
                    message = msgspec.json.decode(answered)["choices"][0]["message"]
                    said[place].append({"role": "assistant", "content": message["content"]})

        for turn in range(size.turns):
            if turn == size.turns - 1:
                latencies.clear()
                begin()
            started, waiting = time.perf_counter(), iter(list(enumerate(requests)))
            await asyncio.gather(*(client(waiting) for _ in range(clients)))
        return time.perf_counter() - started, latencies


def measure(
    requests: list[tuple[str, str]],
    clients: int,
    pid: int,
    number: Iterator[int],
    size: Size = ONE_CALL,
) -> Measured:
    """One round."""
    before = 0.0

    def begin() -> None:
        nonlocal before
        before = cpu_seconds(pid)

    seconds, latencies = asyncio.run(load(requests, clients, number, size, begin))
    ranked = sorted(latencies)
    return Measured(
        rate=len(requests) / seconds,
        p50=1e3 * median(ranked),
        p99=1e3 * ranked[int(0.99 * (len(ranked) - 1))],
        cpu=1e3 * (cpu_seconds(pid) - before) / len(requests),
    )


def count(
    instructions: Instructions,
    calls: list[tuple[str, str]],
    pids: list[int],
    number: Iterator[int],
    size: Size,
    clients: int = 16,
) -> float:
    """Million instructions that each of these calls takes of the processes."""
    asyncio.run(load(calls, clients, number, size, lambda: instructions.begin(pids)))
    return instructions.end(pids) / len(calls) / 1e6


def open_attempts(store: HttpStore, n: int) -> list[tuple[str, str]]:
    """`n` claimed rollouts, as (base URL, key) of their attempts."""
    patient = RolloutConfig(unresponsive_seconds=3600, timeout_seconds=None)
    store.enqueue([RolloutRequest(task=None, config=patient) for _ in range(n)])
    claims = []
    while len(claims) < n:
        claims += store.claim("benchmark", limit=min(100, n - len(claims)))
    return [(c.resources["main_llm"]["base_url"], c.resources["main_llm"]["api_key"]) for c in claims]


def end_attempts(store: HttpStore, attempts: list[tuple[str, str]]) -> None:
    """Finish them: a server takes so many open ones and no more."""
    for url, _ in attempts:
        _, rollout_id, _, attempt_id, _ = url.split("://")[1].partition("/")[2].split("/")
        store.finish(rollout_id, attempt_id, Finish(status="succeeded"))


def records(file: Path) -> str:
    """What a call takes in the store, of which so much is its tokens, log probabilities and texts; the tools that all
    show are not counted to these."""
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as store:
        pages = dict(store.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name"))
        recorded = [unpack(record) for (record,) in store.execute("SELECT record FROM spans")]
    calls = [span.attributes for span in recorded if span.name == semconv.CALL_SPAN]  # others are of tools
    packed = (semconv.PROMPT_IDS, semconv.RESPONSE_IDS, semconv.LOGPROBS)
    needed = sum(len(call[name]) for call in calls for name in packed)
    texts = [m for call in calls for name in (semconv.INPUT_MESSAGES, semconv.OUTPUT_MESSAGES) for m in call[name]]
    needed += sum(len(message["content"].encode()) for message in texts)
    spans = sum(pages[name] for name in ("spans", "spans_by_attempt", "sqlite_autoindex_spans_1"))
    each, whole = needed / len(calls), sum(pages.values())
    return (
        f"a call is {each:,.0f} bytes of tokens, log probabilities and text; its record takes {spans / needed:.2f} "
        f"times as much, with its rollout and attempt {whole / needed:.2f} times ({len(calls)} calls)"
    )


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="calls of a round with 16 clients; 1 client: a quarter")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=40, help="tokens of a prompt, about")
    parser.add_argument("--answer", type=int, default=len(ANSWER), help="tokens of an answer")
    parser.add_argument("--group", type=int, default=1, help="calls with the same prompt")
    parser.add_argument("--tools", type=int, default=0, help="that each call shows, of about 600 tokens each")
    parser.add_argument("--turns", type=int, default=1, help="the call is this one of its conversation")
    parser.add_argument("--peer", help="the Python of an environment with agentlightning 0.3 and litellm's proxy")
    parser.add_argument("--agl", help="the program agl-server")
    parser.add_argument("--rllm", help="the program of rllm-model-gateway")
    parser.add_argument("--peer-calls", type=int, default=200, help="its calls of a round")
    parser.add_argument("--instructions", action="store_true", help="of gateway and relay, counted by Valgrind")
    parser.add_argument("--role", choices=["engine", "relay"])
    parser.add_argument("--engine-url")
    parser.add_argument("--database", type=Path)
    arguments = parser.parse_args()
    if arguments.role == "engine":
        return serve(instant_engine(arguments.answer, arguments.prompt))
    if arguments.role == "relay":
        return serve(bare_relay(arguments.engine_url, arguments.database))

    number, size = itertools.count(), Size(arguments.prompt, arguments.group, arguments.turns, arguments.tools)
    with ExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        engine_url, _ = parts.enter_context(
            role("--role", "engine", "--answer", str(arguments.answer), "--prompt", str(arguments.prompt))
        )
        instructions = parts.enter_context(counted() if arguments.instructions else nullcontext())
        relay_url, relay_pid = parts.enter_context(
            role("--role", "relay", "--engine-url", engine_url, "--database", str(folder / "relay.db"))
        )
        engine = {"model": MODEL, "kind": "embedded", "url": engine_url, "policy_version": 0}
        endpoint = Endpoint(model=MODEL, tokenizer=str(TOKENIZER), renderer="qwen3", engines=[engine])
        serving = parts.enter_context(server.launch(folder, endpoint, admin_key="admin", runner_key="runner"))
        store = HttpStore(serving.url, "admin")
        if instructions is not None:
            calls = min(arguments.calls, 400)
            print("| | million instructions per call |\n|---|---|")
            for name, pid in (("gateway", serving.pid), ("bare relay", relay_pid)):
                for warm_up in (True, False):
                    ours = name == "gateway"
                    asked = open_attempts(store, calls) if ours else [(f"{relay_url}/v1", "none")] * calls
                    found = count(instructions, asked, [pid], number, size)
                    if ours:
                        end_attempts(store, asked)
                    if not warm_up:
                        print(f"| {name} | {found:.2f} |", flush=True)
            return None
        peers: dict[str, tuple[Callable[[int], list[str]], int]] = {}  # the URLs of so many calls, and the process id
        if arguments.peer:
            urls, pid = parts.enter_context(
                llm_proxy(arguments.peer, engine_url, arguments.peer_calls, folder / "peer.log")
            )
            peers[PEER] = (lambda _: urls), pid
        if arguments.agl:
            peers[AGL] = parts.enter_context(agl_server(arguments.agl, engine_url, folder))
        if arguments.rllm:
            url, pid = parts.enter_context(rllm_gateway(arguments.rllm, engine_url, folder))
            peers[RLLM] = (lambda calls: [f"{url}/sessions/{uuid.uuid4().hex}/v1" for _ in range(calls)]), pid
        print("| clients | | calls/s | median ms | p99 ms | CPU ms per call |\n|---|---|---|---|---|---|")
        for clients in (1, 16):
            calls = arguments.calls if clients > 1 else arguments.calls // 4
            found: dict[str, list[Measured]] = {name: [] for name in ("gateway", "bare relay", *peers)}
            for warm_up in (True, *[False] * arguments.rounds):
                attempts = open_attempts(store, calls)
                turn = {"gateway": measure(attempts, clients, serving.pid, number, size)}
                end_attempts(store, attempts)
                relayed = [(f"{relay_url}/v1", "none")] * calls
                turn["bare relay"] = measure(relayed, clients, relay_pid, number, size)
                for name, (urls_of, pid) in peers.items():
                    turn[name] = measure([(url, AGL_KEY) for url in urls_of(calls)], clients, pid, number, size)
                if not warm_up:
                    for name, measured in turn.items():
                        found[name].append(measured)
            middle = {name: Measured(*map(median, zip(*rounds, strict=True))) for name, rounds in found.items()}
            for name, m in middle.items():
                print(f"| {clients} | {name} | {m.rate:.0f} | {m.p50:.2f} | {m.p99:.2f} | {m.cpu:.2f} |")
            ratio = median(g.rate / r.rate for g, r in zip(found["gateway"], found["bare relay"], strict=True))
            added = middle["gateway"].p50 - middle["bare relay"].p50
            print(f"| {clients} | | **{ratio:.2f}x the relay's calls/s** | {added:+.2f} | | |")
            for name in peers:
                over = median(g.rate / p.rate for g, p in zip(found["gateway"], found[name], strict=True))
                print(f"| {clients} | | **{over:.3g}x the calls/s of {name}** | | | |")
        store.close()
        print("\n" + records(folder / "store.db"))
    return None


if __name__ == "__main__":
    main()
