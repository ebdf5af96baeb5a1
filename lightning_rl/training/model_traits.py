"""What a model's config and modules say of how its forward pass may be run; and rows to try it on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lightning_rl.training.batch import TrainingSequence

_DROPOUTS: Final = ("dropout", "pdrop", "dropout_prob", "drop_rate")  # how names of rates end
_WINDOWS: Final = ("sliding_window", "attention_chunk_size", "window_size")
_ATTENTION: Final = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """The layer from hidden states to logits; None: the model is a bare trunk."""
    layer = getattr(model, "get_output_embeddings", lambda: None)()
    return layer if isinstance(layer, nn.Module) else None


def text_config(model: nn.Module) -> Any:
    """The config of its language part; None: it is no model of transformers."""
    config = getattr(model, "config", None)
    return config.get_text_config() if isinstance(config, PreTrainedConfig) else None


def has_dropout(model: nn.Module) -> bool:
    """Whether its config asks for dropout in training, in any part: each forward pass is then another one."""
    config = getattr(model, "config", None)
    return isinstance(config, PreTrainedConfig) and _asks_for_dropout(config.to_dict())


def _asks_for_dropout(config: dict[Any, Any]) -> bool:
    return any(
        _asks_for_dropout(value)
        if isinstance(value, dict)
        else str(name).endswith(_DROPOUTS) and isinstance(value, int | float) and value > 0
        for name, value in config.items()
    )


def grouped_heads(config: Any) -> int:
    """How many heads of queries share a key; tried with the model like all else."""
    heads = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None)
    return heads // keys if isinstance(heads, int) and isinstance(keys, int) and 0 < keys <= heads else 1


def attention_window(config: Any) -> int | None:
    """How many tokens attention sees at least, in each layer; None: all before."""
    windows = [getattr(config, name, None) for name in _WINDOWS]
    return min((window for window in windows if isinstance(window, int) and window > 0), default=None)


def refusal_of(config: Any) -> str | None:
    """What in a model's config rules packed rows out; longer rows than those tried would show it."""
    if config is None:
        return "it is no model of transformers"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION)
    if other:
        return f"it has layers that are no attention over tokens: {', '.join(other)}"
    attention = config._attn_implementation
    if attention not in (None, "eager", "sdpa"):
        return f"its attention is {attention!r}, which takes no mask of ours; set attn_implementation=sdpa"
    return None


def probe_rows(config: Any) -> list[TrainingSequence]:
    """A few rows of the model's vocabulary: a tree of three with two forks, and one that shares nothing."""
    ids = np.random.default_rng(0).permutation(min(getattr(config, "vocab_size", 32), 1000))
    ids = np.resize(ids, 18)
    rows = [ids[:9], [*ids[:5], *ids[9:12]], [*ids[:3], *ids[12:14]], ids[14:18]]
    return [_probe_row(np.asarray(row, dtype=np.int64)) for row in rows]


def _probe_row(token_ids: NDArray[np.int64]) -> TrainingSequence:
    each = np.ones(len(token_ids) - 1, dtype=np.float32)
    trained = np.arange(1, len(token_ids))
    return TrainingSequence(0, token_ids, trained, -each, each, each)


def apart(a: Tensor, b: Tensor | float = 0.0) -> float:
    """The norm of a difference."""
    return float(torch.linalg.vector_norm((a - b).double()))


def tolerance(dtype: torch.dtype) -> float:
    """What rounding may do, as a share of a real difference."""
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 0.25)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and then each part's own mode again."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
