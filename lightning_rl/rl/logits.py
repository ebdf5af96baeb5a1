"""From logits to the log probabilities and entropies of chosen tokens, a few rows at a time.

Whatever is as wide as the vocabulary weighs as much as the logits themselves: float32 copies, probabilities, the
log-softmax that is kept for the backward pass. Here each of them is as large as one chunk, forward and backward; only
the gradient of the logits is whole. The backward pass computes a chunk's log-softmax again, from the same logits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

CHUNK = 2**22  # numbers of one chunk: 16 MB of float32


def token_log_probs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    with_entropy: bool = False,
    candidates: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """log softmax(logits[rows] / temperature) at `targets`, the entropies of these distributions, and the log
    probabilities of other tokens in them, in nats.

    Computed in float32, in float64 where the logits are. All results have a gradient, once.

    Args:
        logits: float [N, V].
        rows: int64 [K], the row of each token's distribution; targets: int64 [K], the tokens; temperature: float [K].
        candidates: int64 [K, C], other tokens of each distribution, each once; None: none.
        chunk: numbers that are computed at once, at least one row.

    Returns: [K]; [K] or None; [K, C] or None.
    """
    at_once = max(1, chunk // max(logits.shape[-1], 1))
    if 2 * len(rows) < len(logits):  # few rows are trained: keep a copy of them for the backward pass, and not the rest
        logits, rows = rows_at(logits, rows), torch.arange(len(rows), device=rows.device)
    log_probs, entropies, of_candidates = _Chunked.apply(  # type: ignore[no-untyped-call]
        logits, rows, targets, temperature, candidates, with_entropy, at_once
    )
    return log_probs, entropies if with_entropy else None, None if candidates is None else of_candidates


def rows_at(values: Tensor, places: Tensor) -> Tensor:
    """The rows [K, D] of `values` [N, D] at `places`, int64 [K], of which several may be one.

    Where a row is taken several times, its gradients are added up in one order: on a CPU of several threads
    `values[places]` would add them up in any, and two runs would differ in the last bits. A GPU sorts them.
    """
    return embedding(places, values) if values.device.type == "cpu" else values[places]


_SKIPPED: ContextVar[bool] = ContextVar("repeats are skipped", default=False)


def parts(total: int, size: int) -> Iterator[slice]:
    """`total` rows in parts of `size`, the last may be smaller."""
    starts: Sequence[int] = range(0, total, size)
    if _SKIPPED.get() and len(starts) > 3:
        starts = (*starts[:2], starts[-1])
    return (slice(start, start + size) for start in starts)


@contextmanager
def repeats_skipped() -> Iterator[None]:
    """For a block in which tensors have no numbers: of parts of one size the third and later ones are skipped, which
    take what the second takes."""
    token = _SKIPPED.set(True)
    try:
        yield
    finally:
        _SKIPPED.reset(token)


@torch.no_grad()
def top_log_probs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    temperature: Tensor,
    top: int,
    *,
    vocabulary: int | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities as of `token_log_probs`, [K], and of each distribution its `top` most likely tokens, int64
    [K, top], with their log probabilities, [K, top]; without gradient. They are among the first `vocabulary` tokens
    (None: all). Raises ValueError where there are not so many.
    """
    vocabulary = min(vocabulary or logits.shape[-1], logits.shape[-1])
    if top > vocabulary:
        raise ValueError(f"the {top} most likely of {vocabulary} tokens are asked for")
    at_once = max(1, chunk // max(logits.shape[-1], 1))
    exact = torch.promote_types(logits.dtype, torch.float32)
    chosen = torch.empty(len(rows), dtype=exact, device=logits.device)
    likely = torch.empty(len(rows), top, dtype=torch.int64, device=logits.device)
    of_likely = torch.empty(len(rows), top, dtype=exact, device=logits.device)
    for part in parts(len(rows), at_once):
        log_probs = _log_softmax(logits, rows[part], temperature[part])
        chosen[part] = log_probs.gather(-1, targets[part, None]).squeeze(-1)
        of_likely[part], likely[part] = log_probs[:, :vocabulary].topk(top, dim=-1)
    return chosen, likely, of_likely


def _log_softmax(logits: Tensor, rows: Tensor, temperature: Tensor) -> Tensor:
    exact = torch.promote_types(logits.dtype, torch.float32)
    return (logits[rows].to(exact) / temperature[:, None].to(exact)).log_softmax(-1)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        temperature: Tensor,
        candidates: Tensor | None,
        with_entropy: bool,
        at_once: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        outputs = of_tokens(logits, rows, targets, temperature, candidates, with_entropy=with_entropy, at_once=at_once)
        chosen, entropies, of_candidates = outputs
        ctx.save_for_backward(logits, rows, targets, temperature, candidates, entropies)
        ctx.at_once = at_once
        return chosen, entropies, of_candidates

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_chosen: Tensor | None, of_entropies: Tensor | None, of_candidates: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, rows, targets, temperature, candidates, entropies = ctx.saved_tensors
        gradient = gradient_of_logits(
            logits,
            rows,
            Saved(targets, temperature, candidates, entropies),
            Upstream(of_chosen, of_entropies, of_candidates),
            at_once=ctx.at_once,
        )
        return gradient, None, None, None, None, None, None


class Saved(NamedTuple):
    """What a forward pass saves of K tokens: ids int64 [K], temperatures [K], other tokens int64 [K, C] or None, and
    the entropies [K] of their distributions (empty where they were not asked for)."""

    targets: Tensor
    temperature: Tensor
    candidates: Tensor | None
    entropies: Tensor

    def part(self, part: slice) -> "Saved":
        """Those of some tokens."""
        candidates = None if self.candidates is None else self.candidates[part]
        return Saved(self.targets[part], self.temperature[part], candidates, self.entropies[part])


class Upstream(NamedTuple):
    """The gradients of a loss by log probabilities [K], entropies [K] and those of candidates [K, C]; None: 0."""

    log_probs: Tensor | None
    entropies: Tensor | None
    candidates: Tensor | None

    def part(self, part: slice) -> "Upstream":
        """Those of some tokens."""
        return Upstream(*(None if gradient is None else gradient[part] for gradient in self))


def of_tokens(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    temperature: Tensor,
    candidates: Tensor | None,
    *,
    with_entropy: bool,
    at_once: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `token_log_probs` returns, without a gradient, `at_once` tokens at once; empty for what is not asked for."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    chosen = torch.empty(len(rows), dtype=exact, device=logits.device)
    entropies = torch.empty_like(chosen) if with_entropy else chosen.new_empty(0)
    of_candidates = chosen.new_empty(0 if candidates is None else candidates.shape)
    for part in parts(len(rows), at_once):
        log_probs = _log_softmax(logits, rows[part], temperature[part])
        chosen[part] = log_probs.gather(-1, targets[part, None]).squeeze(-1)
        if candidates is not None:
            of_candidates[part] = log_probs.gather(-1, candidates[part])
        if with_entropy:
            entropies[part] = _entropies(log_probs, log_probs.exp())
    return chosen, entropies, of_candidates


def gradient_of_logits(logits: Tensor, rows: Tensor, saved: Saved, upstream: Upstream, *, at_once: int) -> Tensor:
    """The gradient by `logits` [N, V], in their number format."""
    gradient = torch.zeros_like(logits)
    for part in parts(len(rows), at_once):
        of, above = saved.part(part), upstream.part(part)
        log_probs = _log_softmax(logits, rows[part], of.temperature)
        probs = log_probs.exp()
        own = torch.zeros_like(probs)
        if above.entropies is not None:
            own = _of_entropy(log_probs, probs, of.entropies).mul_(above.entropies[:, None])
        if above.log_probs is not None:
            own.addcmul_(probs, above.log_probs[:, None], value=-1)
            own.scatter_add_(-1, of.targets[:, None], above.log_probs[:, None])
        if above.candidates is not None and of.candidates is not None:
            own.addcmul_(probs, above.candidates.sum(-1, keepdim=True), value=-1)
            own.scatter_add_(-1, of.candidates, above.candidates)
        own.div_(of.temperature[:, None].to(own.dtype))
        gradient.index_add_(0, rows[part], own.to(gradient.dtype))
    return gradient


def _entropies(log_probs: Tensor, probs: Tensor) -> Tensor:
    return -(probs * log_probs.clamp_(min=torch.finfo(log_probs.dtype).min)).sum(-1)  # 0 x -inf would be NaN


def _of_entropy(log_probs: Tensor, probs: Tensor, entropies: Tensor) -> Tensor:
    """The gradient of the entropy: -p (log p + H)."""
    log_probs.clamp_(min=torch.finfo(log_probs.dtype).min).add_(entropies[:, None])
    return log_probs.mul_(probs).neg_()
