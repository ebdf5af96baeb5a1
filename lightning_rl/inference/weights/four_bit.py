"""Weights of linear layers in 4 bits (NF4 of `bitsandbytes`): what a frozen model takes under an adapter that is
trained (QLoRA, arXiv 2305.14314).

Invariant: what is computed with and what `weight_of` gives are the same numbers, so an engine that is sent the latter
samples from the model that is trained.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.errors import Explained
from lightning_rl.inference.weights.stream import Described


class NoBitsAndBytes(Explained, ImportError):
    """The library of 4-bit weights is not installed."""


def quantize(model: Any, device: torch.device) -> None:
    """Hold the weights of a model's linear layers in 4 bits, on `device`, one layer after another; in place.

    Each block of 64 has a scale of 8 bits ("double quantisation"): 4.13 bits a number in all. The output layer keeps
    its numbers, and so does all that is no `nn.Linear`: embeddings, norms, experts whose weights are one tensor.
    Raises NoBitsAndBytes.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise NoBitsAndBytes(
            "actor_rollout_ref.model.load_in_4bit=true needs bitsandbytes: pip install 'lightning-rl[bitsandbytes]'"
        ) from error
    layers: Any = bitsandbytes.nn
    for parent, name, layer in linear_layers(model):
        held: Any = layers.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=layer.weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        held.weight = layers.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=held).to(
            device
        )
        held.bias = layer.bias
        # Its forward pass without gradients would lay the weights out anew, and then no gradient comes through them.
        held.support_avx512bf16_for_cpu = False
        setattr(parent, name, held.train(layer.training))


def linear_layers(model: Any) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The layers that `quantize` takes, each with the module that has it and its name there."""
    head = model.get_output_embeddings()
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear and layer is not head
    ]


def is_quantized(layer: nn.Module) -> bool:
    """Whether the weight of a layer is in 4 bits."""
    return getattr(layer.weight, "quant_state", None) is not None


def weight_of(layer: Any) -> Tensor:
    """The weight of a layer, [outputs, inputs], in the format that it was read in."""
    if not is_quantized(layer):
        weight: Tensor = layer.weight
        return weight
    from bitsandbytes.functional import dequantize_4bit

    whole: Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return whole


def described(layer: Any) -> Described:
    """What is known of `weight_of` a layer."""
    weight = layer.weight
    source = weight.quant_state if is_quantized(layer) else weight
    return Described(source.dtype, tuple(source.shape))


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose weights are in 4 bits, by name."""
    own = {name: module for name, module in model.named_modules() if "weight" in module._parameters}
    return {name: module for name, module in own.items() if is_quantized(module)}


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy whose weights are all whole."""
    copied = copy.deepcopy(model)
    for name, layer in quantized_layers(copied).items():
        whole = weight_of(layer)
        linear = nn.Linear(whole.shape[1], whole.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(whole)
        linear.bias = layer.bias  # type: ignore[assignment]
        parent, _, own = name.rpartition(".")
        setattr(copied.get_submodule(parent), own, linear.train(layer.training))
    return copied


def count(model: nn.Module) -> int:
    """How many numbers the parameters of a model are."""
    held = {id(layer.weight): layer for layer in quantized_layers(model).values()}
    return sum(
        torch.Size(described(held[id(each)]).shape).numel() if id(each) in held else each.numel()
        for each in model.parameters()
    )
