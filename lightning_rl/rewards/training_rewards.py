"""Rewards that training gives, beside the agents: asked for when a group has ended, and kept in the store.

They are late rewards of their attempts, under ids of their own: a run that goes on finds them and asks nobody again.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from lightning_rl.config.schema import RewardSection
from lightning_rl.rewards import FinishedRollout, GroupReward
from lightning_rl.rewards.finished import finished_rollout
from lightning_rl.rewards.grading import as_graded, before_grading, from_config, graded_before, late_rewards
from lightning_rl.rewards.reward_model import RewardModel
from lightning_rl.rewards.trl import TrlRewards
from lightning_rl.store.contract import Reward, RolloutTrace
from lightning_rl.store.rewards import with_late_rewards
from lightning_rl.store.run_store import RunStore

_SAVE_SECONDS = 1.0  # between two times that rewards are given to the store, while groups are graded


class Grader:
    """Grades rollouts whose agents ended well; those that failed count as `algorithm.agent_failure` says.

    `concurrency` groups are graded at once, each in a thread; with 1 all are in the caller's.
    """

    def __init__(self, reward: GroupReward, *, concurrency: int) -> None:
        self.reward = reward
        self._concurrency = concurrency

    @classmethod
    def of(cls, config: RewardSection, reward: GroupReward | None) -> "Grader | None":
        """The grader that was given, else that of the config; None where the agents' own rewards count."""
        chosen = reward or from_config(config)
        # Functions of verl's and TRL's make may use signals, which only the main thread can.
        own_thread = isinstance(reward, TrlRewards) or (reward is None and config.judge.model is None)
        return None if chosen is None else cls(chosen, concurrency=1 if own_thread else config.judge.concurrency)

    def graded(
        self, traces: Sequence[RolloutTrace], store: RunStore, model: str | Collection[str]
    ) -> list[RolloutTrace]:
        """The traces, with the rewards that their groups were given. `model` is the policy's name, or those of several.

        A group that was graded in part, before a run was cut off, is graded again as a whole, since its rollouts may be
        ranked against each other, by what their agents gave them. Those that have rewards keep them.
        """
        groups: defaultdict[str, list[FinishedRollout]] = defaultdict(list)
        attempts: dict[str, str] = {}
        for trace in traces:
            counting = trace.counting
            if trace.rollout.status == "succeeded" and counting is not None:
                own = replace(trace.rollout, rewards=before_grading(counting))
                finished = finished_rollout(own, counting.spans, model)
                groups[finished.group_id].append(finished)
                if not graded_before(counting.rewards):
                    attempts[finished.rollout_id] = counting.attempt.attempt_id
        ungraded = [group for group in groups.values() if any(finished.rollout_id in attempts for finished in group)]
        late: dict[str, list[Reward]] = {}
        unsaved: dict[tuple[str, str], list[Reward]] = {}
        saved = time.monotonic()
        try:
            for place, rewards in as_graded(self.reward, ungraded, concurrency=self._concurrency):
                for finished, named in zip(ungraded[place], rewards, strict=True):
                    if (attempt_id := attempts.get(finished.rollout_id)) is not None:
                        late[finished.rollout_id] = late_rewards(named)
                        unsaved[finished.rollout_id, attempt_id] = late[finished.rollout_id]
                if time.monotonic() - saved >= _SAVE_SECONDS:
                    store.add_late_rewards(unsaved)
                    unsaved, saved = {}, time.monotonic()
        finally:  # what was paid for is kept, also where a later group cannot be graded
            if unsaved:
                store.add_late_rewards(unsaved)
        return [
            with_late_rewards(trace, late[trace.rollout.rollout_id]) if trace.rollout.rollout_id in late else trace
            for trace in traces
        ]


def fetch(grader: Grader | None) -> None:
    """Take the grader's model from the hub, if it has one: what is wrong with it is told before any rollout runs.

    Raises as `RewardModel.fetch`.
    """
    if grader is not None and isinstance(grader.reward, RewardModel):
        grader.reward.fetch()
