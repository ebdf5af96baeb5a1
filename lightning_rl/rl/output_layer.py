"""From hidden states through the output layer to the log probabilities of chosen tokens, a few rows at a time.

Logits are never there for more than a chunk of rows, nor is their gradient: the backward pass computes a chunk's logits
again from its hidden states. Of the layer's own gradient there is one, added up in float32 or finer. The algorithm is
that of Liger's `chunked_loss` and verl's `FusedLinearForPPO`, with the temperature applied after the cast to float32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from lightning_rl.rl.logits import CHUNK, Saved, Upstream, gradient_of_logits, of_tokens, parts, top_log_probs

ROWS_CHUNK = 2**25  # logits that are there at once: 128 MiB of float32; fewer would read the weights too often
_BLOCK = 2**25  # numbers of the layer's gradient that are computed at once, where they are then cast


@dataclass(frozen=True)
class Behind:
    """What a model does with the output z of its last layer: (z x `factor` / `divisor`), and c tanh(that / c) for a
    `cap` c (Gemma 2's `final_logit_softcapping`; Granite's `logits_scaling`, Cohere's `logit_scale`)."""

    factor: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    def __call__(self, outputs: Tensor) -> Tensor:
        """The logits, in place of `outputs`."""
        if self.factor != 1.0:
            outputs = outputs.mul_(self.factor)
        if self.divisor != 1.0:
            outputs = outputs.div_(self.divisor)
        return outputs if self.cap is None else outputs.div_(self.cap).tanh_().mul_(self.cap)

    def backward(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient by the layer's output, in place of that by the logits; `logits` are overwritten."""
        if self.cap is not None:
            gradient = gradient.mul_(logits.div_(self.cap).square_().neg_().add_(1))
        return gradient if self == IDENTITY else gradient.mul_(self.factor / self.divisor)


IDENTITY = Behind()


@dataclass(frozen=True)
class Layer:
    """An output layer: `weight` [V, D], `bias` [V] or None, what comes `behind`, and the number format in which it is
    multiplied (None: the weight's)."""

    weight: Tensor
    bias: Tensor | None = None
    behind: Behind = IDENTITY
    dtype: torch.dtype | None = None

    def cast(self) -> "Layer":
        """The same with its weights in the format in which they are multiplied."""
        dtype = self.dtype or self.weight.dtype
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        return Layer(self.weight.detach().to(dtype), bias, self.behind, dtype)

    def logits(self, states: Tensor) -> Tensor:
        """[N, D] -> [N, V]; of a layer that is `cast`."""
        return self.behind(linear(states.to(self.weight.dtype), self.weight, self.bias))

    def rows_at_once(self, chunk: int) -> int:
        """Rows of a chunk of so many logits."""
        return max(1, chunk // max(len(self.weight), 1))


def token_log_probs_of_states(
    states: Tensor,
    layer: Layer,
    targets: Tensor,
    temperature: Tensor,
    *,
    with_entropy: bool = False,
    candidates: Tensor | None = None,
    chunk: int = ROWS_CHUNK,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `rl.logits.token_log_probs` of the logits of `states`, which are never whole.

    Args:
        states: float [K, D], for each token the state that its distribution comes from.
        layer: has a gradient in `weight` and `bias`, where these require one.
        targets, temperature, with_entropy, candidates: as there, of the K tokens.
        chunk: logits that are there at once, at least one row's.

    Returns: [K]; [K] or None; [K, C] or None, in float32, or float64 where the layer is.
    """
    outputs = _OfStates.apply(  # type: ignore[no-untyped-call]
        states, layer.weight, layer.bias, layer, targets, temperature, candidates, with_entropy, chunk
    )
    log_probs, entropies, of_candidates = outputs
    return log_probs, entropies if with_entropy else None, None if candidates is None else of_candidates


@torch.no_grad()
def top_log_probs_of_states(
    states: Tensor,
    layer: Layer,
    targets: Tensor,
    temperature: Tensor,
    top: int,
    *,
    vocabulary: int | None = None,
    chunk: int = ROWS_CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `rl.logits.top_log_probs` of the logits of `states` [K, D], which are never whole."""
    ready, at_once = layer.cast(), layer.rows_at_once(chunk)
    chunks = []
    for part in parts(max(len(states), 1), at_once):
        logits = ready.logits(states[part])
        rows = torch.arange(len(logits), device=logits.device)
        chunks.append(top_log_probs(logits, rows, targets[part], temperature[part], top, vocabulary=vocabulary))
    log_probs, likely, of_likely = (torch.cat(own) for own in zip(*chunks, strict=True))
    return log_probs, likely, of_likely


class _OfStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Layer,
        targets: Tensor,
        temperature: Tensor,
        candidates: Tensor | None,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ready, at_once = layer.cast(), layer.rows_at_once(chunk)
        inner = layer.rows_at_once(min(CHUNK, chunk))
        exact = torch.promote_types(ready.weight.dtype, torch.float32)
        chosen = torch.empty(len(states), dtype=exact, device=states.device)
        entropies = torch.empty_like(chosen) if with_entropy else chosen.new_empty(0)
        of_candidates = chosen.new_empty(0 if candidates is None else candidates.shape)
        for part in parts(len(states), at_once):
            logits = ready.logits(states[part])
            outputs = of_tokens(
                logits,
                torch.arange(len(logits), device=logits.device),
                targets[part],
                temperature[part],
                None if candidates is None else candidates[part],
                with_entropy=with_entropy,
                at_once=inner,
            )
            chosen[part] = outputs[0]
            if with_entropy:
                entropies[part] = outputs[1]
            if candidates is not None:
                of_candidates[part] = outputs[2]
            del logits  # before the next chunk's are made
        ctx.save_for_backward(states, weight, bias, targets, temperature, candidates, entropies)
        ctx.behind, ctx.dtype, ctx.at_once, ctx.inner = layer.behind, layer.dtype, at_once, inner
        return chosen, entropies, of_candidates

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_chosen: Tensor | None, of_entropies: Tensor | None, of_candidates: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets, temperature, candidates, entropies = ctx.saved_tensors
        ready = Layer(weight, bias, ctx.behind, ctx.dtype).cast()
        saved, upstream = (
            Saved(targets, temperature, candidates, entropies),
            Upstream(of_chosen, of_entropies, of_candidates),
        )
        exact = torch.promote_types(weight.dtype, torch.float32)
        by_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
        by_bias = torch.zeros_like(bias, dtype=exact) if ctx.needs_input_grad[2] else None
        for part in parts(len(states), ctx.at_once):
            own = states[part].to(ready.weight.dtype)
            logits = ready.logits(own)
            rows = torch.arange(len(logits), device=logits.device)
            gradient = gradient_of_logits(logits, rows, saved.part(part), upstream.part(part), at_once=ctx.inner)
            gradient = ready.behind.backward(gradient, logits)
            if by_states is not None:
                by_states[part] = gradient.mm(ready.weight)
            if by_weight is not None:
                _add_product(by_weight, gradient, own)
            if by_bias is not None:
                by_bias += gradient.sum(0)
            del logits, gradient
        return (
            by_states,
            None if by_weight is None else by_weight.to(weight.dtype),
            None if by_bias is None else by_bias.to(bias.dtype),
            *[None] * 6,
        )


def _add_product(total: Tensor, gradient: Tensor, states: Tensor) -> None:
    """`total` [V, D] += gradient [N, V]ᵀ states [N, D]; of a narrower format a block of rows at a time."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), states)
        return
    rows = max(1, _BLOCK // max(states.shape[-1], 1))
    for part in parts(len(total), rows):
        total[part] += gradient[:, part].t().mm(states)
