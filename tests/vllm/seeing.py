"""A policy that sees, on a real vLLM server, and what engine and trainer compute of an image."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rl.inference.load import ModelSource
from lightning_rl.inference.vllm.command import Options
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.vision import PlacedImage, vision_of
from tests import seeing
from tests.vllm.server import PYTHON

TORCHVISION = PYTHON.parents[1] / "seeing"
MAKE = f"{PYTHON.parent}/pip install --no-deps --target {TORCHVISION} torchvision==0.28.0"
PATH = f"{Path(__file__).parent / 'torchvision_ops'}{os.pathsep}{TORCHVISION}"  # of vLLM's Python


def make_folder(folder: Path, family: str = "qwen2_vl") -> Path:
    """A tiny model in dimensions that vLLM takes on a CPU. Raises FileNotFoundError where vLLM's Qwen2-VL would not
    even be imported."""
    if not TORCHVISION.exists():
        raise FileNotFoundError(f"{TORCHVISION} is not there; vLLM's Qwen2-VL needs torchvision: {MAKE}")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    own: dict[str, Any] = {}
    if family == "qwen3_vl":  # whose sections are interleaved, which vLLM does where the config says so
        rope |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        own = {"head_dim": 32}
    sizes = {"hidden_size": 128, "intermediate_size": 128, "rope_parameters": rope}
    return seeing.make_folder(folder, family=family, **sizes, **own)


@contextmanager
def policy_of(folder: Path, run_dir: Path) -> Iterator[VllmPolicy]:
    """The model in `folder`, sampled by a server that was started as a run starts it."""
    options = Options(python=str(PYTHON), dtype="float32", device="cpu", processed_logprobs=False)
    policy = VllmPolicy(ModelSource(folder, device="cpu"), options, run_dir)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", PATH)
            policy.start()
        policy.update_weights(policy.model, 0)
        yield policy
    finally:
        policy.close()


@torch.no_grad()
def trainers_log_probs(policy: VllmPolicy, token_ids: Sequence[int], images: Sequence[PlacedImage]) -> torch.Tensor:
    """Of each token but the first its log probability, as the trainer computes it. [T - 1]"""
    model = policy.model
    vision = vision_of(policy.folder, model)
    assert vision is not None
    ids = torch.tensor([list(token_ids)])
    logits = vision.run(model, ids, [images], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
