"""What limits a run of many GPUs and rollouts, on paper: a closed queueing network over measured costs.

    python benchmarks/scaling.py                    # the table of docs/scaling.md
    python benchmarks/scaling.py --plot docs/scaling.png
    python benchmarks/scaling.py --measure          # the two costs that no other benchmark has

A rollout goes round between its tools, its runner, a server (gateway and store) and the engine's GPUs; there are as
many in the network as run. Who waits where follows from mean value analysis (Reiser and Lavenberg 1980) in Schweitzer's
approximation, which is exact in both limits that matter here: nobody waits, or one station is always busy. Stations of
several servers are taken as Seidmann has it: one that is so many times as fast, and the rest of the time as a delay.

Invariant: every number below is measured (with its line in docs/performance.md), published by somebody (with the
place), or an assumption that says so.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Measured: each with its line of docs/performance.md, on two shared x86-64 cores.
SHORT_CALL_MS, LONG_CALL_MS = 0.60, 1.77  # CPU of a call, its record in the store included, at 16 clients; of
SHORT_CALL, LONG_CALL = 300 + 128, 3000 + 500  # tokens, all new
LONG_PROMPT_MS = 0.36 / 61.4  # more for 1,000 tokens of history: 0.26 to 0.51 ms at turn 300
LIFE_MS = 0.77  # CPU of a rollout's life in the store, SQLite, real runners
LIFE_POSTGRES_MS = 1.51  # the same in the server before a PostgreSQL
POSTGRES_PER_SECOND = 248.0  # such lives; what they take that is not the server's is the database's, at most
LIFE_CALLS = 2  # of such a life
RUNNER_MS = 1.9  # CPU of a call in the runner: agent and `openai` client
RUNNER_KB = 71_000 / 256  # resident, of an async rollout that waits; docs/runners.md
STORAGE = 1.19  # times (12 bytes a sampled token + 4 a prompt token + text), in conversations
TEXT_BYTES = 860 / 211  # of a token
SOURCES = {
    "SHORT_CALL_MS": "| 300 + 128 | 16 | 1,647, 0.60 ms |",
    "LONG_CALL_MS": "| 3,000 + 500 | 16 | 607, 1.77 ms |",
    "LONG_PROMPT_MS": "Turn 300 costs 0.26 to 0.51 ms over turn 3",
    "LIFE_MS": "966 rollouts/s, 0.77 ms of the server's CPU each",
    "LIFE_POSTGRES_MS": "| PostgreSQL 15 (no fsync), HTTP, batches | 248 | 1.51 and what PostgreSQL takes |",
    "RUNNER_MS": "the runners (agent, `openai` client, SQLite) took about 1.9 ms of",
    "STORAGE": "Storage: 1.19 times (12 bytes",
    "TEXT_BYTES": "211 tokens and 860 bytes a turn more",
}
# Measured by `--measure`.
HEARTBEAT_US = 15.0  # CPU in the store of one heartbeat of 50: 9 to 16 in four runs
OPEN_KB = 680.0  # resident, of an open attempt of ten calls that add some 560 tokens each
# The defaults of this release.
BEAT_SECONDS = 10.0  # a third of `unresponsive_seconds`
OPEN_LIMIT = 10_000  # attempts open on one server, `--limit open_attempts`

# Measured on one H200, docs/gpu.md: Qwen2.5-1.5B, recipe (3), with vLLM on the same card.
SAMPLED_PER_SECOND = 12_500.0  # by vLLM, the prompts included
TRAINED_PER_SECOND = 65_536 / (0.53 + 2.75)  # tokens of rows: their log probabilities, then the update
WEIGHTS_SECONDS = 3.3  # from the last token before new weights to the first after

# Assumptions: what an agent does, how much a step trains, and how busy a part may be.
CALLS = 10  # of a rollout
STEP_CALLS = 1024 * CALLS  # after which there are new weights
PROMPT_TOKENS, SAMPLED_TOKENS = 500, 300  # that a call adds
TOOL_SECONDS = 20.0  # between two calls
TOKEN_SECONDS = 0.02  # to sample one, when nobody waits
FILL = 1.2  # times the rollouts that would just keep the engine busy: so many are handed out
BUSY = 0.7  # of each server, where one plans
OPEN = 100_000  # rollouts
AWAY_SECONDS = TOOL_SECONDS + SAMPLED_TOKENS * TOKEN_SECONDS + RUNNER_MS / 1e3  # of a call's round, at no station


@dataclass(frozen=True)
class Gpus:
    """What a call takes of a GPU, in seconds, and what new weights take of all of them after a step."""

    sampling: float
    training: float = 0.0
    weights: float = 0.0

    def station(self, number: int) -> "Station":
        """So many of them: all stand still for new weights."""
        return Station("GPUs", self.sampling + self.training, number, self.weights / STEP_CALLS)

    def shares(self, number: int) -> str:
        """Of the time of so many: sampling, training, new weights."""
        if not self.training:
            return "together"
        parts = (self.sampling, self.training, self.weights * number / STEP_CALLS)
        return " / ".join(f"{part / sum(parts):.0%}" for part in parts)


# Tokens a second and GPU of whole RL runs, published by others and not measured by us: sampling, training and weights
# are in them together.
MODELS = {
    "0.6B": Gpus((PROMPT_TOKENS + SAMPLED_TOKENS) / 11_900.0),  # prime-rl's benchmarks: Qwen3-0.6B, one H100, 16k
    "1.5B": Gpus(
        SAMPLED_TOKENS / SAMPLED_PER_SECOND,
        (PROMPT_TOKENS + SAMPLED_TOKENS) / TRAINED_PER_SECOND,
        WEIGHTS_SECONDS,
    ),
    # verl's docs: Qwen3.5-35B-A3B, V1 colocate_async, 4 nodes; 8 GPUs each assumed
    "35B-A3B": Gpus((PROMPT_TOKENS + SAMPLED_TOKENS) / (18_852.0 / 32)),
}


@dataclass(frozen=True)
class Deployment:
    """`servers` processes over SQLite (one), or over a PostgreSQL of so many cores."""

    servers: int = 1
    postgres_cores: int = 0

    def __str__(self) -> str:
        return f"{self.servers}, PostgreSQL with {self.postgres_cores} cores" if self.postgres_cores else "1, SQLite"


@dataclass(frozen=True)
class Station:
    """A part that calls queue for: seconds of one of its servers for a call, and of all of them at once."""

    name: str
    seconds: float
    servers: int
    pause: float = 0.0

    @property
    def between(self) -> float:
        """Seconds between two calls where it is busy all the time."""
        return self.seconds / self.servers + self.pause


@dataclass(frozen=True)
class Flow:
    """What comes of it: calls a second, and by station how busy it is and how long a call waits there (s)."""

    calls: float
    busy: dict[str, float]
    waits: dict[str, float]

    @property
    def limit(self) -> str:
        """The busiest part; where none is busy all the time there are too few rollouts for more."""
        name = max(self.busy, key=lambda each: self.busy[each])
        return name if self.busy[name] > 0.9 else "open rollouts"


def stations(model: str, gpus: int, deployment: Deployment, rollouts: int) -> list[Station]:
    """The parts that a call passes, with what heartbeats leave of them."""
    call_ms = gateway_ms()
    beats = beating(rollouts)
    engine = MODELS[model].station(gpus)
    if not deployment.postgres_cores:
        return [engine, _beside("server", (call_ms + LIFE_MS / CALLS) / 1e3, 1, beats)]
    database_ms = (1e3 / POSTGRES_PER_SECOND - LIFE_POSTGRES_MS) / LIFE_CALLS
    return [
        engine,
        Station("server", (call_ms + LIFE_POSTGRES_MS / CALLS) / 1e3, deployment.servers),
        _beside("database", database_ms / 1e3, deployment.postgres_cores, beats),
    ]


def gateway_ms() -> float:
    """CPU of a call: what is new, by the two sizes that were measured, and what came before."""
    token_ms = (LONG_CALL_MS - SHORT_CALL_MS) / (LONG_CALL - SHORT_CALL)
    new = PROMPT_TOKENS + SAMPLED_TOKENS
    return SHORT_CALL_MS + token_ms * (new - SHORT_CALL) + LONG_PROMPT_MS * CALLS / 2 * new / 1000


def beating(rollouts: int) -> float:
    """The cores that heartbeats take."""
    return rollouts / BEAT_SECONDS * HEARTBEAT_US / 1e6


def _beside(name: str, seconds: float, servers: int, taken: float) -> Station:
    """A station of which `taken` servers are busy with something else."""
    return Station(name, seconds / max(1e-3, 1 - taken / servers), servers)


def flow(parts: Sequence[Station], rollouts: float, away: float) -> Flow:
    """The flow of so many rollouts; `away`: seconds between a call and the next in which they need no station."""
    seconds = np.array([part.seconds for part in parts])
    servers = np.array([part.servers for part in parts], dtype=float)
    queued = np.array([part.between for part in parts])
    delay = float((seconds * (servers - 1) / servers).sum())
    lengths = np.full(len(parts), rollouts / (len(parts) + 1.0))
    for _ in range(100_000):
        times = queued * (1 + lengths * (rollouts - 1) / rollouts)
        calls = rollouts / (away + delay + float(times.sum()))
        after = calls * times
        if float(np.abs(after - lengths).max()) < 1e-9 * rollouts:
            break
        lengths = after
    named = [part.name for part in parts]
    return Flow(
        calls,
        dict(zip(named, (calls * queued).tolist(), strict=True)),
        dict(zip(named, (times - queued).tolist(), strict=True)),
    )


def run(model: str, gpus: int, deployment: Deployment, rollouts: int) -> Flow:
    """The flow of a run in which so many rollouts run."""
    return flow(stations(model, gpus, deployment, rollouts), rollouts, AWAY_SECONDS)


def admitted(model: str, gpus: int, rollouts: int = OPEN) -> int:
    """How many of the open rollouts run: few more than keep the engine busy, the rest is queued."""
    engine, _ = stations(model, gpus, Deployment(), 0)
    filling = (AWAY_SECONDS + engine.seconds + engine.pause) / engine.between
    return min(rollouts, math.ceil(FILL * filling))


def plan(model: str, gpus: int, rollouts: int) -> Deployment:
    """The smallest deployment whose server and database are no busier than `BUSY` and have room for all that run."""
    one = Deployment()
    if rollouts <= OPEN_LIMIT and run(model, gpus, one, rollouts).busy["server"] <= BUSY:
        return one
    many = 10_000
    ample = run(model, gpus, Deployment(many, many), rollouts)
    servers = max(math.ceil(ample.busy["server"] * many / BUSY), math.ceil(rollouts / OPEN_LIMIT))
    return Deployment(servers, math.ceil(ample.busy["database"] * many / BUSY + beating(rollouts)))


def table() -> str:
    """The table of the page."""
    names = ["model", "GPUs", "run at once", "calls/s, one server", "limited by", "servers as planned", "calls/s"]
    names += ["limited by", "wait for a GPU, s", "busy GPUs", "sample / train / weights", "runner cores"]
    names += ["servers, GB", "disk, MB/s"]
    lines = [names, ["---"] * len(names)]
    for model in MODELS:
        for gpus in (1, 64, 1000):
            running = admitted(model, gpus)
            alone, deployment = run(model, gpus, Deployment(), running), plan(model, gpus, running)
            planned = run(model, gpus, deployment, running)
            cores = math.ceil(planned.calls * RUNNER_MS / 1e3 / BUSY)
            line = [model, f"{gpus:,}", f"{running:,}", rounded(alone.calls), alone.limit, str(deployment)]
            line += [rounded(planned.calls), planned.limit, rounded(planned.waits["GPUs"])]
            line += [f"{planned.busy['GPUs']:.0%}", MODELS[model].shares(gpus), f"{cores:,}"]
            line += [rounded(running * OPEN_KB / 1e6)]
            lines.append([*line, rounded(planned.calls * call_bytes() / 1e6)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rounded(number: float) -> str:
    """Two digits that count."""
    digits = 1 - math.floor(math.log10(number)) if number > 0 else 0
    return f"{round(number, digits):,.{max(0, min(digits, 2))}f}"


def call_bytes() -> float:
    """What the store keeps of a call."""
    tokens = PROMPT_TOKENS + SAMPLED_TOKENS
    return STORAGE * (12 * SAMPLED_TOKENS + 4 * PROMPT_TOKENS + TEXT_BYTES * tokens)


def plot(path: Path) -> None:
    """The curves of the page."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4))
    gpus = [int(number) for number in np.unique(np.geomspace(1, 1000, 40).astype(int))]
    for model, colour in zip(MODELS, ("tab:blue", "tab:green", "tab:orange"), strict=True):
        for deployment, style in ((Deployment(), ":"), (Deployment(2, 4), "--"), (Deployment(10, 20), "-")):
            calls = [run(model, number, deployment, admitted(model, number)).calls for number in gpus]
            left.loglog(gpus, calls, style, color=colour, label=f"{model}; {deployment}")
    left.set(xlabel="GPUs", ylabel="calls a second", title=f"{OPEN:,} open rollouts")
    left.legend(fontsize=7, title="model; servers", title_fontsize=7)
    servers = range(1, 13)
    flows = [run("0.6B", 1000, Deployment(number, 2 * number), OPEN) for number in servers]
    middle.plot(servers, [each.calls for each in flows], label="calls a second")
    middle.set(xlabel="servers, over PostgreSQL with twice the cores", title="0.6B, 1,000 GPUs, 100,000 at once")
    middle.legend(fontsize=7, loc="upper left")
    beside = middle.twinx()
    beside.semilogy(servers, [max(1e-4, each.waits["server"]) for each in flows], "k:", label="wait for a server, s")
    beside.legend(fontsize=7, loc="upper right")
    rollouts = [int(number) for number in np.unique(np.geomspace(16, OPEN, 40).astype(int))]
    for number, colour in ((1, "tab:green"), (64, "tab:blue"), (1000, "tab:red")):
        flows = [run("0.6B", number, plan("0.6B", number, many), many) for many in rollouts]
        waits = {part: [max(1e-4, each.waits[part]) for each in flows] for part in ("GPUs", "server")}
        right.loglog(rollouts, waits["GPUs"], color=colour, label=f"{number} GPUs")
        right.loglog(rollouts, waits["server"], ":", color=colour)
    right.set(xlabel="rollouts that run at once", ylabel="seconds that a call waits", title="0.6B, servers as planned")
    right.legend(fontsize=7, title="for a GPU (dotted: a server)", title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def measure(attempts: int) -> None:
    """The two costs that no other benchmark has: a heartbeat among many, and the memory of an open attempt."""
    sys.path.insert(0, str(Path(__file__).parent))
    import asyncio
    import statistics
    import time

    import aiohttp
    import msgspec
    from gateway import MODEL, TOKENIZER, open_attempts, role
    from load import __file__ as load
    from load import resident_mb

    from lightning_rl.algorithms.base import Endpoint
    from lightning_rl.control_plane import launch as server
    from lightning_rl.store.client import HttpStore
    from lightning_rl.store.contract import RolloutRequest
    from lightning_rl.store.sql import SqlStore

    with tempfile.TemporaryDirectory() as folder:
        store = SqlStore(f"sqlite:///{folder}/store.db")
        store.enqueue([RolloutRequest(task=None)] * 2000)
        claims = [claim for _ in range(10) for claim in store.claim("benchmark", limit=200)]
        places = [(claim.rollout.rollout_id, claim.attempt.attempt_id) for claim in claims]
        taken = []
        for first in range(0, len(places), 50):
            began = time.process_time()
            store.heartbeats(places[first : first + 50])
            taken.append((time.process_time() - began) / 50 * 1e6)
        print(f"a heartbeat of 50: {statistics.median(taken):.1f} us of CPU")
        store.close()

    async def converse(session: aiohttp.ClientSession, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        chat: list[dict[str, str]] = []
        for turn in range(CALLS):
            chat.append({"role": "user", "content": f"{key[-12:]} {turn} " + "how many singers are there " * 80})
            body = msgspec.json.encode({"model": MODEL, "messages": chat})
            async with session.post(f"{url}/chat/completions", data=body, headers=headers) as answer:
                told = await answer.json()
                assert answer.status == 200, told
            chat.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})

    async def all_of(places: Sequence[tuple[str, str]]) -> None:
        async with aiohttp.ClientSession() as session:
            for first in range(0, len(places), 16):
                await asyncio.gather(*(converse(session, url, key) for url, key in places[first : first + 16]))

    with tempfile.TemporaryDirectory() as folder, role("--role", "instant", script=load) as (engine_url, _):
        engine = {"model": MODEL, "kind": "embedded", "url": engine_url, "policy_version": 0}
        endpoint = Endpoint(model=MODEL, tokenizer=str(TOKENIZER), renderer="qwen3", engines=[engine])
        with server.launch(Path(folder), endpoint, admin_key="admin", runner_key="runner") as serving:
            store_there = HttpStore(serving.url, "admin")
            asyncio.run(all_of(open_attempts(store_there, 100)))
            before = resident_mb(serving.pid)
            asyncio.run(all_of(open_attempts(store_there, attempts)))
            more = resident_mb(serving.pid) - before
            print(f"an open attempt of {CALLS} calls: {more * 1e3 / attempts:.0f} kB resident ({attempts} of them)")


def main() -> None:
    """Print the table, or what else is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--attempts", type=int, default=1000, help="open ones, where memory is measured")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.attempts)
    elif arguments.plot:
        plot(arguments.plot)
    else:
        print(table())


if __name__ == "__main__":
    main()
