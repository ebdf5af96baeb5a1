"""Low-rank adapters (`peft`): the model's weights stay, and W + (alpha / rank) B A is what is sampled and trained.

Invariant: whatever leaves here under the names of the unadapted model computes what the adapted one does, to float
rounding; so only plain LoRA is taken, and no weight that is tied to another.
"""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.inference.adapters import A, B
from lightning_rl.inference.weights import four_bit
from lightning_rl.inference.weights.stream import Described, WeightStream, distinct
from lightning_rl.training.shards import full

# bitsandbytes, which peft looks for, warns on some CPUs of a kernel that is for sampling alone.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
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

_NAME = re.compile(r"\w+")


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
        targets: a name of modules (`q_proj`) or several, a regex of their whole names, or all-linear.
        exclude: which of these get none, named likewise; of a name all that is in modules of that name.
        adapter_path: a `peft` folder to go on from, which says itself what it adapts; its dropout is left out, since
            what is sampled must be what is trained. None: a fresh adapter (A random, B zero), which changes nothing.
        seed: of A.

    Its numbers are float32, or those of the model where these are finer.

    Raises:
        ValueError: no module fits `targets`, or `exclude`, the adapter is not of this rank and alpha, is not plain
            LoRA, or would sit on a weight that is tied to another.
    """
    import peft  # seconds: not where nobody adapts

    if adapter_path is None:
        config: Any = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # it is multiplied with
            target_modules=_named(targets),
            exclude_modules=None if exclude is None else _with_parts(exclude),
        )
    else:
        config = _config_of(Path(adapter_path), rank, alpha)
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.filterwarnings("error", message=".* no modules were excluded")
        try:
            made: Any = peft.get_peft_model(model, config)
        except ValueError as error:
            raise ValueError(f"no adapter for target_modules={config.target_modules!r}: {error}") from error
        except UserWarning as error:
            raise ValueError(
                f"exclude_modules={exclude!r} leaves nothing out: give last parts of names, such as down_proj, or a "
                r"regex of whole names, such as model\.layers\.0\..*"
            ) from error
    _require_modules(made, targets)
    _require_own_weights(made)
    for layer in _layers(made).values():
        if layer.get_base_layer().weight.is_meta:  # others have the weights; an adapter is small
            for part in (layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B):
                part.to_empty(device="cpu")
    if adapter_path is not None:
        _load(made, Path(adapter_path))
    ready: nn.Module = made.eval()
    return ready


def _named(modules: str | Sequence[str]) -> str | list[str]:
    """Modules as `peft` is told of them, for which a text is a regex of whole names."""
    if not isinstance(modules, str):
        return list(modules)
    return [modules] if _NAME.fullmatch(modules) else modules  # all-linear has a hyphen


def _with_parts(modules: str | Sequence[str]) -> str | list[str]:
    """The same, with what is in them: `self_attn` has no weights but those of its parts."""
    names = [modules] if isinstance(modules, str) else modules
    if not all(_NAME.fullmatch(name) for name in names):
        return _named(modules)
    return rf"(.*\.)?({'|'.join(names)})(\..*)?"


def adapts_ends(model: nn.Module) -> bool:
    """Whether the adapter is on the embedding or on the output layer, too."""
    base: Any = model.get_base_model()  # type: ignore[operator]
    layers = set(_layers(model).values())
    return bool(layers & {base.get_input_embeddings(), base.get_output_embeddings()})


def changed(model: nn.Module) -> WeightStream:
    """The weights that the adapter changes, with it, under the unadapted model's names; float32 or finer. Where several
    processes share the model, all go through it."""
    layers = _layers(model)
    described = {f"{name}.weight": _described(layer) for name, layer in layers.items()}
    return WeightStream(
        described, lambda: ((f"{name}.weight", _with_adapter(layer)) for name, layer in layers.items()), _device(model)
    )


def low_rank(model: nn.Module) -> WeightStream:
    """The adapter alone, in float32 or finer: of each module of the unadapted model that it changes, by the module's
    name, A [rank, inputs] and alpha / rank times B [outputs, rank]; as `changed`."""
    layers = _layers(model)
    described: dict[str, Described] = {}
    for name, layer in layers.items():
        down, up, _ = _parts(layer)
        described[name + A] = Described(down.dtype, tuple(down.shape))
        described[name + B] = Described(up.dtype, tuple(up.shape))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, layer in layers.items():
            down, up, _ = _parts(layer)
            yield name + A, full(down.detach())
            yield name + B, full(up.detach()) * layer.scaling["default"]

    return WeightStream(described, tensors, _device(model))


def merged(model: nn.Module) -> WeightStream:
    """The weights of an unadapted model that computes the same, each in its own number format, of tied ones the first
    alone; as `changed`.

    `model` is not changed; weights without an adapter are its own tensors.
    """
    base: Any = model.get_base_model()  # type: ignore[operator]
    state = base.state_dict(keep_vars=True)
    in_4_bits = {f"{name}.weight": layer for name, layer in four_bit.quantized_layers(base).items()}
    scales = tuple(f"{name}." for name in in_4_bits)
    names = {
        name: name.replace(_WRAPPED, ".") for name in state if ".lora_" not in name and not name.startswith(scales)
    }
    own = distinct({names[name]: state[name] for name in names})
    packed = {names[name]: layer for name, layer in in_4_bits.items()}
    layers = {f"{name}.weight": layer for name, layer in _layers(model).items()}
    described = {
        name: four_bit.described(packed[name]) if name in packed else Described(tensor.dtype, tuple(tensor.shape))
        for name, tensor in own.items()
    }

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in own.items():  # one by one: each is made in float32
            if name in layers:
                yield name, _with_adapter(layers[name]).to(described[name].dtype)
            else:
                yield name, four_bit.weight_of(packed[name]) if name in packed else full(tensor.detach())

    return WeightStream(described, tensors, _device(model))


def share_base(model: nn.Module, other: nn.Module) -> None:
    """Have `model` read the unadapted weights of `other` where they are equal, so that both adapters need them once.

    Both are what `adapted` gives; nobody trains these weights.
    """
    frozen = {name: weight for name, weight in other.named_parameters() if not weight.requires_grad}
    for name, weight in model.named_parameters():
        same = frozen.get(name)
        if same is None or weight.requires_grad or (same.dtype, same.device) != (weight.dtype, weight.device):
            continue
        if weight.is_meta:  # others have the weights
            continue
        if torch.equal(same, weight):
            weight.data = same.data


def save(model: nn.Module, folder: Path) -> None:
    """Write the adapter as a `peft` folder: `adapted` goes on from it, and engines load it beside the base model."""
    writer: Any = model
    writer.save_pretrained(str(folder), save_embedding_layers=False)


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

    saved, own = peft.load_peft_weights(str(folder), device="cpu"), peft.get_peft_model_state_dict(model)
    odd = sorted(name for name in saved.keys() | own.keys() if _shape(saved, name) != _shape(own, name))
    if odd:
        raise ValueError(
            f"lora_adapter_path {folder} is not of this model: {len(odd)} of its tensors are missing, unknown or of "
            f"another shape, the first is {odd[0]}"
        )
    peft.set_peft_model_state_dict(model, saved)


def _shape(state: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None


def _layers(model: nn.Module) -> dict[str, Any]:
    """The adapted modules by their names in the unadapted model."""
    from peft.tuners.lora import LoraLayer

    base: Any = model.get_base_model()  # type: ignore[operator]
    return {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def _with_adapter(layer: Any) -> Tensor:
    """The weight of an adapted layer with its adapter, whole."""
    weight = full(four_bit.weight_of(layer.get_base_layer()))
    down, up, transposed = _parts(layer)
    delta = full(up) @ full(down) * layer.scaling["default"]
    wide = weight.to(torch.promote_types(weight.dtype, delta.dtype))
    summed: Tensor = wide + (delta.T if transposed else delta)
    return summed


def _parts(layer: Any) -> tuple[nn.Parameter, nn.Parameter, bool]:
    """A, B, and whether the weight is the transpose of what they make; of an embedding peft keeps them elsewhere."""
    if len(layer.lora_embedding_A):
        return layer.lora_embedding_A["default"], layer.lora_embedding_B["default"], True
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.fan_in_fan_out


def _described(layer: Any) -> Described:
    weight = four_bit.described(layer.get_base_layer())
    return Described(torch.promote_types(weight.dtype, _parts(layer)[0].dtype), weight.shape)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _require_modules(model: nn.Module, targets: str | Sequence[str]) -> None:
    """Raises ValueError for experts and routers that `peft` adapts by their tensors, since they are no modules."""
    from peft.tuners.lora import ParamWrapper

    layers = _layers(model)
    tensors = sorted(name for name, layer in layers.items() if isinstance(layer, ParamWrapper))
    if tensors:
        kinds = {name.rpartition(".")[2] for name, layer in layers.items() if name not in tensors}
        others = sorted(kinds) or ["q_proj", "..."]
        raise ValueError(
            f"target_modules={targets!r} takes in experts or routers, {tensors[0]} for one, which get no adapter here: "
            f"name the other modules, [{', '.join(others)}]"
        )


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
