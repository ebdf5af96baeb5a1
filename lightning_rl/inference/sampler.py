"""Logits to tokens, for all rows of a batch at once, as pure functions.

Invariant: a row's token and logprob depend on its own logits, parameters, seed and token index alone, so
that the company it is sampled in changes nothing (but for the rounding of the logits themselves). The
logprob is log softmax(logits / temperature), before top-k and top-p; for greedy rows, of temperature 1.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_GREEDY_BELOW = 1e-5
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Sampled(NamedTuple):
    """One token per row: ids, natural-log probabilities (float32 values), ranks from 1. All [n]."""

    token_ids: Ints
    logprobs: Floats
    ranks: Ints


def _mix(state: Keys) -> Keys:
    """SplitMix64's output function."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def stream_key(seed: int) -> np.uint64:
    """The random stream of a seed: any integer, taken modulo 2**64."""
    return np.uint64(_mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))[0])


def uniforms(keys: Keys, indices: Ints) -> Floats:
    """The `indices[i]`-th number of stream `keys[i]`, in [0, 1). SplitMix64, entered at any place.

    52 bits, so that the product with any float64 is smaller than that float64: see `_draw`.
    """
    state = keys + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample(logits: Tensor, *, temperature: Floats, top_p: Floats, top_k: Ints, uniform: Floats) -> Sampled:
    """Sample one token per row by the inverse of its distribution function.

    Args:
        logits: [n, vocab], any float dtype, on any device.
        temperature: [n], below 1e-5 for greedy: logits divided by less are no numbers.
        top_p: [n], 1 for all.
        top_k: [n], below 1 for all.
        uniform: [n], in [0, 1).

    Raises:
        FloatingPointError: a row's logits hold NaN or +inf, or nothing but -inf.
    """
    scaled = logits.float()
    greedy = temperature < _GREEDY_BELOW
    if (temperature != 1).any():
        divisor = np.where(greedy, 1.0, temperature).astype(np.float32)
        scaled = scaled / torch.from_numpy(divisor).to(logits.device)[:, None]
    peak = scaled.amax(dim=-1, keepdim=True)
    weights = (scaled - peak).exp_()
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    if not mass[:, -1].isfinite().all():
        raise FloatingPointError("the model's logits are not finite: its weights are broken")
    log_normaliser = mass[:, -1:].log() + peak
    if greedy.all():
        chosen = scaled.argmax(dim=-1, keepdim=True)
    else:
        chosen = _draw(mass, torch.from_numpy(uniform).to(logits.device)[:, None])
        truncated = np.flatnonzero(~greedy & ((top_p < 1) | (top_k > 0)))
        if truncated.size:
            rows = torch.from_numpy(truncated).to(logits.device)
            chosen[rows] = _draw_truncated(weights[rows], top_p[truncated], top_k[truncated], uniform[truncated])
        if greedy.any():
            rows = torch.from_numpy(np.flatnonzero(greedy)).to(logits.device)
            chosen[rows] = scaled[rows].argmax(dim=-1, keepdim=True)
    value = scaled.gather(-1, chosen)
    logprob = (value - log_normaliser).float()
    rank = (scaled > value).sum(dim=-1, keepdim=True) + 1
    # One transfer for all three: float64 holds ids, ranks and float32 logprobs exactly.
    answer = torch.cat([chosen.double(), logprob.double(), rank.double()], dim=1).cpu().numpy()
    return Sampled(answer[:, 0].astype(np.int64), answer[:, 1], answer[:, 2].astype(np.int64))


def _draw(mass: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulated mass exceeds uniform * total: [n, vocab], [n, 1] -> [n, 1].

    The threshold is strictly below the total, so an index exists, and its own mass is above zero.
    """
    return torch.searchsorted(mass, mass[:, -1:] * uniform, right=True)


def _draw_truncated(weights: Tensor, top_p: Floats, top_k: Ints, uniform: Floats) -> Tensor:
    """Draw among each row's `top_k` likeliest, then the fewest of those whose share reaches `top_p`."""
    device = weights.device
    ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
    limit = torch.from_numpy(np.where(top_k > 0, top_k, weights.shape[-1])).to(device)[:, None]
    place = torch.arange(weights.shape[-1], device=device)
    truncated = ordered.double().masked_fill_(place >= limit, 0.0)
    before = truncated.cumsum(dim=-1) - truncated
    share = torch.from_numpy(top_p).to(device)[:, None]
    # The likeliest token has nothing before it and always stays.
    truncated.masked_fill_((before >= share * truncated.sum(dim=-1, keepdim=True)) & (place > 0), 0.0)
    drawn = _draw(truncated.cumsum(dim=-1), torch.from_numpy(uniform).to(device)[:, None])
    return ids.gather(-1, drawn)
