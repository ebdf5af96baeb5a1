"""Attention over a tree of tokens that computes only what is seen: a mask that knows the tree it was made of.

A token of a tree sees its own path from the root. Behind a mask all pairs of a line are computed, and most are hidden.
Here the tokens of a branch (a `Segment`) are given the keys of the branches above it and their own, and segments of
like size are one call of `scaled_dot_product_attention`; on a GPU all of them are one call of `flex_attention`, where
that computes (`layers.flex`). To the model it is a mask like any other: torch hands the
call to `TreeMask`, so no model and no configuration is changed, and a layer that is computed again in the backward pass
finds it again. Whoever wants the numbers of the mask (other kinds of attention) gets them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import embedding, scaled_dot_product_attention
from torch.utils._pytree import tree_map

from lightning_rl.training.layers import flex

Ints = NDArray[np.int64]

# In pairs of a query and a key, forward and backward; measured. A call costs a GPU as much as many more pairs.
PER_PLACE = 20  # to gather a query, a key and its value, or a result
PER_CALL = {"cpu": 5_000, "cuda": 500_000}


class Size(NamedTuple):
    """Of a segment: how many tokens stand before it on its path, and how many are its own."""

    before: int
    tokens: int


@dataclass(frozen=True)
class Segment:
    """A branch without forks: `tokens` places from `start` on; all of them see the places `before`, int64 [P]. Places
    are counted through [B, T]."""

    start: int
    tokens: int
    before: Ints

    @property
    def size(self) -> Size:
        return Size(len(self.before), self.tokens)


@dataclass(frozen=True)
class _AttentionCall:
    """What one call computes: `queries` int64 [N, Q], `keys` int64 [N, K], `mask` [N or 1, 1, Q, K]; None: causal."""

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


class AttentionMask(Tensor):
    """A mask that computes the attention which it is given to: torch hands it each call of
    `scaled_dot_product_attention`."""

    @staticmethod
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """As `scaled_dot_product_attention`, behind a mask of this kind."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            return cls.attention(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class TreeMask(AttentionMask):
    """What is added to attention scores [B, 1, T, T], without the numbers as long as nobody asks for them.

    Attributes:
        used: how many calls of `scaled_dot_product_attention` were computed without the mask.
    """

    used: int
    _segments: Sequence[Segment]
    _blocks: BlockMask | None
    _parts: tuple[list[_AttentionCall], Tensor] | None
    _groups: int
    _whole: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int],
        segments: Sequence[Segment],
        dtype: torch.dtype,
        device: torch.device,
        whole: Callable[[], Tensor],
        *,
        groups: int = 1,
        blocks: BlockMask | None = None,
    ) -> "TreeMask":
        """
        Args:
            shape: B and T.
            segments: every place that is no padding stands in one.
            whole: the mask as an ordinary tensor.
            groups: queries' heads that share a key; where keys come repeated for each, one of them is taken.
            blocks: the same tree for `flex_attention`; None: attention goes by segments.
        """
        rows, length = shape
        made: TreeMask = torch.Tensor._make_wrapper_subclass(cls, (rows, 1, length, length), dtype=dtype, device=device)
        made._segments, made._blocks, made._parts = segments, blocks, None
        made._groups, made._whole, made.used = groups, whole, 0
        if blocks is None:
            made._by_segments()  # once for all layers
        return made

    @staticmethod
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """By segments where the mask knows them."""
        if isinstance(attn_mask, TreeMask) and not is_causal and attn_mask.fits(query, key):
            options.pop("enable_gqa", None)
            return attn_mask.attend(query, key, value, dropout_p=dropout_p, **options)
        return scaled_dot_product_attention(query, key, value, _plain(attn_mask), dropout_p, is_causal, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Whatever else is computed with it is computed with its numbers."""
        args, kwargs = tree_map(_plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TreeMask of {len(self._segments)} segments"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attention [B, H, T, D] to what the tree sees."""
        if self._groups > 1 and key.shape[1] == query.shape[1]:
            key, value = key[:, :: self._groups], value[:, :: self._groups]
        self.used += 1
        if self._blocks is not None and not options.get("dropout_p"):  # which flex_attention has not
            return flex.attend(query, key, value, self._blocks, options.get("scale"))
        options["enable_gqa"] = key.shape[1] != query.shape[1]
        chosen, where = self._by_segments()
        q, k, v = _by_place(query), _by_place(key), _by_place(value)
        parts = []
        for call in chosen:
            own = scaled_dot_product_attention(
                _gathered(q, call.queries),
                _gathered(k, call.keys),
                _gathered(v, call.keys),
                attn_mask=call.mask,
                is_causal=call.mask is None,
                **options,
            )
            parts.append(own.transpose(1, 2).flatten(0, 1).flatten(1))
        output = embedding(where, torch.cat(parts))
        return output.view(*query.shape[::2], query.shape[1], -1).transpose(1, 2)

    def _by_segments(self) -> tuple[list[_AttentionCall], Tensor]:
        """The calls, and where of their results those of each place stand, int64 [B T]."""
        if self._parts is None:
            rows, _, length, _ = self.shape
            where, written, made = np.zeros(rows * length, dtype=np.int64), 0, []  # of padding: anything
            for numbers in calls([segment.size for segment in self._segments], self.device.type):
                chosen = [self._segments[number] for number in numbers]
                tokens = max(segment.tokens for segment in chosen)
                for segment in chosen:
                    where[segment.start : segment.start + segment.tokens] = np.arange(written, written + segment.tokens)
                    written += tokens
                made.append(_call(chosen, self.dtype, self.device))
            self._parts = made, torch.from_numpy(where).to(self.device)
        return self._parts

    def fits(self, query: Tensor, key: Tensor) -> bool:
        """Whether queries and keys are those of the tree, and no others beside."""
        rows, _, length, _ = self.shape
        return query.shape[::2] == key.shape[::2] == (rows, length)


def calls(sizes: Sequence[Size], device: str) -> list[list[int]]:
    """Segments that are computed at once, as their numbers: those of like size, where padding costs less than a call;
    roots apart, since causal attention needs no mask."""
    numbers: dict[Size, list[int]] = defaultdict(list)
    for number, size in enumerate(sizes):
        numbers[size].append(number)
    return [[number for size in alike for number in numbers[size]] for alike in _alike(Counter(sizes), device)]


def pairs(sizes: Sequence[Size], device: str) -> float:
    """What attention by segments costs, in pairs of a query and a key behind a mask."""
    counts = Counter(sizes)
    total = 0.0
    for alike in _alike(counts, device):
        one = _work(max(map(sum, alike)), max(size.tokens for size in alike), alike[0].before == 0)
        total += sum(counts[size] for size in alike) * one + _per_call(device)
    return total


def seen_pairs(sizes: Sequence[Size]) -> float:
    """The pairs of a query and a key that are seen, which is what `flex_attention` computes but for whole blocks."""
    return sum(size.tokens * (size.before + size.tokens / 2) for size in sizes)


def _alike(counts: Mapping[Size, int], device: str) -> list[list[Size]]:
    """The sizes of each call."""
    of_calls: list[list[Size]] = []
    held, widest, tokens, rooted = 0, 0, 0, False
    for size in sorted(counts, key=lambda size: (size.before > 0, -sum(size), -size.tokens)):
        count, width = counts[size], sum(size)
        if of_calls and rooted == (size.before == 0):
            most = max(tokens, size.tokens)
            together = (held + count) * _work(widest, most, rooted)  # `widest` stays: the wide ones come first
            apart = held * _work(widest, tokens, rooted) + count * _work(width, size.tokens, rooted)
            if together <= apart + _per_call(device):
                of_calls[-1].append(size)
                held, tokens = held + count, most
                continue
        of_calls.append([size])
        held, widest, tokens, rooted = count, width, size.tokens, size.before == 0
    return of_calls


def _work(keys: int, queries: int, rooted: bool) -> float:
    return queries * keys * (0.5 if rooted else 1) + PER_PLACE * (keys + 2 * queries)


def _per_call(device: str) -> float:
    return PER_CALL.get(device, PER_CALL["cuda"])


def _call(segments: Sequence[Segment], dtype: torch.dtype, device: torch.device) -> _AttentionCall:
    width = max(sum(segment.size) for segment in segments)
    tokens = max(segment.tokens for segment in segments)
    queries = np.zeros((len(segments), tokens), dtype=np.int64)
    keys = np.zeros((len(segments), width), dtype=np.int64)
    for number, segment in enumerate(segments):
        own = np.arange(segment.start, segment.start + segment.tokens)
        queries[number, : segment.tokens] = own
        keys[number, : sum(segment.size)] = np.concatenate([segment.before, own])
    before = np.array([len(segment.before) for segment in segments])
    if not before.any():
        at = torch.from_numpy(queries).to(device)
        return _AttentionCall(at, at, None)
    if (before == before[0]).all():
        before = before[:1]
    hidden = torch.from_numpy(np.arange(width) > (before[:, None] + np.arange(tokens))[:, :, None]).to(device)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)
    return _AttentionCall(torch.from_numpy(queries).to(device), torch.from_numpy(keys).to(device), mask[:, None])


def _plain(mask: Any) -> Any:
    return mask._whole() if isinstance(mask, TreeMask) else mask


def _by_place(states: Tensor) -> Tensor:
    """[B, H, T, D] as [B T, H, D]."""
    return states.transpose(1, 2).flatten(0, 1)


def _gathered(states: Tensor, at: Tensor) -> Tensor:
    """[N, H, S, D] of `states` [B T, H, D] at `at` [N, S]; an embedding's backward pass is the fast one."""
    return embedding(at, states.flatten(1)).view(*at.shape, *states.shape[1:]).transpose(1, 2)
