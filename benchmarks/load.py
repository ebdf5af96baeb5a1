"""What a server bears: many attempts that wait on a slow engine at once, and its memory over many calls.

    python benchmarks/load.py

Two loads against the real server. The first opens attempts by the thousand, all of which call at the same time an
engine that takes seconds: every call must be answered. The second sends many short attempts through, each opened,
called and finished as a runner does it, and reads the resident memory of the serving process on the way.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from gateway import GENERATE, MODEL, TOKENIZER, body_of, instant_engine, open_attempts, role, serve

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane import launch as server
from lightning_rl.store.client import HttpStore

SLOW_SECONDS = 5.0


def slow_engine() -> Any:
    """The instant engine's answer, after some seconds."""
    instant = instant_engine()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = await body_of(receive)
        if scope["path"] == GENERATE:
            await asyncio.sleep(SLOW_SECONDS)

        async def again() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        await instant(scope, again, send)

    return app


def resident_mb(pid: int) -> float:
    """Resident memory of a process (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1e3


def chat(text: str) -> bytes:
    """A request."""
    return msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": text}]})


async def call(session: aiohttp.ClientSession, url: str, key: str, text: str) -> int:
    """One call; its status."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with session.post(f"{url}/chat/completions", data=chat(text), headers=headers) as response:
        await response.read()
        return response.status


async def at_once(attempts: list[tuple[str, str]]) -> tuple[list[int | BaseException], float]:
    """A call of every attempt, all at the same time; their statuses, and the seconds of all."""
    started = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        calls = (call(session, url, key, f"question {i}") for i, (url, key) in enumerate(attempts))
        found = await asyncio.gather(*calls, return_exceptions=True)
    return found, time.perf_counter() - started


async def attempts_through(serving: server.Serving, calls: int, workers: int, per_attempt: int) -> None:
    """So many calls in attempts of `per_attempt`, each started, called and finished; prints ten lines of a table."""
    begun = done = 0
    marks = [calls * i // 10 for i in range(1, 11)]
    headers = {"authorization": "Bearer admin"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=workers)) as session:
        started = time.perf_counter()

        async def worker() -> None:
            nonlocal begun, done
            while begun < calls:
                begun += per_attempt
                api = f"{serving.url}/api/v1/rollouts"
                asked = {"task": None}
                async with session.post(f"{api}/start", json=asked, headers=headers) as response:
                    claim = await response.json()
                assert response.status == 201, claim
                llm = claim["resources"]["main_llm"]
                for turn in range(per_attempt):
                    assert await call(session, llm["base_url"], llm["api_key"], f"{begun} {turn}") == 200
                attempt = claim["attempt"]["attempt_id"]
                end = f"{api}/{claim['rollout']['rollout_id']}/attempts/{attempt}/finish"
                async with session.post(end, json={"status": "succeeded", "reward": 1.0}, headers=headers) as response:
                    assert response.status == 200, await response.text()
                done += per_attempt
                if marks and done >= marks[0]:
                    rate = done / (time.perf_counter() - started)
                    print(f"| {marks.pop(0)} | {resident_mb(serving.pid):.0f} | {rate:.0f} |", flush=True)

        await asyncio.gather(*(worker() for _ in range(workers)))


def main() -> None:
    """Run both loads and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attempts", type=int, default=1000, help="open at the same time")
    parser.add_argument("--calls", type=int, default=100_000, help="of the second load")
    parser.add_argument("--role", choices=["slow", "instant"])
    arguments = parser.parse_args()
    if arguments.role is not None:
        return serve(slow_engine() if arguments.role == "slow" else instant_engine())
    for kind in ("slow", "instant"):
        with ExitStack() as parts:
            folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
            engine_url, _ = parts.enter_context(role("--role", kind, script=__file__))
            engine = {"model": MODEL, "kind": "embedded", "url": engine_url, "policy_version": 0}
            endpoint = Endpoint(model=MODEL, tokenizer=str(TOKENIZER), renderer="qwen3", engines=[engine])
            serving = parts.enter_context(server.launch(folder, endpoint, admin_key="admin", runner_key="runner"))
            if kind == "slow":
                attempts = open_attempts(HttpStore(serving.url, "admin"), arguments.attempts)
                found, seconds = asyncio.run(at_once(attempts))
                failed = [one for one in found if one != 200]
                print(
                    f"{len(found)} attempts called an engine of {SLOW_SECONDS:g} s at once: {len(failed)} errors, all "
                    f"answered after {seconds:.1f} s, {resident_mb(serving.pid):.0f} MB"
                )
                assert not failed, failed[:3]
            else:
                print("\n| calls | resident MB | calls/s |\n|---|---|---|")
                asyncio.run(attempts_through(serving, arguments.calls, workers=16, per_attempt=10))
    return None


if __name__ == "__main__":
    main()
