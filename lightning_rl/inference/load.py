"""Reading a model from disk for the engine: evaluation mode, scaled-dot-product attention."""

import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

# Notebooks without ipywidgets get it from tqdm, whose progress bars we do not show.
warnings.filterwarnings("ignore", message="IProgress not found")


def model_folder(path: str) -> Path:
    """The folder of a model: `path` itself, or, for a model id such as `Qwen/Qwen3-0.6B`, its copy from the hub.

    Raises FileNotFoundError for what is neither a folder nor an id; what the hub raises carries a note.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if path.count("/") != 1 or path.startswith((".", "/")):
        raise FileNotFoundError(f"model {path!r} is neither a folder nor a model id (owner/name)")
    try:
        return Path(huggingface_hub.snapshot_download(path))
    except (OSError, ValueError) as error:
        error.add_note(f"model {path!r} is no folder here, and could not be taken from the hub")
        raise


def load_model(path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> nn.Module:
    """The causal LM at `path` (a folder or a model id), on `device`, ready to be sampled from."""
    transformers.utils.logging.disable_progress_bar()  # it would break up the progress line of the run
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    ready: nn.Module = model.to(device).eval()
    return ready
