"""Tiny random models of several architectures, and what they should have said."""

import functools
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 48
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    # Large enough that distributions are not flat, and a wrong position or mask shows.
    "initializer_range": 0.12,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SIZE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZE, head_dim=16, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SIZE, rope_parameters=LLAMA3_ROPE),
    "llama-biased": lambda: LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True),
    "mistral": lambda: MistralConfig(**SIZE, sliding_window=None),
    "phi": lambda: PhiConfig(**SIZE),
}
FUSED = {"qwen2", "qwen3", "llama", "llama-biased"}


def make(architecture: str, seed: int = 0) -> nn.Module:
    """A fresh model with every weight (biases and norms too) random."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@functools.cache
def reference(architecture: str, seed: int = 0) -> nn.Module:
    """A shared copy that no engine ever touches."""
    return make(architecture, seed)


def true_logprobs(model: nn.Module, prompt: list[int], answer: list[int], temperature: float = 1.0) -> list[float]:
    """log softmax(logits / temperature) of the answer's tokens, by one plain forward pass."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].float()
    scores = (logits[len(prompt) - 1 : -1] / (temperature or 1.0)).log_softmax(-1)
    return scores.gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()
