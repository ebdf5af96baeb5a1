"""Which tasks of a batch are traced: so many of them, and of each all its rollouts.

Invariant: the same seed and step choose the same tasks, and no generator of random numbers that training draws from is
touched.
"""

import random
from collections.abc import Sequence


class TraceSampling:
    """`most` tasks of a step, or of a validation, at most; None: all."""

    def __init__(self, most: int | None, seed: int) -> None:
        self._most = most
        self._seed = seed
        self._batch = ""
        self._remaining = 0

    def of(self, batch: str, groups: Sequence[str]) -> set[str]:
        """The groups to trace among these of `batch`; a batch that comes in parts has its number once."""
        if self._most is None:
            return set(groups)
        if batch != self._batch:
            self._batch, self._remaining = batch, self._most
        sample = random.Random(f"{self._seed} {batch}").sample(sorted(groups), min(self._remaining, len(groups)))
        self._remaining -= len(sample)
        return set(sample)
