"""What the gateway costs in front of a real vLLM: calls per second and latency against vLLM called directly.

    python benchmarks/vllm_gateway.py --python .venv-vllm/bin/python

A vLLM server on the CPU samples 32 tokens for every call of 1, 16 or 64 clients. Asked are, in turn: vLLM's own chat
endpoint for text alone; the same for what a trainer needs as well (token ids, logprobs, a seed); and the gateway, which
asks vLLM's token endpoint, records, and answers with text. Medians of the rounds are printed. vLLM, gateway and clients
share the machine's cores.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from gateway import MODEL, TOKENIZER, cpu_seconds, end_attempts, open_attempts

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane import launch as server
from lightning_rl.inference.vllm.command import Options
from lightning_rl.inference.vllm.server import VllmServer
from lightning_rl.store.client import HttpStore

TOKENS = 32
END = 996  # the checkpoint's end of a turn, which is kept from coming
TRAINERS = {"logprobs": True, "return_token_ids": True}


async def load(requests: list[tuple[str, str]], clients: int, more: dict[str, Any]) -> tuple[float, list[float]]:
    """Send one call to each (URL, key); seconds, and the latency of each."""
    waiting, number = iter(requests), itertools.count()
    latencies: list[float] = []

    async def client(session: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
        for url, key in waiting:
            n = next(numbers)
            body: dict[str, Any] = {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"shops id size city\nhow many have size over {n}?"}],
                "max_tokens": TOKENS,
                "logit_bias": {str(END): -100},
                **({"seed": n} if more else {}),
                **more,
            }
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            started = time.perf_counter()
            async with session.post(f"{url}/chat/completions", data=msgspec.json.encode(body), headers=headers) as got:
                said = msgspec.json.decode(await got.read())
                assert got.status == 200, said
                assert said["usage"]["completion_tokens"] == TOKENS, said
            latencies.append(time.perf_counter() - started)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:
        started = time.perf_counter()
        await asyncio.gather(*(client(session, number) for _ in range(clients)))
        return time.perf_counter() - started, latencies


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    arguments = parser.parse_args()
    with ExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        options = Options(
            python=arguments.python,
            model=str(TOKENIZER),
            context=512,
            dtype="float32",
            device="cpu",
            processed_logprobs=False,
            flags={"served_model_name": MODEL},
        )
        vllm = VllmServer(options, folder, 0)
        parts.callback(vllm.stop)
        vllm.start()
        vllm.wait()
        engine = {"model": MODEL, "kind": "vllm", "url": vllm.url, "policy_version": 0}
        endpoint = Endpoint(model=MODEL, tokenizer=str(TOKENIZER), renderer="auto", engines=[engine])
        serving = parts.enter_context(server.launch(folder, endpoint, admin_key="admin", runner_key="runner"))
        store = HttpStore(serving.url, "admin")
        print("| clients | | calls/s | median ms | gateway CPU ms per call |\n|---|---|---|---|---|")
        for clients in arguments.clients:
            calls = max(12, 4 * clients)
            found: dict[str, list[tuple[float, float, float]]] = {}
            for round_number in range(arguments.rounds + 1):  # the first warms up
                attempts = open_attempts(store, calls)
                direct = [(f"{vllm.url}/v1", "none")] * calls
                asked = {
                    "vLLM, text": (direct, {}),
                    "vLLM, ids and logprobs": (direct, TRAINERS),
                    "gateway": (attempts, {}),
                }
                for name, (requests, more) in asked.items():
                    before = cpu_seconds(serving.pid)
                    seconds, latencies = asyncio.run(load(requests, clients, more))
                    spent = cpu_seconds(serving.pid) - before if name == "gateway" else 0.0
                    if round_number:
                        figures = (calls / seconds, 1e3 * median(latencies), 1e3 * spent / calls)
                        found.setdefault(name, []).append(figures)
                end_attempts(store, attempts)
            for name, rounds in found.items():
                rate, latency, cpu = (median(column) for column in zip(*rounds, strict=True))
                print(f"| {clients} | {name} | {rate:.1f} | {latency:.1f} | {f'{cpu:.2f}' if cpu else ''} |")
            ratio = {
                name: median(g[0] / d[0] for g, d in zip(found["gateway"], found[name], strict=True))
                for name in ("vLLM, text", "vLLM, ids and logprobs")
            }
            text, trainer = ratio.values()
            print(
                f"| {clients} | **gateway: {text:.2f}x of text, {trainer:.2f}x of ids and logprobs** | | | |",
                flush=True,
            )


if __name__ == "__main__":
    main()
