"""What may be a reward: a finite number; anything else is an error that names where it came from."""

import math
from collections.abc import Mapping

from lightning_rl.agents.values import number
from lightning_rl.errors import Explained
from lightning_rl_adapters.credit import FINAL


class RewardError(Explained, ValueError):
    """A reward function or a judge gave what is no reward."""


def finite(value: object, where: str) -> float:
    """`value` as a float. Raises RewardError naming `where` for NaN, infinities and what is no number."""
    as_float = number(value)
    if as_float is None:
        raise RewardError(f"{where} is {value!r}, of type {type(value).__name__}; return a number")
    if not math.isfinite(as_float):
        raise RewardError(f"{where} is {as_float}; it must be finite")
    return as_float


def named_rewards(rewards: object, where: str) -> dict[str, float]:
    """One rollout's rewards by name; a plain number is the final one.

    Raises RewardError naming `where`: a value is no finite number, or none is named `reward`.
    """
    if not isinstance(rewards, Mapping):
        return {FINAL: finite(rewards, f"{where}: the reward")}
    if FINAL not in rewards:
        raise RewardError(f"{where}: the rewards {sorted(map(str, rewards))} have none named {FINAL!r}; add it")
    return {str(name): finite(value, f"{where}: the reward {name!r}") for name, value in rewards.items()}
