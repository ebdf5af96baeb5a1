"""A model's output layer, run by chunks in the middle of its forward pass: what is asked of the logits, without them.

The layer's own `forward` is replaced for one call: it takes the states of the trained tokens, and gives their log
probabilities in the place of logits. So all that happens around the layer happens as ever, FSDP's gathering of its
weights too. Invariant: whoever has an `OutputLayer` has tried what its model does behind the layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_rl.rl.output_layer import (
    IDENTITY,
    ROWS_CHUNK,
    Behind,
    Layer,
    token_log_probs_of_states,
    top_log_probs_of_states,
)

_RANGE: Final = 200.0  # logits that are tried: a cap shows there


class Around(NamedTuple):
    """The forward pass around a layer: `logits` runs the model, `states` are what of the layer's input is of K tokens,
    [K, D]."""

    logits: Callable[[], Tensor]
    states: Callable[[Tensor], Tensor]


class OutputLayer:
    """The layer `head` of a model that does `behind` with its output.

    It is multiplied in `autocast` (None: in its own number format).
    """

    def __init__(self, head: nn.Linear, behind: Behind, autocast: torch.dtype | None) -> None:
        self._head, self._behind, self._autocast = head, behind, autocast

    def is_large(self, places: int) -> bool:
        """Whether the logits of so many places are more than a chunk."""
        return places * self._head.out_features > ROWS_CHUNK

    def token_log_probs(
        self,
        around: Around,
        targets: Tensor,
        temperature: Tensor,
        *,
        with_entropy: bool,
        candidates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `rl.logits.token_log_probs`, of K tokens."""

        def compute(states: Tensor, layer: Layer) -> tuple[Tensor, ...]:
            parts = token_log_probs_of_states(
                states,
                layer,
                targets,
                temperature,
                with_entropy=with_entropy,
                candidates=candidates,
                chunk=ROWS_CHUNK,
            )
            return tuple(part for part in parts if part is not None)

        parts = list(self._run(around, compute))
        log_probs = parts.pop(0)
        return log_probs, parts.pop(0) if with_entropy else None, None if candidates is None else parts.pop(0)

    @torch.no_grad()
    def top_log_probs(
        self, around: Around, targets: Tensor, temperature: Tensor, top: int, vocabulary: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `rl.logits.top_log_probs`, of K tokens."""

        def compute(states: Tensor, layer: Layer) -> tuple[Tensor, ...]:
            return top_log_probs_of_states(
                states, layer, targets, temperature, top, vocabulary=vocabulary, chunk=ROWS_CHUNK
            )

        log_probs, likely, of_likely = self._run(around, compute)
        return log_probs, likely, of_likely

    def _run(self, around: Around, compute: Callable[[Tensor, Layer], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `compute` gives, tensors [K] or [K, C]."""
        results: list[tuple[Tensor, ...]] = []

        def instead(states: Tensor) -> Tensor:
            layer = Layer(self._head.weight, self._head.bias, self._behind, self._autocast)
            results.append(compute(around.states(states), layer))
            if not torch.is_grad_enabled():
                return states[:1, :1]
            return torch.cat([part[:, None] if part.dim() == 1 else part for part in results[0]], -1)[None]

        with _replaced(self._head, instead):
            logits = around.logits()
        if self._behind != IDENTITY or not torch.is_grad_enabled():
            return results[0]
        # What came through the model: there FSDP waits for the gradient, to gather the layer's weights again.
        widths = [1 if part.dim() == 1 else part.shape[-1] for part in results[0]]
        through = torch.split_with_sizes(logits[0], widths, -1)
        return tuple(
            part.squeeze(-1) if whole.dim() == 1 else part for part, whole in zip(through, results[0], strict=True)
        )


def output_layer(
    model: nn.Module, head: nn.Module, config: Any, logits: Callable[[], Tensor], autocast: torch.dtype | None
) -> OutputLayer | str:
    """The output layer of `model`, or why its logits must be whole.

    Args:
        head: the layer.
        config: the model's.
        logits: a forward pass over a few tokens, of whose logits some [N, V] are returned.
    """
    if type(head) is not nn.Linear:
        kind = type(head)
        return f"its output layer is a {kind.__name__} of {kind.__module__.partition('.')[0]}, and no nn.Linear alone"
    if head._forward_hooks or head._forward_pre_hooks:
        return "its output layer has hooks, which want to see logits"
    shown = torch.linspace(-_RANGE, _RANGE, head.out_features)

    def instead(states: Tensor) -> Tensor:
        wide = shown.to(states.device, states.dtype if autocast is None else autocast)
        return wide.expand(*states.shape[:-1], -1).clone()

    with _replaced(head, instead):
        actual = logits()
    sent = shown.to(actual.device, next(model.parameters()).dtype if autocast is None else autocast)
    for behind in _behinds(config):
        expected = behind(sent.clone())[None].expand(actual.shape)
        if torch.allclose(actual.float(), expected.float(), rtol=2 * torch.finfo(sent.dtype).eps, atol=1e-6):
            if behind != IDENTITY and isinstance(model, FSDPModule):
                return "it changes its logits behind the layer, and is held in shards"
            return OutputLayer(head, behind, autocast)
    return "it does something with its logits that is not known here"


def _behinds(config: Any) -> Iterator[Behind]:
    """What models are known to do with their logits, by the names of their configs."""
    yield IDENTITY
    if isinstance(cap := getattr(config, "final_logit_softcapping", None), int | float):
        yield Behind(cap=float(cap))
    if isinstance(divisor := getattr(config, "logits_scaling", None), int | float):
        yield Behind(divisor=float(divisor))
    if isinstance(factor := getattr(config, "logit_scale", None), int | float):
        yield Behind(factor=float(factor))


@contextmanager
def _replaced(head: nn.Module, instead: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """For the block `head` computes `instead`."""
    head.forward = instead  # on the instance: its class's is back when it is gone
    try:
        yield
    finally:
        del head.forward
