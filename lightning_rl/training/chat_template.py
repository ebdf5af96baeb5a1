"""A chat template for a model that has none, or in the place of its own: a tokenizer's folder beside the model's.

Invariant: the model's own folder stays as it is.
"""

import json
import shutil
from pathlib import Path

from lightning_rl.config import ConfigError
from lightning_rl.inference.load import model_folder
from lightning_rl.training.checkpoint import copy_tokenizer
from lightning_rl_proxy.rendering.chat_templates import read_template

_KEY = "actor_rollout_ref.model.chat_template"
_FILE = "chat_template.jinja"


def text_of(source: str) -> str:
    """The template in a file, or that of a model's folder or id. Raises ConfigError where there is none."""
    if Path(source).is_file():
        return Path(source).read_text(encoding="utf-8")
    try:
        folder = model_folder(source)
        config = folder / "tokenizer_config.json"
        texts = read_template(folder, json.loads(config.read_bytes()) if config.is_file() else {})
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{_KEY}={source!r} is no file with a template, and no model that has one: {error}"
        ) from error
    if texts is None:
        raise ConfigError(
            f"{_KEY}={source!r}: the model in {folder} has no chat template; name a file, or another model"
        )
    return texts["default"]


def with_template(model: Path, source: str | None, folder: Path) -> Path:
    """The tokenizer of `model` with the template `source`, in `folder`; the model's own folder where none is given."""
    if source is None:
        return model
    text = text_of(source)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copy_tokenizer(model, folder)
    shutil.copy(model / "config.json", folder / "config.json")
    (folder / _FILE).write_text(text, encoding="utf-8")
    return folder
