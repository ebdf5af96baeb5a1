"""Finding a model, and reading it from disk for an engine, in evaluation mode."""

import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from lightning_rl import tutorial
from lightning_rl.errors import Explained

# Notebooks without ipywidgets get it from tqdm, whose progress bars we do not show.
warnings.filterwarnings("ignore", message="IProgress not found")


def is_model_id(path: str) -> bool:
    """Whether a path may be the id of a model at the hub: owner/name."""
    return path.count("/") == 1 and not path.startswith((".", "/"))


def model_folder(path: str) -> Path:
    """The folder of a model: `path` itself, or, for a model id such as `Qwen/Qwen3-0.6B`, its copy from the hub.

    Raises FileNotFoundError for what is neither a folder nor an id; what the hub raises carries a note.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if not is_model_id(path):
        raise FileNotFoundError(f"model {path!r} is neither a folder nor a model id (owner/name)")
    try:
        return Path(huggingface_hub.snapshot_download(path))
    except (OSError, ValueError) as error:
        error.add_note(f"model {path!r} is no folder here, and could not be taken from the hub")
        raise


def located(path: str | Path | None) -> tuple[Path, str]:
    """The folder of a model (None: the tutorial's), and its name: under a hub's id it finds its renderer by itself.

    Raises as `model_folder`.
    """
    folder = tutorial.checkpoint() if path is None else model_folder(str(path))
    return folder, folder.name if path is None or Path(path).is_dir() else str(path)


def device_of(name: str) -> torch.device:
    """`cpu`, `cuda`, or, for `auto`, a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def vocabulary_size(folder: Path) -> int:
    """How many tokens the tokenizer of a model has; its logits may be more, as padding."""
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(with_added_tokens=True)


def sees(path: str | Path) -> bool:
    """Whether the model at `path` takes images: its config has one of a vision tower."""
    return getattr(AutoConfig.from_pretrained(path), "vision_config", None) is not None


class AttentionUnknown(Explained, ValueError):
    """The model cannot compute attention in the way that was asked for."""


def attention_of(config: Any, asked: str | None = None) -> str | None:
    """How the attention of a model with this config is computed: as asked; else (None) by torch's scaled-dot-product
    one where the model has it, but for those whose scores are capped, since that one leaves the cap out."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return asked or ("eager" if capped else None)


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: str | None = None,
) -> nn.Module:
    """The causal LM at `path` (a folder or a model id), on `device`, ready to be sampled from; with its vision tower,
    if it has one. `attention`: see `attention_of`."""
    transformers.utils.logging.disable_progress_bar()  # it would break up the progress line of the run
    loader = AutoModelForImageTextToText if sees(path) else AutoModelForCausalLM
    implementation = attention_of(AutoConfig.from_pretrained(path), attention)
    try:
        model: Any = loader.from_pretrained(path, dtype=dtype, attn_implementation=implementation)
    except (ValueError, ImportError) as error:
        if attention is None:
            raise
        raise AttentionUnknown(
            f"the model {path} cannot be loaded with actor_rollout_ref.model.attn_implementation={attention} "
            f"({error}); leave it null"
        ) from error
    ready: nn.Module = model.to(device).eval()
    return ready
