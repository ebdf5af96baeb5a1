"""Checkpoints: a Hugging Face folder that `transformers` loads as it is, with the state of training beside.

Invariant: a checkpoint is whole or not there: it is written under another name and then renamed.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lightning_rl.errors import Explained

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_STATE = "training_state.pt"


class CheckpointError(Explained, OSError):
    """A checkpoint could not be written."""


def save(model: Any, tokenizer_path: Path, folder: Path, state: dict[str, Any]) -> Path:
    """Write weights, config, tokenizer and `state` (tensors and plain values) to `folder`; returns it.

    Raises CheckpointError naming the folder, where it cannot be written.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        for name in _TOKENIZER_FILES:
            if (tokenizer_path / name).exists():
                shutil.copy(tokenizer_path / name, partial / name)
        torch.save(state, partial / _STATE)
        for file in partial.iterdir():
            _sync(file)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        # What torch and safetensors raise on a full disk names no file.
        raise CheckpointError(f"checkpoint {folder} cannot be written ({error}); make room, then resume") from error
    return folder


def latest(checkpoints: Path) -> Path | None:
    """The newest whole checkpoint among the `step-N` folders of `checkpoints`."""
    steps = {int(folder.name[5:]): folder for folder in checkpoints.glob("step-*") if folder.name[5:].isdecimal()}
    return next((steps[step] for step in sorted(steps, reverse=True) if (steps[step] / _STATE).exists()), None)


def load_state(folder: Path) -> dict[str, Any]:
    """The `state` that was saved in `folder`."""
    state: dict[str, Any] = torch.load(folder / _STATE, weights_only=True)
    return state


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
