"""Which rewards are numbers, and which of an attempt's rewards is the final one.

Invariant: a reward that is kept is finite; an attempt has at most one final reward.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from lightning_rl.store.contract import Finish, Reward, RolloutTrace
from lightning_rl.store.errors import Invalid
from lightning_rl_adapters.credit import FINAL


def check_finite(rollout_id: str, name: str, value: object) -> float:
    """`value` as a float.

    Raises:
        Invalid: naming the rollout, when it is no number, NaN or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Invalid(
            f"rollout {rollout_id}: the reward {name!r} is {value!r}, of type {type(value).__name__}; return a number"
        )
    if not math.isfinite(value):
        raise Invalid(f"rollout {rollout_id}: the reward {name!r} is {value}; it must be finite")
    return float(value)


def returned_rewards(rollout_id: str, finish: Finish) -> dict[str, float]:
    """What the agent returned, by name; {} when it returned nothing.

    Raises:
        Invalid: naming the rollout, for a bad number or a dict without the name "reward".
    """
    if finish.reward is None:
        return {}
    named = finish.reward if isinstance(finish.reward, dict) else {FINAL: finish.reward}
    if FINAL not in named:
        raise Invalid(
            f"rollout {rollout_id}: the returned rewards {sorted(named)} have none named "
            f"{FINAL!r}; add it: it is the one that is trained on"
        )
    return {name: check_finite(rollout_id, name, value) for name, value in named.items()}


def rewards_by_name(emitted: Iterable[Reward], returned: Mapping[str, float]) -> dict[str, float]:
    """All rewards of an attempt that belong to no single call: the last of a name wins, and a
    returned one comes last. The final reward is the one named "reward", if there is any."""
    named = {reward.name: reward.value for reward in emitted if reward.call_id is None}
    return {**named, **returned}


def rewards_by_call(rewards: Iterable[Reward], names: Mapping[str, str]) -> dict[str, list[Reward]]:
    """The rewards of single calls, by call id; `names` leads from other names of calls to their ids."""
    of_calls: dict[str, list[Reward]] = {}
    for reward in rewards:
        if reward.call_id is not None:
            of_calls.setdefault(names.get(reward.call_id, reward.call_id), []).append(reward)
    return of_calls


def added_up(rewards: Iterable[Reward]) -> dict[str, float]:
    """The rewards of one call by name: those of a name add up."""
    named: dict[str, float] = {}
    for reward in rewards:
        named[reward.name] = named.get(reward.name, 0.0) + reward.value
    return named


def with_late(named: Mapping[str, float], late: Iterable[Reward]) -> dict[str, float]:
    """An attempt's rewards by name after late ones came: these come last of all, so they win, even over a returned
    one; those of single calls change nothing here."""
    return {**named, **rewards_by_name(late, {})}


def with_late_rewards(trace: RolloutTrace, late: Sequence[Reward]) -> RolloutTrace:
    """The trace of a rollout as the store has it when its counting attempt was given late rewards with new ids. The
    rewards of one that has none are as they are."""
    counting = trace.counting
    if counting is None:
        return trace
    named = with_late(counting.attempt.rewards, late)
    outcome = {"rewards": named, "reward": named.get(FINAL)}
    changed = replace(counting, attempt=replace(counting.attempt, **outcome), rewards=[*counting.rewards, *late])
    attempts = [changed if one is counting else one for one in trace.attempts]
    return replace(trace, rollout=replace(trace.rollout, **outcome), attempts=attempts)
