"""The Python code of a model's own folder: run, and known to `transformers`, only where it is trusted."""

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightning_rl.errors import Explained

_MODELS = ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText")  # what is loaded by its config


class ModelCodeRefused(Explained, ValueError):
    """A model that comes with code of its own, which cannot be loaded, or without which it cannot be."""


def register(folder: Path) -> None:
    """Run the code that the model's config.json names (`auto_map`), and have `transformers` take its classes for the
    model's type, in this process. A model that is saved takes its code along. Nothing happens where there is none.

    Raises ModelCodeRefused with what the code raises.
    """
    code = _code_of(folder)
    if not code:
        return
    try:
        config = (
            _class(code["AutoConfig"], folder) if "AutoConfig" in code else type(AutoConfig.from_pretrained(folder))
        )
        config.register_for_auto_class()
        AutoConfig.register(config.model_type, config, exist_ok=True)
        for name in _MODELS:
            if name in code:
                model = _class(code[name], folder)
                model.register_for_auto_class(name)
                getattr(transformers, name).register(config, model, exist_ok=True)
    except Exception as error:  # whatever a stranger's code raises
        raise ModelCodeRefused(f"the code of the model in {folder} fails: {type(error).__name__}: {error}") from error


def refuse_unknown(folder: Path) -> None:
    """Raises ModelCodeRefused for a model that `transformers` cannot load without the code of its folder."""
    config = json.loads((folder / "config.json").read_bytes())
    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING:
        raise ModelCodeRefused(
            f"the model in {folder} is of type {config.get('model_type')!r}, which transformers "
            f"{transformers.__version__} knows only by the code of that folder ({', '.join(_files(config))})"
        )


def _code_of(folder: Path) -> dict[str, Any]:
    code: dict[str, Any] = json.loads((folder / "config.json").read_bytes()).get("auto_map") or {}
    return code


def _files(config: dict[str, Any]) -> list[str]:
    named = config["auto_map"].values()
    return sorted({f"{name.rpartition('.')[0]}.py" for name in named if isinstance(name, str)})


def _class(name: str, folder: Path) -> Any:
    return get_class_from_dynamic_module(name, str(folder))
