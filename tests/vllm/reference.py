"""What transformers computes for the tokens that vLLM sampled: the same weights, in float32."""

import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.vllm.server import CHECKPOINT

TOLERANCE = 1e-3


@functools.cache
def _model() -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@torch.no_grad()
def logits(prompt: list[int], response: list[int]) -> torch.Tensor:
    """The logits (response, vocabulary) from which each response token was sampled."""
    ids = torch.tensor([prompt + response])
    return _model()(ids).logits[0, len(prompt) - 1 : -1].float()


def logprobs(prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
    """log softmax(logits / temperature) of each response token."""
    at = torch.log_softmax(logits(prompt, response) / temperature, -1)
    return at.gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
