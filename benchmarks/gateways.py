"""How calls per second scale with gateway processes, and what each call costs them.

    python benchmarks/gateways.py [--turns 10] [--instructions] [--own-stores]

Each gateway is the real server in a process of its own; all share one PostgreSQL (started for this, on the same
machine) and one instant token engine. Attempts are claimed at one server, which names the least busy gateway for each;
every call goes to an attempt of its own. With `--own-stores` each server has a SQLite store instead, and its share of
the attempts, as a training run at several servers spreads them. Where processes outnumber cores, clients, engine,
database and gateways share them: then calls per second say little, and the processor time per call (of the gateways,
and of PostgreSQL) says what one more core would bear. With `--instructions` the gateways run under Valgrind, and what
is printed instead is how many instructions a call takes of all of them together.
"""

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))  # whose tests start a PostgreSQL
from gateway import MODEL, TOKENIZER, Size, count, cpu_seconds, load, open_attempts, role
from valgrind import Instructions, counted

from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import Ending, Finish
from tests.postgres import Cluster, programs


class Round(NamedTuple):
    """Calls per second, latencies (ms), and CPU (ms per call): of all gateways together, of PostgreSQL."""

    rate: float
    p50: float
    p99: float
    gateways: float
    database: float


@contextmanager
def gateway(folder: Path, store: str, engine: str) -> Iterator[tuple[str, int]]:
    """A server process: its URL and process id."""
    folder.mkdir()
    settings = {"store": store, "run_dir": str(folder), "admin_key": "admin", "runner_key": "runner", "model": MODEL}
    settings |= {"tokenizer": str(TOKENIZER), "renderer": "qwen3"}
    settings |= {"engines": [{"model": MODEL, "kind": "embedded", "url": engine}]}
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "lightning_rl.control_plane.process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(settings) + b"\n")
        child.stdin.flush()
        yield msgspec.json.decode(child.stdout.readline())["url"], child.pid
    finally:
        child.stdin.close()
        child.wait(30)


def postgres_cpu(postmaster: int) -> float:
    """Processor time of PostgreSQL's processes that live, in seconds."""
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    return sum(cpu_seconds(int(pid)) for pid in children)


def measure(
    servers: list[tuple[str, int]],
    stores: list[HttpStore],
    postmaster: int,
    calls: int,
    clients: int,
    number: Iterator[int],
    turns: int,
) -> Round:
    """One round: attempts over all servers, one call each, the last of so many turns."""
    attempts = opened(stores, calls)
    used: list[tuple[float, float]] = []

    def begin() -> None:
        time.sleep(1)  # what is written behind the earlier answers belongs to them
        used.append((sum(cpu_seconds(pid) for _, pid in servers), postgres_cpu(postmaster)))

    if turns == 1:
        begin()
    seconds, latencies = asyncio.run(load(attempts, clients, number, Size(40 * turns, 1, turns), begin))
    time.sleep(1)
    gateways = sum(cpu_seconds(pid) for _, pid in servers) - used[0][0]
    database = postgres_cpu(postmaster) - used[0][1]
    end_all(stores, attempts)
    ranked = sorted(latencies)
    return Round(
        rate=calls / seconds,
        p50=1e3 * median(ranked),
        p99=1e3 * ranked[int(0.99 * (len(ranked) - 1))],
        gateways=1e3 * gateways / calls,
        database=1e3 * database / calls,
    )


def counted_round(
    servers: list[tuple[str, int]],
    stores: list[HttpStore],
    instructions: Instructions,
    calls: int,
    clients: int,
    number: Iterator[int],
    size: Size,
) -> float:
    """Million instructions per call of all gateways together."""
    attempts = opened(stores, calls)
    found = count(instructions, attempts, [pid for _, pid in servers], number, size, clients)
    end_all(stores, attempts)
    return found


def opened(stores: list[HttpStore], calls: int) -> list[tuple[str, str]]:
    """So many attempts, claimed in turn at the server of each store."""
    shares = [open_attempts(store, calls // len(stores)) for store in stores]
    return [attempt for several in zip(*shares, strict=True) for attempt in several]


def end_all(stores: list[HttpStore], attempts: list[tuple[str, str]]) -> None:
    """Finish them, many at once, each at the server where it was claimed."""
    for number, store in enumerate(stores):
        parts = [url.split("/") for url, _ in attempts[number :: len(stores)]]
        endings = [Ending(rollout_id=p[4], attempt_id=p[6], finish=Finish(status="succeeded")) for p in parts]
        for start in range(0, len(endings), 100):
            store.finish_many(endings[start : start + 100])


def together(urls: list[str]) -> None:
    """Wait until all gateways are named."""
    while True:
        told = HttpStore(urls[0], "admin")._call("GET", "/gateways", None, dict[str, Any])["gateways"]
        if len(told) == len(urls):
            return
        time.sleep(0.1)


def main() -> None:
    """Measure each number of gateways, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--calls", type=int, default=600, help="of a round")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1, help="the call is this one of its attempt")
    parser.add_argument("--instructions", action="store_true", help="of the gateways, counted by Valgrind")
    parser.add_argument("--own-stores", action="store_true", help="each server has a store of its own, in SQLite")
    arguments = parser.parse_args()
    bin_dir = programs()
    if bin_dir is None:
        raise SystemExit("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    number = itertools.count()
    benchmark = str(Path(__file__).with_name("gateway.py"))
    with ExitStack() as parts:
        cluster = Cluster(bin_dir)
        parts.callback(cluster.remove)
        postmaster = int((cluster._folder / "data" / "postmaster.pid").read_text().split()[0])
        engine_url, _ = parts.enter_context(role("--role", "engine", script=benchmark))
        instructions = parts.enter_context(counted() if arguments.instructions else nullcontext())
        print(f"{os.cpu_count()} cores, {arguments.clients} clients, {arguments.calls} calls a round")
        if instructions is not None:
            print("| gateways | million instructions per call, all together |\n|---|---|")
        else:
            print(
                "| gateways | calls/s | median ms | p99 ms | CPU ms per call, gateways | CPU ms per call, PostgreSQL |"
            )
            print("|---|---|---|---|---|---|")
        for many in arguments.gateways:
            with ExitStack() as servers:
                folder = Path(servers.enter_context(tempfile.TemporaryDirectory()))
                shared = None if arguments.own_stores else cluster.url(cluster.database())
                there = [
                    servers.enter_context(gateway(place, shared or f"sqlite:///{place}/store.db", engine_url))
                    for place in (folder / str(i) for i in range(many))
                ]
                if shared is not None:
                    together([url for url, _ in there])
                stores = [HttpStore(url, "admin") for url, _ in (there if shared is None else there[:1])]
                if instructions is not None:
                    size = Size(40 * arguments.turns, 1, arguments.turns)
                    rounds = [
                        counted_round(there, stores, instructions, arguments.calls, arguments.clients, number, size)
                        for _ in range(2)
                    ]
                    print(f"| {many} | {rounds[-1]:.2f} |", flush=True)  # the first warms up
                    continue
                found = [
                    measure(there, stores, postmaster, arguments.calls, arguments.clients, number, arguments.turns)
                    for _ in range(arguments.rounds + 1)
                ][1:]
                middle = Round(*map(median, zip(*found, strict=True)))
                numbers = f"{middle.rate:.0f} | {middle.p50:.1f} | {middle.p99:.1f}"
                print(f"| {many} | {numbers} | {middle.gateways:.2f} | {middle.database:.2f} |", flush=True)


if __name__ == "__main__":
    main()
