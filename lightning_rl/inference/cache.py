"""Keys and values: of the sequences that are written, one row (slot) each, and those kept for prompts that begin like
something already read.

Invariant: a query at position p of a row sees exactly the columns 0..p of that row, and every one of them was written
by that row's own tokens, or copied from a row of the same tokens that the weights in force wrote. Columns beyond may
hold leftovers; no mask ever shows them.
"""

import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from lightning_rl.errors import Explained

Ints = NDArray[np.int64]

SHORTEST_PREFIX = 8  # fewer tokens are sooner read again than copied
OTHER_ENGINE = "use vLLM, actor_rollout_ref.rollout.name=vllm, or SGLang"


class ModelUnfit(Explained, ValueError):
    """The embedded engine cannot sample from a model, or not with such a context."""


def at_first(max_rows: int, max_length: int) -> tuple[int, int]:
    """Rows and columns that a cache takes memory for at first."""
    return min(max_rows, 4), min(max_length, 128) + 1


def grown(
    rows: int, columns: int, needed_rows: int, needed_columns: int, max_rows: int, max_length: int
) -> tuple[int, int]:
    """Rows and columns of a cache of `rows` and `columns` once it has room for others: they double."""
    while rows < needed_rows:
        rows = min(2 * rows, max_rows)
    while columns <= needed_columns:
        columns = min(2 * columns, max_length + 1)
    return rows, columns


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's part: hands the new keys and values to the cache that owns the memory."""

    is_sliding = False

    def __init__(self, cache: "SlotCache", number: int) -> None:
        super().__init__()
        self.cache = cache
        self.number = number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape != value_states.shape:
            raise ModelUnfit(
                f"the model's keys are {key_states.shape[-1]} numbers wide, its values {value_states.shape[-1]}: the "
                f"embedded engine has no cache for such attention; {OTHER_ENGINE}"
            )
        self.cache.allocate(key_states.shape[1], key_states.shape[3], key_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.cache.update(key_states, value_states, self.number)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.window, 0

    def get_seq_length(self) -> int:
        return self.cache.window

    def get_max_length(self) -> int:
        return self.cache.max_length


class SlotCache(Cache):  # type: ignore[misc]
    """The `past_key_values` of a forward pass over rows [first, first + b).

    `place` says before each pass where its tokens go; `update` (called by the model, once per layer)
    scatters them and returns the rows' window [b, heads, window, head_dim] as views. Memory grows by
    doubling up to `max_rows` x `max_length`; the last column of a row is where padding is written.
    """

    def __init__(self, n_layers: int, max_rows: int, max_length: int) -> None:
        super().__init__(layers=[SlotLayer(self, number) for number in range(n_layers)])
        self.n_layers = n_layers
        self.max_rows = max_rows
        self.max_length = max_length
        self.window = 0
        self._first = 0
        self._end = 0
        self._rows, self._columns = at_first(max_rows, max_length)
        # [layers, 2 (k, v), rows, heads, columns, head_dim]: what a head reads lies together, also for the next head.
        self._memory: Tensor | None = None
        self._layers: list[Tensor] = []  # the same, by layer, and as
        self._flat: list[Tensor] = []  # [2 * rows * heads * columns, head_dim]
        self._cells: tuple[Ints, Ints] = (np.empty(0, np.int64), np.empty(0, np.int64))  # rows and columns, [b * q]
        self._target: Tensor | None = None  # their places in `_flat`, [b * q * 2 * heads]

    def place(self, first: int, positions: Ints) -> None:
        """The next pass writes row first + i, columns positions[i] (shape [b, q]; -1 is padding)."""
        self._first, self._end = first, first + positions.shape[0]
        self.window = int(positions.max()) + 1
        self._reserve(self._end, self.window)
        rows = np.arange(self._first, self._end).repeat(positions.shape[1])
        self._cells = rows, np.where(positions < 0, self._columns - 1, positions).reshape(-1)
        self._target = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """New keys and values [b, heads, q, head_dim] in; everything the rows hold so far out."""
        if self._memory is None:
            self.layers[layer_idx].lazy_initialization(key_states, value_states)
        both = torch.cat([key_states, value_states], dim=1).transpose(1, 2).flatten(0, 1)
        return self.write(layer_idx, both)

    def write(self, layer: int, both: Tensor) -> tuple[Tensor, Tensor]:
        """As `update`, of keys and then values [b * q, 2 * heads, head_dim]."""
        if self._target is None:
            rows, columns = (cells[:, None] for cells in self._cells)
            heads = both.shape[1] // 2
            which, head = np.divmod(np.arange(2 * heads), heads)
            places = ((which * self._rows + rows) * heads + head) * self._columns + columns
            self._target = torch.from_numpy(places.reshape(-1)).to(both.device)
        self._flat[layer].index_copy_(0, self._target, both.reshape(-1, both.shape[-1]))
        keys, values = self._layers[layer][:, self._first : self._end, :, : self.window]
        return keys, values

    def allocate(self, heads: int, head_dim: int, like: Tensor) -> None:
        """Take the memory, with the dtype and device of `like`, where that has not been done."""
        if self._memory is not None:
            return
        shape = (self.n_layers, 2, self._rows, heads, self._columns, head_dim)
        self._adopt(like.new_zeros(shape))

    def copy_to(self, other: "SlotCache", sources: Ints, targets: Ints, length: int) -> None:
        """Copy the first `length` columns of rows `sources` over rows `targets` of `other`.

        `other` may be this cache; then no row is both source and target.
        """
        if self._memory is None:
            return
        self._reserve(int(sources.max()) + 1, length)
        other.allocate(self._memory.shape[3], self._memory.shape[5], self._memory)
        other._reserve(int(targets.max()) + 1, length)
        # Row by row: index_select would first copy the whole memory, which a window of is not contiguous.
        mine, other_memory = self._memory, other._memory
        assert other_memory is not None
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            other_memory[:, :, target, :, :length] = mine[:, :, source, :, :length]

    def _reserve(self, rows: int, columns: int) -> None:
        if rows <= self._rows and columns < self._columns:
            return
        if rows > self.max_rows or columns > self.max_length:
            raise IndexError(
                f"slot {rows - 1}, column {columns - 1} is outside of the cache of {self.max_rows} x {self.max_length}"
            )
        self._rows, self._columns = grown(self._rows, self._columns, rows, columns, self.max_rows, self.max_length)
        if (old := self._memory) is not None:
            # Zeros, not empty: a masked NaN still poisons attention, since 0 * NaN is NaN.
            layers, two, old_rows, heads, old_columns, head_dim = old.shape
            memory = old.new_zeros(layers, two, self._rows, heads, self._columns, head_dim)
            memory[:, :, :old_rows, :, : old_columns - 1] = old[..., :-1, :]
            self._adopt(memory)

    def _adopt(self, memory: Tensor) -> None:
        self._memory = memory
        self._layers = list(memory.unbind(0))
        self._flat = [layer.flatten(0, 3) for layer in self._layers]


class KeptPrefix(NamedTuple):
    """A kept row, how many tokens of a prompt it begins with, and when that was looked up."""

    row: int
    shared: int
    at: int


NOTHING = KeptPrefix(0, 0, -1)


class Prefixes:
    """At most `size` kept sequences; what was kept longest ago goes first. Its memory is a cache of its own.

    A sequence that goes on from a whole kept one takes its row: nothing is lost, and the turns of a conversation take
    the room of the last one. What is kept was computed wholly by the weights in force: `clear` comes with every update.
    Several threads may use it, each within `lock`, from what it finds to where that is copied.
    """

    def __init__(self, size: int, n_layers: int, max_length: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self._cache = SlotCache(n_layers, max(size, 1), max_length)
        self._tokens = np.full((size, min(max_length, 128)), -1, np.int64)  # padded with -1
        self._adapters = np.zeros(size, np.int64)  # by which each was read
        self._lengths = np.zeros(size, np.int64)
        self._used = 0
        self._times = 0  # that something was kept or forgotten
        self._kept_at = np.zeros(max(size, 1), np.int64)  # each row, by that count
        self._begun_at = np.zeros(max(size, 1), np.int64)  # and since when it was only gone on from
        self._cleared = 0

    def find(self, prompt: Ints, adapter: int, earlier: KeptPrefix = NOTHING) -> KeptPrefix:
        """The kept row that begins like `prompt` for longest, read by `adapter`; `shared` is 0 for too few tokens.

        The last token is never counted: it has to be read for the logits that follow it. `earlier` is the answer for
        the same prompt before: then only what was kept since is looked at, unless its own row is another's now.
        """
        width = min(len(prompt) - 1, self._tokens.shape[1])
        if earlier.at < self._cleared or self._begun_at[earlier.row] > earlier.at:
            earlier = NOTHING
        rows = np.flatnonzero(self._kept_at[: self._used] > earlier.at)
        if width < SHORTEST_PREFIX or not rows.size:
            return earlier._replace(at=self._times)
        differs = self._tokens[rows, :width] != prompt[:width]
        differs[:, 0] |= self._adapters[rows] != adapter
        shared = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        best = int(shared.argmax())
        if shared[best] < max(SHORTEST_PREFIX, earlier.shared + 1):
            return earlier._replace(at=self._times)
        return KeptPrefix(int(rows[best]), int(shared[best]), self._times)

    def keep(
        self, cache: SlotCache, rows: list[int], contents: list[Ints], adapters: Ints, prefixes: list[KeptPrefix]
    ) -> list[KeptPrefix]:
        """Keep the first len(contents[i]) columns of row rows[i], which those tokens wrote by adapter adapters[i].

        `prefixes[i]` is what was there of contents[i], or kept; what comes back is where each is now.
        """
        now = list(prefixes)
        order = [each for each, tokens in enumerate(contents) if len(tokens) >= SHORTEST_PREFIX]
        order = order[-self.size :] if self.size else []
        if not order:
            return now
        longest = max(len(contents[each]) for each in order)
        self._widen(longest)
        self._times += 1
        for each in order:
            tokens, adapter = contents[each], int(adapters[each])
            target = self._target(prefixes[each])
            self._tokens[target] = -1
            self._tokens[target, : len(tokens)] = tokens
            self._adapters[target] = adapter
            self._lengths[target] = len(tokens)
            self._kept_at[target] = self._times
            now[each] = KeptPrefix(target, len(tokens), self._times)
        sources, targets = (
            np.array(which) for which in ([rows[each] for each in order], [now[each].row for each in order])
        )
        cache.copy_to(self._cache, sources, targets, longest)
        return now

    def restore(self, cache: SlotCache, kept_rows: list[int], rows: list[int], length: int) -> None:
        """Copy the first `length` columns of the kept rows to rows of `cache`."""
        self._cache.copy_to(cache, np.array(kept_rows), np.array(rows), length)

    def clear(self, adapter: int) -> None:
        """Forget what was read by that adapter; 0: everything, since all are over the same weights."""
        self._times += 1
        self._cleared = self._times
        if adapter:
            outdated = self._adapters == adapter
            self._tokens[outdated] = -1
            self._kept_at[: self.size][outdated] = 0  # these rows are taken first
        else:
            self._used = 0

    def _target(self, prefix: KeptPrefix) -> int:
        """The row for a sequence that begins with `prefix`: that row, where it is gone on from as a whole."""
        alone = self._kept_at[prefix.row] <= prefix.at and self._cleared <= prefix.at
        if prefix.shared and alone and self._lengths[prefix.row] == prefix.shared:
            return prefix.row
        if self._used < self.size:
            target = self._used
            self._used += 1
        else:
            target = int(self._kept_at[: self.size].argmin())
        self._begun_at[target] = self._times
        return target

    def _widen(self, columns: int) -> None:
        width = self._tokens.shape[1]
        if columns > width:
            more = ((0, 0), (0, max(columns, 2 * width) - width))
            self._tokens = np.pad(self._tokens, more, constant_values=-1)
