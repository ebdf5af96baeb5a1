"""What an agent may say on its way: rewards, kept by name, the last of a name wins.

Emitting works inside a rollout of a runner; outside of one it is a no-op, so that a decorated function stays an
ordinary function.
"""

import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_emitted: ContextVar[dict[str, float] | None] = ContextVar("lightning_rl_emitted", default=None)


def emit_reward(value: float, name: str = "reward") -> None:
    """Record a reward of the running rollout; the one named `reward` is the final one.

    Raises ValueError for a value that is not a finite number.
    """
    rewards = _emitted.get()
    checked = finite(value, f"emit_reward(name={name!r})")
    if rewards is not None:
        rewards[name] = checked


@contextmanager
def collect_rewards() -> Iterator[dict[str, float]]:
    """Collect what is emitted inside the block, in this thread and in the tasks that it starts."""
    rewards: dict[str, float] = {}
    token = _emitted.set(rewards)
    try:
        yield rewards
    finally:
        _emitted.reset(token)


def finite(value: object, where: str) -> float:
    """`value` as a float. Raises ValueError naming `where` for NaN, infinities and what is no number."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{where}: a reward must be a finite number, got {value!r}")
    return float(value)
