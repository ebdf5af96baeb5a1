"""Layers that hold and compute what 4-bit ones of `bitsandbytes` do, of tensors without numbers.

Its own parameters cannot be made of those, so this is written again: what a layer holds, and the whole weight that it
makes for a moment, forward and backward (of few tokens a GPU needs none; rows of training are many).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl.inference.weights.four_bit import linear_layers

_BLOCK, _NESTED = 64, 256  # numbers that share a scale, and scales that share one of their own


def hold_in_4bit(model: nn.Module) -> None:
    """What `four_bit.quantize` makes of a model, on tensors without numbers; in place."""
    for parent, name, layer in linear_layers(model):
        setattr(parent, name, _In4Bits(layer).train(layer.training))


class _In4Bits(nn.Linear):
    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._read_as, numbers = layer.weight.dtype, layer.weight.numel()
        blocks = -(-numbers // _BLOCK)
        self.weight = nn.Parameter(torch.empty(-(-numbers // 2), 1, dtype=torch.uint8), requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("_scales", torch.empty(blocks, dtype=torch.uint8))
        self.register_buffer("_scales_of_scales", torch.empty(-(-blocks // _NESTED)))

    def forward(self, inputs: Tensor) -> Tensor:
        """See `nn.Linear`."""
        computed: Tensor = _Product.apply(inputs.to(self._read_as), self)  # type: ignore[no-untyped-call]
        return computed.to(inputs.dtype)

    def whole(self) -> Tensor:
        """The weight, for a moment."""
        return torch.empty(self.out_features, self.in_features, dtype=self._read_as)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: _In4Bits) -> Tensor:
        ctx.layer = layer
        return F.linear(inputs, layer.whole(), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.layer.whole(), None
