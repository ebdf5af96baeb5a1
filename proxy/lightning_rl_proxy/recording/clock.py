"""The time that calls are recorded with: the machine's clock as it stood at the start, counted on steadily.

Invariant: it never goes back, nor behind what was recorded before, so calls of this process are told from earlier ones
whoever sets the machine's clock.
"""

import time


class Clock:
    """Nanoseconds since the epoch."""

    def __init__(self) -> None:
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self.began_ns = self()

    def __call__(self) -> int:
        """The time now."""
        return self._epoch_ns + time.monotonic_ns()

    def begin_after(self, ns: int) -> None:
        """Begin behind `ns`, where the clock stands before it."""
        self._epoch_ns += max(0, ns + 1 - self())
        self.began_ns = self()
