"""Checkpoints: a Hugging Face folder that `transformers` loads as it is."""

import shutil
from pathlib import Path
from typing import Any

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def save(model: Any, tokenizer_path: Path, folder: Path) -> Path:
    """Write weights, config and tokenizer to `folder`, whole or not at all; returns the folder."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for name in _TOKENIZER_FILES:
        if (tokenizer_path / name).exists():
            shutil.copy(tokenizer_path / name, partial / name)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder
