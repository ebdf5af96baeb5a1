"""The best checkpoint and early stopping: what the rewards on a tuning set say of a run, one measurement at a time.

Invariant: they go by the tuning set alone. A validation set that a choice was made by would no longer be one.
"""

import math
from typing import Any


class TuningRecord:
    """The best step so far, and when to stop looking for a better one.

    Args:
        patience: end after so many measurements in a row without a rise that counts; None: never early.
        min_delta: a rise counts where it is more than this, above the last one that counted.
    """

    def __init__(self, patience: int | None = None, min_delta: float = 0.0) -> None:
        self.patience = patience
        self.min_delta = min_delta
        self.best_step: int | None = None
        self.best_reward = -math.inf
        self._reference = -math.inf  # the last reward that counted as a rise
        self._without_rise = 0
        self._last = -math.inf

    def measured(self, step: int, reward: float) -> bool:
        """Enter the mean reward on the tuning tasks after `step`; whether it is the best so far (the first of equals).

        However little it is better by, the best is the best; `min_delta` is a matter of patience alone.
        """
        best = reward > self.best_reward
        if best:
            self.best_step, self.best_reward = step, reward
        if reward > self._reference + self.min_delta:
            self._reference, self._without_rise = reward, 0
        else:
            self._without_rise += 1
        self._last = reward
        return best

    @property
    def stop(self) -> str | None:
        """Why the run ends here, in a sentence; None where it goes on."""
        if self.patience is None or self._without_rise < self.patience:
            return None
        least = f" by more than {self.min_delta:g}" if self.min_delta else ""
        times = "measurement" if self._without_rise == 1 else f"{self._without_rise} measurements"
        best = "" if self.best_step is None else f"; the best is {self.best_reward:.4g}, of step {self.best_step}"
        return f"the reward on the tuning tasks, now {self._last:.4g}, has not risen{least} in the last {times}{best}"

    def state_dict(self) -> dict[str, Any]:
        """What was measured, for a checkpoint; patience and min_delta are the config's."""
        return {
            "best_step": self.best_step,
            "best_reward": self.best_reward,
            "reference": self._reference,
            "without_rise": self._without_rise,
            "last": self._last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.best_step, self.best_reward = state["best_step"], state["best_reward"]
        self._reference, self._without_rise = state["reference"], state["without_rise"]
        self._last = state["last"]
