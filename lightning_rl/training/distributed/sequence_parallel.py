"""One row computed by several workers: each has a part of its tokens, and in attention a part of the heads (Ulysses).

Before attention a group's workers exchange what they have, so that each has all tokens of its own heads, and after it
they exchange it back (Jacobs et al. 2023, arXiv 2309.14509). To the model that is a mask: torch hands the call of
`scaled_dot_product_attention` to it, as to a `TreeMask`, which may be within.

Invariant: the workers of a group are given the same rows, and each trains those tokens whose distributions it computes.
Loss, gradient and metrics are sums over tokens, so they add up over all workers as they do anyway.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_rl.training.batch import TrainingSequence
from lightning_rl.training.distributed.forward import ShardedForward, on_cpu
from lightning_rl.training.layers.attention import AttentionMask, Segment
from lightning_rl.training.model_traits import apart, evaluating, probe_rows, refusal_of, tolerance
from lightning_rl.training.packing import Ints, Layout, alone, lay_out
from lightning_rl.vision import ModelVision

T = TypeVar("T")


class CannotBeSplit(ValueError):
    """A model, or a row, that several workers cannot compute together."""


@dataclass
class SequencePart(TrainingSequence):
    """A sequence of which this worker trains some tokens: those of `whole` that `mask` [K] has."""

    whole: TrainingSequence | None = None
    mask: Any = None


class SequenceParallelForward(ShardedForward):
    """`ShardedForward` where so many workers as `group` has compute a row together.

    Args:
        model, pad_id, talk, packed, autocast, vision: as of `ShardedForward`.
        group: the neighbours of this worker; they exchange tokens over it.

    Raises CannotBeSplit for a model that cannot be computed so; it is tried on a few tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        pad_id: int,
        *,
        talk: dist.ProcessGroup,
        group: dist.ProcessGroup,
        packed: bool = False,
        autocast: torch.dtype | None = None,
        vision: ModelVision | None = None,
    ) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._split = False  # what a model allows is tried without
        self._parts: list[SequencePart] = []
        super().__init__(model, pad_id, talk=talk, packed=packed, autocast=autocast, vision=vision)
        self._groups = 1  # a worker's heads need not be whole groups that share a key
        with evaluating(self.model), self._resharding():
            self._check()

    def micro_batches(
        self, sequences: Sequence[TrainingSequence], *, rows: int | None, tokens: int | None
    ) -> Iterator[list[TrainingSequence]]:
        """As of `ShardedForward`, the same for all workers of a group, but for which tokens are trained: `tokens` are
        those that each of them computes."""
        self._parts = []
        for micro in super().micro_batches(
            sequences, rows=rows, tokens=None if tokens is None else tokens * self._size
        ):
            own = self._own_parts(micro)
            self._parts += own
            yield list(own)

    def gathered(self, sequences: Sequence[TrainingSequence], by_id: Mapping[int, T]) -> list[T]:
        """As of `ShardedForward`; what is found of a sequence is joined of what is found of its parts."""
        numbers = {id(sequence): n for n, sequence in enumerate(sequences)}
        own = [
            (numbers[id(part.whole)], on_cpu(by_id[id(part)]))
            for part in self._parts
            if id(part) in by_id and id(part.whole) in numbers
        ]
        of_all: list[list[tuple[int, T]]] = [[]] * self._talk.size()
        dist.all_gather_object(of_all, own, group=self._talk)
        joined: dict[int, list[T]] = {}
        for number, value in (one for of_one in of_all for one in of_one):
            joined.setdefault(number, []).append(value)  # by rank, which is the order of a row's tokens
        return [_join(joined[n]) for n in range(len(sequences))]

    def of_part(self, sequence: TrainingSequence, values: Mapping[int, Tensor]) -> Tensor:
        """Those of a sequence's `values` (by its `id`, [K]) that are of the tokens of this part."""
        assert isinstance(sequence, SequencePart)
        return values[id(sequence.whole)][torch.from_numpy(sequence.mask)]

    def _share(self) -> tuple[int, int]:
        return self._talk.rank() // self._size, self._talk.size() // self._size

    def _own_parts(self, micro: Sequence[TrainingSequence]) -> list[SequencePart]:
        whole = super()._layout(micro)
        length = whole.token_ids.shape[1]
        is_own = (whole.at % length // self._width(length) == self._rank)[whole.which]
        ends = np.cumsum([len(sequence.trained) for sequence in micro])[:-1]
        return [_part(sequence, own) for sequence, own in zip(micro, np.split(is_own, ends), strict=True)]

    def _layout(self, micro: Sequence[TrainingSequence]) -> Layout:
        """This worker's columns of it; `end` and `segments` stay whole, as attention needs them."""
        whole = super()._layout(micro)
        return self._columns(whole) if self._split else whole

    def _columns(self, whole: Layout) -> Layout:
        rows, length = whole.token_ids.shape
        if self._longest is not None and length > self._longest:
            raise CannotBeSplit(
                f"a row of {length} tokens is longer than the {self._longest} that attention reaches back in this "
                "model: set ulysses_sequence_parallel_size=1"
            )
        width = self._width(length)
        own = slice(self._rank * width, (self._rank + 1) * width)
        more = width * self._size - length
        row, column = np.divmod(whole.at, length)
        end = np.concatenate([whole.end, np.broadcast_to(np.arange(length + 1, length + more + 1), (rows, more))], 1)
        return replace(
            whole,
            token_ids=np.ascontiguousarray(_wider(whole.token_ids, more, self._pad_id)[:, own]),
            position_ids=np.ascontiguousarray(_wider(whole.position_ids, more, 0)[:, own]),
            end=end,  # padding sees itself
            at=row * width + column - own.start,
            segments=[_moved(segment, segment.start // length * more) for segment in whole.segments],
        )

    def _width(self, length: int) -> int:
        """The columns of each worker."""
        return -(-length // self._size)

    def _inputs(self, layout: Layout) -> dict[str, Any]:
        if not self._split:
            return super()._inputs(layout)
        whole = self._mask(layout) if layout.masked else None
        return {
            "input_ids": self._tensor(layout.token_ids),
            "position_ids": self._tensor(layout.position_ids),
            "attention_mask": ExchangingMask(layout.token_ids.shape, self._dtype, self.device, self._group, whole),
            "use_cache": False,
        }

    def _check(self) -> None:
        """Raises CannotBeSplit where the workers of a group do not come to the states of one."""
        if (reason := refusal_of(self._config)) is not None:
            raise CannotBeSplit(f"rows of this model cannot be split: {reason}")
        rows = probe_rows(self._config)
        layout = lay_out(rows, alone(rows), self._pad_id, masked=False)
        right = torch.split(self._states(layout), [len(row.trained) for row in rows])
        self._split = True
        parts = self._own_parts(rows)
        expected = [state[torch.from_numpy(part.mask)] for state, part in zip(right, parts, strict=True)]
        actual = self._states(self._layout(parts))
        wrong = torch.tensor(apart(actual, torch.cat(expected)) > tolerance(self._dtype) * apart(torch.cat(right)))
        dist.all_reduce(counted := wrong.int(), dist.ReduceOp.MAX, group=self._talk)
        if counted.item():
            raise CannotBeSplit(
                "rows of this model cannot be split: its states are others than those of one worker; set "
                "ulysses_sequence_parallel_size=1"
            )


class ExchangingMask(AttentionMask):
    """A mask [B, 1, S, S] over the S tokens of one worker, whose attention is over the tokens of all of a group.

    It holds no numbers: whoever asks for some computes another attention than `scaled_dot_product_attention`.
    """

    _group: dist.ProcessGroup
    _whole: Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        whole: Tensor | None,
    ) -> "ExchangingMask":
        """
        Args:
            shape: B and S.
            group: the workers that have the other tokens.
            whole: what is added to attention scores over all of them; None: they are causal.
        """
        rows, length = shape
        made: ExchangingMask = torch.Tensor._make_wrapper_subclass(
            cls, (rows, 1, length, length), dtype=dtype, device=device
        )
        made._group, made._whole = group, whole
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
        """Attention [B, H, S, D] over the tokens of all workers of the mask's group."""
        group, whole = attn_mask._group, attn_mask._whole
        heads, size = query.shape[1], group.size()
        if heads % size:
            raise CannotBeSplit(
                f"{heads} heads of attention are not {size} equal parts, one for each worker of a group"
            )
        if key.shape[1] % size:
            key, value = (states.repeat_interleave(heads // key.shape[1], 1) for states in (key, value))
        q, k, v = (_exchange(states, group, 1, 2) for states in (query, key, value))
        options["enable_gqa"] = q.shape[1] != k.shape[1]
        attended = scaled_dot_product_attention(q, k, v, whole, dropout_p, whole is None, **options)
        return _exchange(attended, group, 2, 1)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise CannotBeSplit(
            f"rows of this model cannot be split: its attention asks for {func}; set attn_implementation=sdpa"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ExchangingMask of {self._group.size()} workers"


class _Exchange(torch.autograd.Function):
    """Each worker gives every other a part of dimension `cut`, and joins what it gets along `joined`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup, cut: int, joined: int) -> Tensor:
        ctx.of = group, cut, joined
        sent = torch.stack(states.chunk(group.size(), cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        group, cut, joined = ctx.of
        return _exchange(gradient, group, joined, cut), None, None, None


def _exchange(states: Tensor, group: dist.ProcessGroup, cut: int, joined: int) -> Tensor:
    exchanged: Tensor = _Exchange.apply(states, group, cut, joined)  # type: ignore[no-untyped-call]
    return exchanged


def _part(sequence: TrainingSequence, mask: Any) -> SequencePart:
    values = {field.name: getattr(sequence, field.name) for field in fields(TrainingSequence)}
    part = SequencePart(**values, whole=sequence, mask=mask)
    part.keep(mask)
    part.entropies = None
    return part


def _moved(segment: Segment, by: int) -> Segment:
    return replace(segment, start=segment.start + by, before=segment.before + by)


def _wider(values: Ints, more: int, filled: int) -> Ints:
    return np.pad(values, ((0, 0), (0, more)), constant_values=filled)


def _join(parts: list[Any]) -> Any:
    """Tensors, arrays, or tuples of them, one behind the other; None where it is None of each."""
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, tuple):
        return type(first)(*map(_join, map(list, zip(*parts, strict=True))))
    return torch.cat(parts) if isinstance(first, Tensor) else np.concatenate(parts)
