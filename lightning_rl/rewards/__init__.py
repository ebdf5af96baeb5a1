"""Rewards that the algorithm gives, beside those of the agent: functions of one rollout, judges of a whole group.

Both are a `GroupReward`: from the finished rollouts of a group to one reward each, or several by name.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec


class FinishedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout whose agent ended well, as a reward function sees it.

    `answer` is the text of the policy's last answer (without its reasoning), "" where it made no call; `answer_ids` are
    that answer's tokens as they were sampled, with its reasoning and end, [] where they are not known. `messages` is
    the conversation that led there, with it. `rewards` are those that the agent gave, by name.
    """

    rollout_id: str
    group_id: str
    task: Any
    answer: str
    messages: list[dict[str, Any]]
    rewards: dict[str, float] = {}
    answer_ids: list[int] = []


GroupRewards = Sequence[float | Mapping[str, float]]
GroupReward = Callable[[Sequence[FinishedRollout]], GroupRewards | Awaitable[GroupRewards]]
"""What gives rewards to the finished rollouts of a group, in their order: a number each, or several by name. It may be
an async function; its calls run on one event loop."""
