"""Finding a model, and reading it from disk for an engine, in evaluation mode."""

import difflib
import json
import math
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from lightning_rl import tutorial
from lightning_rl.errors import Explained
from lightning_rl.inference.weights import four_bit
from lightning_rl.inference.weights.stream import distinct, files_of

ONE_AT_A_TIME = threading.Lock()  # `from_pretrained` makes models by settings of torch that all threads share
_ALIGNED = 64  # bytes: where torch's tensors begin
_OLD_NAMES = {"rope_theta", "rope_scaling"}  # of what `rope_parameters` holds, which `transformers` still takes

# Notebooks without ipywidgets get it from tqdm, whose progress bars we do not show.
warnings.filterwarnings("ignore", message="IProgress not found")


def is_model_id(path: str) -> bool:
    """Whether a path may be the id of a model at the hub: owner/name."""
    return path.count("/") == 1 and not path.startswith((".", "/"))


def model_folder(path: str) -> Path:
    """The folder of a model: `path` itself, or, for a model id such as `Qwen/Qwen3-0.6B`, its copy from the hub.

    Raises FileNotFoundError for what is neither a folder nor an id, for the folder of a run, and for an adapter; what
    the hub raises carries a note.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").exists() and (folder / "model" / "config.json").exists():
            raise FileNotFoundError(f"{path!r} is the folder of a run: its model is in {str(folder / 'model')!r}")
        if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
            raise FileNotFoundError(
                f"{path!r} is an adapter (of `lora_export=adapter`, say) and no whole model: name the model that it "
                "was trained over; a policy goes on with the adapter by actor_rollout_ref.model.lora_adapter_path"
            )
        return folder
    if not is_model_id(path):
        raise FileNotFoundError(f"model {path!r} is neither a folder nor a model id (owner/name)")
    try:
        return Path(huggingface_hub.snapshot_download(path))
    except (OSError, ValueError) as error:
        beside = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        near = difflib.get_close_matches(folder.name, beside, n=1)
        hint = f"; did you mean {str(folder.with_name(near[0]))!r}?" if near else ""
        error.add_note(f"model {path!r} is no folder here, and could not be taken from the hub{hint}")
        raise


def folder_here(path: str) -> Path | None:
    """The folder of a model, where it is on this machine: `path` itself, or the copy that was taken from the hub."""
    if Path(path).is_dir():
        return Path(path)
    cached = huggingface_hub.try_to_load_from_cache(path, "config.json") if is_model_id(path) else None
    return Path(cached).parent if isinstance(cached, str) else None


def located(path: str | Path | None) -> tuple[Path, str]:
    """The folder of a model (None: the tutorial's), and its name: under a hub's id it finds its renderer by itself.

    Raises as `model_folder`.
    """
    folder = tutorial.checkpoint() if path is None else model_folder(str(path))
    return folder, folder.name if path is None or Path(path).is_dir() else str(path)


_DROPOUTS = ("pdrop", "dropout")


class ModelConfigRefused(Explained, ValueError):
    """Values that a model's config.json cannot have."""


def with_config(folder: Path, changes: Mapping[str, Any], into: Path) -> Path:
    """The model in `folder` with other values in its config.json: the folder `into`, whose other files are links.

    Values of a nested section replace those of their names there. A dropout of 0 that the model has not is left out:
    scripts give every kind's name. Raises ModelConfigRefused for what the model's class does not take.
    """
    known_names = AutoConfig.from_pretrained(folder).to_dict().keys() | _OLD_NAMES
    changes = {k: v for k, v in changes.items() if k in known_names or v != 0 or not k.endswith(_DROPOUTS)}
    if unknown := sorted(changes.keys() - known_names):
        raise ModelConfigRefused(f"the config of the model in {folder} has no {', '.join(unknown)}")
    into.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        link = into / file.name
        if file.name != "config.json" and not link.exists():
            link.symlink_to(file.resolve())
    config = _merged(json.loads((folder / "config.json").read_text(encoding="utf-8")), changes)
    (into / "config.json").write_text(json.dumps(config, indent=2))
    try:
        AutoConfig.from_pretrained(into)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ModelConfigRefused(f"{dict(changes)} does not fit the model in {folder}: {error}") from error
    return into


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with the values of `new`; of sections that both have, name by name."""
    nested = {name for name, value in new.items() if isinstance(value, Mapping) and isinstance(old.get(name), Mapping)}
    return {**old, **new, **{name: _merged(old[name], new[name]) for name in nested}}


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


def attention_of(config: Any, implementation: str | None = None) -> str | None:
    """How the attention of a model with this config is computed: as asked; else (None) by torch's scaled-dot-product
    one where the model has it, but for those whose scores are capped, since that one leaves the cap out."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return implementation or ("eager" if capped else None)


def skeleton(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: str | None = None,
) -> nn.Module:
    """The model of `load_model` without its weights: they are on `meta`, whatever `device` it would have."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(path)
        model: Any = _loader(path).from_config(config, dtype=dtype, attn_implementation=attention_of(config, attention))
    if (Path(path) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path)
    ready: nn.Module = model.eval()
    return ready


def unfilled(
    path: Path, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> tuple[nn.Module, dict[str, Path]]:
    """The model of `load_model` with its buffers, its parameters on `meta`; and the safetensors file that has each of
    these, under the same name.

    Raises NotBySlices, with the reason, where a model cannot be read so.
    """
    model: Any = skeleton(path, dtype, attention=attention)
    files = files_of(path)
    if files is None:
        raise NotBySlices(f"the weights in {path} are not in safetensors files")
    names = distinct(dict(model.named_parameters(remove_duplicate=False)))
    if lacking := sorted(names.keys() - files.keys()):
        raise NotBySlices(
            f"the files in {path} have no {lacking[0]} (of {len(lacking)}): they are converted on reading"
        )
    if getattr(model.config, "quantization_config", None) is not None or (
        dtype != torch.float32 and (model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict)
    ):
        raise NotBySlices(f"the model in {path} keeps some weights in formats of their own")
    model._weight_conversions = []  # it is saved under the names of these files
    _make_buffers(model)
    return model, {name: files[name] for name in names}


class NotBySlices(Explained, ValueError):
    """A model's weights cannot be read a part at a time."""


@torch.no_grad()
def _make_buffers(model: Any) -> None:
    """Compute the buffers of a model on `meta` as `transformers` does for those that no file has."""
    made: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set or not buffer.is_floating_point():
                raise NotBySlices(f"{type(model).__name__} has buffers that are no plain tables ({name})")
            module.register_buffer(name, torch.full_like(buffer, math.nan, device="cpu"), persistent=False)
            module._is_hf_initialized = False
            made.append((module, name))
    model.initialize_weights()
    if odd := [name for module, name in made if getattr(module, name).isnan().any()]:
        raise NotBySlices(f"{type(model).__name__} does not say how its buffer {odd[0]} is computed")


def _loader(path: str | Path) -> Any:
    # Bars would break up the progress line of the run, as a model is read and as it is written.
    transformers.utils.logging.disable_progress_bar()
    return AutoModelForImageTextToText if sees(path) else AutoModelForCausalLM


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: str | None = None,
    *,
    load_in_4bit: bool = False,
) -> nn.Module:
    """The causal LM at `path` (a folder or a model id), on `device`, ready to be sampled from; with its vision tower,
    if it has one. `attention`: see `attention_of`; `load_in_4bit`: see `four_bit.quantize`."""
    implementation = attention_of(AutoConfig.from_pretrained(path), attention)
    try:
        with ONE_AT_A_TIME:
            model: Any = _loader(path).from_pretrained(path, dtype=dtype, attn_implementation=implementation)
    except (ValueError, ImportError) as error:
        if attention is None:
            raise
        raise AttentionUnknown(
            f"the model {path} cannot be loaded with actor_rollout_ref.model.attn_implementation={attention} "
            f"({error}); leave it null"
        ) from error
    if load_in_4bit:
        four_bit.quantize(model, torch.device(device))
    ready: nn.Module = aligned(model.to(device)).eval()
    return ready


def aligned(model: nn.Module) -> nn.Module:
    """The model, its weights on a CPU where torch would put them.

    What is read from a file begins anywhere in memory, and the last bits of some matrix products depend on that: a run
    that is resumed reads another file, and would not end with the weights of a run that was not stopped.
    """
    for weight in model.parameters():
        if weight.device.type == "cpu" and weight.data_ptr() % _ALIGNED:
            weight.data = weight.data.clone()
    return model


@dataclass(frozen=True)
class ModelSource:
    """Where a policy's model is read from, and how it is held.

    Args:
        path: a folder or a hub's id; None: the tutorial's.
        name: what it is called, by which its renderer is found; None: the id, or the folder's name.
        weights: a checkpoint whose weights are read instead of those at `path`.
        device: cpu, cuda, or auto.
        dtype: of its parameters.
        attention: see `attention_of`.
        load_in_4bit: the weights of its linear layers are in 4 bits.
        elsewhere: other processes hold the weights that are trained; the model here has none.
    """

    path: str | Path | None = None
    name: str | None = None
    weights: Path | None = None
    device: str = "auto"
    dtype: torch.dtype = torch.float32
    attention: str | None = None
    load_in_4bit: bool = False
    elsewhere: bool = False

    @cached_property
    def located(self) -> tuple[Path, str]:
        """The folder with its tokenizer, and its name. Raises as `model_folder`."""
        folder, name = located(self.path)
        return folder, self.name or name

    def model(self) -> Any:
        """The model that is trained: without weights, where they are `elsewhere`."""
        if self.elsewhere:
            return skeleton(self.weights or self.located[0], self.dtype, attention=self.attention)
        return self.loaded()

    def loaded(self) -> Any:
        """The model with its weights, also where they are `elsewhere`."""
        return load_model(
            self.weights or self.located[0],
            self.dtype,
            device_of(self.device),
            self.attention,
            load_in_4bit=self.load_in_4bit,
        )
