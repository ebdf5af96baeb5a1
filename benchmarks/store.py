"""What the store bears: whole lives of rollouts over HTTP, beside Agent Lightning's store in the same run.

    python benchmarks/store.py lives sizes memory --peer PYTHON --postgres URL

`lives`: rollouts are enqueued in batches, claimed, given one heartbeat, two model calls as OpenTelemetry spans and a
reward, finished, waited for, and read back by whoever enqueued them. Ours is the real server, asked by `HttpStore` in
threads, and by real runners, its SQLite file on disk; `--postgres` (the URL of an empty database) adds the same over
that, and the last line leaves HTTP out. The peer, Agent Lightning 0.3's in-memory store, is its own server (`--peer`
names the Python of an environment that `agentlightning` was installed in), asked by an asyncio client that neither
checks nor decodes more than it needs, which is less work than its own client does. All take turns; medians are printed,
and the processor time of the serving process per rollout, which depends least on what else the machine does.

`sizes`: what each operation costs in a store of a thousand to a million rollouts, in process, over files that are
filled by SQL. `memory`: the resident memory of the serving process while rollouts go through it.
"""

import argparse
import asyncio
import functools
import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import msgspec
import urllib3
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

sys.path.insert(0, str(Path(__file__).parent))
from gateway import MODEL, cpu_seconds, peer_program
from load import resident_mb

from lightning_rl.agents.agent import as_agent
from lightning_rl.processes.child import Child
from lightning_rl.runner.launch import at_once, launch
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Ending, Finish, Reward, RolloutRequest
from lightning_rl.store.sql import SqlStore
from lightning_rl_adapters import semconv
from lightning_rl_adapters.call import Call, VersionRange, to_span
from lightning_rl_adapters.span import Span, pack

BATCH = 128  # rollouts that are enqueued, waited for and read back together
CLAIM = 8  # rollouts that a worker takes at a time
ALGORITHMS = 2  # that each have a batch under way
WORKERS = 8
PROMPT, RESPONSE = list(range(1000, 1100)), list(range(2000, 2032))  # token ids of a call
SAID = "SELECT count(*) FROM shops WHERE size > 7 " * 4
ASKED = "shops id size city\nbooks id shops_id price\nhow many shops have a size over seven? " * 4
TASK = {"question": ASKED, "answer": "7"}
DONE, FORMAT = Finish(status="succeeded", reward=1.0), Reward(value=0.5, name="format")
REWARD_SPAN = "agentlightning.annotation"
PEER = "Agent Lightning 0.3, memory"
Place = tuple[str, str]  # rollout id, attempt id
Times = dict[str, list[float]]


class Measured(NamedTuple):
    """One round: rollouts per second, CPU ms of the server per rollout, seconds of each operation by name."""

    rate: float
    cpu: float
    times: Times


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    """Note how long the block took."""
    started = time.perf_counter()
    yield
    times[name].append(time.perf_counter() - started)


def otlp(places: Sequence[Place], reward: float | None = None) -> bytes:
    """Two model calls of each attempt as an instrumented agent exports them, with token ids; with `reward`, a span of
    that too."""
    request = ExportTraceServiceRequest()
    for place in places:
        spans = request.resource_spans.add()
        spans.CopyFrom(_exported(reward))
        for attribute, value in zip(spans.resource.attributes, place, strict=True):
            attribute.value.string_value = value
        trace = os.urandom(16)
        for span in spans.scope_spans[0].spans:
            span.trace_id, span.span_id = trace, os.urandom(8)
    return bytes(request.SerializeToString())


@functools.cache
def _exported(reward: float | None) -> ResourceSpans:
    """The spans of any attempt."""
    spans = ResourceSpans()
    for name in (semconv.AGENT_LIGHTNING_ROLLOUT_ID, semconv.AGENT_LIGHTNING_ATTEMPT_ID):
        spans.resource.attributes.add(key=name)
    scope, now = spans.scope_spans.add(), time.time_ns()
    texts = {"gen_ai.request.model": MODEL, "gen_ai.prompt.0.content": ASKED, "gen_ai.completion.0.content": SAID}
    for turn in range(2):
        span = scope.spans.add(name="chat policy", start_time_unix_nano=now + turn, end_time_unix_nano=now + turn + 1)
        for name, text in texts.items():
            span.attributes.add(key=name).value.string_value = text
        for name, ids in (("prompt_token_ids", PROMPT), ("response_token_ids", RESPONSE)):
            values = span.attributes.add(key=name).value.array_value.values
            for token in ids:
                values.add(int_value=token)
    if reward is not None:
        span = scope.spans.add(name=REWARD_SPAN, start_time_unix_nano=now + 2, end_time_unix_nano=now + 3)
        span.attributes.add(key="agentlightning.reward.0.value").value.double_value = reward
    return spans


def recorded(rollout_id: str, attempt_id: str) -> list[Span]:
    """The same calls as the gateway records them."""
    found = []
    for turn in range(2):
        call = Call(
            call_id=os.urandom(12).hex(),
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            number=turn,
            model=MODEL,
            prompt_ids=PROMPT,
            response_ids=RESPONSE,
            logprobs=[-0.5] * len(RESPONSE),
            versions=[VersionRange(0, 0, len(RESPONSE))],
            temperature=1.0,
            finish_reason="stop",
        )
        messages = {semconv.INPUT_MESSAGES: [{"role": "user", "content": ASKED}]}
        messages |= {semconv.OUTPUT_MESSAGES: [{"role": "assistant", "content": SAID}]}
        found.append(to_span(call, **messages))
    return found


# Ours


class OverHttp:
    """Our server: one client of the algorithm's, one of the workers'."""

    def __init__(self, url: str, pid: int) -> None:
        self.pid = pid
        self.admin, self.runner = HttpStore(url, "admin"), HttpStore(url, "runner")
        self._traces = f"{url}/v1/traces"
        self._pool = urllib3.PoolManager(maxsize=WORKERS)
        self._headers = {"authorization": "Bearer runner", "content-type": "application/x-protobuf"}

    def add_spans(self, places: Sequence[Place]) -> None:
        """The calls of these attempts."""
        answer = self._pool.request("POST", self._traces, body=otlp(places), headers=self._headers)
        assert (answer.status, answer.data) == (200, b""), answer.data


class InProcess:
    """Our store without a server."""

    def __init__(self, store: SqlStore) -> None:
        self.pid = os.getpid()
        self.admin = self.runner = self
        self._store = store
        self.enqueue, self.claim, self.heartbeat = store.enqueue, store.claim, store.heartbeat
        self.add_rewards, self.finish, self.traces = store.add_rewards, store.finish, store.traces
        self.heartbeats, self.finish_many = store.heartbeats, store.finish_many

    def wait(self, rollout_ids: Sequence[str], seconds: float) -> list[Any]:
        """Those that have ended; the store itself has nothing to wait with."""
        ended = self._store.ended(rollout_ids)
        if not ended:
            time.sleep(0.02)
        return ended

    def add_spans(self, places: Sequence[Place]) -> None:
        """The calls of these attempts."""
        self._store.add_spans([span for place in places for span in recorded(*place)])


@contextmanager
def our_server(folder: Path, store: str) -> Iterator[tuple[str, int]]:
    """Our server with its store at the URL `store`; its own URL and process id."""
    settings = {"store": store, "run_dir": str(folder), "admin_key": "admin", "runner_key": "runner", "model": MODEL}
    child = Child(
        "lightning_rl.control_plane.process",
        name="the server",
        log=folder / "server.log",
        first=msgspec.json.encode(settings) + b"\n",
    )
    try:
        child.start()
        child.hear(child.next_line())
        child.listen()
        yield str(child.told["url"]), child.process.pid
    finally:
        child.stop()


def emitting(task: Any, llm: Any) -> dict[str, float]:
    """An agent that tells of the same calls, and takes a while."""
    from lightning_rl.agents.emit import emit_object

    for _ in range(2):
        emit_object({"asked": ASKED, "said": SAID, "prompt_token_ids": PROMPT, "response_token_ids": RESPONSE})
    time.sleep(0.02)
    return {"reward": 1.0, "format": 0.5}


def runners_lives(side: Any, url: str, folder: Path, rollouts: int) -> Measured:
    """Lives of so many rollouts on real runners, as a Trainer starts them."""
    with launch(at_once(None, start_processes=False), as_agent(emitting), url, "runner", log_dir=folder):
        asked(side, BATCH, defaultdict(list))  # until they are there
        return lived(side, rollouts, [], threading.Event(), defaultdict(list))


def our_lives(side: Any, rollouts: int, *, batched: bool) -> Measured:
    """Lives of so many rollouts, a claim's together or one by one; whoever enqueues reads all of them back."""
    times: Times = defaultdict(list)
    over = threading.Event()

    def worker(name: str) -> None:
        while not over.is_set():
            with timed(times, f"claim {CLAIM}"):
                claims = side.runner.claim(name, limit=CLAIM)
            if not claims:
                del times[f"claim {CLAIM}"][-1]
                time.sleep(0.02)
            places = [(claim.rollout.rollout_id, claim.attempt.attempt_id) for claim in claims]
            if batched and places:
                with timed(times, f"heartbeats {CLAIM}"):
                    side.runner.heartbeats(places)
                with timed(times, f"spans {CLAIM}"):
                    side.add_spans(places)
                endings = [Ending(rollout_id=r, attempt_id=a, finish=DONE, rewards=[FORMAT]) for r, a in places]
                with timed(times, f"rewards and finish {CLAIM}"):
                    side.runner.finish_many(endings)
                continue
            for place in places:
                with timed(times, "heartbeat"):
                    side.runner.heartbeat(*place)
                with timed(times, "spans"):
                    side.add_spans([place])
                with timed(times, "rewards"):
                    side.runner.add_rewards(*place, [FORMAT])
                with timed(times, "finish"):
                    side.runner.finish(*place, DONE)

    return lived(side, rollouts, [functools.partial(worker, f"w{i}") for i in range(WORKERS)], over, times)


def asked(side: Any, rollouts: int, times: Times) -> None:
    """The algorithm's part: rollouts are enqueued together, waited for, and read back."""
    with timed(times, f"enqueue {rollouts}"):
        made = side.admin.enqueue([RolloutRequest(task=TASK) for _ in range(rollouts)])
    left = {rollout.rollout_id for rollout in made}
    while left:
        left -= {rollout.rollout_id for rollout in side.admin.wait(list(left), 10)}
    with timed(times, f"read {rollouts}"):
        found = side.admin.traces([rollout.rollout_id for rollout in made])
    assert all(len(trace.attempts[0].spans) == 2 and trace.rollout.reward == 1.0 for trace in found.values())


def lived(
    side: Any, rollouts: int, workers: Sequence[Callable[[], None]], over: threading.Event, times: Times
) -> Measured:
    """What so many lives take, as the `workers` live them until `over`."""
    batches = iter(range(rollouts // BATCH))

    def algorithm() -> None:
        for _ in batches:
            asked(side, BATCH, times)

    before, started = cpu_seconds(side.pid), time.perf_counter()
    with ThreadPoolExecutor(WORKERS + ALGORITHMS) as threads:
        working = [threads.submit(worker) for worker in workers]
        asking = [threads.submit(algorithm) for _ in range(ALGORITHMS)]
        try:
            for one in asking:
                one.result()
            seconds = time.perf_counter() - started
        finally:
            over.set()
        for one in working:
            one.result()
    return Measured(rollouts / seconds, 1e3 * (cpu_seconds(side.pid) - before) / rollouts, times)


# The peer


@contextmanager
def peer_server(python: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Agent Lightning's store in memory, behind its own server; its URL and process id."""
    command = [python, "-m", "agentlightning.cli.store", "--host", "127.0.0.1", "--log-level", "WARNING"]
    there = peer_program(command, "--port {}", "/v1/agl/health", folder, LITELLM_LOCAL_MODEL_COST_MAP="True")
    with there as (url, pid):
        yield f"{url}/v1", pid


async def peer_lives(url: str, pid: int, rollouts: int) -> Measured:
    """As `our_lives`: the same requests where it has them. A reward is a span there, and spans are read one rollout
    at a time."""
    times: Times = defaultdict(list)
    batches = iter(range(rollouts // BATCH))
    over = asyncio.Event()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(name: str | None, path: str, body: Any) -> Any:
            started = time.perf_counter()
            async with session.post(
                f"{url}/agl{path}", data=msgspec.json.encode(body), headers={"content-type": "application/json"}
            ) as response:
                answer = msgspec.json.decode(await response.read())
                assert response.status < 300, answer
            if name is not None:
                times[name].append(time.perf_counter() - started)
            return answer

        async def send(body: bytes) -> None:
            started = time.perf_counter()
            async with session.post(
                f"{url}/traces", data=body, headers={"content-type": "application/x-protobuf"}
            ) as response:
                await response.read()
                assert response.status == 200
            times[f"spans {CLAIM}"].append(time.perf_counter() - started)

        async def worker(name: str) -> None:
            while not over.is_set():
                claims = await ask(f"claim {CLAIM}", "/queues/rollouts/dequeue", {"limit": CLAIM, "worker_id": name})
                if not claims:
                    del times[f"claim {CLAIM}"][-1]
                    await asyncio.sleep(0.02)
                places = [(claim["rollout_id"], claim["attempt"]["attempt_id"]) for claim in claims]
                attempts = [f"/rollouts/{rollout_id}/attempts/{attempt_id}" for rollout_id, attempt_id in places]
                for attempt in attempts:
                    await ask("heartbeat", attempt, {"last_heartbeat_time": time.time()})
                if places:
                    await send(otlp(places, reward=1.0))
                for attempt in attempts:
                    await ask("finish", attempt, {"status": "succeeded"})

        async def algorithm() -> None:
            for _ in batches:
                made = await ask(
                    f"enqueue {BATCH}",
                    "/queues/rollouts/enqueue",
                    {"rollouts": [{"input": TASK, "mode": "train"}] * BATCH},
                )
                left = {rollout["rollout_id"] for rollout in made}
                while left:
                    ended = await ask(None, "/waits/rollouts", {"rollout_ids": list(left), "timeout": 0})
                    left -= {rollout["rollout_id"] for rollout in ended}
                    if left:
                        await asyncio.sleep(0.1)
                started = time.perf_counter()
                for rollout in made:
                    found = await ask(None, "/spans/search", {"rollout_id": rollout["rollout_id"], "limit": -1})
                    assert len(found["items"]) == 3, found
                times[f"read {BATCH}"].append(time.perf_counter() - started)

        before, started = cpu_seconds(pid), time.perf_counter()
        working = [asyncio.create_task(worker(f"w{i}")) for i in range(WORKERS)]
        await asyncio.gather(*(algorithm() for _ in range(ALGORITHMS)))
        seconds = time.perf_counter() - started
        over.set()
        await asyncio.gather(*working)
    return Measured(rollouts / seconds, 1e3 * (cpu_seconds(pid) - before) / rollouts, times)


def lives(arguments: argparse.Namespace) -> None:
    """All sides by turns, and the tables."""
    with ExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        sides: dict[str, Callable[[], Measured]] = {}

        def ours(name: str, store: str) -> None:
            run_dir = folder / name.split()[0]
            run_dir.mkdir()
            url, pid = parts.enter_context(our_server(run_dir, store))
            side = OverHttp(url, pid)
            sides[f"{name}, batches"] = lambda: our_lives(side, arguments.rollouts, batched=True)
            sides[f"{name}, one by one"] = lambda: our_lives(side, arguments.rollouts, batched=False)
            sides[f"{name}, runners"] = lambda: runners_lives(side, url, run_dir, arguments.rollouts)

        ours("SQLite, HTTP", f"sqlite:///{folder / 'http.db'}")
        if arguments.postgres:
            ours("PostgreSQL, HTTP", arguments.postgres)
        if arguments.peer:
            url, pid = parts.enter_context(peer_server(arguments.peer, folder))
            sides[PEER] = lambda: asyncio.run(peer_lives(url, pid, arguments.rollouts))
        direct = InProcess(parts.enter_context(closing(SqlStore(f"sqlite:///{folder / 'direct.db'}"))))
        sides["SQLite, no HTTP, batches"] = lambda: our_lives(direct, arguments.rollouts, batched=True)
        found: dict[str, list[Measured]] = defaultdict(list)
        for warm_up in (True, *[False] * arguments.rounds):
            for name, side in sides.items():
                measured = side()
                print(f"{name}: {measured.rate:.0f} rollouts/s, {measured.cpu:.2f} ms", file=sys.stderr, flush=True)
                if not warm_up:
                    found[name].append(measured)
    print("| | rollouts/s | CPU ms of the server per rollout | of the peer's rollouts/s |\n|---|---|---|---|")
    for name, rounds in found.items():
        peers = found.get(PEER, [])  # round by round, as the machine's load changes
        ratio = f"{median(m.rate / peer.rate for m, peer in zip(rounds, peers, strict=True)):.1f}x" if peers else ""
        print(f"| {name} | {median(m.rate for m in rounds):.0f} | {median(m.cpu for m in rounds):.2f} | {ratio} |")
    print("\n| | operation | median ms | p99 ms |\n|---|---|---|---|")
    for name, rounds in found.items():
        for operation in rounds[0].times:
            ranked = sorted(seconds for m in rounds for seconds in m.times[operation])
            p99 = ranked[int(0.99 * (len(ranked) - 1))]
            print(f"| {name} | {operation} | {1e3 * median(ranked):.1f} | {1e3 * p99:.1f} |")


# How large the store is

_NAMED = "printf('%s%08x%012x', '{kind}', (i * 2654435761) & 4294967295, i)"  # looks random, and is found again
_OPEN = 300  # rollouts that have not ended: a third of them runs
_FILL = """
WITH RECURSIVE numbers(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM numbers WHERE i < :rollouts)
INSERT INTO rollouts (position, rollout_id, status, mode, group_id, request, attempt_count, attempt_id, created_at,
    ended_at)
SELECT i, {r}, CASE WHEN i <= :ended THEN CASE WHEN i % 10 THEN 'succeeded' ELSE 'failed' END
    WHEN i % 3 THEN 'queued' ELSE 'running' END,
    CASE WHEN i % 1000 THEN 'train' ELSE 'val' END, 'g' || (i / 8), :request, i <= :ended OR i % 3 = 0,
    CASE WHEN i <= :ended OR i % 3 = 0 THEN {a} END, 1.0, CASE WHEN i <= :ended THEN 2.0 END FROM numbers;
INSERT INTO attempts (attempt_id, rollout_id, sequence, status, worker_id, claim_id, claim_body, unresponsive_seconds,
    lease_expires_at, started_at, ended_at, reward, rewards, finish_body)
SELECT attempt_id, rollout_id, 1, status, 'w' || position % 64, 'c' || attempt_id, '["w",null,8]', 30.0, 9e9, 1.0,
    ended_at, ended_at - 1, CASE WHEN ended_at THEN '{{"reward":1.0}}' END,
    CASE WHEN ended_at THEN '{{"status":"succeeded","reward":1.0}}' END FROM rollouts WHERE attempt_id IS NOT NULL;
INSERT INTO spans SELECT {c}, rollout_id, attempt_id, 0, :record FROM (SELECT position AS i, * FROM rollouts)
    WHERE ended_at;
INSERT INTO rewards (rollout_id, attempt_id, reward_id, name, value)
SELECT rollout_id, attempt_id, 'w' || attempt_id, 'format', 0.5 FROM rollouts WHERE ended_at;
"""


def fill(database: Path, rollouts: int) -> None:
    """A store of so many rollouts, nearly all ended, each with an attempt, a call and a reward."""
    SqlStore(f"sqlite:///{database}").close()
    values = {
        "rollouts": rollouts,
        "ended": rollouts - _OPEN,
        "request": msgspec.json.encode(RolloutRequest(task=TASK)),
        "record": pack(recorded("r", "a")[0]).record,
    }
    names = {kind: _NAMED.format(kind=kind) for kind in "rac"}
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = -2000000")
        connection.execute("BEGIN")
        for statement in _FILL.format(**names).split(";\n")[:-1]:
            connection.execute(statement, {name: value for name, value in values.items() if f":{name}" in statement})
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def operations(store: SqlStore, rollouts: int, repeats: int) -> dict[str, float]:
    """Microseconds of each operation, the median, in a store of so many rollouts."""
    times: Times = defaultdict(list)
    page, _ = store.page(limit=1000, cursor=str(rollouts // 2))
    ids = [rollout.rollout_id for rollout in page]
    for i in range(repeats):
        with timed(times, "enqueue"):
            store.enqueue([RolloutRequest(task=TASK)])
        with timed(times, "claim"):
            [claim] = store.claim("w", claim_id=f"c{i}")
        place = claim.rollout.rollout_id, claim.attempt.attempt_id
        with timed(times, "heartbeat"):
            store.heartbeat(*place)
        spans = recorded(*place)
        with timed(times, "2 spans"):
            store.add_spans(spans)
        with timed(times, "reward"):
            store.add_rewards(*place, [Reward(value=0.5, name="format")])
        with timed(times, "finish"):
            store.finish(*place, Finish(status="succeeded", reward=1.0))
        with timed(times, "sweep"):
            store.overdue()
        with timed(times, "wait for 100"):
            store.ended(ids[i % 800 :][:100])
        with timed(times, "read one back"):
            store.traces([place[0]])
        with timed(times, "first page"):
            store.page(limit=100)
        with timed(times, "last page"):
            store.page(limit=100, cursor=str(rollouts - 100))
        with timed(times, "page of queued"):
            store.page(limit=100, status="queued")
        with timed(times, "page of a group"):
            store.page(limit=100, group_id=f"g{i}")
    for _ in range(10):
        with timed(times, "page of val"):
            store.page(limit=100, mode="val")
        with timed(times, "counts"):
            store.counts()
    return {name: 1e6 * median(seconds) for name, seconds in times.items()}


def sizes(arguments: argparse.Namespace) -> None:
    """The table of operations by the number of rollouts."""
    found: dict[int, dict[str, float]] = {}
    for rollouts in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            database = Path(folder) / "store.db"
            started = time.perf_counter()
            fill(database, rollouts)
            print(f"{rollouts}: filled in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            with closing(SqlStore(f"sqlite:///{database}")) as store:
                started = time.perf_counter()
                store.renew_leases()
                store.recorded_calls()
                opened = time.perf_counter() - started
                found[rollouts] = operations(store, rollouts, arguments.repeats)
                found[rollouts] |= {"(start of a server, s)": opened, "(file, MB)": database.stat().st_size / 1e6}
    print(f"| microseconds, median of {arguments.repeats} | " + " | ".join(f"{size:,}" for size in found) + " |")
    print("|---" * (1 + len(found)) + "|")
    for name in next(iter(found.values())):
        print(
            f"| {name} | " + " | ".join(f"{costs[name]:.{2 if '(' in name else 0}f}" for costs in found.values()) + " |"
        )


# Memory


def memory(arguments: argparse.Namespace) -> None:
    """The resident memory of the server while rollouts go through it."""
    print("| rollouts | resident MB | file MB |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with our_server(folder, f"sqlite:///{folder / 'store.db'}") as (url, pid):
            side, done = OverHttp(url, pid), 0
            step = arguments.through // 10 // BATCH * BATCH
            while done < arguments.through:
                our_lives(side, step, batched=True)
                page = urllib3.request("GET", f"{url}/metrics", headers={"authorization": "Bearer admin"})
                assert page.status == 200
                done += step
                file = (folder / "store.db").stat().st_size / 1e6
                print(f"| {done:,} | {resident_mb(pid):.0f} | {file:.0f} |", flush=True)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["lives", "sizes", "memory"])
    parser.add_argument("--rollouts", type=int, default=1024, help="of a round of lives")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="the Python of an environment with agentlightning 0.3")
    parser.add_argument("--postgres", metavar="URL", help="of an empty database")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=300, help="of an operation in a store of one size")
    parser.add_argument("--through", type=int, default=100_000, help="rollouts of which the memory is watched")
    arguments = parser.parse_args()
    for part in arguments.parts:
        {"lives": lives, "sizes": sizes, "memory": memory}[part](arguments)


if __name__ == "__main__":
    main()
