"""Keys and values kept for prompts that begin as something already read: a group's, or the next turn's.

Invariant: what is kept was computed wholly by the weights in force; `clear` comes with every update.
"""

import numpy as np
from numpy.typing import NDArray

from lightning_rl.inference.cache import SlotCache

Ints = NDArray[np.int64]

SHORTEST = 8  # fewer tokens are sooner read again than copied


class Prefixes:
    """A ring of `size` kept sequences; the oldest goes first. Its memory is a cache of its own."""

    def __init__(self, size: int, n_layers: int, max_length: int) -> None:
        self.size = size
        self._cache = SlotCache(n_layers, max(size, 1), max_length)
        self._tokens = np.full((size, min(max_length, 128)), -1, np.int64)  # padded with -1
        self._adapters = np.zeros(size, np.int64)  # by which each was read
        self._used = 0
        self._next = 0

    def find(self, prompt: Ints, adapter: int) -> tuple[int, int]:
        """(kept row, how many tokens of `prompt` it begins with, read by `adapter`); the count is 0 for too few.

        The last token is never counted: it has to be read for the logits that follow it.
        """
        width = min(len(prompt) - 1, self._tokens.shape[1])
        if width < SHORTEST or not self._used:
            return 0, 0
        differs = self._tokens[: self._used, :width] != prompt[:width]
        differs[:, 0] |= self._adapters[: self._used] != adapter
        shared = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        row = int(shared.argmax())
        return (row, int(shared[row])) if shared[row] >= SHORTEST else (0, 0)

    def keep(self, cache: SlotCache, rows: list[int], contents: list[Ints], adapters: Ints) -> None:
        """Keep the first len(contents[i]) columns of row rows[i], which those tokens wrote by adapter adapters[i]."""
        every = zip(rows, contents, adapters.tolist(), strict=True)
        pairs = [each for each in every if len(each[1]) >= SHORTEST][-self.size :]
        if not pairs or not self.size:
            return
        longest = max(len(tokens) for _, tokens, _ in pairs)
        self._widen(longest)
        targets = (self._next + np.arange(len(pairs))) % self.size
        for target, (_, tokens, adapter) in zip(targets, pairs, strict=True):
            self._tokens[target] = -1
            self._tokens[target, : len(tokens)] = tokens
            self._adapters[target] = adapter
        self._next = int(targets[-1] + 1) % self.size
        self._used = max(self._used, int(targets.max()) + 1)
        cache.copy_to(self._cache, np.array([row for row, *_ in pairs]), targets, longest)

    def restore(self, cache: SlotCache, kept: list[int], rows: list[int], length: int) -> None:
        """Copy the first `length` columns of the kept rows to rows of `cache`."""
        self._cache.copy_to(cache, np.array(kept), np.array(rows), length)

    def clear(self, adapter: int) -> None:
        """Forget what was read by that adapter; 0: everything, since all are over the same weights."""
        if adapter:
            self._tokens[self._adapters == adapter] = -1
        else:
            self._used = self._next = 0

    def _widen(self, columns: int) -> None:
        width = self._tokens.shape[1]
        if columns > width:
            more = ((0, 0), (0, max(columns, 2 * width) - width))
            self._tokens = np.pad(self._tokens, more, constant_values=-1)
