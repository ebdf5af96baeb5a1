"""Low-rank adapters (`peft`): the model's weights stay, and W + (alpha / rank) B A is what is sampled and trained.

Invariant: whatever leaves here under the names of the unadapted model computes what the adapted one does, to float
rounding; so only plain LoRA is taken, and no weight that is tied to another.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

# peft asks transformers in an old way.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")

_WRAPPED = ".base_layer."  # between a module's name and its weight's, where peft put an adapter around it

# What a plain adapter may say of itself; whatever else is set would compute something that W + B A is not.
_PLAIN = {
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "lora_dropout", "init_lora_weights",
    "task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
}  # fmt: skip


def adapted(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    targets: str | Sequence[str],
    exclude: str | Sequence[str] | None = None,
    adapter_path: str | Path | None = None,
    seed: int = 0,
) -> nn.Module:
    """`model` with an adapter in it, which alone requires a gradient; `model` itself is changed.

    Args:
        model: a causal LM of transformers.
        rank, alpha: the adapter counts alpha / rank times.
        targets: names of modules, a regex of their whole names, or all-linear.
        exclude: which of these get none, named likewise.
        adapter_path: a `peft` folder to go on from, which says itself what it adapts; its dropout is left out, since
            what is sampled must be what is trained. None: a fresh adapter (A random, B zero), which changes nothing.
        seed: of A.

    Its numbers are float32, or those of the model where these are finer.

    Raises:
        ValueError: no module fits `targets`, the adapter is not of this rank and alpha, is not plain LoRA, or would
            sit on a weight that is tied to another.
    """
    import peft  # seconds: not where nobody adapts

    if adapter_path is None:
        config: Any = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]  # it is multiplied with
            target_modules=targets if isinstance(targets, str) else list(targets),
            exclude_modules=exclude if exclude is None or isinstance(exclude, str) else list(exclude),
        )
    else:
        config = _config_of(Path(adapter_path), rank, alpha)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            made: Any = peft.get_peft_model(model, config)
        except ValueError as error:
            raise ValueError(f"no adapter for target_modules={config.target_modules!r}: {error}") from error
    _require_own_weights(made)
    if adapter_path is not None:
        _load(made, Path(adapter_path))
    ready: nn.Module = made.eval()
    return ready


def changed(model: nn.Module) -> dict[str, Tensor]:
    """The weights that the adapter changes, with it, under the unadapted model's names; float32 or finer."""
    return {f"{name}.weight": _with_adapter(layer) for name, layer in _layers(model).items()}


def merged(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of an unadapted model that computes the same, each weight in its own number format.

    `model` is not changed; weights without an adapter are its own tensors.
    """
    base: Any = model.get_base_model()  # type: ignore[operator]
    state = {name.replace(_WRAPPED, "."): tensor for name, tensor in base.state_dict().items() if ".lora_" not in name}
    for name, layer in _layers(model).items():  # one by one: each is made in float32
        state[f"{name}.weight"] = _with_adapter(layer).to(state[f"{name}.weight"].dtype)
    return state


def save(model: nn.Module, folder: Path) -> None:
    """Write the adapter as a `peft` folder: `adapted` goes on from it, and engines load it beside the base model."""
    writer: Any = model
    writer.save_pretrained(str(folder), save_embedding_layers=False)


def export(model: nn.Module, folder: Path, form: Literal["merged", "adapter"]) -> None:
    """Write the final model: a whole one that `transformers` loads, or the adapter alone."""
    if form == "adapter":
        save(model, folder)
    else:
        base: Any = model.get_base_model()  # type: ignore[operator]
        base.save_pretrained(folder, state_dict=merged(model))


def _config_of(folder: Path, rank: int, alpha: float) -> Any:
    """What the adapter in `folder` says of itself. Raises ValueError where it is not plain, or not as asked for."""
    import peft

    if not (folder / "adapter_config.json").is_file():
        raise ValueError(f"lora_adapter_path {folder} is no peft folder: it has no adapter_config.json")
    config = peft.PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, peft.LoraConfig):
        raise ValueError(f"lora_adapter_path {folder} holds a {config.peft_type} adapter, not LoRA")
    usual = peft.LoraConfig()
    odd = [
        field.name
        for field in fields(config)
        if field.name not in _PLAIN and (value := getattr(config, field.name)) and value != getattr(usual, field.name)
    ]
    if config.init_lora_weights not in (True, False, "gaussian"):
        odd.append("init_lora_weights")
    if odd:
        raise ValueError(
            f"lora_adapter_path {folder} is not plain LoRA, the only kind that is trained: {', '.join(odd)}"
        )
    if (config.r, config.lora_alpha) != (rank, alpha):
        raise ValueError(
            f"lora_adapter_path {folder} has rank {config.r} and alpha {config.lora_alpha}, but lora_rank is {rank} "
            f"and lora_alpha {alpha}: set them to the adapter's"
        )
    config.lora_dropout = 0.0
    config.inference_mode = False
    return config


def _load(model: nn.Module, folder: Path) -> None:
    """Raises ValueError where the adapter in `folder` is not one of this model."""
    import peft

    theirs, ours = peft.load_peft_weights(str(folder), device="cpu"), peft.get_peft_model_state_dict(model)
    odd = sorted(name for name in theirs.keys() | ours.keys() if _shape(theirs, name) != _shape(ours, name))
    if odd:
        raise ValueError(
            f"lora_adapter_path {folder} is not of this model: {len(odd)} of its tensors are missing, unknown or of "
            f"another shape, the first is {odd[0]}"
        )
    peft.set_peft_model_state_dict(model, theirs)


def _shape(state: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None


def _layers(model: nn.Module) -> dict[str, Any]:
    """The adapted modules by their names in the unadapted model."""
    from peft.tuners.lora import LoraLayer

    base: Any = model.get_base_model()  # type: ignore[operator]
    return {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def _with_adapter(layer: Any) -> Tensor:
    weight: Tensor = layer.get_base_layer().weight
    delta: Tensor = layer.get_delta_weight("default")
    return weight.to(torch.promote_types(weight.dtype, delta.dtype)) + delta


def _require_own_weights(model: nn.Module) -> None:
    """An adapter on one of two tied modules would part them, and no state dict of the tied model could hold it."""
    base: Any = model.get_base_model()  # type: ignore[operator]
    names: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.replace(_WRAPPED, "."))
    for name, layer in _layers(model).items():
        same = names[id(layer.get_base_layer().weight)]
        if len(same) > 1:
            raise ValueError(f"{' and '.join(same)} are one weight: leave {name} out of target_modules")
