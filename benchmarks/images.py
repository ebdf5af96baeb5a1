"""What images cost: an agent that shows one more screenshot with every turn, at the gateway and where they are read.

    python benchmarks/images.py [--attempts 32] [--turns 10] [--kb 500] [--group 8]

The gateway is the real server in front of an instant engine; each attempt sends all its screenshots again with every
turn, as such agents do, and each screenshot is another one, or the same for a group of attempts. Printed are the
processor time of a call and the resident memory of the server, turn by turn, and how large the store is. Where engine
and trainer read images, each is a PNG of 1280 x 800 pixels that is decoded, resized and cut into patches; printed is
the time of one by one thread and by as many as there are cores.
"""

import argparse
import asyncio
import base64
import hashlib
import io
import os
import struct
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from gateway import MODEL, cpu_seconds, open_attempts, role
from gateway import __file__ as gateway_file
from load import resident_mb

from lightning_rl.algorithms.base import Endpoint
from lightning_rl.control_plane import launch as server
from lightning_rl.store.client import HttpStore
from lightning_rl.vision import ModelVision, PlacedImage
from tests import seeing

WIDTH, HEIGHT = 1280, 800


def of_size(size: int) -> bytes:
    """So many bytes that begin as a PNG does: the gateway reads no more of an image."""
    head = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">II", WIDTH, HEIGHT)
    return head + os.urandom(size - len(head))


def screenshot(seed: int) -> bytes:
    """A PNG of coloured fields."""
    fields = np.random.default_rng(seed).integers(0, 256, (HEIGHT // 20, WIDTH // 20, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.kron(fields, np.ones((20, 20, 1), np.uint8))).save(file, "PNG")
    return file.getvalue()


async def turns(attempts: list[tuple[str, str]], number: int, size: int, group: int, pid: int) -> None:
    """Every attempt's calls, one after another; prints a line for each turn. So many attempts show the same."""
    said: list[list[Any]] = [[] for _ in attempts]
    print("| turn | body, MB | CPU ms a call | resident MB | images so far, MB |\n|---|---|---|---|---|")
    async with aiohttp.ClientSession() as session:
        for turn in range(1, number + 1):
            spent, shown = 0.0, ""
            for place, ((url, key), messages) in enumerate(zip(attempts, said, strict=True)):
                if place % group == 0:
                    shown = f"data:image/png;base64,{base64.b64encode(of_size(size)).decode()}"
                parts = [{"type": "image_url", "image_url": {"url": shown}}, {"type": "text", "text": "What now?"}]
                messages.append({"role": "user", "content": parts})
                body = msgspec.json.encode({"model": MODEL, "messages": messages})
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                before = cpu_seconds(pid)
                async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                    answer = await response.read()
                    assert response.status == 200, answer
                spent += cpu_seconds(pid) - before
                messages.append(msgspec.json.decode(answer)["choices"][0]["message"])
            await asyncio.sleep(1)  # all is handed over to the store
            ms, shown_mb = 1e3 * spent / len(attempts), turn * len(attempts) * size / 1e6
            print(
                f"| {turn} | {len(body) / 1e6:.2f} | {ms:.1f} | {resident_mb(pid):.0f} | {shown_mb:.0f} |", flush=True
            )


def reading(folder: Path, images: int = 16) -> None:
    """Print how long an image takes to be read."""
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}  # Qwen2.5-VL's
    Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    length = round(WIDTH / 28) * round(HEIGHT / 28)
    pictures = [screenshot(seed) for seed in range(images)]
    placed = [PlacedImage(0, length, hashlib.sha256(data).hexdigest(), data) for data in pictures]
    cores = torch.get_num_threads()
    print("\n| threads | ms an image |\n|---|---|")
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        seen = ModelVision(folder, config)
        started = time.perf_counter()
        read = seen.read(placed)
        print(f"| {threads} | {1e3 * (time.perf_counter() - started) / images:.1f} |")
    one = read[placed[0].sha256]
    print(f"\nkept of an image: {one.values.nbytes / 1e6:.1f} MB, of {one.pixels().nbytes / 1e6:.1f} MB of pixels")


def main() -> None:
    """Measure both, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attempts", type=int, default=32)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--kb", type=int, default=500, help="of a screenshot")
    parser.add_argument("--group", type=int, default=1, help="attempts that show the same screenshots")
    arguments = parser.parse_args()
    with ExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        model = seeing.make_folder(folder / "model")
        engine_url, _ = parts.enter_context(role("--role", "engine", script=gateway_file))
        engine = {"model": MODEL, "kind": "embedded", "url": engine_url, "policy_version": 0}
        endpoint = Endpoint(model=MODEL, tokenizer=str(model), renderer="auto", engines=[engine])
        serving = parts.enter_context(server.launch(folder, endpoint, admin_key="admin", runner_key="runner"))
        attempts = open_attempts(HttpStore(serving.url, "admin"), arguments.attempts)
        asyncio.run(turns(attempts, arguments.turns, 1000 * arguments.kb, arguments.group, serving.pid))
        print(f"\nstore: {sum(file.stat().st_size for file in folder.glob('store.db*')) / 1e6:.0f} MB")
        reading(model)


if __name__ == "__main__":
    main()
