"""How fast the embedded engine samples: in process, and over HTTP from a process of its own.

    python benchmarks/engine.py [--threads 1] [--repeats 5] [--skip-generate]
    python benchmarks/engine.py --formats [--vllm PYTHON] [--threads 1] [--repeats 3]
    python benchmarks/engine.py --cores [--repeats 3]

The model is random, of the quickstart's size (0.92M parameters). Every figure is the median of the
repeats; `generate` is transformers' own, in the same run. Repeats of the two take turns.

`--formats` samples random models of 0.92M and 100M parameters in float32 and in bfloat16, 16 calls of 300 + 128 tokens
at once, beside `generate` and, where `--vllm` names the Python of its environment, vLLM in a process of its own.

`--cores` samples random models with one core and with all of them, by two engines that take turns.
"""

import argparse
import asyncio
import copy
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from lightning_rl.inference.engine import EmbeddedEngine
from lightning_rl.inference.sequence import Event, GenerationRequest, GenerationSampling
from lightning_rl.inference.server import EngineServer

VOCAB = 1024
HTTP_TOKENS = 15
SECONDS = "SECONDS "  # how the line of `vllm_offline.py` begins
CALLS, PROMPT, ANSWER = 16, 300, 128  # of --formats
KINDS = ("answers", "streams", "episodes")
# Of --cores: hidden size, layers, vocabulary, prompt, answer, how many at once.
SIZES = (
    (128, 6, 1024, 40, 32, (16, 32, 64, 128)),
    (128, 6, 1024, 300, 128, (16, 64)),
    (448, 12, 8192, 40, 16, (1, 8, 16, 32, 64)),
    (768, 12, 8192, 200, 12, (8, 24)),
)
_numbers = itertools.count()


def make_model(*, large: bool = False, **sizes: int) -> nn.Module:
    """A random model of the quickstart's size, or of 100M parameters; or with other `sizes`, by the config's names."""
    ours = {
        "hidden_size": 768 if large else 128,
        "num_hidden_layers": 12 if large else 4,
        "num_attention_heads": 12 if large else 4,
        "num_key_value_heads": 4 if large else 2,
        "intermediate_size": 2048 if large else 384,
        "vocab_size": 32_000 if large else VOCAB,
        "max_position_embeddings": 512,
    }
    config = Qwen2Config(**ours | sizes, tie_word_embeddings=True, eos_token_id=None)
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    return model


def prompts(n: int, size: int, group: int = 1, vocabulary: int = VOCAB) -> list[list[int]]:
    """`n` random prompts, each `group` times in a row."""
    each = [[random.randrange(vocabulary) for _ in range(size)] for _ in range(-(-n // group))]
    return [prompt for prompt in each for _ in range(group)][:n]


def median_seconds(repeats: int, *functions: Callable[[], object]) -> list[float]:
    """The median time of each function; they take turns, and the first turn does not count."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[1:]) for taken in times]


def sample_all(engine: EmbeddedEngine, batch: list[list[int]], new_tokens: int) -> None:
    """Sample `new_tokens` for every prompt, all asked for at once."""
    left, done = [len(batch)], threading.Event()

    def outbox(events: list[Event]) -> None:
        left[0] -= len(events)
        if not left[0]:
            done.set()

    sampling = GenerationSampling(max_tokens=new_tokens)
    engine.post(
        [GenerationRequest(request_id=str(next(_numbers)), token_ids=prompt, sampling=sampling) for prompt in batch],
        outbox,
    )
    done.wait()


def generate_all(model: nn.Module, batch: list[list[int]], new_tokens: int) -> None:
    """The same by transformers' own loop."""
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]
            torch.tensor(batch), max_new_tokens=new_tokens, do_sample=True, pad_token_id=0
        )


def in_process(engine: EmbeddedEngine, repeats: int, with_generate: bool) -> None:
    """Tokens per second without HTTP."""
    print("in process, prompt 40, 32 new tokens, tokens/s")
    plain = make_model()
    for n in (1, 8, 32, 64, 256):
        # New prompts every time: the engine remembers the ones it has read.
        work = {
            "distinct": lambda n=n: sample_all(engine, prompts(n, 40), 32),
            "groups of 16": lambda n=n: sample_all(engine, prompts(n, 40, 16), 32),
        }
        if with_generate:
            work["generate"] = lambda n=n: generate_all(plain, prompts(n, 40), 32)
        taken = median_seconds(repeats, *work.values())
        rates = [f"{name} {n * 32 / one:6.0f}" for name, one in zip(work, taken, strict=True)]
        print(f"  batch {n:3d}: {'  '.join(rates)}")


def formats(threads: int, repeats: int, vllm: str | None) -> None:
    """Tokens per second in float32 and in bfloat16."""
    print(f"{CALLS} calls of {PROMPT} + {ANSWER} tokens at once: sampled tokens/s, and seconds to the first ones")
    for large in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            print(f"  {in_format(make_model(large=large).to(dtype), threads, repeats, vllm)}", flush=True)


def in_format(plain: nn.Module, threads: int, repeats: int, vllm: str | None) -> str:
    """A line about one model in its number format."""
    name, vocabulary = str(plain.dtype).removeprefix("torch."), int(plain.config.vocab_size)  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder, EmbeddedEngine(copy.deepcopy(plain)) as engine:
        work = {
            "whole": lambda: sample_all(engine, prompts(CALLS, PROMPT, vocabulary=vocabulary), ANSWER),
            "first": lambda: sample_all(engine, prompts(CALLS, PROMPT, vocabulary=vocabulary), 1),
            "generate": lambda: generate_all(plain, prompts(CALLS, PROMPT, vocabulary=vocabulary), ANSWER),
        }
        whole, first, others = median_seconds(repeats, *work.values())
        tokens, size = CALLS * ANSWER, sum(p.numel() for p in plain.parameters())
        line = (
            f"{size / 1e6:5.1f}M {name:<8}  ours {tokens / whole:6.0f} ({first:.2f} s)  generate {tokens / others:6.0f}"
        )
        if vllm is not None:
            plain.save_pretrained(folder)  # type: ignore[operator]
            asked = [folder, name, *map(str, (CALLS, PROMPT, ANSWER, repeats))]
            line += f"  vLLM {tokens / statistics.median(json.loads(_vllm_says(vllm, threads, asked))):6.0f}"
        return line


def fresh(engine: EmbeddedEngine, n: int, size: int, vocabulary: int, new_tokens: int) -> None:
    """`sample_all` of new prompts."""
    sample_all(engine, prompts(n, size, vocabulary=vocabulary), new_tokens)


def cores(repeats: int) -> None:
    """Tokens per second with one core and with all, float32."""
    most = torch.get_num_threads()
    print(f"sampled tokens/s with one core and with {most}")
    for hidden, layers, vocabulary, prompt, answer, at_once in SIZES:
        model = make_model(
            hidden_size=hidden, num_hidden_layers=layers, intermediate_size=4 * hidden, vocab_size=vocabulary
        )
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        print(f"  {size:.1f}M, {prompt} + {answer} tokens")
        with (
            EmbeddedEngine(copy.deepcopy(model), threads=1) as alone,
            EmbeddedEngine(copy.deepcopy(model), threads=most) as several,
        ):
            for n in at_once:
                asked = (n, prompt, vocabulary, answer)
                one, all_of_them = median_seconds(
                    repeats, partial(fresh, alone, *asked), partial(fresh, several, *asked)
                )
                tokens = n * answer
                print(
                    f"    {n:3d} at once: {tokens / one:6.0f} {tokens / all_of_them:6.0f}  {one / all_of_them:.2f}x",
                    flush=True,
                )


def _vllm_says(python: str, threads: int, arguments: list[str]) -> str:
    cores = "0" if threads == 1 else f"0-{threads - 1}"
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
    command = [python, str(Path(__file__).parent / "vllm_offline.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own)
    if done.returncode:
        sys.exit(f"vLLM failed:\n{done.stderr[-4000:]}")
    said = [line for line in done.stdout.splitlines() if line.startswith(SECONDS)]
    return said[0].removeprefix(SECONDS)


async def client(url: str, concurrency: int, requests: int, kind: str) -> float:
    """Requests per second of `concurrency` callers that share `requests` requests."""
    work = iter(prompts(requests // 2, 40, 16) if kind == "episodes" else mixed_prompts(requests))
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(prompt: list[int]) -> bytes:
            sampling = {"max_tokens": HTTP_TOKENS, "logprobs": 0}
            body = {"token_ids": prompt, "sampling_params": sampling, "stream": kind == "streams"}
            async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                content = await response.read()
                assert response.status == 200, content
                return content

        async def caller() -> None:
            for prompt in work:
                content = await ask(prompt)
                if kind == "episodes":
                    answer = json.loads(content)["choices"][0]["token_ids"]
                    await ask(prompt + answer + prompts(1, 20)[0])

        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(concurrency)))
        return requests / (time.perf_counter() - start)


def mixed_prompts(n: int) -> list[list[int]]:
    """`n` random prompts of 40 to 100 tokens, which share nothing."""
    return [prompts(1, random.randint(40, 100))[0] for _ in range(n)]


def over_http(engine: EmbeddedEngine, repeats: int) -> None:
    """Requests per second through the server.

    answers and streams: prompts of 40-100 tokens that share nothing. episodes: prompts of 40 tokens in
    groups of 16, each followed by a second turn of 20 more. In brackets the CPU time of engine and server
    per request.
    """
    print(f"over HTTP, {HTTP_TOKENS} new tokens, client in its own process, requests/s")
    with EngineServer(engine) as server:
        for concurrency in (1, 16, 32, 64):
            rates = []
            for kind in KINDS:
                command = [sys.executable, __file__, "--client", server.url, "--kind", kind]
                command += ["--concurrency", str(concurrency), "--repeats", str(repeats)]
                cpu = time.process_time()
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                cpu = (time.process_time() - cpu) / (16 * concurrency * (repeats + 1))
                rates.append(f"{kind} {float(done.stdout):5.0f} ({cpu * 1e3:.1f} ms)")
            print(f"  {concurrency:3d} clients: {'  '.join(rates)}")


def update(engine: EmbeddedEngine, repeats: int) -> None:
    """Milliseconds of a weight update."""
    other = make_model()
    (seconds,) = median_seconds(repeats, lambda: engine.update_weights(other, 1))
    print(f"weight update: {seconds * 1e3:.2f} ms")


def main() -> None:
    """Run everything, or with --client be the client process of one figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip-generate", action="store_true")
    parser.add_argument("--formats", action="store_true")
    parser.add_argument("--cores", action="store_true")
    parser.add_argument("--vllm", help="the Python of an environment with vLLM, for --formats")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--concurrency", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        rates = [
            asyncio.run(client(options.client, options.concurrency, 16 * options.concurrency, options.kind))
            for _ in range(options.repeats + 1)
        ]
        print(statistics.median(rates[1:]))
        return
    if options.cores:
        cores(options.repeats)
        return
    torch.set_num_threads(options.threads)
    print(f"threads {options.threads}, load {os.getloadavg()[0]:.1f}")
    if options.formats:
        formats(options.threads, options.repeats, options.vllm)
        return
    with EmbeddedEngine(make_model()) as engine:
        in_process(engine, options.repeats, not options.skip_generate)
        update(engine, options.repeats)
        over_http(engine, options.repeats)


if __name__ == "__main__":
    main()
