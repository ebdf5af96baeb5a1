"""What a turn costs as its conversation grows: processor time of the gateway at turns 3, 30 and 300, and storage.

    python benchmarks/turns.py

A client that sends its whole history every turn, as chat clients do, against the real server with an instant engine.
Around each of the three turns the processor time of the serving process is taken over some turns and divided by their
number; decoding such a body is timed beside it. Every round is a conversation in an attempt of its own, and medians
over the rounds are printed. The store's file is measured at the end, against what the tokens and the texts weigh.

Beside it stands the floor: a proxy that only reads and decodes such a body, and sends as many ids to the engine. They
take turns, round by round.
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import msgspec
import urllib3

sys.path.insert(0, str(Path(__file__).parent))
from gateway import (
    GENERATE,
    MODEL,
    TOKENIZER,
    answer,
    body_of,
    cpu_seconds,
    fixed_answer,
    open_attempts,
    role,
    serve,
)

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane import launch as server
from lightning_rl.store.client import HttpStore
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import calls_of

TURNS = (3, 30, 300)
AROUND = 2  # turns before and after that count too
SETTLE_SECONDS = 0.1  # until the store has what was said
ANSWER = [300 + i % 200 for i in range(100)]
WORDS = "shops id size city books price "
SAID = "x" * 350  # about what the engine's answer reads as
TOKENS_A_TURN = 211


def engine() -> Any:
    """The token wire with an answer of 100 tokens."""
    content = [{"token_id": t, "logprob": -0.5, "rank": 1, "top_logprobs": []} for t in ANSWER]
    choice = {"index": 0, "token_ids": ANSWER, "finish_reason": "stop", "stop_reason": None}
    versions = [{"version": "0", "start": 0, "end": len(ANSWER)}]
    fixed = msgspec.json.encode({"choices": [choice | {"weight_versions": versions, "logprobs": {"content": content}}]})
    return fixed_answer(fixed)


def floor(engine_url: str) -> Any:
    """The least that any proxy does that takes messages and sends token ids: it knows them all without looking."""
    state: dict[str, aiohttp.ClientSession] = {}
    known = [(i * 7919) % 1000 for i in range(TOKENS_A_TURN * (max(TURNS) + AROUND))]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        session = state.get("session") or state.setdefault("session", aiohttp.ClientSession())
        turn = (len(msgspec.json.decode(await body_of(receive))["messages"]) + 1) // 2
        body = msgspec.json.encode({"token_ids": known[: TOKENS_A_TURN * turn], "sampling_params": {"logprobs": 0}})
        headers = {"content-type": "application/json"}
        async with session.post(f"{engine_url}{GENERATE}", data=body, headers=headers) as response:
            msgspec.json.decode(await response.read())
        choices = [{"index": 0, "message": {"role": "assistant", "content": SAID}, "finish_reason": "stop"}]
        usage = {"prompt_tokens": TOKENS_A_TURN * turn}
        await answer(send, msgspec.json.encode({"choices": choices, "usage": usage}))

    return app


class Conversation:
    """One attempt's client, which keeps its history."""

    def __init__(self, url: str, key: str) -> None:
        self._http = urllib3.PoolManager()
        self._url = f"{url}/chat/completions"
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self.messages: list[dict[str, str]] = []
        self.prompt_tokens = 0  # of the latest request

    def body(self, words: str) -> bytes:
        """The next turn's request."""
        return msgspec.json.encode({"model": MODEL, "messages": [*self.messages, {"role": "user", "content": words}]})

    def go_on(self, words: str) -> None:
        """One more turn, which becomes history."""
        response = self._http.request("POST", self._url, body=self.body(words), headers=self._headers)
        assert response.status == 200, response.data
        answer = msgspec.json.decode(response.data)
        self.prompt_tokens = answer["usage"]["prompt_tokens"]
        said = answer["choices"][0]["message"]["content"]
        self.messages += [{"role": "user", "content": words}, {"role": "assistant", "content": said}]


def words_of(turn: int) -> str:
    """About 500 characters that no other turn has."""
    return f"turn {turn}: " + WORDS * 14


def decoding_ms(body: bytes) -> float:
    """Milliseconds of decoding a body, the best of five."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        msgspec.json.decode(body)
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


class Measured(NamedTuple):
    """CPU ms of the serving process per request, median latency (ms), and decoding the body (ms)."""

    cpu: float
    latency: float
    decoding: float


def measure(conversation: Conversation, turn: int, pid: int) -> Measured:
    """Go on to some turns after `turn`, and measure from some turns before it."""
    for earlier in range(len(conversation.messages) // 2 + 1, turn - AROUND):
        conversation.go_on(words_of(earlier))
    time.sleep(SETTLE_SECONDS)
    before, latencies = cpu_seconds(pid), []
    for around in range(turn - AROUND, turn + AROUND + 1):
        started = time.perf_counter()
        conversation.go_on(words_of(around))
        latencies.append(time.perf_counter() - started)
    time.sleep(SETTLE_SECONDS)
    spent = cpu_seconds(pid) - before
    return Measured(1e3 * spent / len(latencies), 1e3 * median(latencies), decoding_ms(conversation.body("")))


def storage(database: Path) -> tuple[int, int]:
    """Bytes of the store's file, and what its contents weigh: 12 per sampled token, 4 per prompt token, the texts."""
    with closing(SqlStore(f"sqlite:///{database}")) as store:
        rollouts, _ = store.page(limit=1000)
        weight = 0
        for trace in store.traces([rollout.rollout_id for rollout in rollouts]).values():
            for attempt in trace.attempts:
                for call in calls_of(attempt.spans):
                    weight += 12 * len(call.response_ids) + 4 * len(call.prompt_ids)
                for span in attempt.spans:
                    for name in (semconv.INPUT_MESSAGES, semconv.OUTPUT_MESSAGES):
                        weight += sum(len(message["content"]) for message in span.attributes[name])
    return database.stat().st_size, weight


def main() -> None:
    """Run both conversations and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="conversations")
    parser.add_argument("--role", choices=["engine", "floor"])
    parser.add_argument("--engine", help="URL, of the role floor")
    arguments = parser.parse_args()
    if arguments.role:
        return serve(engine() if arguments.role == "engine" else floor(arguments.engine))
    with ExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        engine_url, _ = parts.enter_context(role("--role", "engine", script=__file__))
        floor_url, floor_pid = parts.enter_context(role("--role", "floor", "--engine", engine_url, script=__file__))
        attached = {"model": MODEL, "kind": "embedded", "url": engine_url, "policy_version": 0}
        endpoint = Endpoint(model=MODEL, tokenizer=str(TOKENIZER), renderer="qwen3", engines=[attached])
        with server.launch(folder, endpoint, admin_key="admin", runner_key="runner") as serving:
            attempts = open_attempts(HttpStore(serving.url, "admin"), arguments.rounds + 1)
            sides = {"gateway": (attempts, serving.pid), "floor": ([(floor_url, "none")] * len(attempts), floor_pid)}
            compare(sides)
        stored, weight = storage(folder / "store.db")
        print(f"storage: {stored / 1e3:.0f} kB = {stored / weight:.2f}x of tokens and texts")
    return None


def compare(sides: dict[str, tuple[list[tuple[str, str]], int]]) -> None:
    """A conversation at each of the addresses of either side, the first not counted; the table, and what the last turn
    costs over the first."""
    found: dict[tuple[int, str], list[Measured]] = {(turn, name): [] for turn in TURNS for name in sides}
    sizes: dict[tuple[int, str], str] = {}
    for number in range(len(sides["gateway"][0])):
        for name, (addresses, pid) in sides.items():
            conversation = Conversation(*addresses[number])
            for turn in TURNS:
                measured = measure(conversation, turn, pid)
                sizes[turn, name] = f"{len(conversation.body('')) / 1e3:.0f} | {conversation.prompt_tokens}"
                found[turn, name] += [measured] if number else []
    print("| turn | | body kB | prompt tokens | CPU ms | median ms | decoding, ms |\n|---|---|---|---|---|---|---|")
    for (turn, name), rounds in found.items():
        cpu, latency, decoding = map(median, zip(*rounds, strict=True))
        print(f"| {turn} | {name} | {sizes[turn, name]} | {cpu:.2f} | {latency:.2f} | {decoding:.2f} |")
    for name in sides:
        pairs = list(zip(found[TURNS[0], name], found[TURNS[-1], name], strict=True))
        more = median(last.cpu - first.cpu for first, last in pairs)
        times = median((last.cpu - first.cpu) / last.decoding for first, last in pairs)
        print(f"\n{name}: {more:.2f} ms over turn {TURNS[0]}, {times:.1f}x decoding (medians of the rounds)")


if __name__ == "__main__":
    main()
