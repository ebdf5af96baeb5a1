"""Configs of published models, from their sizes: nothing is downloaded."""

from typing import Any

from transformers import Qwen2Config


def qwen(width: int, mlp: int, layers: int, *, heads: int, keys: int, vocabulary: int, tied: bool) -> Any:
    return Qwen2Config(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        architectures=["Qwen2ForCausalLM"],
    )


QWEN_15B = qwen(1536, 8960, 28, heads=12, keys=2, vocabulary=151_936, tied=True)  # Qwen2.5-1.5B
QWEN_7B = qwen(3584, 18_944, 28, heads=28, keys=4, vocabulary=152_064, tied=False)  # Qwen2.5-7B
ONE_LAYER = qwen(64, 128, 1, heads=4, keys=2, vocabulary=500, tied=True)  # whose step is traced whole, and soon
SMALL = qwen(64, 128, 6, heads=4, keys=2, vocabulary=500, tied=True)
