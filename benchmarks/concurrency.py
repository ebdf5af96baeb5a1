"""How many rollouts at once: fixed numbers of them against as many as the engine bears.

    python benchmarks/concurrency.py

Agents of two calls use a tool between them whose time is long-tailed (log-normal: half of them are done in half a
second, some take ten times that). The engine is the embedded one with 16 places and the tutorial's model; everything
else is what a run has: a server process, runner processes, HTTP between all. For each way it prints rollouts per
second, the requests that waited in the engine (the mean over time, and the most), and how long an answer took.

The tutorial's model is small, fast and brief. So that the engine is scarce, and not the cores that agents and server
share with it, every step takes 10 ms more, in which no core is used, and at temperature 50 answers are long. With a
fixed number the engine does not say what it bears, so the server holds nothing back.
"""

import argparse
import math
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from lightning_rl import tutorial
from lightning_rl.agents.agent import as_agent
from lightning_rl.agents.resources import LLM
from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane import launch as server
from lightning_rl.inference.embedded import EmbeddedPolicy
from lightning_rl.inference.engine import EmbeddedEngine
from lightning_rl.inference.load import ModelSource
from lightning_rl.runner import launch as runners
from lightning_rl.store.client import HttpStore
from lightning_rl.store.contract import RolloutRequest

PLACES = 16
TOKENS = 100
STEP_SECONDS = 0.01
QUESTION = "table {}: size id name price\nHow many are there?"


async def agent(task: dict[str, Any], llm: LLM) -> float:
    """Two calls with a tool between them; its reward is how long it waited for an answer, on average."""
    import asyncio
    import time

    import openai

    waited = 0.0
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        chat: Any = [{"role": "user", "content": task["question"]}]
        for tool_seconds in (task["tool_seconds"], 0.0):
            began = time.perf_counter()
            answer = await client.chat.completions.create(
                model=llm.model, messages=chat, max_tokens=task["tokens"], temperature=50.0
            )
            waited += time.perf_counter() - began
            chat += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "And now?"},
            ]
            await asyncio.sleep(tool_seconds)
    return waited / 2


def tool_seconds(rollout: int) -> float:
    """Log-normal, the same for the same rollout whatever the way."""
    at = (rollout * 0.6180339887 + 0.5) % 1
    return 0.5 * math.exp(statistics.NormalDist().inv_cdf(min(max(at, 0.002), 0.998)))


@contextmanager
def looking(engine: EmbeddedEngine) -> Iterator[list[int]]:
    """How many requests wait for a place, hundreds of times a second."""
    seen: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.004):
            seen.append(max(0, engine.in_flight - engine.max_num_seqs))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def measure(workers: int, rollouts: int, *, gated: bool) -> tuple[float, float, int, float]:
    """Rollouts per second, mean and most waiting, and the median of a call's seconds."""
    policy = EmbeddedPolicy(ModelSource(device="cpu"), threads=1, max_num_seqs=PLACES)
    policy.start()
    endpoint = Endpoint(
        model=policy.name, tokenizer=str(tutorial.checkpoint()), renderer="auto", engines=policy.registrations()
    )
    slow_down(policy)
    if not gated:
        say_nothing(policy)
    requests = [
        RolloutRequest(
            task={"question": QUESTION.format(n), "tool_seconds": tool_seconds(n), "tokens": TOKENS},
            rollout_id=f"r{n}",
        )
        for n in range(rollouts)
    ]
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            server.launch(Path(folder), endpoint, admin_key="a", runner_key="r") as serving,
            runners.launch(workers, as_agent(agent), serving.url, "r", log_dir=Path(folder)),
        ):
            store = HttpStore(serving.url, "a")
            through(store, warming(workers))
            with looking(policy.engine) as waiting:
                began = time.perf_counter()
                latencies = through(store, requests)
                seconds = time.perf_counter() - began
            store.close()
    finally:
        policy.close()
    return rollouts / seconds, statistics.fmean(waiting), max(waiting), statistics.median(latencies)


def slow_down(policy: EmbeddedPolicy) -> None:
    """Let every step take as long as that of a larger model on an accelerator."""
    forward = policy.engine._policy.forward

    def slowly(*batch: Any, **about: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return forward(*batch, **about)

    policy.engine._policy.forward = slowly  # type: ignore[method-assign]


def say_nothing(policy: EmbeddedPolicy) -> None:
    """Let the engine's server keep to itself what it bears."""
    router = policy._server.app.router
    router.routes = [route for route in router.routes if route.path != "/v1/models"]  # type: ignore[attr-defined]


def warming(workers: int) -> list[RolloutRequest]:
    """Enough to have every worker's imports and connections there."""
    task = {"question": QUESTION.format("w"), "tool_seconds": 0.5, "tokens": 4}
    return [RolloutRequest(task=task, rollout_id=f"w{n}") for n in range(workers)]


def through(store: HttpStore, requests: list[RolloutRequest]) -> list[float]:
    """Ask for rollouts and wait for all; their rewards."""
    store.enqueue(requests)
    left, rewards = {str(request.rollout_id) for request in requests}, []
    while left:
        for rollout in store.wait(sorted(left), 5):
            if rollout.reward is None:
                raise RuntimeError(f"rollout {rollout.rollout_id} {rollout.status}: {rollout.error}")
            rewards.append(rollout.reward)
            left.discard(rollout.rollout_id)
    return rewards


def main() -> None:
    """Measure each way in turn, again and again, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    ways = {"fixed 4": (4, False), "fixed 16": (16, False), "fixed 64": (64, False), "queue-aware": (64, True)}
    found: dict[str, list[tuple[float, float, int, float]]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for name, (workers, gated) in ways.items():
            found[name].append(measure(workers, given.rollouts, gated=gated))
    print(f"{'rollouts at once':<18}{'rollouts/s':>12}{'waiting, mean':>15}{'most':>7}{'call, median':>14}")
    for name, rounds in found.items():
        rate, mean, most, latency = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:<18}{rate:>12.1f}{mean:>15.2f}{most:>7.0f}{latency * 1e3:>11.0f} ms")


if __name__ == "__main__":
    main()
