"""What a vLLM server takes of the trainer's GPU, awake and asleep; how long new weights take; how fast it samples.

    python benchmarks/vllm_on_gpu.py [--size 1.5B] [--ways file ipc adapter] [--rows 128 --lengths 2048 512]

A model of the named shape (`benchmarks/recipes.py`) with random weights in bfloat16 is trainer and policy at once, as
in a run that shares its GPU: its server sleeps while weights change, wakes, takes them, and is proven to sample from
them. `adapter` sends an adapter of `--rank` alone, which vLLM samples beside the weights that it was started with.
The trainer's own memory is not counted. Then groups of eight rows that share a prompt are sampled at once, asked as the
gateway asks. `ipc` needs vLLM in this environment. On a CPU (`--device cpu`, small sizes) nobody sleeps. Run by hand;
nothing asserts a time.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(Path(__file__).parent))
from recipes import SIZES

from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.vllm.command import Options
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.inference.weights.check import Tolerance
from lightning_rl.training import lora

TOKENIZER = Path(__file__).parents[1] / "examples/sql_agent/checkpoint"


def used(device: str) -> float:
    """GiB in use on the first GPU by others than this process's torch."""
    if device != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    said = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return int(said.stdout.splitlines()[0]) / 1024 - torch.cuda.memory_reserved() / 2**30


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


async def sampled(url: str, name: str | None, vocabulary: int, rows: int, prompt: int, answer: int) -> float:
    """Seconds until all rows have their answers; `name` is an adapter's."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, vocabulary, (prompt,), generator=draw).tolist() for _ in range(rows // 8)]

    async def one(session: aiohttp.ClientSession, n: int) -> None:
        parameters = {"max_tokens": answer, "temperature": 1.0, "seed": n, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": prompts[n // 8], "sampling_params": {**parameters, "detokenize": False}}
        body |= {} if name is None else {"model": name}
        async with session.post(f"{url}/inference/v1/generate", json=body) as got:
            [choice] = (await got.json())["choices"]
            assert len(choice["token_ids"]) == answer

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(one(session, n) for n in range(rows)))
        return time.perf_counter() - began


def measure(way: str, folder: Path, given: argparse.Namespace) -> None:
    """Print one way's figures."""
    prompt, answer = given.lengths
    on_gpu, adapter = given.device == "cuda", way == "adapter"
    options = Options(
        python=given.python,
        context=prompt + answer,
        dtype="bfloat16" if on_gpu else "float32",
        device=given.device,
        devices=(("0",),) if on_gpu else (),
        processed_logprobs=False,
        gpu_memory_utilization=given.share,
        weight_transfer="file" if adapter else way,  # type: ignore[arg-type]  # argparse has looked
        sleeps=on_gpu,
        adapters=1,
        adapter_rank=given.rank,
        flags=json.loads(given.flags),
    )
    with tempfile.TemporaryDirectory() as run_dir:
        # What torch and the driver keep beside tensors is there before the server is.
        torch.zeros(1, device=given.device)
        policy = VllmPolicy(
            ModelSource(folder, device=given.device, dtype=torch.bfloat16),
            options,
            Path(run_dir),
            tolerance=Tolerance(mean=0.1),
            beside=[] if adapter else None,
        )
        model = policy.model
        if adapter:
            model = lora.adapted(model, rank=given.rank, alpha=16, targets="all-linear")
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=1e-3)
        changing = [each for each in model.parameters() if each.requires_grad]
        before = used(given.device)
        try:
            print(f"{way}: started in {timed(policy.start):.0f} s", flush=True)
            first = timed(lambda: policy.update_weights(lora.low_rank(model) if adapter else model, 0))
            awake = used(given.device) - before
            print(f"  first weights {first:.2f} s; awake {awake:.2f} GiB", flush=True)
            for version in (1, 2, 3):
                sleeping = timed(policy.sleep)
                asleep = used(given.device) - before
                with torch.no_grad():
                    for parameter in changing:
                        parameter.mul_(1.05)
                weights = lora.low_rank(model) if adapter else model
                waking = timed(lambda: policy.update_weights(weights, version))  # noqa: B023  # it is called at once
                awake = used(given.device) - before
                print(
                    f"  to sleep {sleeping:.2f} s, asleep {asleep:.2f} GiB; awake with new weights, and compared, "
                    f"after {waking:.2f} s, {awake:.2f} GiB",
                    flush=True,
                )
            [url] = [each["url"] for each in policy.registrations()]
            served = f"{policy.name}@3" if adapter else None
            for again in ("first", "second"):
                seconds = asyncio.run(sampled(url, served, policy.model.config.vocab_size, given.rows, prompt, answer))
                print(
                    f"  {given.rows} rows of {prompt} + {answer}, {again} time: {seconds:.1f} s, "
                    f"{given.rows * answer / seconds:,.0f} sampled tokens/s",
                    flush=True,
                )
        finally:
            policy.close()
            for log in Path(run_dir).glob("*.log"):
                if given.logs:
                    shutil.copy(log, given.logs / f"{way}-{log.name}")


def main() -> None:
    """Make the model, then each way in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="1.5B")
    parser.add_argument("--ways", nargs="+", choices=("file", "ipc", "adapter"), default=["file", "ipc", "adapter"])
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--share", type=float, default=0.3, help="gpu_memory_utilization")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs=2, default=[2048, 512])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--python", default=sys.executable, help="of an environment with vLLM")
    parser.add_argument("--flags", default="{}", help="more flags of vLLM, as JSON by name")
    parser.add_argument("--logs", type=Path, help="a folder where vLLM's logs are kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        torch.manual_seed(0)
        config = Qwen2Config(**SIZES[given.size], max_position_embeddings=32_768)
        with torch.device(given.device):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        for file in TOKENIZER.glob("*token*"):
            shutil.copy(file, folder)
        for way in given.ways:
            measure(way, folder, given)


if __name__ == "__main__":
    main()
