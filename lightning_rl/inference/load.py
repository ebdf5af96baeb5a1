"""Reading a model from disk for the engine: evaluation mode, scaled-dot-product attention."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM


def load_model(path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> nn.Module:
    """The causal LM at `path` (a folder or a model id), on `device`, ready to be sampled from."""
    transformers.utils.logging.disable_progress_bar()  # it would break up the progress line of the run
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    ready: nn.Module = model.to(device).eval()
    return ready
