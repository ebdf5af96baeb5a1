"""Who is written by which of an engine's batches, who waits for a row, and whom a pause holds.

Invariant: nobody waits while there is room for it, but for one whose long prompt another batch is reading: what that
batch has read is then copied.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from lightning_rl.inference import batch

ALONE = 24  # rows that one batch writes before another takes any: fewer are no faster in two


class _Pause:
    """Of the engine's model, or of an adapter over it."""

    def __init__(self) -> None:
        self.on = False
        self.frozen = False  # also what is being written stands still
        self.held: list[batch.Sequence] = []  # that came meanwhile


class Scheduler:
    """Whoever uses it holds a lock.

    Args:
        batches: how many there are.
        max_rows: of all of them together.
        copies_prompts: a batch can copy what another one has read of a prompt.
    """

    def __init__(self, batches: int, max_rows: int, *, copies_prompts: bool) -> None:
        self._max_rows = max_rows
        self._copies_prompts = copies_prompts
        self._rows = np.zeros((batches, 1), np.int64)  # of each batch, with each adapter
        self._waiting: deque[batch.Sequence] = deque()
        self._by_priority = False  # whether any ever had one
        self._being_read: set[tuple[int, bytes]] = set()
        self._pauses = [_Pause()]  # by adapter

    def add_adapter(self) -> int:
        """There is another one; its number."""
        self._pauses.append(_Pause())
        self._rows = np.zeros((len(self._rows), len(self._pauses)), np.int64)
        return len(self._pauses) - 1

    @property
    def adapters(self) -> int:
        """How many there are, the model without one included."""
        return len(self._pauses)

    @property
    def waiting(self) -> int:
        """How many wait for a row."""
        return len(self._waiting)

    def add(self, sequences: Iterable[batch.Sequence]) -> None:
        """They wait: the lowest priority first, of equal ones the first to come; or are held by a pause."""
        for sequence in sequences:
            pause = self._pauses[sequence.adapter]
            (pause.held if pause.on else self._waiting).append(sequence)
            self._by_priority = self._by_priority or sequence.priority != 0
        if self._by_priority:
            self._waiting = deque(sorted(self._waiting, key=attrgetter("priority")))

    def take(self, number: int, free: int) -> list[batch.Sequence]:
        """Those that join this batch now, which has so many free rows."""
        if not self._waiting:
            return []
        most = min(free, room(len(self._waiting), self._rows.sum(axis=1).tolist(), self.going, number, self._max_rows))
        joining: list[batch.Sequence] = []
        passed: list[batch.Sequence] = []
        while self._waiting and len(joining) < most:
            sequence = self._waiting.popleft()
            (passed if sequence.long_prompt in self._being_read else joining).append(sequence)
        self._waiting.extendleft(reversed(passed))
        for sequence in joining:
            self._rows[number, sequence.adapter] += 1
        if self._copies_prompts:
            self._being_read.update(one.long_prompt for one in joining if one.long_prompt is not None)
        return joining

    def read(self, sequences: Iterable[batch.Sequence]) -> None:
        """Their prompts have been read, or had been before."""
        if self._being_read:
            self._being_read -= {one.long_prompt for one in sequences}

    def leave(self, number: int, sequence: batch.Sequence) -> None:
        """It has ended, and leaves its batch."""
        self._rows[number, sequence.adapter] -= 1

    def remove(self, sequence: batch.Sequence) -> None:
        """One that waits, or is held, does so no longer."""
        held = self._pauses[sequence.adapter].held
        (held if sequence in held else self._waiting).remove(sequence)

    @property
    def frozen(self) -> NDArray[np.bool_]:
        """Of each adapter, whether rows with it stand still."""
        return np.array([one.frozen for one in self._pauses])

    @property
    def going(self) -> list[bool]:
        """Of each batch, whether it has rows that do not stand still."""
        return [bool(rows) for rows in self._rows[:, ~self.frozen].sum(axis=1)]

    def pause(self, adapter: int, *, freeze: bool) -> None:
        """Those with this adapter wait until `resume`; with `freeze` also those that are being written."""
        pause = self._pauses[adapter]
        pause.on, pause.frozen = True, pause.frozen or freeze
        pause.held += [one for one in self._waiting if one.adapter == adapter]
        self._waiting = deque(one for one in self._waiting if one.adapter != adapter)

    def resume(self, adapter: int) -> None:
        """Go on after `pause`."""
        pause = self._pauses[adapter]
        held, pause.held = pause.held, []
        pause.on = pause.frozen = False
        self.add(held)

    def paused(self, adapter: int) -> bool:
        """Whether those that come wait until `resume`."""
        return self._pauses[adapter].on

    def quiet(self, adapter: int) -> bool:
        """Whether nothing is sampled with that adapter."""
        return self._pauses[adapter].frozen or not self._rows[:, adapter].any()


def room(waiting: int, rows: Sequence[int], going: Sequence[bool], number: int, most: int) -> int:
    """How many of those that wait may join a batch now: a fair share for each batch that is needed.

    Args:
        waiting: how many wait.
        rows: of each batch, how many it has.
        going: of each batch, whether it writes any of its rows.
        number: which of them asks.
        most: rows of all batches together.
    """
    total = waiting + sum(rows)
    needed = min(len(rows), -(-total // ALONE))
    if not waiting or (not going[number] and sum(going) >= needed):
        return 0
    return max(0, min(waiting, -(-total // needed) - rows[number], most - sum(rows)))
